"""The turns of one conversation: keys and values that stay cached while its environment answers, and the pass
over the tokens added since.

Without them each turn would compute its full context again. An episode of `n` turns would compute `n / 2`
times its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.models.attention import ScoreForm, kernels_share_heads, masked_attention
from opd.rollout.batch import EngineLimits, RunningBatch
from opd.rollout.forward import CachedAttention, Runner, prefill_tokens
from opd.rollout.kv_cache import LayerCache, PromptKV
from opd.types import RolloutRequest

FEW = 256
"""Added tokens that always extend cached ones. If more are added, and more than are cached, all are computed,
because kernels for full sequences are faster than attention under a mask."""
KEPT = 4
"""Cached conversations per slot. More wait for their environments, or for a slot, than run."""
SCORES = 1 << 24
"""Most scores of added tokens, to all held tokens, that are computed at once."""


@dataclass(frozen=True, slots=True)
class CachedTurn:
    """The cached part of a conversation: all tokens that the model has read."""

    tokens: np.ndarray
    """[m] int32."""
    kv: PromptKV


class CachedTurns:
    """Turns by session, the longest waiting one first. It is dropped first if there is no space."""

    def __init__(self, runner: Runner, limits: EngineLimits, slots: int) -> None:
        """`slots`: requests that run at once. At most `KEPT` times as many conversations are cached, within
        the space that `limits` leave besides the runner's cache.
        """
        self._runner, self._limits, self._most = runner, limits, KEPT * slots
        self._turns: dict[str, CachedTurn] = {}
        self._requests: dict[str, RolloutRequest] = {}
        """Requests in flight that belong to a session, by uid."""
        self.reused_tokens = 0
        """Tokens so far that need not be computed again."""
        self._positions = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add_requests(self, requests: Iterable[RolloutRequest]) -> None:
        """Note that `requests` are in flight."""
        self._requests |= {request.uid: request for request in requests if request.session}

    def drop_requests(self, uids: Iterable[str]) -> None:
        """Note that `uids` are no longer in flight."""
        for uid in uids:
            self._requests.pop(uid, None)

    def shrink_to_fit(self, positions: int) -> None:
        """Drop turns that do not fit beside a cache of `positions`, whose memory only grows."""
        limits, cache_bytes = self._limits, self._runner.cache.nbytes
        most = math.inf
        if limits.positions is not None:
            most = limits.positions - max(positions, -(-cache_bytes // limits.token_bytes))
        while self._turns and (len(self) > self._most or self._positions > most):
            self._drop_session(next(iter(self._turns)))

    def clear(self) -> None:
        self._turns.clear()
        self._positions = self.nbytes = 0

    def cache_slots(self, batch: RunningBatch, ended: Iterable[int]) -> None:
        """Cache keys and values of the slots that `ended`, if another turn comes."""
        for slot in ended:
            request = self._requests.pop(batch.uids[slot], None)
            if request is not None and request.continues:
                tokens = batch.known_tokens(slot)[:-1].copy()  # the newest token has not been read yet
                turn = CachedTurn(tokens, self._runner.cache.read_slot(slot, len(tokens)))
                self._drop_session(request.session)
                self._turns[request.session] = turn
                self._positions += len(tokens)
                self.nbytes += turn.kv.nbytes
        self.shrink_to_fit(self._runner.cache.position_capacity)

    def match_slots(self, batch: RunningBatch, start: int) -> list[CachedTurn]:
        """Return the cached earlier turns of the slots from `start` on. These slots come last, in the order
        of the turns, so that they are one pass, and those that are fully computed another.
        """
        slots = list(range(start, batch.size))
        turns: dict[int, CachedTurn] = {}
        for slot in slots:
            request, tokens = self._requests.get(batch.uids[slot]), batch.known_tokens(slot)
            turn = None if request is None else self._drop_session(request.session)
            if turn is None or not np.array_equal(turn.tokens, tokens[:-1][: len(turn.tokens)]):
                continue
            if self._runner.recorder is not None and batch.routed[slot] < len(turn.tokens):
                continue  # expert choices are wanted of tokens that would not be computed
            if len(tokens) - len(turn.tokens) <= max(FEW, len(turn.tokens)):
                self.reused_tokens += len(turn.tokens)
                turns[slot] = turn
        order = sorted(slots, key=lambda slot: slot in turns)
        if order != slots:
            batch.move_slots(np.asarray(order), np.asarray(slots))
            self._runner.cache.assign_tokens(batch.length[: batch.size])
        return list(turns.values())

    def _drop_session(self, session: str) -> CachedTurn | None:
        turn = self._turns.pop(session, None)
        if turn is not None:
            self._positions -= len(turn.tokens)
            self.nbytes -= turn.kv.nbytes
        return turn


class AddedAttention(CachedAttention):
    """Attention of tokens that were added to slots. They are written behind the held tokens, and see them and
    each other in causal order.

    `R` slots, `T` added tokens packed end to end, `Q` of the slot that has most, `L` tokens of the fullest.
    """

    def __init__(self, runner: Runner, first: int, cached: np.ndarray, length: np.ndarray) -> None:
        """`cached` and `length` [R]: tokens of the slots from `first` on, without and with the added ones."""
        added = length - cached
        bounds = np.concatenate([[0], np.cumsum(added)])
        # [R, Q]: padding repeats a slot's last added token.
        column = np.minimum(np.arange(int(added.max())), added[:, None] - 1)
        real = np.arange(int(added.max())) < added[:, None]
        row = np.broadcast_to(np.arange(first, first + len(added))[:, None], real.shape)
        self._slots = first, first + len(added)
        self._bounds, self.first_slot = bounds.tolist(), first
        self._window = int(length.max())
        self._shape = real.shape
        positions = (cached[:, None] + column)[real]
        super().__init__(runner.cache, runner.to_device(positions))
        self._index = runner.to_device(runner.cache.cache_index(row[real], positions))
        self._padded = runner.to_device((bounds[:-1, None] + column).ravel())
        self._real = runner.to_device(np.flatnonzero(real))
        self._last = runner.to_device(cached[:, None] + column)
        self._visible: dict[tuple[int | None, int | None], Tensor] = {}
        """[R, 1, Q, L] bool, by sliding window and chunk: the positions that each added token sees."""

    def added_bounds(self) -> list[int]:
        """[R + 1]."""
        return self._bounds

    def attend(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """`query` [T, H, d], `key` and `value` [T, Hkv, d] -> [T, H, dv]."""
        cache.put(self._index, key, value)
        keys, values = cache.read_slots(*self._slots, self._window)
        padded = query.index_select(0, self._padded).unflatten(0, self._shape).transpose(1, 2)
        case = (form.window, form.chunk)
        if case not in self._visible:
            last = self._last[..., None]
            column = torch.arange(self._window, device=query.device)
            mask = column <= last
            if form.window is not None:
                mask &= column > last - form.window
            if form.chunk is not None:
                mask &= column >= last - last % form.chunk
            self._visible[case] = mask[:, None]
        visible, choice = self._visible[case], form.choice
        if choice is not None:
            chosen_from = self.choice_cache(choice)
            chosen_from.put(self._index, choice.keys[:, None], choice.keys[:, None, :0])
            if self._window > choice.topk:
                held, _ = chosen_from.read_slots(*self._slots, self._window)
                visible = choice.choose(self._padded, held[:, 0], visible[:, 0])[:, None]
        groups = padded.shape[1] // keys.shape[1]
        shared = groups > 1 and form.is_plain and kernels_share_heads(query.device, query.dtype)
        if groups > 1 and not shared:
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        columns = max(1, SCORES // (padded.shape[0] * padded.shape[1] * keys.shape[2]))
        blocks = zip(padded.split(columns, 2), visible.split(columns, 2), strict=True)
        parts = [masked_attention(block, keys, values, form, mask, shared) for block, mask in blocks]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, self._real)


def extend_cached(runner: Runner, batch: RunningBatch, start: int, turns: list[CachedTurn]) -> Tensor:
    """[R, D]: restore the cached `turns` to the slots from `start` on, and compute the tokens added since."""
    parts = []
    cached = np.array([len(turn.tokens) for turn in turns])
    length = batch.length[start : start + len(turns)]
    for slot, turn in enumerate(turns, start):
        runner.cache.write_prompt(slice(slot, slot + 1), turn.kv)
    first = 0
    while first < len(turns):
        # Slots of one pass are padded to the one with most added tokens.
        most = np.maximum.accumulate((length - cached)[first:])
        limit = prefill_tokens(runner.model.device)
        count = max(1, int((most * np.arange(1, len(most) + 1) <= limit).sum()))
        part = slice(first, first + count)
        slots = range(start + first, start + first + count)
        attention = AddedAttention(runner, slots.start, cached[part], length[part])
        spans = zip(slots, cached[part], length[part], strict=True)
        ids = np.concatenate([batch.tokens[slot, start_token:end] for slot, start_token, end in spans])
        runner.prefilled_tokens += len(ids)
        if runner.lean is not None:
            runner.lean.extend_rotary(int(length[part].max()))
        bounds = np.concatenate([[0], np.cumsum(length[part] - cached[part])])
        last = runner.to_device(bounds[1:] - 1)
        parts.append(runner.forward_added(runner.to_device(ids), attention, last))
        if runner.recorder is not None:
            slot_numbers = np.arange(len(bounds) - 1)
            runner.recorder.note_prefilled(batch, slots.start, bounds, slot_numbers, start=cached[part])
        first += count
    return torch.cat(parts)
