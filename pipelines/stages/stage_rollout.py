"""Run the rollouts of a stage: its engine behind a token log, ready to be interrupted at any token.

Keys and values of interrupted requests go into one file (`opd.rollout.preemption.KVStore`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import CheckpointError
from opd.pipelines.stages.context import StageContext
from opd.rollout.collect import DomainSampling
from opd.rollout.engine_pool import EnginePool
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.request_state import Recovery, StopStrings
from opd.storage.files import fsync_folder, read_sealed, write_sealed
from opd.storage.tensors import load_tensors, save_tensors
from opd.storage.wal import TokenWAL
from opd.types import Chunk, LoggedRequest, RolloutRequest, Status

if TYPE_CHECKING:
    from torch import Tensor

    from opd.environments.trajectory import TrajectoryLog


class KVFile:
    """One safetensors file, complete or absent, with its digest beside it. Values that cannot be written or
    read, or have changed, are computed again. So that is no error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seal = path.with_name(f"{path.name}.json")

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the stored values. On a full disk nothing is stored."""
        try:
            write_sealed(self._seal, {"file": save_tensors(self.path, tensors)})
        except OSError:
            self.clear()

    def load(self) -> dict[str, Tensor] | None:
        """Return the stored values, or `None` if there are none or they are damaged."""
        if not (self.path.exists() and self._seal.exists()):
            return None
        try:
            digest = read_sealed(self._seal, "they are computed again", CheckpointError)["file"]
            return load_tensors(self.path, str(digest))
        except (CheckpointError, KeyError):
            return None

    def clear(self) -> None:
        """Delete the stored values."""
        if self.path.exists() or self._seal.exists():
            for path in (self._seal, self.path):
                path.unlink(missing_ok=True)
            fsync_folder(self.path.parent)


MIB = 1 << 20


class TimedLog:
    """A `TokenLog` that measures its caller's waiting time."""

    def __init__(
        self,
        log: TokenWAL,
        episodes: TrajectoryLog | None = None,
        keep: int = 0,
        open_retained: Callable[[], TrajectoryLog] | None = None,
    ) -> None:
        self.log = log
        self.episodes = episodes
        """The log of agents' commands in them. It is pruned with this one."""
        self._most, self._open_retained = keep, open_retained
        self._retained: TrajectoryLog | None = None
        """The log of retained episodes, at most `keep` of them."""
        self.seconds = 0.0

    def open(self, request: RolloutRequest, metadata: Mapping[str, Any]) -> None:
        self.open_many([(request, metadata)])

    def open_many(self, requests: Iterable[tuple[RolloutRequest, Mapping[str, Any]]]) -> None:
        with self._measure_wait():
            self.log.open_many(requests)

    def append(self, chunk: Chunk) -> None:
        with self._measure_wait():
            self.log.append(chunk)

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        with self._measure_wait():
            self.log.close(uid, status, reason)

    def find(self, uid: str) -> LoggedRequest | None:
        with self._measure_wait():
            return self.log.find(uid)

    def retire(self, uids: Iterable[str]) -> None:
        with self._measure_wait():
            retired = list(uids)
            self.log.retire(retired)
            if self.episodes is not None:
                self.store_episodes(self.episodes, retired)
                self.episodes.retire_requests(retired)

    def store_episodes(self, episodes: TrajectoryLog, uids: Iterable[str]) -> None:
        """Store the newest complete episodes of `uids` in a separate log, after their training."""
        if self._open_retained is None or not self._most:
            return
        names = dict.fromkeys(name for uid in uids for name in (uid, uid.rpartition("/")[0]))
        complete = [one for name in names if (one := episodes.find(name)) is not None and one.steps]
        if not complete:
            return
        self._retained = log = self._retained or self._open_retained()
        for one in sorted(complete, key=lambda one: one.order)[-self._most :]:
            log.adopt_episode(one)
        log.retire(log.uids()[: -self._most])

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class StageRollout:
    """A `RolloutEngine` with every token logged, and its log (`None`: no log)."""

    def __init__(
        self, engine: FaultTolerantRollout, log: TimedLog | None, ways: dict[str, DomainSampling]
    ) -> None:
        """`ways`: the generation of each domain's responses, with episodes in the log."""
        self.engine, self.ways = engine, ways
        self._log = log

    def on_checkpoint(self, keep: Collection[str] = ()) -> Callable[[], None]:
        """Return a callback that releases every present response but `keep` from the log."""
        log = self._log
        if log is None:
            return lambda: None
        uids = [uid for uid in log.log.uids() if uid not in keep]
        return lambda: log.retire(uids)

    def release_responses(self, uids: Iterable[str]) -> None:
        """Release these responses from the log and its memory, because they are stored elsewhere."""
        if self._log is not None:
            self._log.retire(uids)

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """Return counts of requests, engines and log since the last call, as metrics. They are added to
        `totals`.
        """
        counters = {f"rollout/{name}": value for name, value in self.engine.take_counters().items()}
        if self._log is not None:
            counters["rollout/log_seconds"], self._log.seconds = self._log.seconds, 0.0
        for name, value in counters.items():
            totals[name] = totals.get(name, 0.0) + value
        return counters


@contextmanager
def open_log(context: StageContext) -> Iterator[TimedLog | None]:
    """Open the stage's token log while the block runs, if the recipe has one. It continues an earlier
    attempt's log, and is always made durable at the end. Raises `StorageError` if it cannot be.
    """
    config, folder = context.recipe.rollout.log, context.folder
    if config is None:
        yield None
        return
    settings: Any = {
        "fsync": config.fsync,
        "interval_seconds": config.interval_seconds,
        "segment_bytes": config.segment_mb * MIB,
    }
    with ExitStack() as stack:
        log = TokenWAL(context.rank_path(folder.wal_folder(context.stage)), **settings)
        stack.enter_context(log)
        episodes, open_retained = None, None
        if any(domain.environment is not None for domain in context.recipe.domains.values()):
            from opd.environments.trajectory import TrajectoryLog

            path = context.rank_path(folder.episodes_folder(context.stage))
            episodes = stack.enter_context(TrajectoryLog(path, **settings))
            retained = context.rank_path(folder.retained_episodes(context.stage))
            open_retained = lambda: stack.enter_context(TrajectoryLog(retained, fsync="os"))  # noqa: E731
        timed = TimedLog(log, episodes, config.keep, open_retained)
        yield timed
        if episodes is not None:  # the remaining ones, as if they were trained on
            timed.store_episodes(episodes, episodes.uids())


def fault_tolerant(
    context: StageContext,
    engine_pool: EnginePool,
    log: TimedLog | None,
    stops: StopStrings | None,
    in_flight: KVFile | None = None,
) -> FaultTolerantRollout:
    """Wrap `engine_pool` with `log`. Its engines leave when the stage is to stop. `in_flight` stores keys and
    values.
    """
    return FaultTolerantRollout(
        engine_pool,
        log,
        stops=stops,
        preemption=context.preemption,
        recovery=Recovery(
            in_flight,
            context.folder.owner_id(context.stage),
            context.recipe.rollout.schedule == "async",
        ),
    )
