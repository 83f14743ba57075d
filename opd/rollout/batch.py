"""Requests as arrays: checked and waiting in a queue, then running by slot.

A decode step does no Python work per request. The `size` running requests always occupy slots `0 ... size -
1`. A request that ends leaves a hole, and the last running requests fill it (`remove_slots`). New requests
are appended (`admit_requests`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from opd.errors import RolloutError
from opd.rollout.sampling import NoiseTable, SamplingPlan, uid_keys
from opd.types import RolloutRequest, SamplingParams, Status

NO_STOP = -1
"""Pads the rows of `stops`."""
_WORD = 2**64 - 1
FEW, HELD_STEPS = 8, 4
"""New requests wait for others if the running batch is more than `FEW` times as large, for at most
`HELD_STEPS` steps. Every prefill has a fixed cost beside its tokens, and the running requests wait for it."""


PARTS = 16
"""Most bands."""
WORTH = 1 << 20
"""Bytes of a layer that one more band must save: about the fixed cost of its products."""
AHEAD = 16
"""Steps for which an order of slots counts: about as many as a turn of an episode has left."""
COPIES = 5
"""Cost of copying a position to another slot, in reads."""
SAME = 16
"""Slots whose token counts differ by less are not reordered."""
NO_SLOTS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    vocab_size: int
    max_sequence: int
    """Prompt plus response tokens."""
    positions: int | None = None
    """Tokens that fit in the cache's budget, if all slots are as long as the longest. `None`: no limit."""
    token_bytes: int = 0
    """Bytes of one token's keys and values."""


@dataclass(slots=True)
class RequestQueue:
    """Waiting requests, taken from the part. Requests with the same known tokens are neighbours. `n`
    requests, `W` the largest number of stop ids.
    """

    uids: list[str]
    tokens: list[np.ndarray]
    """Prompt and prefix of each request, int32."""
    length: np.ndarray
    """[n] int64: number of known tokens."""
    position: np.ndarray
    """[n] int64: response position of the next token."""
    limit: np.ndarray
    """[n] int64: `max_new_tokens`."""
    temperature: np.ndarray
    """[n] float64."""
    top_p: np.ndarray
    """[n] float64."""
    top_k: np.ndarray
    """[n] int64."""
    routed: np.ndarray
    """[n] int64: `RolloutRequest.routed`."""
    stops: np.ndarray
    """[n, W] int64, padded with `NO_STOP`."""
    seeds: np.ndarray
    """[n] uint64."""
    keys: np.ndarray
    """[n] uint64."""
    ended: dict[str, Status] = field(default_factory=dict)
    """Resumed requests whose prefix is already a complete response."""
    front: int = 0
    """Index of the first waiting request. Those before it have left the queue."""

    def __len__(self) -> int:
        return len(self.uids) - self.front

    @property
    def most_tokens(self) -> np.ndarray:
        """[n] int64: most tokens each request may come to hold."""
        return self.length + self.limit - self.position

    @property
    def waiting_uids(self) -> list[str]:
        """Uids of the requests that have not left the queue."""
        return self.uids[self.front :]

    def merge_queue(self, later: RequestQueue) -> RequestQueue:
        """Return the waiting requests of this queue, and behind them those of `later`."""
        width = max(self.stops.shape[1], later.stops.shape[1])
        self.stops, later.stops = _pad_stops(self.stops, width), _pad_stops(later.stops, width)
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(queue, name)[queue.front :] for queue in (self, later)])
            for name in _COLUMNS
        }
        tokens = self.tokens[self.front :] + later.tokens[later.front :]
        return RequestQueue(
            self.waiting_uids + later.waiting_uids, tokens, **columns, ended=self.ended | later.ended
        )

    def drop_requests(self, uids: Collection[str]) -> None:
        """Remove the waiting requests among `uids`."""
        rows = [i for i, uid in enumerate(self.uids) if i < self.front or uid not in uids]
        self.uids, self.tokens = [self.uids[i] for i in rows], [self.tokens[i] for i in rows]
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[rows])
        self.ended = {uid: status for uid, status in self.ended.items() if uid not in uids}


_SLOT_COLUMNS = ("length", "position", "limit", "top_k", "routed", "stops", "temperature", "top_p")
"""Arrays of a queue and of a running batch."""
_COLUMNS = (*_SLOT_COLUMNS, "seeds", "keys")


def _pad_stops(stops: np.ndarray, width: int) -> np.ndarray:
    """Pad `stops` [n, W] to `width` columns."""
    return np.pad(stops, ((0, 0), (0, width - stops.shape[1])), constant_values=NO_STOP)


