"""The embedded rollout engine: KV-cached, continuously batched sampling in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from opd.config.train import DecodeConfig
from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM, WeightsDigest
from opd.models.hf_folder import positions_of
from opd.rollout.batch import EngineLimits, RunningBatch, queue_requests
from opd.rollout.expert_recorder import ExpertRecorder
from opd.rollout.forward import Runner
from opd.rollout.graphs import StaticRunner
from opd.rollout.kv_cache import Origin, PromptKV, fit_states, kv_budget, pack_kv, put_back, unpack_kv
from opd.rollout.request_state import ending_chunk
from opd.rollout.sampling import check_finite
from opd.rollout.sharded import ModelSharing, ShardedRunner
from opd.rollout.streams import Streaming
from opd.rollout.turns import CachedTurns, extend_cached
from opd.types import Chunk, RolloutRequest


class TorchEngine(Streaming):
    """Implements `opd.protocols.RolloutEngine` on a `CausalLM`.

    A request's tokens depend only on the weights, its prompt, its sampling settings, and (seed, uid,
    position). They do not depend on its batch mates, the number of slots, or on being interrupted and resumed
    through `prefix_ids`. (Another batch rounds differently, by 1e-6, in bfloat16 by 4e-3, so a token may
    differ.) `model` is used in place, and its weights change only through `update_weights`.
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
        settings: DecodeConfig | None = None,
        sharing: ModelSharing | None = None,
        record_experts: bool = False,
    ) -> None:
        """`max_running`: most requests in one decode batch. `max_sequence`: prompt plus response tokens of a
        request, at most the model's own `positions_of`. `vocab_size`: sample from the first ids only (a
        model's head may be padded beyond its tokenizer). `lean`: force the lean decoder on or off; `None`
        chooses. `settings`: `runtime.decode` of a recipe. `sharing`: the ranks over which `model` is cut.
        `record_experts`: give the expert choices of every position with the tokens. Raises `RolloutError` if
        those of `model` cannot be recorded.
        """
        if max_running < 1 or max_sequence < 2:
            raise RolloutError(
                f"max_running must be at least 1 and max_sequence at least 2, not {max_running} and"
                f" {max_sequence}."
            )
        self.model = model
        trained, settings = positions_of(model.config), settings or DecodeConfig()
        token_bytes = max(1, model.kv_numbers * model.dtype.itemsize)
        budget = kv_budget(settings.kv_cache_mb, model.device)
        self._max_running, state_bytes = fit_states(budget, max_running, model.state_bytes)
        positions = (budget - state_bytes) // token_bytes
        runner: Callable[..., Runner] = Runner
        if sharing is not None:
            runner = partial(ShardedRunner, sharing=sharing)
        elif model.device.type == "cuda":
            runner = partial(StaticRunner, captures=settings.cuda_graphs)
        self._runner: Runner = runner(model, vocab_size, lean=lean, positions=positions)
        self._recorder = self._runner.recorder = ExpertRecorder(model) if record_experts else None
        self._limits = EngineLimits(
            vocab_size=vocab_size or model.vocab_size,
            max_sequence=min(max_sequence, trained) if trained else max_sequence,
            positions=self._runner.positions,
            token_bytes=token_bytes,
        )
        self.policy_version = version
        """Version of the weights that sample the next token."""
        self.chunk_seconds = 0.0
        """Target seconds of a chunk. A single decode step may take longer."""
        self.paused = False
        """True while decoding is stopped."""
        self._queue = queue_requests([], self._limits)
        self._batch = RunningBatch(1, 0, 0)
        self._longest = 0
        """Most tokens that any request in flight may come to hold."""
        self._joined = False
        """True if requests have come that may need more slots or cache."""
        self._cached = 0
        """Number of first slots whose tokens, but for the newest, are all cached."""
        self.restored_tokens = 0
        """Tokens whose keys and values came from `restore` instead of a forward."""
        self._turns = CachedTurns(self._runner, self._limits, self._max_running)
        self.saved: dict[bytes, PromptKV] = {}
        """Restored keys and values that no request has used yet, by the bytes of their token ids."""

    def record_masks(self, most: int) -> None:
        """Give from now on the sampling masks of tokens that a top-p or top-k cuts to at most `most`."""
        self._runner.most_kept = most

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far. One shared by several requests of a call counts once."""
        return self._runner.prefilled_tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens whose keys and values were cached since an earlier turn."""
        return self._turns.reused_tokens

    @property
    def position_counts(self) -> tuple[int, int]:
        """Cached positions per layer: those decode steps have read so far, and those their requests held."""
        return self._runner.positions_read, self._runner.positions_held

    @property
    def in_flight(self) -> list[str]:
        """Uids of the requests that run or wait."""
        return [*self._batch.uids, *self._queue.waiting_uids, *self._queue.ended]

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue `requests` behind those that wait for a free slot, of which there are `max_running`.

        A resumed request whose `prefix_ids` already end it is reported first, in a chunk without tokens.
        Raises `RolloutError`, and queues none, if one cannot be served or is in flight already.
        """
        in_flight = self.in_flight
        queue = queue_requests(requests, self._limits, in_flight)
        self._longest = int(queue.most_tokens.max(initial=self._longest if in_flight else 0))
        self._queue, self._joined = self._queue.merge_queue(queue) if in_flight else queue, True
        self._turns.add_requests(requests)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk, of one or more decode steps, or None if nothing is in flight. Raises
        `RolloutError` while paused, by which nothing is lost.
        """
        if self.paused:
            raise RolloutError("the engine is paused; call resume() before the next chunk.")
        if self._queue.ended:  # resumed requests that had already ended
            ended, self._queue.ended = self._queue.ended, {}
            self._turns.drop_requests(ended)
            return ending_chunk(self.policy_version, ended)
        if not (self._batch.size or self._queue):
            return None
        start, chunks = time.monotonic(), []
        try:
            with self._runner.guard():
                if self._joined:
                    self._reserve_slots()
                while not chunks or (
                    time.monotonic() - start < self.chunk_seconds and (self._batch.size or self._queue)
                ):
                    chunks.append(self._decode_step())
        except BaseException:
            # Keys and values that are not finite must not reach a later request through masked positions.
            self._runner.release_cache()
            self._turns.drop_requests(self.in_flight)
            self._queue, self._batch = queue_requests([], self._limits), RunningBatch(1, 0, 0)
            self._clear_cached()
            raise
        return Chunk.join(chunks)

    def abort(self, uids: Collection[str]) -> None:
        """Free slots and queue entries of these requests. No chunk mentions them again."""
        aborted = set(uids)
        self._turns.drop_requests(aborted)
        self._queue.drop_requests(aborted)
        if rows := [row for row, uid in enumerate(self._batch.uids) if uid in aborted]:
            with self._runner.guard():
                self._remove_slots(rows)

    def drain(self) -> None:
        """Make the passes that other ranks of a sharded model need, until none has work."""
        self._runner.drain()

    def stop_passes(self) -> None:
        """Tell those ranks that this one makes no more passes."""
        self._runner.stop_passes()

    def pause(self) -> None:
        """Stop sampling. Requests in flight stay where they are, and `next_chunk` raises until `resume`."""
        self.paused = True

    def flush(self) -> None:
        """Drop every cached key and value. Requests in flight rebuild theirs from their tokens later."""
        self._runner.clear_cache()
        self._clear_cached()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy `weights` in place, flush, and return the quick digest of the model the engine now holds.

        Raises `RolloutError` if the engine is not paused or `version` does not grow.
        """
        if not self.paused:
            raise RolloutError("weights change only between decode steps: pause() before update_weights().")
        if version <= self.policy_version:
            raise RolloutError(
                f"the policy version must grow, but {version} was given while the engine holds"
                f" {self.policy_version}."
            )
        asleep, digest = self.asleep, WeightsDigest(quick=True)
        try:
            self._runner.load_weights(weights, digest)
            asleep = False
        finally:
            # A refused tensor leaves those before it copied, so nothing computed earlier is valid any more.
            self._runner.sleep() if asleep else self._runner.refresh_weights()
            self._clear_cached()
        self.policy_version = version
        return digest.hex_digest()

    def resume(self) -> None:
        """Continue sampling. Raises `RolloutError` while asleep."""
        if self.asleep:
            raise RolloutError("the engine sleeps and holds no weights; call update_weights() to wake it.")
        self.paused = False

    def snapshot(self) -> dict[str, Tensor]:
        """Return keys and values of all requests in flight, as named tensors on the CPU, or nothing if there
        are none. Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("snapshot")
        tokens = [self._batch.known_tokens(row)[:-1].copy() for row in range(self._cached)]
        sequence_kv = [(ids, self._runner.cache.read_slot(row, len(ids))) for row, ids in enumerate(tokens)]
        return pack_kv(sequence_kv, self._kv_origin()) if sequence_kv else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> int:
        """Take over a `snapshot` and return the number of its sequences. A request whose tokens are among
        them continues from these keys and values. Every other is prefilled. `flush` and new weights drop
        them.

        Raises `RolloutError` if the snapshot was made with other weights or by another form of decoder.
        """
        saved, origin = unpack_kv(tensors, self.model.device)
        if origin != self._kv_origin():
            raise RolloutError(
                f"the saved keys and values come from {origin}, but the engine holds {self._kv_origin()};"
                " let it prefill instead."
            )
        for kv in saved.values():  # all have one form
            numbers = sum(x.shape[0] * x.shape[2] for pair in kv.layers.values() for x in pair)
            if (numbers, kv.state_bytes) != (self.model.kv_numbers, self.model.state_bytes):
                raise RolloutError("the saved keys, values and states are not the model's; let it prefill.")
        self.saved = saved
        return len(saved)

    def release(self) -> None:
        """Free the memory of keys and values. Requests in flight rebuild or restore theirs when they go on.
        Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("release")
        self._runner.release_cache()
        self._runner.reset_cache(self._batch.slots)
        self._clear_cached()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def asleep(self) -> bool:
        """True if it holds no weights."""
        return self._runner.head is None

    def sleep(self) -> None:
        """`pause` and `release`, and free the weights' memory too, until `update_weights`."""
        self.pause()
        self.release()
        self._runner.sleep()

    def resident(self) -> dict[str, int]:
        """Bytes of weights, with decode's copies of them, and of keys and values."""
        resident = self._runner.resident()
        return resident | {"engine_kv": resident["engine_kv"] + self._turns.nbytes}

    def _clear_cached(self) -> None:
        """Mark all keys and values as lost."""
        self.saved.clear()
        self._turns.clear()
        self._cached = 0

    def _check_paused(self, verb: str) -> None:
        if not self.paused:
            raise RolloutError(f"requests are being decoded; call pause() before {verb}().")

    def _kv_origin(self) -> Origin:
        return Origin(self._runner.model_digest(), self.policy_version, self._runner.lean is not None)

    def _reserve_slots(self) -> None:
        """Lay slots and cache out for new requests, also next to running ones."""
        queue, batch, self._joined = self._queue, self._batch, False
        slots, width = batch.size + len(queue), queue.stops.shape[1]
        if slots > batch.slots and batch.size:  # turns come one by one
            slots = max(slots, batch.slots * 3 // 2)
        slots = min(self._max_running, slots)
        if batch.size:
            self._batch = batch.with_capacity(slots, width, self._longest)
            self._runner.cache.reserve_slots(slots)
        else:
            self._batch, self._cached = RunningBatch(slots, width, self._longest), 0
            self._runner.reset_cache(slots)

    def _decode_step(self) -> Chunk:
        """Decode one token for every running request."""
        batch, cache = self._batch, self._runner.cache
        if overdue := cache.overdue_slots(batch):  # they are computed again when there is space
            self._queue = batch.as_queue(overdue).merge_queue(self._queue)
            self._remove_slots(overdue)
        batch.admit_requests(self._queue, cache.admissible_count(batch, self._queue))
        lengths = batch.length[: batch.size]
        self._turns.shrink_to_fit(cache.positions_for(lengths, self._longest))
        cache.reserve_tokens(lengths, self._longest, self._cached)
        if self.saved:
            restored = put_back(self.saved, cache, batch, self._cached, self._recorder is not None)
            self._cached += len(restored)
            self.restored_tokens += sum(restored)
            if not self._queue:
                self.saved.clear()
        if self._recorder is not None:
            self._recorder.begin_step()
        # [B, D] of all parts: the hidden states that predict the next token of every running request.
        parts = [self._runner.decode(batch, self._cached)] if self._cached else []
        if self._cached < batch.size:
            turns = self._turns.match_slots(batch, self._cached)
            first = batch.size - len(turns)
            if first > self._cached:
                queue = self._queue
                upcoming = queue.tokens[queue.front].tobytes() if queue else None
                parts.append(self._runner.prefill(batch, self._cached, first, upcoming))
            if turns:
                parts.append(extend_cached(self._runner, batch, first, turns))
            self._cached = batch.size
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        ids, logprobs, masks = self._runner.draw_tokens(hidden, batch)
        check_finite(logprobs)
        chunk = Chunk(
            uids=batch.uids.copy(),
            positions=batch.position[: batch.size].astype(np.int32),
            token_ids=ids.astype(np.int32),
            logprobs=logprobs,
            policy_version=self.policy_version,
            finished={},
            sampling_masks=masks,
        )
        if self._recorder is not None:
            chunk.expert_choices, chunk.expert_spans = self._recorder.step_choices()
        ended = batch.append(ids)
        if self._recorder is not None:
            batch.routed[: batch.size] = batch.length[: batch.size] - 1
        if ended:
            chunk.finished = {chunk.uids[row]: status for row, status in ended.items()}
            self._turns.cache_slots(batch, ended)
            self._remove_slots(list(ended))
        cache.sort_slots(batch)
        return chunk

    def _remove_slots(self, rows: list[int]) -> None:
        """Free slots, with their keys and values."""
        batch = self._batch
        length = batch.length[: batch.size] - 1  # the newest token has not been read yet
        source, target = batch.remove_slots(rows)
        if source.size:
            self._runner.cache.move_slots(source, target, length[source])
        self._runner.cache.free_slots(batch.size)
        self._cached = min(self._cached, batch.size)  # after a flush none is
