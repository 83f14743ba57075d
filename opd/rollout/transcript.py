"""What every request of a call has been given so far, put together from chunks without per-token work.

Shapes: `B` tokens of a step, `R` response tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from opd.errors import RolloutError
from opd.types import Chunk, LoggedRequest, RolloutRequest

FOLD_AT = 1 << 16
"""Tokens of kept steps after which they are sorted at the latest: every step is an object of its own."""

_NOTHING = tuple(np.zeros(0, dtype=dtype) for dtype in (np.int32, np.float32, np.int32))


@dataclass(slots=True)
class Tokens:
    """Columns about consecutive tokens of one or more requests, all of one length."""

    token_ids: np.ndarray
    """[R] int32."""
    logprobs: np.ndarray
    """[R] float32, nats."""
    policy_versions: np.ndarray
    """[R] int32."""

    @classmethod
    def empty(cls) -> Tokens:
        """No tokens."""
        return cls(*_NOTHING)

    @classmethod
    def logged(cls, request: LoggedRequest) -> Tokens:
        """Everything a log holds of `request`."""
        return cls(request.token_ids, request.logprobs, request.policy_versions)

    @classmethod
    def prefix(cls, request: RolloutRequest, version: int = 0) -> Tokens:
        """What `request` begins with, of which only the ids are known."""
        count = len(request.prefix_ids)
        if not count:
            return cls.empty()
        ids = np.asarray(request.prefix_ids, np.int32)
        return cls(ids, np.zeros(count, np.float32), np.full(count, version, np.int32))

    @classmethod
    def join(cls, parts: list[Tokens]) -> Tokens:
        """`parts` one after another."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty()
        return cls(*map(np.concatenate, zip(*(part.columns for part in parts), strict=True)))

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fields, in their order."""
        return self.token_ids, self.logprobs, self.policy_versions

    def cut(self, rows: slice | np.ndarray) -> Tokens:
        """Some of the tokens, by index."""
        return Tokens(*(column[rows] for column in self.columns))

    def __len__(self) -> int:
        return len(self.token_ids)


class _Growing:
    """One request's tokens in buffers that double: appending `R` tokens one by one copies less than `2 R`."""

    __slots__ = ("_held", "gone", "length", "moved")

    def __init__(self, tokens: Tokens) -> None:
        self._held = tokens
        self.length = len(tokens)
        self.moved = 0
        """Tokens copied because the buffers were full."""
        self.gone = False

    def append(self, new: Tokens) -> None:
        """Take over `new`; what was given out before stays as it is."""
        start, end = self.length, self.length + len(new)
        self.length = end
        if self.gone:
            return
        if start == 0:
            self._held = new
            return
        if end > len(self._held):
            self.moved += start
            held = Tokens(*(np.empty(max(end, 2 * start), c.dtype) for c in self._held.columns))
            for wide, old in zip(held.columns, self._held.columns, strict=True):
                wide[:start] = old[:start]
            self._held = held
        for wide, fresh in zip(self._held.columns, new.columns, strict=True):
            wide[start:end] = fresh

    def drop(self) -> None:
        """Let the tokens go; their number stays."""
        self._held, self.gone = Tokens.empty(), True

    def tokens(self) -> Tokens:
        return self._held if len(self._held) == self.length else self._held.cut(slice(0, self.length))


class Transcript:
    """Tokens by request. Steps are kept until somebody asks or there are many, then sorted by request all at
    once.
    """

    def __init__(self, known: dict[str, Tokens]) -> None:
        """`known`: every request there is, with the tokens it has already."""
        self._requests = {uid: _Growing(tokens) for uid, tokens in known.items()}
        self._steps: list[Chunk] = []
        self._waiting = 0
        self._ended: list[str] = []

    @property
    def moved(self) -> int:
        """Tokens copied so far because a buffer was full."""
        return sum(request.moved for request in self._requests.values())

    def add(self, step: Chunk) -> None:
        """Take one chunk. Raises `RolloutError` as `tokens` does, now or later."""
        count = len(step.uids)
        if count:
            self._steps.append(step)
            self._waiting += count
            if self._waiting >= FOLD_AT:
                self._fold()

    def length(self, uid: str) -> int:
        """Tokens of a request so far."""
        self._fold()
        return self._requests[uid].length

    def tokens(self, uid: str) -> Tokens:
        """All tokens of a request so far, in order; later ones do not change them. Raises `RolloutError` if a
        position is missing or came twice, or `end` was told that nobody would ask.
        """
        self._fold()
        if self._requests[uid].gone:
            raise RolloutError(f"request {uid!r} has ended and its tokens were let go; ask before.")
        return self._requests[uid].tokens()

    def end(self, uids: Iterable[str]) -> None:
        """Nobody will ask for the tokens of `uids`: they go when the kept steps are sorted."""
        self._ended += uids

    def _fold(self) -> None:
        """Sort the tokens of all kept steps into their requests."""
        if self._steps:
            self._sort()
        for uid in self._ended:
            self._requests[uid].drop()
        self._ended.clear()

    def _sort(self) -> None:
        steps, self._steps, self._waiting = self._steps, [], 0
        names = list(dict.fromkeys(chain.from_iterable(step.uids for step in steps)))
        self._check_known(names)
        number = {uid: i for i, uid in enumerate(names)}
        owner = np.fromiter(
            map(number.__getitem__, chain.from_iterable(step.uids for step in steps)), dtype=np.int64
        )
        order = np.argsort(owner, kind="stable")
        counts = [len(step.uids) for step in steps]
        columns = Tokens(
            np.concatenate([step.token_ids for step in steps]).astype(np.int32),
            np.concatenate([step.logprobs for step in steps]).astype(np.float32),
            np.repeat(np.array([step.policy_version for step in steps], dtype=np.int32), counts),
        ).cut(order)
        positions = np.concatenate([step.positions for step in steps])[order]
        bounds = np.searchsorted(owner[order], np.arange(len(names) + 1))
        first = np.array([self._requests[uid].length for uid in names], dtype=np.int64)
        expected = np.arange(len(positions)) - (bounds[:-1] - first)[owner[order]]
        self._check_positions(names, owner[order], positions, expected)
        for uid, start, stop in zip(names, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self._requests[uid].append(columns.cut(slice(start, stop)))

    def _check_known(self, names: Iterable[str]) -> None:
        stranger = next((uid for uid in names if uid not in self._requests), None)
        if stranger is not None:
            raise RolloutError(
                f"the engine gave tokens for request {stranger!r}, which nobody asked for; replace the"
                " engine."
            )

    @staticmethod
    def _check_positions(
        names: list[str], owner: np.ndarray, positions: np.ndarray, expected: np.ndarray
    ) -> None:
        wrong = np.flatnonzero(positions != expected)
        if wrong.size:
            row = int(wrong[0])
            raise RolloutError(
                f"the engine gave token {int(positions[row])} of request {names[owner[row]]!r} where token"
                f" {int(expected[row])} was due; replace the engine."
            )
