"""The Ray cluster of a run: one that is there already, or one of its own on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from opd.config import RayLaunch
from opd.errors import LaunchError, MissingExtraError, PreemptedError
from opd.pipelines.on_ray.address import probe, require_free, resolved
from opd.pipelines.on_ray.layout import Layout, words
from opd.pipelines.on_ray.processes import Processes, descendants, end_left_over, own_folder
from opd.rollout.preemption import Preemption

GOODBYE_SECONDS = 5.0
"""Time the processes of a cluster of our own have to leave."""
LOOK = 0.25
LOOPBACK = ("127.0.0.1:", "localhost:")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, Ray binds the loopback interface alone
    "RAY_DEDUP_LOGS": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # half a minute for those who serve the web
}


def import_ray() -> Any:
    """Ray. Raises `MissingExtraError` where it is not installed."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("launch: ray", "ray") from None
    return ray


@dataclass(slots=True)
class Cluster:
    """A connection to a cluster."""

    ray: Any
    address: str
    own: bool
    """Whether it was started for this run, and ends with it."""
    lost_since: float | None = None
    processes: Processes = field(default_factory=dict)
    """What was started here, as far as it is known."""
    looked: float = 0.0
    """When; monotonic seconds."""

    def lost(self, patience: float | None = None) -> bool:
        """Whether the cluster's head has not answered for `patience` seconds, or by default for so long that
        nobody will start it again.
        """
        patience = patience if patience is not None else 1.0 if self.own else 5.0
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            self.lost_since = self.lost_since or time.monotonic()
            return time.monotonic() - self.lost_since >= patience
        self.lost_since = None
        return False

    def require(self) -> None:
        """Raise `gone` if the head does not answer: some of Ray's own calls would then wait for ever, and Ray
        ends the process after a minute.
        """
        while not self.lost():
            if self.lost_since is None:
                return
            time.sleep(LOOK)
        raise self.gone()

    def look(self, every: float = 0.0) -> None:
        """Remember the processes of a cluster of our own, if the last look is `every` seconds ago: those of a
        dead node manager are found no more.
        """
        if self.own and time.monotonic() - self.looked >= every:
            self.processes |= descendants(os.getpid())
            self.looked = time.monotonic()

    def gone(self) -> LaunchError:
        """The error for a cluster that is lost."""
        return LaunchError(
            f"the Ray cluster at {self.address} no longer answers; everything acknowledged is in the run"
            " folder, so start the cluster again and continue with --resume."
        )


@contextmanager
def open_cluster(launch: RayLaunch, layout: Layout, asked: Preemption) -> Iterator[Cluster]:
    """The cluster of `launch` while the block runs; only what was started here is ended.

    Raises `MissingExtraError` without Ray, `LaunchError` if the cluster cannot be reached, is of another
    version, or cannot be started, `PreemptedError` if the run is asked to stop meanwhile.
    """
    if launch.address is None or launch.address.startswith(LOOPBACK):
        os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    ray = import_ray()
    if ray.is_initialized():
        raise LaunchError("this process is connected to a Ray cluster already; call ray.shutdown() first.")
    opened = _started(ray, launch, layout, asked) if launch.address is None else _joined(ray, launch, asked)
    with opened as cluster:
        yield cluster


