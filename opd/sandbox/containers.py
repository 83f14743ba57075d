"""Containers: each command in one of its own, from an image that this machine has, by podman or docker.

The engine's client is the command that `warden.py` watches from outside, because an image may hold no Python.
Process 1 of a container is the image's own `/bin/sh`. It reports that the command begins, starts it and
adopts its orphans. Its end ends all processes. A recipe names images, and they are run by their digest.
Nothing is fetched. All facts come from a client's program. Every call of it has a time limit, and its answers
are untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from opd.config.environments import IMAGE_NAME
from opd.sandbox.isolation import OWNER, is_left, process_name
from opd.sandbox.protocol import Limits, SandboxError
from opd.untrusted import convert_decode_errors, read_document, safe_excerpt

_log = logging.getLogger(__name__)
HOME = "/home/agent"
VARIABLES = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
"""Environment of every command, in every kind of sandbox."""
TEMPORARY, SHARED = 1 << 26, 1 << 24
"""Bytes of /tmp and of /dev/shm."""
STARTING = 120.0
"""Seconds in which an engine begins a command."""
_WORD, _WORDS = 1 << 17, 1 << 20
"""Bytes of one word and of all words of a command. The kernel starts no program with more than about that."""
_MOST_PROCESSES = 1 << 15
"""Most of RLIMIT_NPROC. Podman's helper allows no more."""
_LATEST = 300
"""Seconds beyond a command's time after which podman's helper ends it, if it still runs."""
_REFUSED = ("unshare", "setns", "keyctl", "add_key", "request_key")
_CLONES = ("clone", "clone3")
_NAMESPACES = 0x7E020000
"""Flags of clone."""
_PROFILE = 1 << 20
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
ENGINES = ("podman", "docker")
"""Commands that are tried, in this order."""
ANSWERING = 30.0
"""Seconds in which an engine answers a request."""
LABEL = "opd.sandbox"
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_NAME = re.compile(rf"opd-(?P<owner>{OWNER})-[0-9a-f]{{16}}")
_ANSWER = 1 << 24
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "DBUS_SESSION_BUS_ADDRESS")
_PASSED_ALL = ("XDG_", "DOCKER_", "CONTAINER_", "CONTAINERS_", "STORAGE_", "PODMAN_")
_BEGIN = """umask 022
echo "$1"; echo "$1" >&2; shift
"$@"
status=$? waited=0
[ $status = 0 ] || for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r $file ] && while read -r what count; do
        [ "$what" = oom_kill ] && [ "$count" != 0 ] && while [ $waited -lt 300000 ]; do
            waited=$((waited + 1))
        done
    done < $file
done
exit $status"""
"""After a kill for memory, process 1 waits until the watcher outside can see it."""


PROBE = """
path=$1 memory=$2 processes=$3
n=1 p=1 r=1
[ -r /proc/net/route ] && while read -r dev rest; do [ "$dev" = Iface ] || n=0; done < /proc/net/route
routes=/proc/net/ipv6_route
[ -r $routes ] && while read -r line; do [ "${line%lo}" != "$line" ] || n=0; done < $routes
echo "network $n"
(read -r line < "$path") 2>/dev/null && r=0
echo "reading $r"
r=1
(echo x >> "$path") 2>/dev/null && r=0
while read -r device place type options rest; do
    [ "$place" != / ] || case $options in ro|ro,*) ;; *) r=0 ;; esac
done < /proc/mounts
echo "writing $r"
[ "$PPID" = 1 ] && echo "signals 1" || echo "signals 0"
while read -r key value rest; do
    case $key in
        Cap???:) [ "$value" = 0000000000000000 ] || p=0 ;;
        NoNewPrivs:|Seccomp:) [ "$value" != 0 ] || p=0 ;;
    esac
done < /proc/self/status
echo "privileges $p"
held() {
    for file in $2 $3; do
        [ -r $file ] && read -r value < $file && [ "$value" = "$4" ] && echo "$1 1" && return
    done
    echo "$1 0"
}
held memory /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes "$memory"
held processes /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max "$processes"
printf written > note
"""
"""Checks that a shell alone can make. Its words: a file of another user, bytes and processes."""
KEPT = ("network", "reading", "writing", "signals", "privileges", "memory", "processes")


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """A client's program, and facts about its engine."""

    program: str
    name: Literal["podman", "docker"]
    """The engine's kind, whatever the program is called."""
    version: str
    rootless: bool
    """True if root in its containers is the engine's user."""
    profile: str | None = None
    """podman's own file of the calls that a container may make, which lets it make namespaces."""


