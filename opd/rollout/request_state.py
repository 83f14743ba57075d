"""The open requests. Every token goes into the log, then to the caller.

A request's logged tokens are checked, returned again in chunks, and continued. Stop strings are found in a
response's text however it was cut into tokens, and across interruptions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from opd.errors import RolloutError
from opd.protocols import TokenLog
from opd.rollout.preemption import KVStore
from opd.storage.transcript import ChoiceForm, Tokens, Transcript, form_of
from opd.types import Chunk, LoggedRequest, RolloutRequest, Status, no_ids


class OtherRequestError(RolloutError):
    """The log holds the request with other settings than it has now."""

    def __init__(self, message: str, uid: str) -> None:
        super().__init__(message)
        self.uid = uid


class StopStrings:
    """Looks for `strings` in the text of a turn. The tokens that hold the string are kept.

    Every token of every request costs one call of `decode`, so give stop ids if they suffice.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """`decode`: token ids to text, special tokens included. Raises `RolloutError` for an empty string."""
        if not strings or not all(strings):
            raise RolloutError(f"stop strings {list(strings)} must be given, and none of them empty.")
        self.strings = tuple(strings)
        self._decode = decode
        # A token holds at least a byte of text. One more token keeps a leading space from being dropped.
        self.window = max(len(string.encode()) for string in strings) + 1
        """How many of the newest tokens to look at."""

    def has_stop(self, tail: Sequence[int]) -> bool:
        """Return True if the newest `window` tokens of a turn, or all it has, hold one of the strings."""
        text = self._decode(list(tail))
        return any(string in text for string in self.strings)


ENDS = (Status.COMPLETED, Status.TRUNCATED)
"""The statuses with which an engine may end a request. With any other it has only stopped."""
OWNER = "owner"
"""Key of a request's metadata that tells the logs of two runs apart."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Data that an earlier process may have left, and which of it is used."""

    kv: KVStore | None = None
    """Store for keys and values when the rollout is preempted. Without it they are rebuilt by prefill."""
    owner: str | None = None
    """Owner of these requests. Logged requests of another owner are refused."""
    accept_newer: bool = False
    """Accept logged tokens of newer weights than the engine holds. Asynchronous rollouts leave such tokens
    when a run goes back to its last checkpoint."""


NOTHING_LEFT = Recovery()