def _init(ray: Any, asked: Preemption, **options: Any) -> Any:
    """`ray.init`, which answers SIGTERM by leaving, and would go on doing so: that is the run's own to do."""
    asked.check()
    with _own_sigterm():
        try:
            return ray.init(
                logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options
            )
        except SystemExit:
            asked.stop()
    asked.check()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Answer SIGTERM after the block as before it: Ray takes the signal, and leaves it without an answer."""
    answer = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


@contextmanager
def _started(ray: Any, launch: RayLaunch, layout: Layout, asked: Preemption) -> Iterator[Cluster]:
    before = descendants(os.getpid())
    cluster = Cluster(ray, "", own=True)
    with own_folder("opd-ray-") as folder:
        try:
            cluster.address = _start_head(ray, launch, layout, str(folder), asked)
            yield cluster
        finally:
            cluster.look()
            with _own_sigterm():
                ray.shutdown()
            end_left_over({p: s for p, s in cluster.processes.items() if p not in before}, GOODBYE_SECONDS)


def _start_head(ray: Any, launch: RayLaunch, layout: Layout, folder: str, asked: Preemption) -> str:
    """Start the cluster with its files in `folder`; returns its address."""
    if launch.port is not None:
        require_free(launch.port)
        os.environ["RAY_GCS_SERVER_PORT"] = str(launch.port)
    # The machine is shared out by the operating system: as many CPUs are counted as the layout asks for.
    cpus = max(os.cpu_count() or 1, int(layout.total.get("CPU", 0)) + 1)
    custom = {n: v for n, v in layout.total.items() if n not in ("CPU", "GPU", "memory")}
    try:
        context = _init(
            ray,
            asked,
            num_cpus=cpus,
            resources=custom,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            namespace="opd",
        )
    except PreemptedError:
        raise
    except Exception as error:
        raise LaunchError(f"no Ray cluster could be started here: {one_line(error)}.") from error
    finally:
        os.environ.pop("RAY_GCS_SERVER_PORT", None)
    return str(context.address_info["gcs_address"])


@contextmanager
def _joined(ray: Any, launch: RayLaunch, asked: Preemption) -> Iterator[Cluster]:
    address = resolved(launch)
    probe(address)
    environment = {"runtime_env": {"working_dir": launch.working_dir}} if launch.working_dir else {}
    namespace = f"opd-{os.getpid()}-{time.time_ns():x}"
    try:
        try:
            with _at_most(launch.start_timeout):
                _init(ray, asked, address=address, namespace=namespace, **environment)
        except PreemptedError:
            raise
        except Exception as error:
            raise _unjoinable(address, error) from error
        yield Cluster(ray, address, own=False)
    finally:
        with _own_sigterm():
            ray.shutdown()


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """`TimeoutError` in the block after `seconds`: a driver whose own address the cluster does not know waits
    for ever. Only the main thread can be interrupted.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _unjoinable(address: str, error: Exception) -> LaunchError:
    if "ersion mismatch" in str(error):
        return LaunchError(
            f"the Ray cluster at {address} runs other versions than this process ({one_line(error)}); install"
            " the same Ray and Python on both sides."
        )
    return LaunchError(f"the Ray cluster at {address} could not be joined: {one_line(error)}.")


def reserve(cluster: Cluster, launch: RayLaunch, layout: Layout, asked: Preemption) -> Any:
    """The placement group of `layout`. Raises `LaunchError` if it is not there within the time-out,
    `PreemptedError` if the run is asked to stop meanwhile.
    """
    ray = cluster.ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(layout.bundles, strategy=layout.strategy)
    there = ray.cluster_resources()
    short = any(there.get(name, 0.0) < value for name, value in layout.total.items())
    # A cluster of its own does not grow; one that is shared may, or others may leave it.
    if (cluster.own and short) or not _placed(group, launch.placement_timeout, asked):
        largest = max(layout.bundles, key=lambda bundle: sum(bundle.values()))
        free = words(ray.available_resources())
        with suppress(Exception):
            remove_placement_group(group)
        raise LaunchError(
            f"the Ray cluster at {cluster.address} did not give {words(layout.total)}"
            f" ({len(layout.bundles)} bundles, the largest of {words(largest)}, {layout.strategy}) within"
            f" {launch.placement_timeout:g} s; it has {words(there)}, free: {free}. Lower launch.engines,"
            " launch.teachers or what each actor asks for, or add nodes."
        )
    return group


def _placed(group: Any, seconds: float, asked: Preemption) -> bool:
    until = time.monotonic() + seconds
    while not group.wait(LOOK):
        asked.check()
        if time.monotonic() > until:
            return False
    return True


def one_line(error: BaseException) -> str:
    """What an error says, on one line and not for ever."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else f"{text[:297]}..."