@dataclass(frozen=True, slots=True)
class Container:
    """An image, and the engine that runs commands in it."""

    engine: ContainerEngine
    image: str
    """The recipe's name for it."""
    digest: str
    """`sha256:...` of the image."""
    asks_groups: bool = True
    """True if control groups are requested."""
    grouped: bool = True
    """True if they limit memory and processes. Otherwise `warden.py` watches, and each process has a limit.
    """

    def __str__(self) -> str:
        engine = self.engine
        return f"{engine.name} {engine.version}, image {self.image} ({self.digest[:19]})"


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders, limits and container of commands."""

    home: Path
    temporary: Path
    """An empty folder that no snapshot contains, if /tmp is not the sandbox's own."""
    limits: Limits
    reads: tuple[str, ...] = ()
    """Files and folders that commands can read, besides the system's and Python's library."""
    container: Container | None = None
    """The container, for the kind `container`."""


def find_container(image: str) -> Container:
    """Return the image, in the first engine that works and has it. Raises `SandboxError` if none does."""
    if not IMAGE_NAME.fullmatch(image):
        raise SandboxError(f"{safe_excerpt(image)!r} names no image; give a name, name:tag, digest or id")
    why: list[str] = []
    for engine in installed_engines():
        try:
            if isinstance(engine, SandboxError):
                raise engine
            container = Container(engine, image, image_digest(engine, image))
        except SandboxError as error:
            why.append(str(error))
            continue
        remove_left(engine)
        return container
    if not why:
        raise SandboxError(
            "the sandbox container needs podman or docker, and neither is installed; install podman, or set"
            " the sandbox's substrate to bubblewrap"
        )
    raise SandboxError("; and ".join(why))


def digest_of_image(image: str) -> str:
    """Return `sha256:...` of the name on this machine now. Raises `SandboxError` as `find_container`."""
    return find_container(image).digest


def container_job(workspace: Workspace, words: Sequence[str], uid: int) -> dict[str, Any]:
    """Return the job of `warden.py` for a command in the place's container. Files for its engine are put into
    the temporary folder. `uid`: user of the command, 0 for the engine's or this process's own user. Raises
    `SandboxError` for a path that no engine takes.
    """
    container, limits, name, token = workspace.container, workspace.limits, new_name(), secrets.token_hex(16)
    assert container is not None
    engine = container.engine
    # A home's files belong to this process's user, or to root's unprivileged user.
    owner = f"{uid}:{uid}" if uid else f"{os.getuid()}:{os.getgid()}"
    user = "0:0" if engine.rootless else owner
    script = _BEGIN if container.grouped else f"ulimit -v {limits.memory >> 10} || exit 125\n{_BEGIN}"
    command = [
        engine.program, "run", f"--name={name}", f"--user={user}",
        *_limit_options(container, limits, uid), *_isolation_options(engine),
        *_seccomp_options(engine, workspace.temporary),
        *_mount_options(engine, workspace.home, workspace.reads),
        container.digest.removeprefix("sha256:"), "/bin/sh", "-c", script, "sh", token, *words,
    ]  # fmt: skip
    state_format = "{{.State.OOMKilled}} {{.State.ExitCode}}"
    return asdict(limits) | {
        "kind": "container",
        "command": command,
        "home": str(workspace.home),
        "filled": [str(workspace.home)],
        "uid": uid,
        "token": f"{token}\n",
        "processes": limits.processes + 1,
        "grouped": container.grouped,
        "starting": STARTING,
        "answering": ANSWERING,
        "inspect": [engine.program, "container", "inspect", "--format", state_format, name],
        "remove": removal_command(engine, [name]),
        "environment": client_environment(),
    }


def too_long(words: Sequence[str]) -> bool:
    """Return True if no program can be started with so many words, or so long ones."""
    sizes = [len(os.fsencode(word)) + 1 for word in words]
    return max(sizes) > _WORD or sum(sizes) > _WORDS


