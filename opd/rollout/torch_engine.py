"""The embedded rollout engine: KV-cached, continuously batched sampling in this process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM
from opd.rollout.batch import Limits, RequestQueue, RunningBatch, queue_requests
from opd.rollout.forward import Runner
from opd.rollout.kv_cache import Origin, PromptKV, pack, unpack
from opd.rollout.sampling import SamplingPlan, sample
from opd.types import Chunk, RolloutRequest, Status

if TYPE_CHECKING:
    from torch import Tensor


class EngineState(Protocol):
    """What a generation asks of its engine."""

    @property
    def policy_version(self) -> int: ...

    @property
    def paused(self) -> bool: ...

    chunk_seconds: float

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


class Generation(Iterator[Chunk]):
    """Iterator over the chunks of a call, each of one or more decode steps.

    Requests in flight survive pause, flush and weight updates.

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

    def __next__(self) -> Chunk:
        """The next chunk. Raises `RolloutError` while the engine is paused; nothing is lost by that."""
        if not self._open:
            raise StopIteration
        if self._engine.paused:
            raise RolloutError("the engine is paused; call resume() before the next chunk.")
        if self._aborting:
            with torch.inference_mode():
                self._drop_aborted()
        if self._queue.ended:
            return self._report_ended()
        if self._batch.size == 0 and not self._queue:
            self.close()
            raise StopIteration
        begin, steps = time.monotonic(), []
        with torch.inference_mode():
            while not steps or (
                time.monotonic() - begin < self._engine.chunk_seconds and (self._batch.size or self._queue)
            ):
                steps.append(self._step())
        return Chunk.join(steps)

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

    def _step(self) -> Chunk:
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

    def _commit(self, ids: np.ndarray, logprobs: np.ndarray) -> Chunk:
        batch = self._batch
        step = Chunk(
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

    def _report_ended(self) -> Chunk:
        """A step without tokens for resumed requests that had already ended."""
        ended, self._queue.ended = self._queue.ended, {}
        nothing = np.zeros(0, dtype=np.int32)
        return Chunk([], nothing, nothing, np.zeros(0, dtype=np.float32), self._engine.policy_version, ended)


class TorchEngine:
    """Implements `opd.protocols.RolloutEngine` on a `CausalLM`.

    A request's tokens depend on the weights, its prompt, its sampling settings, and (seed, uid, position)
    alone: not on its batch mates, the number of slots, or on being interrupted and resumed through
    `prefix_ids`. (The log-probabilities of another batch differ by floating-point rounding, about 1e-6.)

    `model` is used in place, and its weights change only through `update_weights`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_running: int = 512,
        max_sequence: int = 4096,
        vocab_size: int | None = None,
        version: int = 0,
        lean: bool | None = None,
    ) -> None:
        """`max_running`: requests decoded together. `max_sequence`: prompt plus response tokens of a request,
        at most the model's own `max_position_embeddings`. `vocab_size`: sample from the first ids only (a
        model's head may be padded beyond its tokenizer). `lean`: force the lean decoder on or off; `None`
        chooses.
        """
        if max_running < 1 or max_sequence < 2:
            raise RolloutError(
                f"max_running must be at least 1 and max_sequence at least 2, not {max_running} and"
                f" {max_sequence}."
            )
        self.model = model
        self._vocab_size = vocab_size
        self._max_running = max_running
        trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._limits = Limits(
            vocab_size=vocab_size or model.vocab_size,
            max_sequence=min(max_sequence, trained) if trained else max_sequence,
        )
        self._runner = Runner(model, lean=lean)
        self._head = self._decode_head()
        self._version = version
        self.chunk_seconds = 0.0
        """Tokens are handed out together that are decoded in less; a single decode step may take longer."""
        self._paused = False
        self._epoch = 0
        self._active: weakref.ref[Generation] | None = None
        self._restored = 0
        self.saved: dict[bytes, PromptKV] = {}
        """Restored keys and values that no request has taken yet, by the bytes of their token ids."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    @property
    def paused(self) -> bool:
        """Whether decoding is stopped."""
        return self._paused

    @property
    def cache_epoch(self) -> int:
        """Grows whenever the cached keys and values were dropped."""
        return self._epoch

    @property
    def head(self) -> Head:
        """The head that turns hidden states into logits."""
        return self._head

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far; one shared by several requests of a call counts once."""
        return self._runner.prefilled_tokens

    @property
    def restored_tokens(self) -> int:
        """Tokens whose keys and values came from `restore` instead of a forward, in all calls so far."""
        active = self._active() if self._active is not None else None
        return self._restored + (active.restored_tokens if active is not None else 0)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """Decode all `requests`, more than `max_running` of them waiting for a free slot.

        A resumed request whose `prefix_ids` already end it is reported first, in a step without tokens.
        Raises `RolloutError` for a request that cannot be served, before anything is sampled, and if the
        iterator of an earlier call is neither exhausted nor closed nor dropped.
        """
        earlier = self._active() if self._active is not None else None
        if earlier is not None:
            raise RolloutError(
                "an earlier generate call is still in flight; exhaust or close its iterator before"
                " starting another."
            )
        queue = queue_requests(requests, self._limits)
        generation = Generation(self, self._runner, queue, self._max_running, _forget(weakref.ref(self)))
        self._active = weakref.ref(generation)
        return generation

    def pause(self) -> None:
        """Stop sampling; requests in flight stay where they are, and their iterator raises until `resume`."""
        self._paused = True

    def flush(self) -> None:
        """Drop every cached key and value; requests in flight rebuild theirs from their tokens when they go
        on.
        """
        self._runner.clear()
        self.saved.clear()
        self._epoch += 1

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy `weights` in place, flush, and return the digest of the model the engine now holds.

        Raises `RolloutError` if the engine is not paused or `version` does not grow.
        """
        if not self._paused:
            raise RolloutError(
                "weights can change only between decode steps; call pause() before update_weights()."
            )
        if version <= self._version:
            raise RolloutError(
                f"the policy version must grow, but {version} was given while the engine holds"
                f" {self._version}."
            )
        try:
            self.model.load_weights(weights)
        finally:
            # Even a refused tensor leaves those before it copied: nothing computed earlier is valid any more.
            self._runner.refresh()
            self.saved.clear()
            self._head = self._decode_head()
            self._epoch += 1
        self._version = version
        return self.model.digest()

    def resume(self) -> None:
        """Continue sampling."""
        self._paused = False

    def abort(self, uids: Collection[str]) -> None:
        """Stop these requests of the call in flight; its next step reports them as aborted."""
        active = self._active() if self._active is not None else None
        if active is not None:
            active.abort(uids)

    def snapshot(self) -> dict[str, Tensor]:
        """Keys and values of all requests in flight, as named tensors on the CPU; empty if there are none.

        Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("snapshot")
        active = self._active() if self._active is not None else None
        held = list(active.held()) if active is not None else []
        return pack(held, self._origin()) if held else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> int:
        """Take over a `snapshot`; returns how many sequences it holds. A request whose tokens are among them
        continues from these keys and values; every other is prefilled. `flush` and new weights drop them.

        Raises `RolloutError` if the snapshot was made with other weights or by another form of decoder.
        """
        saved, origin = unpack(tensors)
        if origin != self._origin():
            raise RolloutError(
                f"the saved keys and values come from {origin}, but the engine holds {self._origin()};"
                " let it prefill instead."
            )
        device = self.model.device
        for prompt in saved.values():
            prompt.layers = {i: (k.to(device), v.to(device)) for i, (k, v) in prompt.layers.items()}
        self.saved = saved
        return len(saved)

    def release(self) -> None:
        """Give the memory of keys and values back; requests in flight rebuild or restore theirs when they go
        on. Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("release")
        slots = self._runner.cache.slots
        self._runner.release()
        self._runner.start(slots)
        self.saved.clear()
        self._epoch += 1
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_paused(self, verb: str) -> None:
        if not self._paused:
            raise RolloutError(f"requests are being decoded; call pause() before {verb}().")

    def _origin(self) -> Origin:
        return Origin(self.model.digest(), self._version, self._runner.lean is not None)

    def _decode_head(self) -> Head:
        """The model's head, in float32: `Head.logits` would convert half-precision weights at every step."""
        head = self.model.head(self._vocab_size)
        if head.weight.dtype not in (torch.float16, torch.bfloat16):
            return head
        return replace(head, weight=head.weight.detach()[: head.vocabulary].float(), vocab_size=None)

    def _end(self, generation: Generation) -> None:
        if self._active is not None and self._active() is generation:
            self._active = None
            self._restored += generation.restored_tokens


def _forget(engine: weakref.ref[TorchEngine]) -> Callable[[Generation], None]:
    """A callback that does not keep the engine alive."""

    def on_end(generation: Generation) -> None:
        alive = engine()
        if alive is not None:
            alive._end(generation)

    return on_end
