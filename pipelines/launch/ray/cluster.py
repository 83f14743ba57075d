"""Connect to the Ray cluster of a run: a running one, or its own on this machine.

Its own leaves no process and no file when the run ends, however it ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.config import ActorResources, RayLaunch, Recipe
from opd.config.servers import ServerGroupConfig
from opd.errors import ConfigError, LaunchError, PreemptedError, RunFolderError, needs_extra, reason_of
from opd.pipelines.launch.started_server import GUARD, end_timeout
from opd.redact import redact
from opd.rollout.preemption import Preemption
from opd.storage.files import FileLock

PROC = Path("/proc")
TEMPORARY = Path("/tmp")
"""Sockets lie below it, and their paths may have 107 characters."""
LOCK = ".lock"
YOUNG = 60.0
"""Seconds in which the owner of a folder may not have locked it yet."""
KILLED_SECONDS = 2.0
Processes = dict[int, int]
"""Process id -> start in the kernel's ticks. An id alone may name another process later."""


def descendant_processes(root: int) -> Processes:
    """Return the children of process `root`, their children and so on. Empty without `/proc`."""
    table: dict[int, tuple[int, int]] = {}
    for entry in PROC.glob("[0-9]*") if PROC.is_dir() else ():
        stat = _process_stat(int(entry.name))
        if stat is not None:
            table[int(entry.name)] = stat
    descendants: Processes = {}
    parents = {root}
    while parents:
        children = {pid: start for pid, (parent, start) in table.items() if parent in parents}
        children = {pid: start for pid, start in children.items() if pid not in descendants}
        descendants |= children
        parents = set(children)
    return descendants


def end_left_over(processes: Mapping[int, int], patience: float) -> None:
    """Give `processes` `patience` seconds to leave, then SIGKILL the rest.

    Guards of servers among them get a guard's time. A killed guard leaves its server's processes behind.
    """
    start = time.monotonic()
    while alive := _alive_pids(processes):
        over, has_guard = time.monotonic() - start - patience, False
        for pid in alive if over >= 0 else ():
            with suppress(OSError):
                has_guard |= str(GUARD).encode() in (PROC / str(pid) / "cmdline").read_bytes()
        if over >= end_timeout() or (over >= 0 and not has_guard):
            break
        time.sleep(0.1)
    for pid in alive:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + KILLED_SECONDS
    while _alive_pids(processes) and time.monotonic() < until:
        time.sleep(0.02)


@contextmanager
def own_folder(prefix: str, parent: Path = TEMPORARY) -> Iterator[Path]:
    """Create a folder below `parent` while the block runs. First remove folders of this user whose processes
    were killed.
    """
    for lock in parent.glob(f"{prefix}*/{LOCK}"):
        with suppress(OSError, RunFolderError):  # in use, another user's, or being removed
            stat = lock.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime >= YOUNG:
                with FileLock(lock):
                    _remove_folder(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(folder / LOCK):
            yield folder
    finally:
        _remove_folder(folder)


def _remove_folder(folder: Path, patience: float = 2.0) -> None:
    """Remove `folder`. A dying process may still write into it."""
    until = time.monotonic() + patience
    while folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def _alive_pids(processes: Mapping[int, int]) -> list[int]:
    return [
        pid
        for pid, start in processes.items()
        if (stat := _process_stat(pid)) is not None and stat[1] == start
    ]


def _process_stat(pid: int) -> tuple[int, int] | None:
    """Return (parent, start) of a process, or `None` if it is gone or only waits to be reaped."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


GOODBYE_SECONDS = 5.0
"""Seconds for the processes of the run's own cluster to leave."""
LOOK = 0.25
HEAD_SECONDS = 0.5
"""Seconds between two requests to an answering head. Each is a connection, and checks are frequent."""
LOOPBACK = ("127.0.0.1:", "localhost:")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, Ray binds the loopback interface alone
    "RAY_DEDUP_LOGS": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # half a minute for web services
}


def import_ray() -> Any:
    """Import Ray. Raises `MissingExtraError` if it is not installed."""
    with needs_extra("launch: ray", "ray"):
        import ray
    return ray


