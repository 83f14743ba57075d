"""What is asked of podman and docker, and what is said when they fail: a little engine is in their place."""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import stand_in
from boxes import SMALL, gone, opened
from pydantic import ValidationError
from recipes import tiny_recipe

from opd.config.environments import EnvironmentConfig, SandboxConfig
from opd.errors import RunFolderError
from opd.pipelines.records.run_folder import RunFolder
from opd.sandbox import containers
from opd.sandbox.containers import find_container
from opd.sandbox.local import Sandboxes
from opd.sandbox.protocol import SandboxError
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import find_substrate


class Engine:
    """Commands of the names given, which keep what they are asked in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        rule = {"names": ["clone", "unshare", "read"], "action": "SCMP_ACT_ALLOW"}
        (folder / "calls.json").write_text(
            json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [rule]})
        )
        self.put(mode="works", config="{}", containers="", probed=stand_in.PROBED)
        self.put(digest=stand_in.DIGEST, answer="")

    def put(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def install(self, *names: str) -> None:
        for name in names:
            program = self.folder / "bin" / name
            line = f'exec {sys.executable} -S {stand_in.__file__} {self.folder} {name} "$@"'
            program.write_text(f"#!/bin/sh\n{line}\n")
            program.chmod(0o755)

    def calls(self, word: str) -> list[list[str]]:
        place = self.folder / "calls"
        lines = place.read_text().splitlines() if place.exists() else []
        return [words for words in map(json.loads, lines) if words[0] == word]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """None is installed yet; no other is found."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(containers, "ANSWERING", 20.0)
    find_substrate.cache_clear()
    yield Engine(tmp_path)
    find_substrate.cache_clear()


def outcome_of(tmp_path, command, limits=SMALL, **options):
    async def steps():
        async with opened(tmp_path / "boxes", find_substrate("container", "known:1"), limits) as box:
            return await box.exec(command, **options)

    return asyncio.run(steps())


def options_of(engine) -> list[str]:
    """Of the last container, up to its image."""
    words = engine.calls("run")[-1]
    return words[: words.index(stand_in.DIGEST)]


@pytest.mark.parametrize("name", ["podman", "docker"])
def test_a_command_runs_by_the_images_digest_with_all_that_keeps_it_apart(engine, tmp_path, name):
    engine.install(name)
    outcome = outcome_of(tmp_path, ["sh", "-c", "cat; echo x > made; echo no >&2; exit 3"], stdin=b"given")
    assert (outcome.exit, outcome.stdout, outcome.stderr) == (3, b"given", b"no\n")
    assert outcome.files_changed == ("made",)
    given = options_of(engine)
    assert {
        "--pull=never", "--network=none", "--read-only", "--cap-drop=all",
        "--privileged=false", "--ipc=private",
        "--security-opt=no-new-privileges", "--entrypoint=", "--log-driver=none", f"--memory={SMALL.memory}b",
        f"--memory-swap={SMALL.memory}b", f"--pids-limit={SMALL.processes + 1}", "--ulimit=cpu=200:200",
        f"--ulimit=fsize={SMALL.disk}:{SMALL.disk}", "--label=opd.sandbox",
        f"--ulimit=nofile={SMALL.open_files}:{SMALL.open_files}",
    } <= set(given)  # fmt: skip
    calls = [word.partition("seccomp=")[2] for word in given if "seccomp=" in word]
    assert len(calls) == (name == "podman")
    podmans = {"--http-proxy=false", "--read-only-tmpfs=false", "--image-volume=ignore", "--no-hosts"}
    assert podmans <= set(given) if name == "podman" else podmans.isdisjoint(given)
    assert ("--env=HTTPS_PROXY" in given) == (name == "docker")
    assert engine.calls("rm")[-1][-1] == given[1].removeprefix("--name=")