class RequestState:
    """State of all open requests. `next_chunk` returns the chunks that are logged and wait for the caller."""

    def __init__(
        self, log: TokenLog | None, stops: StopStrings | None = None, recovery: Recovery = NOTHING_LEFT
    ) -> None:
        self._log, self._recovery = log, recovery
        self.counters: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        """Reasons of failed requests, by uid, since no request was open."""
        self.requests: dict[str, RolloutRequest] = {}
        """Requests that have not ended, in the caller's order."""
        self._ready: deque[Chunk] = deque()
        self._replayed: Iterator[Chunk] | None = None
        """Chunks of logged tokens. They are built lazily, because a long response's chunks are large."""
        self.version = 0
        """Policy version of the newest chunk."""
        self._transcript = Transcript()
        """Tokens of a rollout without a log."""
        self._stops = stops
        self._tails: dict[str, list[int]] = {}
        """The newest tokens of every open request, in which stop strings are looked for."""

    def add_requests(self, requests: Sequence[RolloutRequest], version: int) -> tuple[list[str], bool]:
        """Look the requests up in the log and open those it does not know. Returns the requests that an
        engine is to continue, and True if the log held tokens of them that the caller has not seen.

        Raises `RolloutError` for a uid given twice or a request that differs from the log's, and
        `StorageError` if the log cannot be written.
        """
        new = {request.uid: request for request in requests}
        if len(new) != len(requests) or new.keys() & self.requests.keys():
            twice = next(
                uid for uid, n in Counter([*self.requests, *(r.uid for r in requests)]).items() if n > 1
            )
            raise RolloutError(
                f"request {twice!r} is given twice; the uid keys the sampling noise and the log, so give"
                " every request its own."
            )
        if not self.requests:
            self.failures.clear()
        self.version = version
        tokens = {uid: Tokens.from_prefix(request, version) for uid, request in new.items()}
        resumed, recovered = [uid for uid in new if len(tokens[uid])], False
        begun = len(new) - len(resumed)
        if self._log is not None:
            resumed, recovered = self._read_log(self._log, new, tokens, version)
        else:
            self._transcript.add_requests(tokens)
        self.counters["requests"] += begun
        self.requests |= new
        if (stops := self._stops) is not None:
            for uid in resumed:
                self._tails[uid] = tail = tokens[uid].token_ids.tolist()[-stops.window :]
                if tail and stops.has_stop(tail):  # interrupted before its end was logged
                    self.close_request(uid, Status.COMPLETED)
        # Resumed requests come first, because cached keys and values are restored from the first slot on.
        order = dict.fromkeys([*resumed, *new])
        return [uid for uid in order if uid in self.requests], recovered

    @property
    def has_chunks(self) -> bool:
        """True if chunks may wait for the caller."""
        return self._replayed is not None or bool(self._ready)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk for the caller, if one waits. Logged tokens come first."""
        if self._replayed is not None:
            chunk = next(self._replayed, None)
            if chunk is not None:
                return chunk
            self._replayed = None
        return self._ready.popleft() if self._ready else None

    def drop_requests(self, uids: Collection[str]) -> None:
        """Drop requests that the caller has aborted. They stay open in the log. No chunk mentions them."""
        dropped = set(uids)
        for uid in dropped:
            self.requests.pop(uid, None)
        self._clear_requests(dropped)
        self._ready = deque(chunk.without_requests(dropped) for chunk in self._ready)
        if self._replayed is not None:
            self._replayed = (chunk.without_requests(dropped) for chunk in self._replayed)

    def resumed_request(self, uid: str) -> RolloutRequest:
        """Return the request for an engine, to be continued after its tokens so far."""
        request = self.requests[uid]
        if self._log is None:
            tokens = self._transcript.request_tokens(uid)
        else:
            logged = self._log.find(uid)
            assert logged is not None
            tokens = Tokens.from_logged(logged)
        if not len(tokens):
            return request
        routed = max(request.routed, tokens.routed_positions(len(request.prompt_ids)))
        return replace(request, prefix_ids=tokens.token_ids, routed=routed)

    def apply_stops(self, chunk: Chunk) -> tuple[Chunk, dict[str, Status]]:
        """Return `chunk` without the tokens after a stop string, and the requests that a stop string ends,
        which the engine does not know of.
        """
        stops, rows = self._stops, []
        if stops is None:
            return chunk, {}
        ended: dict[str, Status] = {}
        for row, (uid, token) in enumerate(zip(chunk.uids, chunk.token_ids.tolist(), strict=True)):
            if uid not in ended:
                rows.append(row)
                tail = self._tails.setdefault(uid, [])
                tail.append(token)
                del tail[: -stops.window]
                if stops.has_stop(tail):
                    ended[uid] = Status.COMPLETED
        return (chunk.select_rows(rows, chunk.finished | ended) if ended else chunk), ended

    def log_chunk(self, chunk: Chunk) -> None:
        """Log a chunk of an engine, then make it ready for the caller.

        `chunk` holds only tokens that are due, and only ends in the sense of `ENDS`.
        """
        self.version = chunk.policy_version
        if not chunk.uids and not chunk.finished:
            return
        if self._log is None:
            self._transcript.add_chunk(chunk)
        else:
            self._log.append(chunk)
        self.counters["tokens"] += len(chunk.uids)
        self._end_requests(chunk.finished)
        self._ready.append(chunk)

    def close_request(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a chunk."""
        if self._log is not None:
            self._log.close(uid, status, reason)
        if reason is not None:
            self.failures[uid] = reason
        self._end_requests({uid: status})
        self._ready.append(ending_chunk(self.version, {uid: status}))

    def _end_requests(self, finished: Mapping[str, Status]) -> None:
        if not finished:
            return
        for uid, status in finished.items():
            self.requests.pop(uid, None)
            self.counters[status.value] += 1
        self._clear_requests(finished)

    def _clear_requests(self, uids: Iterable[str]) -> None:
        self._transcript.drop_requests(uids)
        for uid in uids:
            self._tails.pop(uid, None)

    def _read_log(
        self, log: TokenLog, new: dict[str, RolloutRequest], tokens: dict[str, Tokens], version: int
    ) -> tuple[list[str], bool]:
        """Read logged tokens into `tokens`, to be returned first. Opens the requests that the log does not
        know, and leaves in `new` those that have not ended. Returns the requests with tokens, and True if the
        caller has not seen some of these.
        """
        owner, newest = self._recovery.owner, None if self._recovery.accept_newer else version
        logged, unknown = look_up(log, list(new.values()), newest, owner)
        metadata: dict[str, Any] = {} if owner is None else {OWNER: owner}
        open_many = getattr(log, "open_many", None)
        if open_many is not None:  # in one commit
            open_many([(request, metadata) for request in unknown])
        else:
            for request in unknown:
                log.open(request, metadata)
        logged_tokens = {uid: Tokens.from_logged(request) for uid, request in logged.items()}
        skip = {uid: len(new[uid].prefix_ids) for uid in logged}
        if logged_tokens:
            self._replayed = chain(self._replayed or (), replay_tokens(logged_tokens, skip))
        tokens |= logged_tokens
        ended = {uid: r.status for uid, r in logged.items() if r.status is not Status.PENDING}
        if ended:
            self._ready.append(ending_chunk(version, ended))
        for uid, status in ended.items():
            del new[uid], tokens[uid]
            self.counters[status.value] += 1
            if failure := logged[uid].failure:
                self.failures[uid] = failure
        resumed = [uid for uid in logged if uid not in ended and len(logged_tokens[uid])]
        fresh = {uid: len(part) - skip[uid] for uid, part in logged_tokens.items()}
        self.counters["replayed_requests"] += len(ended)
        self.counters["resumed_requests"] += sum(fresh[uid] > 0 for uid in resumed)
        self.counters["replayed_tokens"] += sum(fresh.values())
        return resumed, any(fresh[uid] for uid in resumed)


