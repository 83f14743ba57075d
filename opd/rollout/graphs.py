"""Decode steps on CUDA, over memory at fixed addresses, so that they can be captured as graphs.

A captured graph reads and writes addresses and knows no Python. Values that change from step to step lie in
buffers that are filled before the replay. Values that the host must know (number of slots, number of
positions, sampling settings in use) are part of the graph's key. Slots and positions are rounded up to few
sizes.

A step is two graphs, the forward and the draw, because hidden states of prefilled requests come between them.
The first run of each is eager, which also warms up calls that may not begin inside a capture. The second run
is captured. Later runs are replays.

Shapes: `S` slots, `B` running requests, `D` hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.errors import reason_of
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM
from opd.rollout.batch import RunningBatch
from opd.rollout.forward import Runner, Span
from opd.rollout.kv_cache import KVCache, bucket_size
from opd.rollout.paged_attention import PagedAttention, PagesForm, is_trusted
from opd.rollout.pages import PAGE, PagedCache
from opd.rollout.sampling import SamplingPlan, mask_rows, sample_tokens

log = logging.getLogger(__name__)

LEAST_ROWS, ROW_PARTS = 4, 4
"""Slots that a step computes: 4 to 8, 10, 12, 14, 16, 20, 24, ..."""
MOST = 96
"""Most graphs. The least recently used one is dropped."""


class Graphs:
    """Captured steps by key, which share one memory pool."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._device, self._enabled = device, enabled
        self._refused: set[Hashable] = set()
        """Kinds of steps that could not be captured."""
        self.drop_graphs()

    def drop_graphs(self) -> None:
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(self, key: tuple[Hashable, ...], step: Callable[[], None]) -> None:
        """Run `step`, or its graph. Until `drop_graphs`, steps of one `key` are the same operations on the
        same memory. The key's first part is the kind of step.
        """
        if not self._enabled or key[0] in self._refused:
            return step()
        graph = self._captured.pop(key, None)
        if graph is None:
            if key not in self._seen:
                self._seen.add(key)
                return step()
            graph = self._capture_graph(key[0], step)
            if graph is None:
                return step()
            if len(self._captured) >= MOST:
                del self._captured[next(iter(self._captured))]
        self._captured[key] = graph  # behind those that were used before
        graph.replay()

    def _capture_graph(self, kind: Hashable, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture the graph of `step`. Returns None, once and with a line in the log, if that fails."""
        try:
            with torch.cuda.device(self._device):
                if self._stream is None:
                    self._pool = torch.cuda.graph_pool_handle()
                    self._stream = torch.cuda.Stream(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self._stream):
                    # Another thread may train on this device meanwhile, so only this thread is restricted.
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        step()
                    finally:
                        graph.capture_end()
            return graph
        except Exception as error:  # any error: the step then runs eagerly as before
            self._refused.add(kind)
            with suppress(Exception):  # cleanup after a capture that failed
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._pool = self._stream = None
            first = error.__context__ if isinstance(error.__context__, Exception) else error
            log.warning(
                "decode: the %s step cannot be captured as a CUDA graph (%s), so its kernels are launched one"
                " by one; runtime.decode.cuda_graphs: false does that from the start.",
                kind,
                reason_of(first),
            )
            return None


class StaticRunner(Runner):
    """A runner on CUDA, whose decode steps read and write the same memory each time."""

    def __init__(
        self,
        model: CausalLM,
        vocab_size: int | None = None,
        *,
        lean: bool | None = None,
        positions: int | None = None,
        captures: bool = True,
    ) -> None:
        """`captures`: capture steps as graphs; the numbers are the same. The others as of `Runner`. Keys and
        values lie in pages if their kernel may be trusted.
        """
        form = PagesForm.from_model(model)
        self.paged = form is not None and positions is not None and positions >= 2 * PAGE and is_trusted(form)
        if self.paged and positions is not None:
            positions = (positions // PAGE - 1) * PAGE
        super().__init__(model, vocab_size, lean=lean, positions=positions)
        self.captures = captures = captures and not model.is_recurrent  # states move between slots
        self.graphs = Graphs(model.device, captures)
        self.buffers: Buffers | None = None
        self._layout: object | None = None
        self._addresses: list[int] = []

    def refresh_weights(self) -> None:
        """Take over new weights in the old ones' memory. If they moved, every graph is captured again."""
        super().refresh_weights()
        if self.buffers is not None and self._weight_addresses() != self._addresses:
            self._drop_buffers()

    def release_cache(self) -> None:
        """Drop the cache, graphs and buffers, and their memory."""
        super().release_cache()
        self._drop_buffers()

    def decode(self, batch: RunningBatch, rows: int) -> Tensor:
        """[rows, D]: feed the newest token of each of the first `rows` slots. Valid until the next step."""
        buffers, positions = self._ready_buffers(), batch.length[:rows] - 1
        count = self._round_rows(rows)
        # A kernel over pages reads only held positions, so its window is the most that a request may hold.
        window = self.cache.capacity if self.paged else self.cache.window_length(int(positions.max()) + 1)
        # Slots beyond the running ones are computed too. They write where a prompt will begin.
        buffers.host_tokens[:, rows:count] = 0
        buffers.host_tokens[0, :rows], buffers.host_tokens[1, :rows] = batch.last_tokens(rows), positions
        buffers.tokens.copy_(buffers.pinned_tokens, non_blocking=True)
        span = Span(count, window, window)
        self._count_reads(int(positions.sum()) + count if self.paged else span.position_count, positions)
        step = partial(self._run_forward, buffers, span)
        self.graphs.run(("forward", count, window), step)
        if self.recorder is not None:
            self.recorder.note_decoded(buffers.choices, rows)
        return buffers.hidden[:rows]

    def draw_tokens(
        self, hidden: Tensor, batch: RunningBatch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """As `Runner.draw_tokens`. The result of `decode` is already in its buffer."""
        size, buffers, head = len(hidden), self._ready_buffers(), self.head
        assert head is not None  # no decode while asleep
        if hidden.data_ptr() != buffers.hidden.data_ptr():
            buffers.hidden[:size].copy_(hidden)
        count, host = self._round_rows(size), buffers.host_settings
        greedy, top_p, top_k = batch.temperature[:size] == 0, batch.top_p[:size], batch.top_k[:size]
        temperature = np.where(greedy, 1.0, batch.temperature[:size])
        host[:, size:count] = 1.0
        host[0, :size], host[1, :size], host[2, :size] = batch.next_uniforms(), temperature, greedy
        host[3, :size], host[4, :size] = np.where(top_k == 0, head.vocabulary, top_k), top_p
        limited = bool((top_k > 0).any()), bool((top_p < 1).any())
        used = bool((temperature != 1).any()), bool(greedy.any()), *limited
        buffers.settings.copy_(buffers.pinned_settings, non_blocking=True)
        self.graphs.run(("draw", count, *used), partial(_draw_tokens, buffers, head, count, used))
        ids, logprobs, kept = buffers.drawn.cpu().numpy()[:, :size]
        masks = None
        if buffers.masks is not None and any(limited):
            masks = mask_rows(buffers.masks[:size, : int(kept.max())].cpu().numpy(), head.vocabulary)
        return ids.astype(np.int64), logprobs.astype(np.float32), masks

    def _round_rows(self, rows: int) -> int:
        return min(bucket_size(rows, LEAST_ROWS, ROW_PARTS), self.cache.slots)

    def forward(self, ids: Tensor, positions: Tensor, span: Span) -> Tensor:
        if isinstance(self.cache, PagedCache):
            return self.forward_added(ids, PagedAttention(self.cache, positions))
        return super().forward(ids, positions, span)

    def _new_cache(self) -> KVCache:
        if self.paged:
            assert self.positions is not None
            return PagedCache(self.positions, self.model.device)
        return KVCache(self.positions, static=True, states=self._new_states())

    def _ready_buffers(self) -> Buffers:
        """Return the buffers for the cache's slots. If the cache has moved, make new ones and drop graphs."""
        if self.buffers is None or self.cache.layout is not self._layout:
            self._drop_buffers()
            if self.lean is not None:
                self.lean.extend_rotary(self.cache.capacity)
            self._layout, self._addresses = self.cache.layout, self._weight_addresses()
            self.buffers = Buffers(self.model, self.cache.slots)
            if self.recorder is not None:
                self.buffers.choices = self.recorder.new_buffer(self.cache.slots)
            if self.most_kept and self.head is not None:
                shape = (self.cache.slots, min(self.most_kept, self.head.vocabulary))
                self.buffers.masks = torch.zeros(shape, dtype=torch.int32, device=self.model.device)
        return self.buffers

    def _drop_buffers(self) -> None:
        self.graphs.drop_graphs()
        self.buffers = None

    def _weight_addresses(self) -> list[int]:
        """Addresses of the weights that a decode step reads."""
        module = self.model.module
        tensors = [
            *module.parameters(),
            *module.buffers(),
            *([] if self.lean is None else self.lean.step_tensors()),
        ]
        return [x.data_ptr() for x in tensors]

    def _run_forward(self, buffers: Buffers, span: Span) -> None:
        ids, positions = buffers.tokens[:, : span.rows]
        if self.recorder is not None:
            self.recorder.buffer = buffers.choices
        try:
            buffers.hidden[: span.rows].copy_(self.forward(ids, positions, span))
        finally:
            if self.recorder is not None:
                self.recorder.buffer = None


class Buffers:
    """Buffers that steps read and write, besides weights and cache."""

    def __init__(self, model: CausalLM, slots: int) -> None:
        device = model.device
        self.pinned_tokens = torch.zeros(2, slots, dtype=torch.int64, pin_memory=True)
        self.host_tokens = self.pinned_tokens.numpy()
        """[2, S] int64: newest token and its position."""
        self.tokens = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(slots, model.config.hidden_size, dtype=model.dtype, device=device)
        """[S, D]."""
        self.choices: Tensor | None = None
        """[S, L, K]: expert choices, if they are recorded."""
        self.pinned_settings = torch.zeros(5, slots, dtype=torch.float64, pin_memory=True)
        self.host_settings = self.pinned_settings.numpy()
        """[5, S] float64: uniform, temperature, whether greedy, top-k, top-p."""
        self.settings = torch.zeros(5, slots, dtype=torch.float64, device=device)
        self.masks: Tensor | None = None
        """[S, K] int32: sampling masks as of `sample_tokens`, if they are recorded."""
        self.drawn = torch.zeros(3, slots, dtype=torch.float64, device=device)
        """[3, S] float64: token id, log-probability and number of tokens in the sampling mask, all exact."""


def _draw_tokens(buffers: Buffers, head: Head, count: int, used: tuple[bool, bool, bool, bool]) -> None:
    """Sample for the first `count` slots. `used`: True if any of them has a temperature, is greedy, has a
    top-k, has a top-p.
    """
    uniforms, temperature, greedy, top_k, top_p = buffers.settings[:, :count]
    plan = SamplingPlan(
        temperature=temperature.float()[:, None] if used[0] else None,
        greedy=greedy > 0 if used[1] else None,
        top_k=top_k.long()[:, None] if used[2] else None,
        top_p=top_p[:, None] if used[3] else None,
    )
    most = 0 if buffers.masks is None else buffers.masks.shape[1]
    ids, logprobs, masks = sample_tokens(head.logits(buffers.hidden[:count]), uniforms, plan, most)
    if buffers.masks is not None and masks is not None:
        buffers.masks[:count].copy_(masks)
        buffers.drawn[2, :count].copy_((masks < head.vocabulary).sum(-1))
    buffers.drawn[0, :count].copy_(ids)
    buffers.drawn[1, :count].copy_(logprobs)