@dataclass(slots=True)
class Cluster:
    """A connection to a cluster."""

    ray: Any
    address: str
    own: bool
    """The cluster was started for this run, and ends with it."""
    lost_since: float | None = None
    answered: float = -math.inf
    """Time of the head's last answer, in monotonic seconds."""
    processes: Processes = field(default_factory=dict)
    """The known processes that were started here."""
    looked: float = 0.0
    """Time of the last look at them, in monotonic seconds."""

    def is_lost(self, patience: float | None = None) -> bool:
        """Return whether the head has not answered for `patience` seconds. By default that is long enough
        that nobody will start it again. The head is asked every `HEAD_SECONDS`, however often you call this.
        """
        if self.lost_since is None and time.monotonic() - self.answered < HEAD_SECONDS:
            return False
        patience = patience if patience is not None else 1.0 if self.own else 5.0
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            self.lost_since = self.lost_since or time.monotonic()
            return time.monotonic() - self.lost_since >= patience
        self.lost_since, self.answered = None, time.monotonic()
        return False

    def require_answer(self) -> None:
        """Raise `lost_error` if the head does not answer, or if it knows of no node any more. Some of Ray's
        own calls would then wait for ever, and Ray ends the process after a minute.
        """
        self.answered = -math.inf
        while not self.is_lost():
            if self.lost_since is None:
                with suppress(Exception):
                    if any(node["Alive"] for node in self.ray.nodes()):
                        return
                break
            time.sleep(LOOK)
        raise self.lost_error()

    def record_processes(self, every: float = 0.0) -> None:
        """Record the processes of the run's own cluster, at most once in `every` seconds. Processes of a dead
        node manager cannot be found later.
        """
        if self.own and time.monotonic() - self.looked >= every:
            self.processes |= descendant_processes(os.getpid())
            self.looked = time.monotonic()

    def lost_error(self) -> LaunchError:
        return LaunchError(
            f"the Ray cluster at {self.address} no longer answers; everything acknowledged is in the run"
            " folder, so start the cluster again and continue with --resume."
        )


@contextmanager
def open_cluster(launch: RayLaunch, layout: BundleLayout, preemption: Preemption) -> Iterator[Cluster]:
    """Open the cluster of `launch` while the block runs. Only processes started here are ended.

    Raises `MissingExtraError` without Ray. Raises `LaunchError` if the cluster cannot be reached, is of
    another version, or cannot be started. Raises `PreemptedError` if the run is to stop meanwhile.
    """
    if launch.address is None or launch.address.startswith(LOOPBACK):
        os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    ray = import_ray()
    if ray.is_initialized():
        raise LaunchError("this process is connected to a Ray cluster already; call ray.shutdown() first.")
    opened = (
        _start_cluster(ray, launch, layout, preemption)
        if launch.address is None
        else _join_cluster(ray, launch, preemption)
    )
    with opened as cluster:
        yield cluster


def _init_ray(ray: Any, preemption: Preemption, **options: Any) -> Any:
    """Call `ray.init` with the run's own SIGTERM handling. Ray would leave at SIGTERM, now and later."""
    preemption.check()
    with _own_sigterm():
        try:
            return ray.init(
                logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options
            )
        except SystemExit:
            preemption.stop()
    preemption.check()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler after the block, because Ray removes it."""
    answer = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


@contextmanager
def _start_cluster(
    ray: Any, launch: RayLaunch, layout: BundleLayout, preemption: Preemption
) -> Iterator[Cluster]:
    """Start a cluster on this machine, and end it with all its processes after the block."""
    earlier = descendant_processes(os.getpid())
    cluster = Cluster(ray, "", own=True)
    with own_folder("opd-ray-") as folder:
        try:
            if launch.port is not None:
                require_free(launch.port)
                os.environ["RAY_GCS_SERVER_PORT"] = str(launch.port)
            totals = layout.total_resources
            try:
                context = _init_ray(
                    ray,
                    preemption,
                    # The operating system shares out the machine, so the layout gets as many as it needs.
                    num_cpus=max(os.cpu_count() or 1, int(totals.get("CPU", 0)) + 1),
                    resources={n: v for n, v in totals.items() if n not in ("CPU", "GPU", "memory")},
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                    namespace="opd",
                )
            except PreemptedError:
                raise
            except Exception as error:
                raise LaunchError(
                    f"no Ray cluster could be started here: {one_line(error).rstrip('.')}; if the machine is"
                    " busy, try again, with --resume where the run folder is there."
                ) from error
            finally:
                os.environ.pop("RAY_GCS_SERVER_PORT", None)
            cluster.address = str(context.address_info["gcs_address"])
            yield cluster
        finally:
            cluster.record_processes()
            with _own_sigterm():
                ray.shutdown()
            ours = {pid: start for pid, start in cluster.processes.items() if pid not in earlier}
            end_left_over(ours, GOODBYE_SECONDS)


@contextmanager
def _join_cluster(ray: Any, launch: RayLaunch, preemption: Preemption) -> Iterator[Cluster]:
    address = resolve_address(launch)
    check_head(address)
    environment = {"runtime_env": {"working_dir": launch.working_dir}} if launch.working_dir else {}
    namespace = f"opd-{os.getpid()}-{time.time_ns():x}"
    try:
        try:
            with _at_most(launch.start_timeout):
                _init_ray(ray, preemption, address=address, namespace=namespace, **environment)
        except PreemptedError:
            raise
        except Exception as error:
            message = f"the Ray cluster at {address} could not be joined: {one_line(error)}."
            if "ersion mismatch" in str(error):
                message = (
                    f"the Ray cluster at {address} runs other versions than this process ({one_line(error)});"
                    " install the same Ray and Python on both sides."
                )
            raise LaunchError(message) from error
        yield Cluster(ray, address, own=False)
    finally:
        with _own_sigterm():
            ray.shutdown()


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after `seconds`. A driver whose own address the cluster does not know
    waits for ever. Only the main thread can be interrupted.
    """

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)