def look_up(
    log: TokenLog, requests: Sequence[RolloutRequest], version: int | None, owner: str | None = None
) -> tuple[dict[str, LoggedRequest], list[RolloutRequest]]:
    """Return the log's state of `requests`, and the requests it does not know.

    Raises `RolloutError` if the log holds one with another prompt, sampling or seed, with tokens of a policy
    later than `version` (`None`: any), or of another `owner`. Also if a request brings a prefix that the log
    does not hold.
    """
    logged_requests: dict[str, LoggedRequest] = {}
    unknown = []
    for request in requests:
        uid, logged, length = request.uid, log.find(request.uid), len(request.prefix_ids)
        if logged is None:
            if length:
                raise RolloutError(
                    f"request {uid!r} brings {length} tokens that the log does not hold; give it without"
                    " prefix_ids: the log continues what it knows."
                )
            unknown.append(request)
            continue
        logged_requests[uid] = logged
        if not np.array_equal(logged.request.prompt_ids, request.prompt_ids):
            difference = "with another prompt"
        elif logged.request.sampling != request.sampling:
            difference = "with other sampling settings"
        elif logged.request.seed != request.seed:
            difference = "with another seed"
        elif not np.array_equal(logged.token_ids[:length], request.prefix_ids):
            difference = "with other response tokens"
        elif version is not None and logged.policy_versions.max(initial=version) > version:
            newest = logged.policy_versions.max()
            difference = f"with tokens of policy version {newest}, later than {version},"
        elif logged.metadata.get(OWNER) != owner:
            difference = "of another owner"
        else:
            continue
        raise OtherRequestError(
            f"the log holds request {uid!r} {difference}, which is not what is asked for now: model,"
            " tokenizer, data and settings must be those it was written with; restore them, or start a new"
            " run.",
            uid,
        )
    return logged_requests, unknown


def replay_tokens(tokens: dict[str, Tokens], skip: dict[str, int]) -> Iterator[Chunk]:
    """Yield the tokens again, in chunks of one position and one policy version, without the first `skip` of
    each request. Every request's tokens come in order.
    """
    by_form: dict[ChoiceForm, dict[str, Tokens]] = {}
    for uid, part in tokens.items():
        if len(part) > skip[uid]:
            by_form.setdefault(form_of(part.expert_choices), {})[uid] = part
    for alike in by_form.values():
        yield from _replay_alike(alike, skip)


def _replay_alike(tokens: dict[str, Tokens], skip: dict[str, int]) -> Iterator[Chunk]:
    """`replay_tokens` for at least one token, with expert choices of one form."""
    uids = list(tokens)
    parts = [tokens[uid].select_rows(slice(skip[uid], None)) for uid in uids]
    owner = np.repeat(np.arange(len(uids)), [len(part) for part in parts])
    position = np.concatenate(
        [np.arange(skip[uid], skip[uid] + len(part)) for uid, part in zip(uids, parts, strict=True)]
    )
    joined = Tokens.join(parts)
    order = np.lexsort((joined.policy_versions, position))
    joined, owner, position = joined.select_rows(order), owner[order], position[order]
    changed = (np.diff(position) != 0) | (np.diff(joined.policy_versions) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(owner)]])
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = joined.select_rows(slice(start, stop))
        fresh = [uids[i] for i in owner[start:stop] if position[start] == skip[uids[i]]]
        yield Chunk(
            uids=[uids[i] for i in owner[start:stop]],
            positions=position[start:stop].astype(np.int32),
            token_ids=rows.token_ids,
            logprobs=rows.logprobs,
            policy_version=int(rows.policy_versions[0]),
            finished={},
            expert_choices=rows.expert_choices,
            expert_spans=[(uid, span) for uid in fresh for span in tokens[uid].expert_spans],
            sampling_masks=rows.sampling_masks,
        )


def ending_chunk(version: int, finished: dict[str, Status]) -> Chunk:
    """Build a chunk without tokens."""
    return Chunk([], no_ids(), no_ids(), np.zeros(0, dtype=np.float32), version, finished)