def _isolation_options(engine: ContainerEngine) -> list[str]:
    options = [
        "--pull=never", "--interactive", f"--label={LABEL}", "--network=none", "--ipc=private",
        "--cgroupns=private", "--hostname=sandbox", "--privileged=false", "--cap-drop=all",
        "--security-opt=no-new-privileges", "--security-opt=label=disable", "--read-only", "--entrypoint=",
        "--no-healthcheck", "--log-driver=none", "--stop-timeout=0",
    ]  # fmt: skip
    settings = {"HOME": HOME, "TMPDIR": "/tmp", **VARIABLES}
    variables = [f"{name}={value}" for name, value in settings.items()]
    if engine.name == "podman":
        options += [
            "--read-only-tmpfs=false", "--image-volume=ignore", "--no-hosts", "--http-proxy=false",
            "--detach-keys=",
        ]  # fmt: skip
    else:  # its client takes them from settings of its own, unless they are set here
        variables += [name for proxy in _PROXIES for name in (proxy, proxy.upper())]
    return options + [f"--env={variable}" for variable in variables]


def _seccomp_options(engine: ContainerEngine, temporary: Path) -> list[str]:
    """Return podman's own list of the calls that a container may make, without calls that make namespaces or
    reach keys. Docker refuses those by itself.
    """
    if engine.profile is None:
        return []
    try:
        with open(engine.profile, "rb") as file:
            profile = read_document(file.read(_PROFILE + 1), _PROFILE)
    except (OSError, ValueError) as error:
        raise SandboxError(
            f"{engine.profile}, what podman lets containers do, cannot be read ({error}); install it anew"
        ) from error
    with convert_decode_errors(
        lambda cause: SandboxError(f"{engine.profile} makes no sense ({cause}); install it anew")
    ):
        rules = [
            {**rule, "names": names}
            for rule in profile["syscalls"]
            if (names := [name for name in rule["names"] if name not in (*_REFUSED, *_CLONES)])
        ]
        none = {"index": 0, "value": _NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
        rules += [
            {"names": list(_REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [none]},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        ]
        path = temporary / "calls.json"
        path.write_text(json.dumps({**profile, "syscalls": rules}))
        return [f"--security-opt=seccomp={path}"]
    raise AssertionError


def _limit_options(container: Container, limits: Limits, uid: int) -> list[str]:
    """Return the options of kernel limits: for each process by its limits, for all by a control group.
    Without one, by `uid`, which no other process has.
    """
    limits_by_name = {
        "cpu": limits.cpu_seconds, "fsize": limits.disk, "nofile": limits.open_files, "core": 0,
        "nproc": limits.processes + 1 if uid and not container.grouped else _MOST_PROCESSES,
    }  # fmt: skip
    options = []
    for name, most in limits_by_name.items():
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        options.append(f"--ulimit={name}={value}:{value}")
    if container.engine.name == "podman":  # for the container, if this process and its watcher are killed
        options.append(f"--timeout={int(limits.seconds) + _LATEST}")
    if not container.asks_groups:
        return [*options, "--cgroups=disabled"]
    return [
        *options, f"--memory={limits.memory}b", f"--memory-swap={limits.memory}b",
        f"--pids-limit={limits.processes + 1}",
    ]  # fmt: skip


def _mount_options(engine: ContainerEngine, home: Path, reads: Sequence[str]) -> list[str]:
    """Return the mounts of the home, the readable paths, /tmp and /dev/shm."""
    wrong = next((path for path in (str(home), *reads) if set(path) & set(',"\n\r')), None)
    if wrong is not None:
        raise SandboxError(
            f"{safe_excerpt(wrong)!r} cannot be given to a container: it has a comma, quote or new line;"
            " rename it"
        )
    only = "readonly,bind-nonrecursive" if engine.name == "podman" else "readonly"
    return [
        f"--mount=type=bind,source={home},target={HOME}", f"--workdir={HOME}",
        *(f"--mount=type=bind,source={path},target={path},{only}" for path in reads),
        f"--tmpfs=/tmp:rw,exec,nosuid,nodev,size={TEMPORARY},mode=1777", f"--shm-size={SHARED}",
    ]  # fmt: skip


def client_environment() -> dict[str, str]:
    """Return the variables of an engine's client. No other may reach a container through its settings."""
    return {
        name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PASSED_ALL)
    }


def installed_engines() -> Iterator[ContainerEngine | SandboxError]:
    """Yield the installed engines, or the error of one that does not work."""
    for name in ENGINES:
        program = shutil.which(name)
        if program is not None:
            try:
                yield _client_engine(program)
            except SandboxError as error:
                yield error


def run_client(program: str, words: Sequence[str]) -> bytes:
    """Return a client's output. Raises `SandboxError` if it fails, cannot be started or takes too long."""
    label = f"`{os.path.basename(program)} {' '.join(words[:2])}`"
    try:
        process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=client_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{program} cannot be started ({error.strerror}); install it anew") from error
    with process:
        try:
            output, errors = process.communicate(timeout=ANSWERING)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise SandboxError(
                f"{label} did not answer within {ANSWERING:g} s: its engine hangs; start it anew"
            ) from None
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = safe_excerpt(lines[-1].strip(), 300) if lines else "it says nothing"
        raise SandboxError(f"{label} failed ({reason})")
    return output


def _client_engine(program: str) -> ContainerEngine:
    """Return the engine of a client. Raises `SandboxError` if it does not work."""
    name = os.path.basename(program)
    try:
        info = _client_object(program, ["info", "--format", "{{json .}}"])
    except SandboxError as error:
        mend = "start its daemon and let this user reach it" if name == "docker" else "mend its settings"
        raise SandboxError(f"{name} does not work here: {error}; {mend}") from None
    with convert_decode_errors(
        lambda cause: SandboxError(f"`{name} info` makes no sense ({cause}); install it anew")
    ):
        if "host" in info:  # also a `docker` that is podman's
            safety = info["host"]["security"]
            profile = str(safety.get("seccompProfilePath") or "") or None
            version = safe_excerpt(info["version"]["Version"], 30)
            return ContainerEngine(program, "podman", version, safety["rootless"] is True, profile)
        if errors := info.get("ServerErrors"):
            raise SandboxError(f"docker does not work here: {safe_excerpt(errors[0], 300)}; start its daemon")
        rootless = any(str(one).startswith("name=rootless") for one in info["SecurityOptions"] or [])
        return ContainerEngine(program, "docker", safe_excerpt(info["ServerVersion"], 30), rootless)
    raise AssertionError


def _client_object(program: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the single object of JSON in a client's output, alone or in a list."""
    label = f"`{os.path.basename(program)} {' '.join(words[:2])}`"
    data = run_client(program, words)
    with convert_decode_errors(lambda cause: SandboxError(f"the answer of {label} makes no sense ({cause})")):
        document = read_document(data, _ANSWER)
        document = document[0] if isinstance(document, list) and len(document) == 1 else document
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        return document
    raise AssertionError


def image_digest(engine: ContainerEngine, image: str) -> str:
    """Return an image's digest. Raises `SandboxError` if there is no usable image of that name."""
    try:
        facts = _client_object(engine.program, ["image", "inspect", "--format", "{{json .}}", image])
    except SandboxError as error:
        raise SandboxError(
            f"{engine.name} has no image {safe_excerpt(image)} here: {error}; build it, or fetch it before"
            f" the run by `{engine.name} pull`"
        ) from None
    with convert_decode_errors(
        lambda cause: SandboxError(
            f"what {engine.name} says of {safe_excerpt(image)} makes no sense ({cause})"
        )
    ):
        match, volumes = _ID.fullmatch(facts["Id"]), (facts.get("Config") or {}).get("Volumes")
        if match is None:
            raise ValueError(f"its id is {safe_excerpt(facts['Id'])}")
        if volumes and engine.name == "docker":
            raise SandboxError(
                f"the image {safe_excerpt(image)} declares the volume {safe_excerpt(next(iter(volumes)))},"
                " which docker lets a command write without bound; use podman, or build the image without"
                " VOLUME"
            )
        return f"sha256:{match[1]}"
    raise AssertionError


def new_name() -> str:
    """Return a new container's name: its owner, and a random word."""
    return f"opd-{process_name()}-{secrets.token_hex(8)}"


def removal_command(engine: ContainerEngine, names: Sequence[str]) -> list[str]:
    """Return the command that ends and removes containers. A missing one is no error to podman."""
    return [engine.program, "rm", "--force", "--volumes", *names]


def remove_left(engine: ContainerEngine) -> None:
    """End the containers of this user's processes that were killed here. Logs any that may be left."""
    try:
        words = ["ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        names = []
        for name in run_client(engine.program, words).decode(errors="replace").split():
            match = _NAME.fullmatch(name)
            if match and is_left(match["owner"]):
                names.append(name)
        if names:
            program, *words = removal_command(engine, names)
            run_client(program, words)
            _log.info("%d containers of processes that were killed are removed", len(names))
    except SandboxError as error:
        _log.warning("containers of processes that were killed may be left: %s", error)
