"""The turns of one conversation: keys and values that stay cached while its environment answers, and the pass
over the tokens added since.

Without them each turn would compute its full context again. An episode of `n` turns would compute `n / 2`
times its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.models.attention import ScoreForm, kernels_share_heads, masked_attention
from opd.rollout.batch import EngineLimits, RequestQueue, RunningBatch
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
        self.taken = 0
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
        limits, held = self._limits, self._runner.cache.nbytes
        room = math.inf
        if limits.positions is not None:
            room = limits.positions - max(positions, -(-held // limits.token_bytes))
        while self._turns and (len(self) > self._most or self._positions > room):
            self._drop_session(next(iter(self._turns)))

    def clear(self) -> None:
        """Drop all turns."""
        self._turns.clear()
        self._positions = self.nbytes = 0

    def cache_slots(self, batch: RunningBatch, ended: Iterable[int]) -> None:
        """Cache keys and values of the slots that `ended`, if another turn comes."""
        for slot in ended:
            request = self._requests.pop(batch.uids[slot], None)
            if request is not None and request.continues:
                known = batch.known_tokens(slot)[:-1].copy()  # the newest token has not been read yet
                turn = CachedTurn(known, self._runner.cache.read_slot(slot, len(known)))
                self._drop_session(request.session)
                self._turns[request.session] = turn
                self._positions += len(known)
                self.nbytes += turn.kv.nbytes
        self.shrink_to_fit(self._runner.cache.position_capacity)

    def prefill(self, batch: RunningBatch, start: int, queue: RequestQueue) -> Iterator[Tensor]:
        """[R, D] each: the slots from `start` on, reordered: first those that are fully computed, then those
        with a cached earlier turn, so that each kind is one pass. `queue`: the requests that wait for slots.
        """
        upcoming = queue.tokens[queue.taken].tobytes() if queue else None
        kept = {slot: self._pop_earlier(batch, slot) for slot in range(start, batch.size)}
        order = sorted(kept, key=lambda slot: kept[slot] is not None)
        if order != list(kept):
            batch.reorder_slots(order)
            self._runner.cache.assign_tokens(batch.length[: batch.size])
        turns = [turn for turn in kept.values() if turn is not None]
        first = batch.size - len(turns)
        if first > start:
            yield self._runner.prefill(batch, start, first, upcoming)
        if turns:
            yield extend_cached(self._runner, batch, first, turns)

    def _pop_earlier(self, batch: RunningBatch, slot: int) -> CachedTurn | None:
        """Remove and return the cached turn that this slot's request continues, if there is one."""
        request, tokens = self._requests.get(batch.uids[slot]), batch.known_tokens(slot)
        turn = None if request is None else self._drop_session(request.session)
        if turn is None or not np.array_equal(turn.tokens, tokens[:-1][: len(turn.tokens)]):
            return None
        if len(tokens) - len(turn.tokens) > max(FEW, len(turn.tokens)):
            return None
        self.taken += len(turn.tokens)
        return turn

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

    def __init__(self, runner: Runner, first: int, held: np.ndarray, length: np.ndarray) -> None:
        """`held` and `length` [R]: tokens of the slots from `first` on, without and with the added ones."""
        added = length - held
        bounds = np.concatenate([[0], np.cumsum(added)])
        # [R, Q]: padding repeats a slot's last added token.
        column = np.minimum(np.arange(int(added.max())), added[:, None] - 1)
        real = np.arange(int(added.max())) < added[:, None]
        row = np.broadcast_to(np.arange(first, first + len(added))[:, None], real.shape)
        self._slots = first, first + len(added)
        self._window = int(length.max())
        self._shape = real.shape
        places = (held[:, None] + column)[real]
        self._places, positions, self._place, self._real, self._last = (
            runner.to_device(x)
            for x in (
                runner.cache.cache_index(row[real], places),
                places,
                (bounds[:-1, None] + column).ravel(),
                np.flatnonzero(real),
                held[:, None] + column,
            )
        )
        super().__init__(runner.cache, positions)
        self._visible: dict[int | None, Tensor] = {}

    def attend(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """`query` [T, H, d], `key` and `value` [T, Hkv, d] -> [T, H, dv]."""
        cache.put(self._places, key, value)
        keys, values = cache.read_slots(*self._slots, self._window)
        padded = query.index_select(0, self._place).unflatten(0, self._shape).transpose(1, 2)
        attended = _attend_blocks(padded, keys, values, form, self._visible_mask(form.window, query.device))
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, self._real)

    def _visible_mask(self, window: int | None, device: torch.device) -> Tensor:
        """[R, 1, Q, L] bool: the positions that each added token sees."""
        if window not in self._visible:
            last = self._last[..., None]
            column = torch.arange(self._window, device=device)
            seen = column <= last
            if window is not None:
                seen &= column > last - window
            self._visible[window] = seen[:, None]
        return self._visible[window]


def _attend_blocks(query: Tensor, keys: Tensor, values: Tensor, form: ScoreForm, seen: Tensor) -> Tensor:
    """`query` [R, H, Q, d] to `keys` [R, Hkv, L, d], masked by `seen` [R, 1, Q, L] -> [R, H, Q, dv], with
    about `SCORES` scores at a time.
    """
    groups = query.shape[1] // keys.shape[1]
    shared = groups > 1 and form.softcap is None and kernels_share_heads(query.device, query.dtype)
    if groups > 1 and not shared:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    columns = max(1, SCORES // (query.shape[0] * query.shape[1] * keys.shape[2]))
    blocks = zip(query.split(columns, 2), seen.split(columns, 2), strict=True)
    parts = [masked_attention(some, keys, values, form, visible, shared) for some, visible in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def extend_cached(runner: Runner, batch: RunningBatch, start: int, turns: list[CachedTurn]) -> Tensor:
    """[R, D]: restore the cached `turns` to the slots from `start` on, and compute the tokens added since."""
    parts = []
    held = np.array([len(turn.tokens) for turn in turns])
    length = batch.length[start : start + len(turns)]
    for slot, turn in enumerate(turns, start):
        runner.cache.write_prompt(slice(slot, slot + 1), turn.kv)
    first = 0
    while first < len(turns):
        # Slots of one pass are padded to the one with most added tokens.
        most = np.maximum.accumulate((length - held)[first:])
        limit = prefill_tokens(runner.model.device)
        count = max(1, int((most * np.arange(1, len(most) + 1) <= limit).sum()))
        some = slice(first, first + count)
        parts.append(_run_pass(runner, batch, start + first, held[some], length[some]))
        first += count
    return torch.cat(parts)


def _run_pass(
    runner: Runner, batch: RunningBatch, first: int, held: np.ndarray, length: np.ndarray
) -> Tensor:
    attention = AddedAttention(runner, first, held, length)
    spans = [np.arange(h, n) for h, n in zip(held, length, strict=True)]
    ids = np.concatenate([batch.tokens[slot, span] for slot, span in enumerate(spans, first)])
    runner.prefilled_tokens += len(ids)
    if runner.lean is not None:
        runner.lean.extend_rotary(int(length.max()))
    return runner.forward_added(
        runner.to_device(ids), attention, runner.to_device(np.cumsum(length - held) - 1)
    )
