"""One `generate` call in progress: admit, forward, sample, commit; one decode step per `next`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError
from opd.kernels.head import Head
from opd.rollout.batch import RunningBatch
from opd.rollout.kv_cache import PromptKV
from opd.rollout.requests import RequestQueue
from opd.rollout.runner import Runner
from opd.rollout.sampling import SamplingPlan, sample
from opd.types import DecodeStep, Status


class EngineState(Protocol):
    """What a generation asks of its engine."""

    @property
    def policy_version(self) -> int: ...

    @property
    def paused(self) -> bool: ...

    @property
    def cache_epoch(self) -> int:
        """Changes whenever the cache was dropped."""
        ...

    @property
    def head(self) -> Head: ...

    @property
    def saved(self) -> dict[bytes, PromptKV]:
        """Keys and values from before a preemption, by the bytes of their int32 token ids."""
        ...


class Generation(Iterator[DecodeStep]):
    """Iterator over the decode steps of a call. Requests in flight survive pause, flush and weight updates.

    After a flush the keys and values of all running requests are rebuilt from their tokens.
    """

    def __init__(
        self,
        engine: EngineState,
        runner: Runner,
        queue: RequestQueue,
        slots: int,
        on_end: Callable[[Generation], None],
    ) -> None:
        self._engine, self._runner, self._queue, self._on_end = engine, runner, queue, on_end
        slots = max(1, min(slots, len(queue)))
        self._batch = RunningBatch(slots, queue.stops.shape[1], queue.longest)
        runner.start(slots)
        self._cached = 0
        """The first slots, whose tokens but the newest are all in the cache."""
        self._epoch = engine.cache_epoch
        self._plan: SamplingPlan | None = None
        self._aborting: set[str] = set()
        self.restored_tokens = 0
        """Tokens whose keys and values came from `EngineState.saved`."""
        self._open = True

    def __next__(self) -> DecodeStep:
        """The next decode step. Raises `RolloutError` while the engine is paused; nothing is lost by that."""
        if not self._open:
            raise StopIteration
        if self._engine.paused:
            raise RolloutError("the engine is paused; call resume() before the next decode step.")
        if self._aborting:
            with torch.inference_mode():
                self._drop_aborted()
        if self._queue.ended:
            return self._report_ended()
        if self._batch.size == 0 and not self._queue:
            self.close()
            raise StopIteration
        with torch.inference_mode():
            return self._step()

    def close(self) -> None:
        """Drop the requests that are still in flight."""
        if self._open:
            self._open = False
            self._on_end(self)

    def abort(self, uids: Collection[str]) -> None:
        """Stop these requests before the next decode step, which reports them as aborted."""
        self._aborting.update(uids)

    def held(self) -> Iterator[tuple[np.ndarray, PromptKV]]:
        """Of every running request: its tokens but the newest, `[L]` int32, and their keys and values."""
        if self._epoch != self._engine.cache_epoch:
            return
        for row in range(self._cached):
            known = self._batch.known(row)[:-1].copy()
            yield known, self._runner.cache.read(row, len(known))

    def _drop_aborted(self) -> None:
        """Free the slots and queue places of aborted requests; their end is reported like that of others."""
        names, self._aborting = self._aborting, set()
        rows = [row for row, uid in enumerate(self._batch.uids) if uid in names]
        queue = self._queue
        waiting = [i for i in range(queue.taken, len(queue.uids)) if queue.uids[i] in names]
        gone = [self._batch.uids[row] for row in rows] + [queue.uids[i] for i in waiting]
        queue.ended = queue.ended | dict.fromkeys(gone, Status.ABORTED)
        if rows:
            self._remove(rows)
        if waiting:
            queue.drop(waiting)

    def _step(self) -> DecodeStep:
        if self._epoch != self._engine.cache_epoch:
            self._epoch, self._cached = self._engine.cache_epoch, 0
        if self._batch.admit(self._queue):
            self._plan = None
        logits = self._engine.head.logits(self._forward())
        batch = self._batch
        if self._plan is None:
            size = batch.size
            self._plan = SamplingPlan.build(
                batch.temperature[:size], batch.top_p[:size], batch.top_k[:size], logits.device
            )
        uniforms = torch.from_numpy(batch.noise.at(batch.position[: batch.size])).to(logits.device)
        try:
            ids, logprobs = sample(logits, uniforms, self._plan)
        except RolloutError:
            # Keys and values that are not finite must not reach a later call through masked positions.
            self._runner.release()
            self.close()
            raise
        return self._commit(ids.cpu().numpy(), logprobs.cpu().numpy())

    def _forward(self) -> Tensor:
        """[B, D]: the hidden states that predict the next token of every running request."""
        batch, cached = self._batch, self._cached
        longest = int(batch.length[: batch.size].max())
        self._runner.cache.ensure(longest, self._queue.longest, cached)
        if self._engine.saved:
            cached = self._cached = self._restore(cached)
        parts = [self._runner.decode(batch, cached)] if cached else []
        if cached < batch.size:
            upcoming = self._queue.tokens[self._queue.taken].tobytes() if self._queue else None
            parts.append(self._runner.prefill(batch, cached, upcoming))
            self._cached = batch.size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _commit(self, ids: np.ndarray, logprobs: np.ndarray) -> DecodeStep:
        batch = self._batch
        step = DecodeStep(
            uids=batch.uids.copy(),
            positions=batch.position[: batch.size].astype(np.int32),
            token_ids=ids.astype(np.int32),
            logprobs=logprobs,
            policy_version=self._engine.policy_version,
            finished={},
        )
        ended = batch.append(ids)
        if ended:
            step.finished = {step.uids[row]: status for row, status in ended.items()}
            self._remove(list(ended))
        return step

    def _remove(self, rows: list[int]) -> None:
        """Free slots, with their keys and values."""
        batch = self._batch
        length = int(batch.length[: batch.size].max()) - 1
        source, target = batch.remove(rows)
        if source.size:
            self._runner.cache.move(source, target, length)
        self._cached = batch.size
        self._plan = None

    def _restore(self, cached: int) -> int:
        """Give the next slots the keys and values that were saved for their tokens; returns how many slots
        are cached then.
        """
        batch, saved = self._batch, self._engine.saved
        while cached < batch.size:
            known = batch.known(cached)[:-1]
            kept = saved.get(known.tobytes())
            if kept is None:
                break
            self._runner.cache.write(slice(cached, cached + 1), kept)
            self.restored_tokens += len(known)
            cached += 1
        if not self._queue:
            saved.clear()
        return cached

    def _report_ended(self) -> DecodeStep:
        """A step without tokens for resumed requests that had already ended."""
        ended, self._queue.ended = self._queue.ended, {}
        nothing = np.zeros(0, dtype=np.int32)
        return DecodeStep(
            [], nothing, nothing, np.zeros(0, dtype=np.float32), self._engine.policy_version, ended
        )