def queue_requests(
    requests: Sequence[RolloutRequest], limits: EngineLimits, in_flight: Collection[str] = ()
) -> RequestQueue:
    """Check and queue `requests`. Raises `RolloutError` for one that cannot be served, or is `in_flight`."""
    uids = set(in_flight)
    for request in requests:
        if request.uid in uids:
            raise RolloutError(
                f"request {request.uid!r} is given twice; the uid keys the sampling noise, so give every"
                " request its own."
            )
        uids.add(request.uid)
    for params in {id(r.sampling): r.sampling for r in requests}.values():
        _check_sampling(params, limits)
    _check_tokens(requests, limits)
    waiting: list[RolloutRequest] = []
    ended: dict[str, Status] = {}
    for request in requests:  # a resumed one may have ended before the interruption
        written, limit = request.prefix_ids, request.sampling.max_new_tokens
        if limit and len(written) and int(written[-1]) in request.sampling.stop_ids:
            ended[request.uid] = Status.COMPLETED
        elif len(written) >= limit:
            ended[request.uid] = Status.TRUNCATED
        else:
            waiting.append(request)

    # Requests with the same prompt usually share the array too, but only equal bytes matter.
    tokens = [
        np.concatenate([r.prompt_ids, r.prefix_ids]).astype(np.int32)
        if len(r.prefix_ids)
        else np.asarray(r.prompt_ids, dtype=np.int32)
        for r in waiting
    ]
    numbering: dict[bytes, int] = {}
    fresh = count()
    group = np.array([numbering.setdefault(t.tobytes(), next(fresh)) for t in tokens], dtype=np.int64)
    order = np.argsort(group, kind="stable")
    waiting = [waiting[i] for i in order]
    params = [r.sampling for r in waiting]
    width = max((len(p.stop_ids) for p in params), default=0)
    padded_stops = {ids: ids + (NO_STOP,) * (width - len(ids)) for ids in {p.stop_ids for p in params}}
    stops = [padded_stops[p.stop_ids] for p in params]
    return RequestQueue(
        uids=[r.uid for r in waiting],
        tokens=[tokens[i] for i in order],
        length=np.array([len(tokens[i]) for i in order], dtype=np.int64),
        position=np.array([len(r.prefix_ids) for r in waiting], dtype=np.int64),
        limit=np.array([p.max_new_tokens for p in params], dtype=np.int64),
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        routed=np.array([r.routed for r in waiting], dtype=np.int64),
        stops=np.array(stops, dtype=np.int64).reshape(len(params), width),
        seeds=np.array([r.seed & _WORD for r in waiting], dtype=np.uint64),
        keys=uid_keys(r.uid for r in waiting),
        ended=ended,
    )


def _check_sampling(params: SamplingParams, limits: EngineLimits) -> None:
    wrong = None
    if not (params.temperature >= 0 and np.isfinite(params.temperature)):
        wrong = f"temperature {params.temperature} must be finite and at least 0 (0 is greedy)"
    elif not 0 < params.top_p <= 1:
        wrong = f"top_p {params.top_p} must lie in (0, 1]"
    elif params.top_k < 0:
        wrong = f"top_k {params.top_k} must be at least 0 (0 keeps the whole vocabulary)"
    elif params.max_new_tokens < 0:
        wrong = f"max_new_tokens {params.max_new_tokens} must be at least 0"
    elif any(not 0 <= token < limits.vocab_size for token in params.stop_ids):
        wrong = f"stop_ids {params.stop_ids} must lie in the vocabulary of {limits.vocab_size} tokens"
    if wrong:
        raise RolloutError(f"sampling parameters: {wrong}.")


def _check_tokens(requests: Sequence[RolloutRequest], limits: EngineLimits) -> None:
    for request in requests:
        prompt = len(request.prompt_ids)
        if prompt == 0:
            raise RolloutError(f"request {request.uid!r} has an empty prompt; give it at least one token.")
        total = prompt + max(request.sampling.max_new_tokens, len(request.prefix_ids))
        if total > limits.max_sequence:
            raise RolloutError(
                f"request {request.uid!r} may take {total} tokens (prompt {prompt}) but the engine serves"
                f" {limits.max_sequence}; shorten it, or raise max_sequence if the model allows."
            )
        if limits.positions is not None and total > limits.positions:
            raise RolloutError(
                f"request {request.uid!r} may take {total} tokens, whose keys and values are"
                f" {-(-total * limits.token_bytes >> 20)} MiB, but the cache may hold"
                f" {limits.positions * limits.token_bytes >> 20} MiB; shorten it, or raise"
                " runtime.decode.kv_cache_mb."
            )
    pieces = [ids for r in requests for ids in (r.prompt_ids, r.prefix_ids) if len(ids)]
    everything = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    if everything.size and (everything.min() < 0 or everything.max() >= limits.vocab_size):
        for request in requests:
            ids = np.concatenate([request.prompt_ids, request.prefix_ids])
            outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
            if outside.size:
                raise RolloutError(
                    f"request {request.uid!r} holds token id {int(outside[0])}, outside the vocabulary of"
                    f" {limits.vocab_size} tokens; encode it with the model's own tokenizer."
                )


