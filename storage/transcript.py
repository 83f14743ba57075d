"""Tokens generated so far by request, collected from chunks without per-token work.

Shapes: `B` tokens of a chunk, `R` response tokens of a request, `L` routed blocks, `K` experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opd.errors import RolloutError
from opd.storage.logged_choices import mask_counts
from opd.types import Chunk, ExpertSpan, LoggedRequest, RolloutRequest, join_choices, join_masks

FOLD_AT = 1 << 16
"""Most tokens that wait to be sorted by request."""

_NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)


@dataclass(slots=True)
class Tokens:
    """Columns for consecutive tokens of one or more requests, all of one length."""

    token_ids: np.ndarray
    """[R] int32."""
    logprobs: np.ndarray
    """[R] float32, nats."""
    policy_versions: np.ndarray
    """[R] int32."""
    expert_choices: np.ndarray | None = None
    """[R, L, K] as of `Chunk`, or `None` if not all of these tokens came with theirs."""
    expert_spans: tuple[ExpertSpan, ...] = ()
    """Expert choices of further positions of the request."""
    sampling_masks: np.ndarray | None = None
    """[R] object as of `Chunk`."""

    @classmethod
    def empty(cls) -> Tokens:
        return cls(*_NOTHING)

    @classmethod
    def from_logged(cls, request: LoggedRequest) -> Tokens:
        return cls(
            request.token_ids,
            request.logprobs,
            request.policy_versions,
            request.expert_choices,
            request.expert_spans,
            request.sampling_masks,
        )

    @classmethod
    def from_prefix(cls, request: RolloutRequest, version: int = 0) -> Tokens:
        """Return the prefix of `request`, of which only the ids are known."""
        count = len(request.prefix_ids)
        if not count:
            return cls.empty()
        ids = np.asarray(request.prefix_ids, np.int32)
        return cls(ids, np.zeros(count, np.float32), np.full(count, version, np.int32))

    @classmethod
    def join(cls, parts: list[Tokens]) -> Tokens:
        """Concatenate `parts`, of several requests or of one. Several have no expert spans."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty()
        ids, logprobs, versions = map(np.concatenate, zip(*(part.columns for part in parts), strict=True))
        choices = join_choices([part.expert_choices for part in parts])
        masks = join_masks([(len(part), part.sampling_masks) for part in parts])
        return cls(ids, logprobs, versions, choices, sampling_masks=masks)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fields of every token, in their order."""
        return self.token_ids, self.logprobs, self.policy_versions

    def select_rows(self, rows: slice | np.ndarray) -> Tokens:
        """Return some of the tokens, by index."""
        choices = None if self.expert_choices is None else self.expert_choices[rows]
        ids, logprobs, versions = self.token_ids[rows], self.logprobs[rows], self.policy_versions[rows]
        masks = None if self.sampling_masks is None else self.sampling_masks[rows]
        return Tokens(ids, logprobs, versions, choices, self.expert_spans, masks)

    def routed_positions(self, start: int) -> int:
        """Return the position after the last one with expert choices, if `start` tokens come before these."""
        end = start + len(self) - 1
        if self.expert_choices is not None and len(self):
            return end
        return min(end, max((span.first + len(span.choices) for span in self.expert_spans), default=0))

    def __len__(self) -> int:
        return len(self.token_ids)


ChoiceForm = tuple[np.dtype, tuple[int, ...]] | None


def form_of(choices: np.ndarray | None) -> ChoiceForm:
    """Return the dtype and the shape of one position's expert choices, `None` without."""
    return None if choices is None else (choices.dtype, choices.shape[1:])


def _empty_tokens(count: int, form: ChoiceForm) -> Tokens:
    """Return memory for `count` tokens."""
    ids, logprobs, versions = (np.empty(count, column.dtype) for column in _NOTHING)
    choices = None if form is None else np.empty((count, *form[1]), form[0])
    return Tokens(ids, logprobs, versions, choices)


def _arrays(tokens: Tokens) -> list[np.ndarray]:
    choices = tokens.expert_choices
    return [*tokens.columns, *([] if choices is None else [choices])]