def test_no_variable_but_the_engines_own_reaches_its_client(engine, monkeypatch):
    for name in ("HF_TOKEN", "http_proxy", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")
    assert "secret" not in containers.client_environment().values()
    assert containers.client_environment()["DOCKER_HOST"] == "unix:///run/docker.sock"


def test_podman_comes_first_and_docker_where_podman_has_no_such_image_or_does_not_work(engine):
    with pytest.raises(
        SandboxError, match=r"needs podman or docker, and neither is installed; install podman"
    ):
        find_container("known:1")
    engine.install("docker")
    assert find_container("known:1").engine.name == "docker"
    engine.install("podman")
    assert find_container("known:1").engine.name == "podman"
    with pytest.raises(SandboxError) as told:
        find_container("other:1")
    assert "podman has no image other:1 here" in str(told.value)
    assert "docker has no image other:1 here" in str(told.value)
    assert "`docker pull`" in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    (engine.folder / "bin/podman").write_text("#!/bin/sh\nexit 1\n")
    assert find_container("known:1").engine.name == "docker"


def hurry(monkeypatch, word: str) -> None:
    """The engine has a second to answer this question, which it never does, and long to answer others."""
    ask = containers.run_client

    def asked(program, words):
        monkeypatch.setattr(containers, "ANSWERING", 1.0 if words[0] == word else 20.0)
        return ask(program, words)

    monkeypatch.setattr(containers, "run_client", asked)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (
            "refuses",
            r"docker does not work here: `docker info --format` failed \(Error: info is refused\); start",
        ),
        ("garbage", "makes no sense"),
        ("hangs", "did not answer within 1 s: its engine hangs; start it anew"),
        ("image:refuses", r"has no image known:1 here: `docker image inspect` failed"),
        ("image:garbage", "makes no sense"),
        ("image:hangs", "`docker image inspect` did not answer within 1 s"),
        ("run:refuses", r"did not run as it should .*Error: run is refused"),
        ("run:hangs", "no container starts within 1 s"),
        ("run:garbage", "did not run as it should .*it says nothing"),
    ],
)
def test_an_engine_that_fails_is_told_in_one_sentence_and_in_time(engine, monkeypatch, mode, told):
    engine.install("docker")
    engine.put(mode=mode)
    word, _, what = mode.rpartition(":")
    if what == "hangs":
        hurry(monkeypatch, word or "info")
    monkeypatch.setattr(containers, "STARTING", 1.0 if mode == "run:hangs" else 60.0)
    with pytest.raises(SandboxError, match=told) as said:
        find_substrate("container", "known:1")
    assert len(str(said.value).splitlines()) == 1
    assert str(said.value).isprintable()


def test_a_container_that_cannot_be_removed_is_an_error_as_it_may_still_write(engine, tmp_path, monkeypatch):
    engine.install("docker")
    find_substrate("container", "known:1")
    engine.put(mode="rm:refuses")
    with pytest.raises(SandboxError, match="the container cannot be removed"):
        outcome_of(tmp_path, ["true"])
    engine.put(mode="rm:hangs")
    monkeypatch.setattr(containers, "ANSWERING", 1.0)
    with pytest.raises(SandboxError, match="the container cannot be removed"):
        outcome_of(tmp_path, ["true"])


def test_a_client_that_is_killed_ends_the_command_and_the_container_is_removed(engine, tmp_path):
    engine.install("docker")
    outcome = outcome_of(tmp_path, ["sh", "-c", "echo before; kill -9 $PPID; sleep 900"])
    assert (outcome.killed_by, outcome.exit, outcome.stdout) == ("sandbox", None, b"before\n")
    assert engine.calls("rm")[-1][-1] == options_of(engine)[1].removeprefix("--name=")


KILLED = """
import asyncio, sys
from pathlib import Path
from boxes import opened
from opd.sandbox.substrates import find_substrate
from opd.errors import RunFolderError
from opd.pipelines.records.run_folder import RunFolder

async def steps():
    async with opened(Path(sys.argv[1]), find_substrate("container", "known:1")) as box:
        await box.exec(["sh", "-c", "sleep 900; : " + sys.argv[2]])

asyncio.run(steps())
"""