def reserve_bundles(cluster: Cluster, launch: RayLaunch, layout: BundleLayout, preemption: Preemption) -> Any:
    """Reserve the placement group of `layout`. Raises `LaunchError` if it is not there within the time-out,
    `PreemptedError` if the run is to stop meanwhile.
    """
    ray = cluster.ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(layout.bundles, strategy=layout.strategy)
    total, deadline = ray.cluster_resources(), time.monotonic() + launch.placement_timeout
    lacks = any(total.get(name, 0.0) < value for name, value in layout.total_resources.items())
    # The run's own cluster does not grow. A shared one may, or others may leave it.
    is_given = not (cluster.own and lacks)
    while is_given and not group.wait(LOOK):
        preemption.check()
        is_given = time.monotonic() <= deadline
    if not is_given:
        largest = max(layout.bundles, key=lambda bundle: sum(bundle.values()))
        free = format_resources(ray.available_resources())
        with suppress(Exception):
            remove_placement_group(group)
        raise LaunchError(
            f"the Ray cluster at {cluster.address} did not give {format_resources(layout.total_resources)}"
            f" ({len(layout.bundles)} bundles, the largest of {format_resources(largest)},"
            f" {layout.strategy}) within {launch.placement_timeout:g} s; it has {format_resources(total)},"
            f" free: {free}. Lower launch.engines, launch.teachers, servers.NAME.count or what each actor"
            " asks for (launch.ROLE.gpus ...), or add nodes."
        )
    return group


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, of limited length."""
    text = redact(reason_of(error))
    return text if len(text) <= 300 else f"{text[:297]}..."


PROBE_SECONDS = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The first bytes of a gRPC client: HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""


def resolve_address(launch: RayLaunch) -> str:
    if launch.address != "auto":
        return str(launch.address)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise LaunchError(
            "launch.address is auto, but RAY_ADDRESS is not set: submit the run as a Ray job, or give the"
            " cluster's HOST:PORT."
        )
    return address


def check_head(address: str, seconds: float = PROBE_SECONDS) -> None:
    """Raise `LaunchError` unless a Ray head answers at `address` (HOST:PORT). Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"launch.address is {address!r}, but must be HOST:PORT, or auto.")
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.settimeout(seconds)
            connection.sendall(PREFACE)
            answer = connection.recv(9)
    except TimeoutError:
        raise LaunchError(
            f"{address} does not answer within {seconds:g} s; check launch.address and that a Ray head"
            " listens there."
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise LaunchError(
            f"the Ray cluster at {address} cannot be reached ({reason}); start it, or correct launch.address."
        ) from None
    if len(answer) < 9 or answer[3] != 4:
        raise LaunchError(f"what listens at {address} is no Ray head; correct launch.address.")


def require_free(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            raise LaunchError(
                f"launch.port {port} is in use; choose another, or none to take a free one."
            ) from None


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """The bundles to reserve, and each actor's place in them."""

    bundles: list[dict[str, float]]
    strategy: str
    """Ray's strategy of spreading the bundles over nodes."""
    places: dict[str, int]
    """Actor name -> index of its bundle."""
    needs: dict[str, ActorResources]

    @classmethod
    def from_launch(
        cls, launch: RayLaunch, ranks: int = 1, groups: Mapping[str, ServerGroupConfig] | None = None
    ) -> BundleLayout:
        """Return one bundle for each trainer with its share of the others, or one for each actor. In the
        second case the actors are on other nodes if there are some. Each server of `groups` has its own
        bundle either way, because it fills its GPUs.
        """
        groups = groups or {}
        needs = {name: getattr(launch, role_of(name)) for name in actor_names(launch, ranks)}
        apart: dict[str, ActorResources] = {}
        for group, names in server_names(groups).items():
            gpus = launch.server.gpus * groups[group].tensor_parallel
            apart |= dict.fromkeys(names, launch.server.model_copy(update={"gpus": gpus}))
        if launch.layout == "colocated":
            places = {name: number_of(name) % ranks for name in needs}
            bundles = [
                _sum_resources(resources_of(wanted) for name, wanted in needs.items() if places[name] == rank)
                for rank in range(ranks)
            ]
        else:
            places = {name: index for index, name in enumerate(needs)}
            bundles = [resources_of(wanted) for wanted in needs.values()]
        places |= {name: index for index, name in enumerate(apart, start=len(bundles))}
        bundles += [resources_of(wanted) for wanted in apart.values()]
        packed = "PACK" if len(bundles) > 1 else "STRICT_PACK"
        return cls(bundles, packed if launch.layout == "colocated" else "SPREAD", places, needs | apart)

    @property
    def total_resources(self) -> dict[str, float]:
        return _sum_resources(self.bundles)


def _sum_resources(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for bundle in bundles:
        for name, value in bundle.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def actor_names(launch: RayLaunch, ranks: int = 1) -> list[str]:
    """Return the names: `trainer`, or `trainer-0` ... of several ranks, `engine-0` ..., `teacher-0` ..."""
    trainers = ["trainer"] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)]
    engines = [f"engine-{index}" for index in range(launch.engines)]
    return [*trainers, *engines, *(f"teacher-{index}" for index in range(launch.teachers))]


def server_names(groups: Mapping[str, ServerGroupConfig]) -> dict[str, list[str]]:
    """Return the actors of each group's servers: `server-0` ..., in the order of the groups."""
    number = itertools.count()
    return {name: [f"server-{next(number)}" for _ in range(group.count)] for name, group in groups.items()}


def needed_launch(recipe: Recipe) -> RayLaunch:
    """Return the launch of `recipe` without unused actors: served models compute elsewhere."""
    launch = recipe.launch
    assert isinstance(launch, RayLaunch)
    idle: dict[str, int] = {}
    if recipe.rollout.engine.type != "torch":
        idle["engines"] = 0
    teachers = [recipe.teacher_settings(name) for name in recipe.used_teachers()]
    if all(teacher.elsewhere or teacher.is_student for teacher in teachers):
        idle["teachers"] = 0
    return launch.model_copy(update=idle)


def require_gpus_asked(recipe: Recipe, gpus: float) -> None:
    """Raise `ConfigError` if a computing role has no GPUs although the cluster has some (`gpus`). Ray would
    hide them from it, and it would compute on a CPU.
    """
    launch = needed_launch(recipe)
    counts = {"trainer": 1, "engine": launch.engines, "teacher": launch.teachers}
    idle = [role for role, count in counts.items() if count and not getattr(launch, role).gpus]
    if gpus and idle and recipe.model.device != "cpu":
        raise ConfigError(
            f"launch.{idle[0]}.gpus is 0, so Ray hides the GPUs that are there ({gpus:g}) from its actors;"
            " set it to 1 (a fraction shares a GPU), or model.device to cpu."
        )


def role_of(name: str) -> str:
    """Return `engine` for `engine-3`."""
    return name.partition("-")[0]


def number_of(name: str) -> int:
    """Return 3 for `engine-3`, and 0 for the only trainer."""
    return int(name.partition("-")[2] or 0)


def resources_of(wanted: ActorResources) -> dict[str, float]:
    """Return a bundle in Ray's format, without zeros."""
    needs = {"CPU": wanted.cpus, "GPU": wanted.gpus, "memory": wanted.memory_mb * MIB, **wanted.custom}
    bundle = {name: float(value) for name, value in needs.items() if value}
    return bundle or {"CPU": 0.001}  # Ray refuses an empty bundle


def options_of(wanted: ActorResources) -> dict[str, Any]:
    """Return the same as options of an actor."""
    options: dict[str, Any] = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus}
    if wanted.memory_mb:
        options["memory"] = wanted.memory_mb * MIB
    return options | ({"resources": dict(wanted.custom)} if wanted.custom else {})


def format_resources(resources: Mapping[str, float]) -> str:
    """Format resources as `CPU 5, GPU 1`, without Ray's bookkeeping."""
    shown = {n: v for n, v in sorted(resources.items()) if ":" not in n and n != "object_store_memory"}
    sizes = {n: f"{v / MIB:.0f} MiB" if n == "memory" else f"{v:g}" for n, v in shown.items()}
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing"