class _TokenBuffer:
    """One request's tokens in buffers that double: appending `R` tokens one by one copies less than `2 R`."""

    __slots__ = ("_held", "length")

    def __init__(self, tokens: Tokens) -> None:
        self._held = tokens
        self.length = len(tokens)

    def append(self, new: Tokens) -> int:
        """Append `new` without changing tokens handed out before. Return the number of tokens copied because
        the buffers were full.
        """
        start, end, moved = self.length, self.length + len(new), 0
        self.length = end
        if start == 0:
            self._held = new
            return 0
        if form_of(self._held.expert_choices) != form_of(new.expert_choices):
            # All tokens of a request have choices, or none has.
            self._held = replace(self._held, expert_choices=None)
        if new.sampling_masks is not None and self._held.sampling_masks is None:
            self._held = replace(self._held, sampling_masks=np.full(len(self._held), None))
        if end > len(self._held):
            moved = start
            larger = _empty_tokens(max(end, 2 * start), form_of(self._held.expert_choices))
            for wide, old in zip(_arrays(larger), _arrays(self._held), strict=True):
                wide[:start] = old[:start]
            if (masks := self._held.sampling_masks) is not None:
                larger.sampling_masks = np.full(len(larger), None)
                larger.sampling_masks[:start] = masks[:start]
            self._held = larger
        for wide, fresh in zip(_arrays(self._held), _arrays(new), strict=False):
            wide[start:end] = fresh
        if self._held.sampling_masks is not None:
            self._held.sampling_masks[start:end] = new.sampling_masks  # `None` for all without
        return moved

    def tokens(self) -> Tokens:
        return self._held if len(self._held) == self.length else self._held.select_rows(slice(0, self.length))


class MisplacedTokenError(RolloutError):
    """A token came for another position than its request's next one, or for no request at all."""

    def __init__(self, uid: str, position: int, due: int | None) -> None:
        self.uid, self.position, self.due = uid, position, due
        super().__init__(
            f"the engine gave tokens for request {uid!r}, which nobody asked for; replace the engine."
            if due is None
            else f"the engine gave token {position} of request {uid!r} where token {due} was due; replace the"
            " engine."
        )


