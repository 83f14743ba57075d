"""Save a stage's checkpoints: taken between two steps, written while training goes on, read by any ranks.

Every rank copies its share of each back end to its host's memory, and a thread writes that into one draft of
the checkpoint. The first rank makes the draft, and gives it its manifest and its name once all have written.
An error is raised on every rank at the end of a later step, or when the stage ends.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from opd.errors import CheckpointError, RanksError, from_system
from opd.models.sharded import compare_together
from opd.pipelines.stages.context import StageContext
from opd.ranks import Ranks
from opd.storage.checkpoints import CheckpointStore, Tensors
from opd.storage.tensors import write_files
from opd.train.backend import Backend

_log = logging.getLogger(__name__)
_WRITING = "the writing of a checkpoint"


class CheckpointSaver:
    """Writes the checkpoints of a stage, one at a time. Use it with `with`.

    Args:
        others: Other trained models, by the prefix of their files.
    """

    def __init__(self, context: StageContext, backend: Backend, others: Mapping[str, Backend]) -> None:
        self._context = context
        self._backends = {"": backend, **{f"{name}_": other for name, other in others.items()}}
        self._writers = context.ranks.new_group(f"{context.stage}/checkpoints")
        self._durable: Callable[[], None] = lambda: None
        self.pending: Future[None] | None = None
        """The checkpoint in progress, if any."""

    def restore_latest(self) -> dict[str, Any]:
        """Restore back ends and metrics from the newest valid checkpoint, if any. Return its other state."""
        checkpoint = self._context.checkpoints.latest(partial(compare_together, self._context.ranks))
        if checkpoint is None:
            self._context.metrics.truncate(0)
            return {}
        for prefix, backend in self._backends.items():
            backend.load_state({file: checkpoint.load(prefix + file) for file in backend.files})
        self._context.metrics.truncate(checkpoint.step, checkpoint.state["metrics"])
        _log.info("resumed from step %d", checkpoint.step)
        return checkpoint.state

    def save(self, step: int, describe: Callable[[str], dict[str, Any]], durable: Callable[[], None]) -> None:
        """Take a checkpoint now, once the previous one is written. `finish_pending` calls `durable` when this
        one is. `describe(tail)` returns the state beside tensors. `tail` is the digest of all metrics so far.
        Raises `CheckpointError` if the previous one could not be written.
        """
        self.wait()
        tensors: dict[str, Any] = {}
        for prefix, backend in self._backends.items():
            tensors |= {prefix + file: values for file, values in backend.state().items()}
            backend.offload_state()
        tail = ""
        if self._context.ranks.is_main:
            self._context.metrics.sync()
            tail = self._context.metrics.last_chain
        self._durable, self.pending = durable, Future()
        store, state, pending = self._context.checkpoints, describe(tail), self.pending

        def write_checkpoint() -> None:
            try:
                save_collectively(store, self._writers, step, tensors, state)
            except BaseException as error:
                pending.set_exception(error)
            else:
                pending.set_result(None)

        threading.Thread(target=write_checkpoint, name="checkpoint", daemon=True).start()

    def finish_pending(self) -> None:
        """Check whether all ranks have written. If so, the checkpoint is no longer `pending`. Raises
        `CheckpointError` on all ranks if it could not be written.
        """
        pending = self.pending
        if pending is not None and not self._context.ranks.any_rank(not pending.done(), _WRITING):
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written. Raises as `finish_pending`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()
            self._durable()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        elif self.pending is not None and not isinstance(error, RanksError):
            # Finish the checkpoint in progress, whatever ended the stage. Other ranks may be gone.
            patience = self._context.ranks.timeout
            failed = self.pending.exception(None if math.isinf(patience) else patience)
            if failed is not None:
                _log.warning("a checkpoint could not be written: %s", failed)


def save_collectively(
    store: CheckpointStore, ranks: Ranks, step: int, tensors: Tensors, state: dict[str, Any]
) -> None:
    """Write the checkpoint of `step`. Each of `ranks` has its `tensors`, and the first has the `state`. All
    call this together. It succeeds for all or for none. Raises `CheckpointError` on each if one fails.
    """
    if ranks.is_alone:
        store.save(step, tensors, state)
    elif ranks.is_main:
        _lead_save(store, ranks, step, tensors, state)
    else:
        first = ranks.gather_json({}, _WRITING)[0]
        name = first.get("draft")
        mine = {"files": {}} if name is None else _write_digests(store.folder / name, ranks, tensors)
        _raise_error([first, *ranks.gather_json(mine, _WRITING), *ranks.gather_json({}, _WRITING)])


_EXCHANGES = 3
"""Number of exchanges between the ranks: the draft's path, its files, its final name."""


def _lead_save(
    store: CheckpointStore, ranks: Ranks, step: int, tensors: Tensors, state: dict[str, Any]
) -> None:
    exchanges = 0
    try:
        with store.draft_checkpoint(step) as draft:
            exchanges += 1
            ranks.gather_json({"draft": draft.name}, _WRITING)
            mine = _write_digests(draft, ranks, tensors)
            exchanges += 1
            reports = ranks.gather_json(mine, _WRITING)
            _raise_error(reports)
            digests = {file: digest for one in reports for file, digest in one["files"].items()}
            store.seal_checkpoint(draft, step, digests, state)
    except CheckpointError as error:
        for _ in range(exchanges, _EXCHANGES):  # the others wait for them
            ranks.gather_json({"error": str(error)}, _WRITING)
        raise
    ranks.gather_json({}, _WRITING)


def _write_digests(draft: Path, ranks: Ranks, tensors: Tensors) -> dict[str, Any]:
    """Return the digests of this rank's files, or the error."""
    try:
        return {"files": write_files(draft, tensors, ranks.rank, ranks.size)}
    except OSError as error:
        return {"error": f"rank {ranks.rank}: {from_system(error) or error}"}


def _raise_error(reports: list[dict[str, Any]]) -> None:
    error = next((one["error"] for one in reports if "error" in one), None)
    if error is not None:
        raise CheckpointError(error)