@pytest.mark.slow
def test_what_watches_removes_the_container_of_a_process_that_is_killed(engine, tmp_path):
    engine.install("docker")
    mark = f"mark-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "boxes"), mark])
    try:
        while not any(mark in words[-1] for words in engine.calls("run")):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert gone(mark)
    name = options_of(engine)[1].removeprefix("--name=")
    until = time.monotonic() + 60
    while name not in engine.calls("rm")[-1] and time.monotonic() < until:
        time.sleep(0.05)
    assert engine.calls("rm")[-1][-1] == name


def test_what_killed_processes_have_left_is_removed_and_nobody_elses(engine):
    engine.install("docker")
    own = containers.new_name()
    place, user, pid, started, word = own.removeprefix("opd-").split("-")
    killed = f"opd-{place}-{user}-{pid}-{int(started) + 1}-{word}"
    ended = f"opd-{place}-{user}-4194304-1-{word}"
    others = [own, f"opd-{'0' * 8}-{user}-4194304-1-{word}", f"opd-{place}-{int(user) + 1}-4194304-1-{word}"]
    others += ["opd-mine", "--all", f"{ended}x", "database"]
    engine.put(containers="\n".join([*others, killed, ended]))
    find_container("known:1")
    (removed,) = engine.calls("rm")
    assert removed == ["rm", "--force", "--volumes", killed, ended]


def test_that_what_is_left_cannot_be_removed_is_told_and_stops_nobody(engine, caplog):
    engine.install("docker")
    engine.put(mode="ps:refuses")
    find_container("known:1")
    (told,) = caplog.messages
    assert "may be left" in told


def test_an_image_with_volumes_is_refused_where_they_have_no_bound(engine):
    engine.install("docker")
    engine.put(config=json.dumps({"Volumes": {"/data": {}}}))
    with pytest.raises(SandboxError, match="declares the volume /data, which docker lets"):
        find_container("known:1")
    engine.install("podman")
    assert find_container("known:1").engine.name == "podman"


@pytest.mark.parametrize("said", [{}, {"Id": 5}, {"Id": "--privileged"}, {"Id": "ab", "Config": []}, []])
def test_an_answer_of_another_form_is_one_sentence(engine, said):
    engine.install("docker")
    engine.put(answer=json.dumps(said))
    with pytest.raises(SandboxError, match="makes no sense"):
        find_container("known:1")


@pytest.mark.some(1)
@pytest.mark.parametrize("lost", ["network", "reading", "writing", "signals", "privileges", "memory"])
def test_an_engine_that_does_not_keep_commands_apart_is_refused(engine, lost):
    engine.install("docker")
    engine.put(probed=stand_in.PROBED.replace(f"{lost} 1", f"{lost} 0"))
    with pytest.raises(SandboxError, match=f"does not keep commands from {lost}; undo"):
        find_substrate("container", "known:1")


def test_podman_without_control_groups_is_asked_for_none_and_says_so(engine, tmp_path, caplog):
    engine.install("podman")
    engine.put(mode="groups:refuses", probed=stand_in.PROBED.replace("memory 1", "memory 0"))
    found = find_substrate("container", "known:1")
    assert found.allowed_attempts == ["memory"]
    assert "does not keep commands from all of: memory. Without control groups" in caplog.text
    outcome_of(tmp_path, ["true"])
    assert "--cgroups=disabled" in options_of(engine)
    assert not any(word.startswith(("--memory", "--pids-limit")) for word in options_of(engine))
    (begin,) = [word for word in engine.calls("run")[-1] if "umask" in word]
    assert f"ulimit -v {SMALL.memory >> 10} " in begin


def test_what_is_too_long_to_start_is_the_commands_fault(engine, tmp_path):
    engine.install("docker")
    for command in (["echo", "x" * (1 << 17)], ["echo", *["x" * 1000] * 1100]):
        outcome = outcome_of(tmp_path, command)
        assert (outcome.exit, outcome.stderr) == (127, b"echo: Argument list too long\n")
    assert outcome_of(tmp_path, ["printf", "%s", "y" * 1000 + "x" * 60_000]).cut == 60_000