class Transcript:
    """Tokens by request. One request's are sorted out when somebody reads them, and all of them when there
    are many, so that no chunk costs work per request. Not safe for several threads: its owner locks.
    """

    def __init__(self, requests: Mapping[str, Tokens] | None = None) -> None:
        """`requests`: by uid, the tokens they have already."""
        self._requests: dict[str, _TokenBuffer] = {}
        self._numbers: dict[str, int] = {}
        self._due = np.zeros(0, np.int64)
        """By number of a request: the position of its next token."""
        self._waiting, self._owner, self._size = Tokens.empty(), np.zeros(0, np.int64), 0
        """Tokens not sorted by request yet, and the numbers of their requests, or -1 for sorted ones."""
        self._uids: list[str] = []
        """Requests of the newest chunk. The next one mostly names the same, so they are looked up once."""
        self._chunk_owner = self._before = np.zeros(0, np.int64)
        """[B]: the request number of each of `_uids`, and the number of its tokens before it in the chunk."""
        self.moved = 0
        """Tokens copied so far because a buffer was full."""
        self._spans: dict[str, list[ExpertSpan]] = {}
        """Expert choices of further positions, by request."""
        self._form: ChoiceForm = None
        """Of the newest expert choices: one form for all, in a log of one model."""
        self._masked = self._mask_bytes = 0
        """Tokens that came with sampling masks, and the bytes of these."""
        self.add_requests(requests or {})

    def add_requests(self, requests: Mapping[str, Tokens]) -> None:
        """Add requests, with the tokens they have already."""
        self._requests |= {uid: _TokenBuffer(tokens) for uid, tokens in requests.items()}
        for uid, tokens in requests.items():
            self.add_spans(uid, tokens.expert_spans)
            self._form = form_of(tokens.expert_choices) or self._form
        self._numbers |= zip(requests, range(len(self._due), len(self._due) + len(requests)), strict=True)
        self._due = np.append(self._due, np.array([len(tokens) for tokens in requests.values()], np.int64))
        self._uids = []

    def add_chunk(self, chunk: Chunk) -> None:
        """Add one chunk. Raises `MisplacedTokenError` and adds nothing if a position is missing or comes
        twice, or a token is of an unknown request.
        """
        self.check(chunk)
        self.add_verified(chunk)

    def check(self, chunk: Chunk) -> None:
        """Raise `MisplacedTokenError` if `add_chunk` would."""
        for uid, _ in chunk.expert_spans:
            if uid not in self._numbers:
                raise MisplacedTokenError(uid, 0, None)
        if not chunk.uids:
            return
        if chunk.uids != self._uids:
            self._uids = []
            try:
                owner = np.fromiter(map(self._numbers.__getitem__, chunk.uids), np.int64, len(chunk.uids))
            except KeyError as error:
                raise MisplacedTokenError(error.args[0], 0, None) from None
            order = np.argsort(owner, kind="stable")
            in_order = owner[order]
            self._before = np.empty(len(owner), np.int64)
            self._before[order] = np.arange(len(owner)) - np.searchsorted(in_order, in_order)
            self._chunk_owner, self._uids = owner, list(chunk.uids)
        due = self._due[self._chunk_owner] + self._before
        wrong = np.flatnonzero(chunk.positions != due)
        if wrong.size:
            row = int(wrong[0])
            raise MisplacedTokenError(chunk.uids[row], int(chunk.positions[row]), int(due[row]))

    def add_verified(self, chunk: Chunk) -> None:
        """Add the chunk that was checked last."""
        for uid, span in chunk.expert_spans:
            self.add_spans(uid, (span,))
        count = len(chunk.uids)
        if not count:
            return
        form = form_of(chunk.expert_choices)
        self._form = form or self._form
        if self._size + count > len(self._owner) or form != form_of(self._waiting.expert_choices):
            self._fold_waiting(count, form)
        owner = self._chunk_owner
        if self._before.any():
            np.add.at(self._due, owner, 1)
        else:
            self._due[owner] += 1
        rows = slice(self._size, self._size + count)
        self._owner[rows] = owner
        if chunk.sampling_masks is not None:
            self._count_masks(chunk.sampling_masks)
            if self._waiting.sampling_masks is None:
                self._waiting.sampling_masks = np.full(len(self._owner), None)
        if self._waiting.sampling_masks is not None:
            self._waiting.sampling_masks[rows] = chunk.sampling_masks
        versions = np.int32(chunk.policy_version)
        for column, new in zip(
            self._waiting.columns, (chunk.token_ids, chunk.logprobs, versions), strict=True
        ):
            column[rows] = new
        if self._waiting.expert_choices is not None:
            self._waiting.expert_choices[rows] = chunk.expert_choices
        self._size += count

    def extend_request(self, uid: str, tokens: Tokens) -> None:
        """Add the next tokens of one request."""
        self.request_tokens(uid)
        self.add_spans(uid, tokens.expert_spans)
        self._form = form_of(tokens.expert_choices) or self._form
        if tokens.sampling_masks is not None:
            self._count_masks(tokens.sampling_masks)
        self.moved += self._requests[uid].append(tokens)
        self._due[self._numbers[uid]] += len(tokens)

    def next_position(self, uid: str) -> int:
        """Return the number of tokens of a request, the position of its next one."""
        return int(self._due[self._numbers[uid]])

    def request_tokens(self, uid: str) -> Tokens:
        """Return all tokens of a request so far, in order. Later ones do not change them."""
        rows = np.flatnonzero(self._owner[: self._size] == self._numbers[uid])
        if len(rows):
            self._owner[rows] = -1
            self.moved += self._requests[uid].append(self._waiting.select_rows(rows))
        tokens = self._requests[uid].tokens()
        return replace(tokens, expert_spans=tuple(self._spans[uid])) if uid in self._spans else tokens

    def token_count(self) -> int:
        return int(self._due[list(self._numbers.values())].sum())

    def drop_requests(self, uids: Iterable[str]) -> None:
        """Drop `uids`, because nobody will read them."""
        for uid in uids:
            self._requests.pop(uid, None)
            self._numbers.pop(uid, None)
            self._spans.pop(uid, None)
        self._uids = []
        if not self._numbers:
            self._due, self._size = self._due[:0], 0

    def _count_masks(self, masks: np.ndarray) -> None:
        self._masked += len(masks)
        self._mask_bytes += sum(len(mask) for mask in masks if mask is not None)

    def recorded_bytes(self) -> int:
        """Return about the bytes of all sampling masks and expert choices, each request's counted in full."""
        row_bytes = 0 if self._form is None else self._form[0].itemsize * int(np.prod(self._form[1]))
        spans = sum(span.choices.nbytes for part in self._spans.values() for span in part)
        mask_bytes = self._mask_bytes / max(self._masked, 1)
        return int((row_bytes + mask_bytes) * self.token_count()) + spans

    def add_spans(self, uid: str, spans: Sequence[ExpertSpan]) -> None:
        """Add expert choices of further positions of a request."""
        if spans:
            self._spans.setdefault(uid, []).extend(spans)

    def _fold_waiting(self, coming: int, form: ChoiceForm) -> None:
        """Sort all waiting tokens by request, number the requests again, and allocate `coming` more, whose
        expert choices have `form`.
        """
        owner = self._owner[: self._size]
        order = np.argsort(owner, kind="stable")
        columns, owner = self._waiting.select_rows(order), owner[order]
        uids, old = list(self._numbers), np.fromiter(self._numbers.values(), np.int64, len(self._numbers))
        starts, stops = (np.searchsorted(owner, old, side).tolist() for side in ("left", "right"))
        for uid, start, stop in zip(uids, starts, stops, strict=True):
            if start < stop:
                self.moved += self._requests[uid].append(columns.select_rows(slice(start, stop)))
        self._numbers = {uid: i for i, uid in enumerate(uids)}
        new_of = np.full(len(self._due), -1, np.int64)
        new_of[old] = np.arange(len(old))
        self._chunk_owner = new_of[self._chunk_owner] if self._uids else self._chunk_owner
        self._due, self._size = self._due[old], 0
        rows = max(FOLD_AT, coming)
        if rows > len(self._owner) or form != form_of(self._waiting.expert_choices):
            self._owner = np.empty(rows, np.int64)
            self._waiting = _empty_tokens(rows, form)


