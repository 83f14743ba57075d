"""The Ray cluster of a run: one that is there already, or one of its own on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.config import RayLaunch
from opd.errors import LaunchError, MissingExtraError
from opd.pipelines.on_ray.layout import Layout, words
from opd.pipelines.on_ray.processes import Processes, descendants, end_left_over

PROBE_SECONDS = 10.0
GOODBYE_SECONDS = 5.0
"""Time the processes of a cluster of our own have to leave."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a gRPC client says first: HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
LOOPBACK = ("127.0.0.1:", "localhost:")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, Ray binds the loopback interface alone
    "RAY_DEDUP_LOGS": "0",
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

    def lost(self, patience: float = 5.0) -> bool:
        """Whether the cluster's head has not answered for `patience` seconds."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            self.lost_since = self.lost_since or time.monotonic()
            return time.monotonic() - self.lost_since > patience
        self.lost_since = None
        return False

    def look(self) -> None:
        """Remember the processes of a cluster of our own: those of a dead node manager are found no more."""
        if self.own:
            self.processes |= descendants(os.getpid())

    def gone(self) -> LaunchError:
        """The error for a cluster that is lost."""
        return LaunchError(
            f"the Ray cluster at {self.address} no longer answers; everything acknowledged is in the run"
            " folder, so start the cluster again and continue with --resume."
        )


@contextmanager
def open_cluster(launch: RayLaunch, layout: Layout) -> Iterator[Cluster]:
    """The cluster of `launch` while the block runs; only what was started here is ended.

    Raises `MissingExtraError` without Ray, `LaunchError` if the cluster cannot be reached, is of another
    version, or cannot be started.
    """
    if launch.address is None or launch.address.startswith(LOOPBACK):
        os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    ray = import_ray()
    if ray.is_initialized():
        raise LaunchError("this process is connected to a Ray cluster already; call ray.shutdown() first.")
    with _started(ray, launch, layout) if launch.address is None else _joined(ray, launch) as cluster:
        yield cluster


@contextmanager
def _started(ray: Any, launch: RayLaunch, layout: Layout) -> Iterator[Cluster]:
    # Sockets lie in this folder, and their paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="opd-ray-", dir="/tmp"))
    before = descendants(os.getpid())
    cluster = Cluster(ray, "", own=True)
    try:
        cluster.address = _start_head(ray, launch, layout, folder)
        yield cluster
    finally:
        cluster.look()
        ray.shutdown()
        end_left_over({p: s for p, s in cluster.processes.items() if p not in before}, GOODBYE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def _start_head(ray: Any, launch: RayLaunch, layout: Layout, folder: Path) -> str:
    """Start the cluster; returns its address."""
    if launch.port is not None:
        _require_free(launch.port)
        os.environ["RAY_GCS_SERVER_PORT"] = str(launch.port)
    # The machine is shared out by the operating system: as many CPUs are counted as the layout asks for.
    cpus = max(os.cpu_count() or 1, int(layout.total.get("CPU", 0)) + 1)
    custom = {n: v for n, v in layout.total.items() if n not in ("CPU", "GPU", "memory")}
    try:
        context = ray.init(
            num_cpus=cpus,
            resources=custom,
            include_dashboard=False,
            _temp_dir=str(folder),
            namespace="opd",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:
        raise LaunchError(f"no Ray cluster could be started here: {one_line(error)}.") from error
    finally:
        os.environ.pop("RAY_GCS_SERVER_PORT", None)
    return str(context.address_info["gcs_address"])


@contextmanager
def _joined(ray: Any, launch: RayLaunch) -> Iterator[Cluster]:
    address = _resolved(launch)
    probe(address)
    environment = {"runtime_env": {"working_dir": launch.working_dir}} if launch.working_dir else {}
    try:
        with _at_most(launch.start_timeout):
            ray.init(
                address=address,
                namespace=f"opd-{os.getpid()}-{time.time_ns():x}",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **environment,
            )
    except Exception as error:
        ray.shutdown()
        raise _unjoinable(address, error) from error
    try:
        yield Cluster(ray, address, own=False)
    finally:
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


def _resolved(launch: RayLaunch) -> str:
    if launch.address != "auto":
        return str(launch.address)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise LaunchError(
            "launch.address is auto, but RAY_ADDRESS is not set: submit the run as a Ray job, or give the"
            " cluster's HOST:PORT."
        )
    return address


def probe(address: str, seconds: float = PROBE_SECONDS) -> None:
    """`LaunchError` unless something at `address` (HOST:PORT) answers as a Ray head would: Ray itself would
    go on trying for minutes.
    """
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


def _require_free(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            raise LaunchError(
                f"launch.port {port} is in use; choose another, or none to take a free one."
            ) from None


def reserve(cluster: Cluster, launch: RayLaunch, layout: Layout) -> Any:
    """The placement group of `layout`. Raises `LaunchError` if it is not there within the time-out."""
    ray = cluster.ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(layout.bundles, strategy=layout.strategy)
    there = ray.cluster_resources()
    short = any(there.get(name, 0.0) < value for name, value in layout.total.items())
    # A cluster of its own does not grow; one that is shared may, or others may leave it.
    if (cluster.own and short) or not group.wait(launch.placement_timeout):
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


def one_line(error: BaseException) -> str:
    """What an error says, on one line and not for ever."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else f"{text[:297]}..."