async def test_a_path_that_no_option_can_hold_is_refused(engine, tmp_path):
    engine.install("docker")
    place = tmp_path / "a,target=/etc"
    place.mkdir(parents=True)
    store = SnapshotStore(tmp_path / "store")
    substrate = find_substrate("container", "known:1")
    boxes = Sandboxes(tmp_path / "boxes", store, SMALL, substrate=substrate, reads=[str(place)])

    box = boxes.open("one")
    with pytest.raises(SandboxError, match="it has a comma, quote or new line; rename it"):
        await box.exec(["true"])
    await box.close()
    boxes.close()


@pytest.mark.parametrize(
    "image", ["--privileged", "", "a b", "a\nb", "-v", "x" * 600, "/etc", "$(x)", "a;b", "\u202eimage", "a,b"]
)
def test_what_names_no_image_is_refused(engine, image):
    engine.install("docker")
    with pytest.raises(ValidationError, match="names no image"):
        SandboxConfig(substrate="container", image=image)
    with pytest.raises(SandboxError, match="names no image"):
        find_container(image)
    assert not (engine.folder / "calls").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"substrate": "container"},
        {"image": "known:1"},
        {"substrate": "process", "image": "known:1"},
        {"substrate": "container", "image": "known:1", "memory_mb": 8},
    ],
)
def test_settings_that_make_no_container_are_refused(settings):
    with pytest.raises(ValidationError, match=r"go together|16 at least"):
        SandboxConfig(**settings)


def test_what_an_image_is_belongs_to_what_a_run_was_given(engine, tmp_path):
    engine.install("docker")
    sandbox = {"substrate": "container", "image": "known:1"}
    recipe = tiny_recipe()
    domain = recipe.domains["sort"].model_dump(mode="json", exclude_none=True)
    domain["environment"] = {"type": "tools", "params": {"sandbox": sandbox}}
    recipe = tiny_recipe(domains={"sort": domain})
    RunFolder.create(tmp_path / "run", recipe).close()
    RunFolder.resume(tmp_path / "run", recipe).close()
    engine.put(digest="cd" * 32)
    with pytest.raises(RunFolderError, match=r"params.sandbox.image: known:1 is not what it was"):
        RunFolder.resume(tmp_path / "run", recipe)


def test_a_container_that_begins_too_late_is_the_engines_fault_and_its_command_does_not_run(
    engine, tmp_path, monkeypatch
):
    engine.install("podman")
    find_substrate("container", "known:1")
    engine.put(mode="run:late")
    monkeypatch.setattr(containers, "STARTING", 0.2)
    before = len(engine.calls("rm"))
    with pytest.raises(SandboxError, match=r"no container starts within 0\.2 s"):
        outcome_of(tmp_path, ["sh", "-c", f"touch {tmp_path}/ran"])
    assert len(engine.calls("rm")) == before + 2  # also when the first says that there is none
    time.sleep(2.5)
    assert not (tmp_path / "ran").exists()


def test_an_engine_that_does_not_say_how_a_command_ended_is_no_fault_of_the_command(engine, tmp_path):
    engine.install("podman")
    find_substrate("container", "known:1")
    engine.put(mode="container:refuses")
    with pytest.raises(SandboxError, match="it does not say how its command ended"):
        outcome_of(tmp_path, ["true"])


def test_paths_that_no_engine_takes_are_refused_in_the_recipe():
    with pytest.raises(ValueError, match="reads has '/a,b', and a container is given no path with a comma"):
        SandboxConfig(substrate="container", image="known:1", reads=["/a,b"])


def test_an_image_of_somebody_elses_sandbox_is_none_of_ours():
    sandbox = {"provider": "mine", "image": "their/image:1"}
    assert EnvironmentConfig(type="tests:Mine", params={"sandbox": sandbox}).container_image is None