class RunningBatch:
    """`S` slots. Every public array is `[S]` int64 by slot unless said otherwise. Only `[:size]` is valid."""

    def __init__(self, slots: int, stop_width: int, capacity: int) -> None:
        """`capacity`: the most tokens a request may come to hold."""
        self.slots = slots
        self.size = 0
        self.uids: list[str] = []
        # One array for all integer fields, so that moving requests is one operation.
        self._integers = np.zeros((slots, 5 + stop_width), dtype=np.int64)
        self._reals = np.zeros((slots, 2), dtype=np.float64)
        self.length, self.position, self.limit, self.top_k, self.routed = self._integers.T[:5]
        """Known tokens; response position of the next token; `max_new_tokens`; top-k; first positions whose
        expert choices the caller has."""
        self.stops = self._integers[:, 5:]
        """[S, W]."""
        self.temperature, self.top_p = self._reals.T
        """float64."""
        self.tokens = np.zeros((slots, capacity), dtype=np.int32)
        """[S, capacity] int32: prompt and response so far."""
        self.noise = NoiseTable(slots)
        self._rows = np.arange(slots)
        self._plan: SamplingPlan | None = None
        self._waited = 0
        """Steps since a request could first have been admitted."""

    def with_capacity(self, slots: int, stop_width: int, capacity: int) -> RunningBatch:
        """Return a batch of the same requests with more slots, stop ids and tokens, or this one if it is
        large enough. Turns of episodes join one by one.
        """
        if slots <= self.slots and stop_width <= self.stops.shape[1] and capacity <= self.tokens.shape[1]:
            return self
        size = self.size
        new = RunningBatch(
            max(slots, self.slots),
            max(stop_width, self.stops.shape[1]),
            max(capacity, self.tokens.shape[1]),
        )
        new.size, new.uids, new._waited = size, self.uids, self._waited
        new._integers[:size, :5] = self._integers[:size, :5]
        new.stops[:size] = _pad_stops(self.stops[:size], new.stops.shape[1])
        new._reals[:size] = self._reals[:size]
        new.tokens[:size, : self.tokens.shape[1]] = self.tokens[:size]
        new.noise.assign_slots(slice(0, size), *self.noise.slot_keys(size))
        return new

    @property
    def most_tokens(self) -> np.ndarray:
        """[size]: tokens that each request may come to hold."""
        return (self.length + self.limit - self.position)[: self.size]

    def admit_requests(self, queue: RequestQueue, limit: int | None = None) -> int:
        """Fill the free slots from the queue, with at most `limit` requests. Returns their number. A few may
        wait for a later step, see `FEW`.
        """
        number = min(self.slots - self.size, len(queue))
        number = number if limit is None else min(number, limit)
        if number == 0:
            return 0
        if number * FEW < self.size and self._waited < HELD_STEPS - 1:
            self._waited += 1
            return 0
        self._plan, self._waited = None, 0
        rows, part = slice(self.size, self.size + number), slice(queue.front, queue.front + number)
        for name in _SLOT_COLUMNS:
            getattr(self, name)[rows] = getattr(queue, name)[part]
        for row, ids in enumerate(queue.tokens[part], start=self.size):
            self.tokens[row, : len(ids)] = ids
        self.noise.assign_slots(rows, queue.seeds[part], queue.keys[part])
        self.uids += queue.uids[part]
        queue.front += number
        self.size += number
        return number

    def next_uniforms(self) -> np.ndarray:
        """[size] float64: the uniform number that draws each request's next token."""
        return self.noise.uniforms_at(self.position[: self.size])

    def sampling_plan(self, device: torch.device) -> SamplingPlan:
        """Return the sampling plan of the next tokens. It is rebuilt after requests have come or gone."""
        if self._plan is None:
            rows = slice(0, self.size)
            self._plan = SamplingPlan.build(
                self.temperature[rows], self.top_p[rows], self.top_k[rows], device
            )
        return self._plan

    def known_tokens(self, row: int) -> np.ndarray:
        """[length] int32: prompt and response of one slot."""
        return self.tokens[row, : self.length[row]]

    def last_tokens(self, count: int) -> np.ndarray:
        """[count] int32: the newest token of each of the first slots."""
        return self.tokens[self._rows[:count], self.length[:count] - 1]

    def append(self, ids: np.ndarray) -> dict[int, Status]:
        """Add one token [size] to every running request. Returns the slots that ended, with their status."""
        rows = slice(0, self.size)
        self.tokens[self._rows[rows], self.length[rows]] = ids
        self.length[rows] += 1
        self.position[rows] += 1
        stopped = (self.stops[rows] == ids[:, None]).any(axis=1)
        ended = np.flatnonzero(stopped | (self.position[rows] >= self.limit[rows]))
        return {int(row): Status.COMPLETED if stopped[row] else Status.TRUNCATED for row in ended}

    def as_queue(self, rows: list[int]) -> RequestQueue:
        """Return the requests of the slots `rows` as a queue. They also stay in their slots."""
        seeds, keys = self.noise.slot_keys(self.size)[:, rows]
        return RequestQueue(
            uids=[self.uids[row] for row in rows],
            tokens=[self.known_tokens(row).copy() for row in rows],
            **{name: getattr(self, name)[rows] for name in _SLOT_COLUMNS},
            seeds=seeds,
            keys=keys,
        )

    def remove_slots(self, ended: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Free the slots `ended`. Returns (source, target): the moves that closed the holes."""
        self._plan = None
        running = np.ones(self.size, dtype=bool)
        running[ended] = False
        remaining = self.size - len(ended)
        source = np.flatnonzero(running[remaining:]) + remaining
        target = np.flatnonzero(~running[:remaining])
        if source.size:
            self.move_slots(source, target)
        del self.uids[remaining:]
        self.size = remaining
        return source, target

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move the slots `source` to `target`, which may be the same slots in another order."""
        self._plan = None
        for column in (self._integers, self._reals, self.tokens):
            column[target] = column[source]
        self.noise.move_slots(source, target)
        for new, uid in zip(target, [self.uids[old] for old in source], strict=True):
            self.uids[new] = uid


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring slots that are read in one slice.

    A decode step multiplies slices of the cache. It reads for every slot of a slice as many positions as its
    fullest slot holds. Requests may begin at different times, or go on from contexts of different lengths as
    turns of episodes do. Then one slice reads about twice the positions that are held. A few sorted slices
    read little more than that. All running requests grow alike, so an order lasts until some leave and others
    come.
    """

    first: int
    stop: int
    longest: int
    """Tokens of the fullest slot."""

    @property
    def position_count(self) -> int:
        return (self.stop - self.first) * self.longest


def bands_of(lengths: np.ndarray, position_bytes: int) -> list[Band]:
    """Bands in which slots that hold `lengths` [B] tokens are read. A token is `position_bytes` a layer."""
    if int(lengths.max()) * len(lengths) * position_bytes <= WORTH:
        return [Band(0, len(lengths), int(lengths.max()))]
    return _cut_bands(lengths, WORTH // position_bytes)


def better_order(lengths: np.ndarray, position_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, target): a permutation of slots that puts the fullest first. It is empty unless it saves more
    reads than it costs. `lengths` [B] as in `bands_of`.
    """
    if int(lengths.max()) * len(lengths) - int(lengths.sum()) < WORTH // position_bytes:
        return NO_SLOTS, NO_SLOTS
    size = lengths // SAME
    ranked = np.argsort(-size, kind="stable")
    bounds = [band.stop for band in _cut_bands((size[ranked] + 1) * SAME, WORTH // position_bytes)]
    slots = np.arange(len(lengths))
    band, best_band = np.searchsorted(bounds, slots, "right"), np.empty_like(slots)
    best_band[ranked] = band
    strays = np.flatnonzero(band != best_band)
    source = strays[np.argsort(best_band[strays], kind="stable")]
    target = strays[np.argsort(band[strays], kind="stable")]
    moved = lengths.copy()
    moved[target] = lengths[source]
    reads, fewer = (
        sum(band.position_count for band in bands_of(x, position_bytes)) for x in (lengths, moved)
    )
    if (reads - fewer) * AHEAD <= COPIES * int(lengths[source].sum()):
        return NO_SLOTS, NO_SLOTS
    return source, target


def _cut_bands(lengths: np.ndarray, price: int) -> list[Band]:
    """Slices of least cost: positions read, plus `price` a slice. They begin at one of `PARTS` bounds."""
    bounds = np.unique(len(lengths) * np.arange(PARTS + 1) // PARTS)
    most = np.maximum.reduceat(lengths, bounds[:-1])
    longest = np.maximum.accumulate(np.triu(np.broadcast_to(most, (len(most),) * 2)), axis=1)
    cost = longest * (bounds[1:] - bounds[:-1, None]) + price
    least, first = np.zeros(len(bounds), dtype=np.int64), []
    for last in range(len(most)):  # `least`: cost of the slots before a bound
        costs = least[: last + 1] + cost[: last + 1, last]
        first.append(int(costs.argmin()))
        least[last + 1] = costs[first[-1]]
    bands, last = [], len(most) - 1
    while last >= 0:
        start = first[last]
        bands.append(Band(int(bounds[start]), int(bounds[last + 1]), int(longest[start, last])))
        last = start - 1
    return bands[::-1]