def choices_of(turns: Iterable[tuple[int, Tokens]]) -> np.ndarray | None:
    """[N, L, K]: the expert choices of the first `N` positions of a sequence, see `Sample.expert_choices`.
    `None` if the first position has none. Raises `RolloutError` if they are not all of one form.

    `turns`: tokens of requests, each with the number of tokens of the sequence before them.
    """
    spans: list[ExpertSpan] = []
    end = 0
    for start, tokens in turns:
        spans += tokens.expert_spans
        if tokens.expert_choices is not None and len(tokens):
            spans.append(ExpertSpan(start - 1, tokens.expert_choices))
        end = max(end, tokens.routed_positions(start))
    if not spans:
        return None
    forms = {f"{span.choices.dtype} {list(span.choices.shape[1:])}" for span in spans}
    if len(forms) > 1:
        raise RolloutError(
            f"expert choices of one response are {' and '.join(sorted(forms))}, which no one model gives;"
            " replace the engine, or start a new run if they come from a log."
        )
    choices = np.zeros((end, *spans[0].choices.shape[1:]), spans[0].choices.dtype)
    known = np.zeros(end, bool)
    for first, rows in spans:
        part = slice(first, min(end, first + len(rows)))
        choices[part], known[part] = rows[: max(0, end - first)], True
    count = end if known.all() else int(known.argmin())
    return choices[:count] if count else None


def masks_of(tokens: Tokens) -> np.ndarray | None:
    """[R + M] int32: the sampling masks of a response, see `Sample.sampling_masks`. `None` without any."""
    masks = tokens.sampling_masks
    if masks is None or not masks.any():
        return None
    ids = np.frombuffer(b"".join(mask for mask in masks if mask is not None), "<i4")
    return np.concatenate([mask_counts(masks), ids]).astype(np.int32)


def check_masks(chunk: Chunk, most: int) -> None:
    """Raise `RolloutError` for masks of a chunk that are not those of its tokens, or of more than `most`."""
    rows = chunk.sampling_masks
    if rows is None:
        return
    form = isinstance(rows, np.ndarray) and rows.dtype == object and rows.shape == chunk.token_ids.shape
    try:
        if not form or not all(row is None or (type(row) is bytes and len(row) % 4 == 0) for row in rows):
            raise ValueError("are no whole ids")
        ids = np.frombuffer(b"".join(row for row in rows if row), "<i4")
        split_masks(chunk.token_ids, np.concatenate([mask_counts(rows).astype(np.int64), ids]), most)
    except ValueError as error:
        raise RolloutError(
            f"the engine gave tokens whose sampling masks {error}; replace the engine."
        ) from None


def split_masks(response: np.ndarray, masks: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of ids [R] int64 of each of the sampling masks [R + M] of `response` [R], and the ids
    [M] int64.

    Raises `ValueError` with what is wrong with them, such as one of more than `most` tokens.
    """
    counts, ids = masks[: len(response)].astype(np.int64), masks[len(response) :].astype(np.int64)
    if len(counts) < len(response) or (counts < 0).any() or counts.sum() != len(ids):
        raise ValueError(f"do not fit its {len(response)} tokens")
    if (counts > most).any():
        raise ValueError(f"have one of {counts.max()} tokens, and {most} is the most")
    owner = np.repeat(np.arange(len(counts)), counts)
    if (ids < 0).any() or ((ids[1:] <= ids[:-1]) & (owner[1:] == owner[:-1])).any():
        raise ValueError("are not ascending token ids")
    own = np.bincount(owner[ids == response[owner]], minlength=len(counts))
    if len(missing := np.flatnonzero((own == 0) & (counts > 0))):
        raise ValueError(f"leave out its token {missing[0]}, which was drawn")
    return counts, ids
