"""Run the rollouts of a stage: its engine behind a token log, ready to be interrupted at any token.

Keys and values of interrupted requests go into one file (`opd.rollout.preemption.KVStore`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import CheckpointError
from opd.pipelines.records.layout import EPISODES, KEPT
from opd.pipelines.stages.context import StageContext
from opd.rollout.collect import DomainSampling
from opd.rollout.engine_pool import EnginePool
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.request_state import Recovery, StopStrings
from opd.storage.files import fsync_folder, read_sealed, write_sealed
from opd.storage.tensors import load_tensors, save_tensors
from opd.storage.wal import TokenWAL

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


class StageLogs:
    """A stage's log of tokens, and those of its episodes."""

    def __init__(
        self,
        log: TokenWAL,
        episodes: TrajectoryLog | None = None,
        keep: int = 0,
        open_retained: Callable[[], TrajectoryLog] | None = None,
    ) -> None:
        self.tokens = log
        self.episodes = episodes
        """The log of agents' commands in them. It is pruned with this one."""
        self._most, self._open_retained = keep, open_retained
        self._retained: TrajectoryLog | None = None
        """The log of retained episodes, at most `keep` of them."""

    def retire(self, uids: Iterable[str]) -> None:
        """Release the responses `uids` from all logs."""
        retired = list(uids)
        self.tokens.retire(retired)
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


class StageRollout:
    """A `RolloutEngine` with every token logged, and its logs (`None`: no log)."""

    def __init__(
        self, engine: FaultTolerantRollout, logs: StageLogs | None, ways: dict[str, DomainSampling]
    ) -> None:
        """`ways`: the generation of each domain's responses, with episodes in the log."""
        self.engine, self.ways = engine, ways
        self.logs, self._counted_seconds = logs, 0.0

    def on_checkpoint(self, keep: Callable[[], Collection[str]] = tuple) -> Callable[[], None]:
        """Return a callback that releases every present response from the log but those of `keep`, which is
        asked once it is known which are present. A response that an earlier attempt wrote for a later step
        stays, if it is asked for before the callback.
        """
        logs, engine = self.logs, self.engine
        if logs is None:
            return lambda: None
        asked = engine.begin_noting()
        present = logs.tokens.uids()
        kept = keep()
        uids = [uid for uid in present if uid not in kept]

        def retire() -> None:
            engine.end_noting(asked)
            logs.retire([uid for uid in uids if uid not in asked])

        return retire

    def release_responses(self, uids: Iterable[str]) -> None:
        """Release these responses from the log and its memory, because they are stored elsewhere."""
        if self.logs is not None:
            self.logs.retire(uids)

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """Return counts of requests, engines and log since the last call, as metrics. Adds to `totals`."""
        counters = {f"rollout/{name}": value for name, value in self.engine.take_counters().items()}
        if self.logs is not None:
            before, self._counted_seconds = self._counted_seconds, self.logs.tokens.write_seconds
            counters["rollout/log_seconds"] = self._counted_seconds - before
        for name, value in counters.items():
            totals[name] = totals.get(name, 0.0) + value
        return counters


@contextmanager
def open_logs(context: StageContext) -> Iterator[StageLogs | None]:
    """Open the stage's logs while the block runs, if the recipe has one. It continues an earlier
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
        tokens = stack.enter_context(
            TokenWAL(context.rank_path(folder.wal_folder(context.stage)), **settings)
        )
        episodes, open_retained = None, None
        if any(domain.environment is not None for domain in context.recipe.domains.values()):
            from opd.environments.trajectory import TrajectoryLog

            stage = folder.stage_folder(context.stage)
            episodes = stack.enter_context(TrajectoryLog(context.rank_path(stage / EPISODES), **settings))
            retained = context.rank_path(stage / KEPT)
            open_retained = lambda: stack.enter_context(TrajectoryLog(retained, fsync="os"))  # noqa: E731
        logs = StageLogs(tokens, episodes, config.keep, open_retained)
        yield logs
        if episodes is not None:  # the remaining ones, as if they were trained on
            logs.store_episodes(episodes, episodes.uids())


def fault_tolerant(
    context: StageContext,
    engine_pool: EnginePool,
    logs: StageLogs | None,
    stops: StopStrings | None,
    in_flight: KVFile | None = None,
) -> FaultTolerantRollout:
    """Wrap `engine_pool` with a log of tokens, until the stage is to stop. `in_flight`: keys and values."""
    return FaultTolerantRollout(
        engine_pool,
        None if logs is None else logs.tokens,
        stops=stops,
        preemption=context.preemption,
        recovery=Recovery(
            in_flight,
            context.folder.owner_id(context.stage),
            context.recipe.rollout.schedule == "async" or context.recipe.rollout.over_sample > 1,
        ),
    )
