"""The requests of one call: every token into the log, then into the transcript, then to the caller.

What the log already holds of a request is checked, told again in chunks, and continued.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opd.errors import RolloutError
from opd.protocols import TokenLog
from opd.rollout.stop_strings import StopStrings, StopWatch
from opd.rollout.transcript import Tokens, Transcript
from opd.types import Chunk, LoggedRequest, RolloutRequest, Status, no_ids

ENDS = (Status.COMPLETED, Status.TRUNCATED)
"""What an engine may call an end; anything else only says that it stopped."""
OWNER = "owner"
"""Metadata of a request that tells the logs of two runs apart."""


@dataclass(slots=True)
class Keeping:
    """What outlives a call."""

    log: TokenLog | None
    describe: Callable[[RolloutRequest], Mapping[str, Any]]
    stops: StopStrings | None
    counters: Counter[str]
    failures: dict[str, str]
    accept_newer: bool = False
    owner: str | None = None
    """Whose requests they are: those of another in the log are refused."""


class Ledger:
    """State of all requests of one call; `take` gives the steps that are logged and wait for the caller."""

    def __init__(self, requests: Sequence[RolloutRequest], keeping: Keeping, version: int) -> None:
        """Look the requests up in the log and open those it does not know. Raises `RolloutError` for a uid
        given twice or a request that the log knows otherwise, and `StorageError` if the log cannot be
        written.
        """
        self.requests = {request.uid: request for request in requests}
        if len(self.requests) != len(requests):
            twice = next(uid for uid, n in Counter(r.uid for r in requests).items() if n > 1)
            raise RolloutError(
                f"request {twice!r} is given twice; the uid keys the sampling noise and the log, so give"
                " every request its own."
            )
        self._keeping = keeping
        self.ended: dict[str, Status] = {}
        self._ready: deque[Chunk] = deque()
        self._told: Iterator[Chunk] = iter(())
        """What the log held, made as it is taken: as objects, a long response's steps are large."""
        self._telling = False
        self.version = version
        """Policy version of the newest step."""
        known = {r.uid: Tokens.prefix(r, version) for r in requests}
        self.resumed = [r.uid for r in requests if len(r.prefix_ids)]
        self.recovered = False
        """Whether the log held tokens that the caller has not seen."""
        keeping.counters["requests"] += len(requests) - len(self.resumed)
        if keeping.log is not None:
            known |= self._read(keeping.log, requests, version)
        self.transcript = Transcript(known)
        self.transcript.end(self.ended)
        self._watch = StopWatch(keeping.stops) if keeping.stops is not None else None
        for uid in self.resumed:  # interrupted after a stop string, before its end was logged
            if self._watch is not None and self._watch.begin(uid, known[uid].token_ids.tolist()):
                self.close(uid, Status.COMPLETED)

    def take(self) -> Chunk | None:
        """The next step for the caller, if one waits: first what the log held."""
        if self._telling:
            step = next(self._told, None)
            if step is not None:
                return step
            self._telling = False
        return self._ready.popleft() if self._ready else None

    @property
    def unfinished(self) -> list[str]:
        """Requests that have not ended, in the caller's order."""
        return [uid for uid in self.requests if uid not in self.ended]

    def ask(self, uid: str) -> RolloutRequest:
        """What to ask an engine for: the request, to be continued after what was written."""
        written = self.transcript.tokens(uid).token_ids
        return replace(self.requests[uid], prefix_ids=written) if len(written) else self.requests[uid]

    def stopped(self, chunk: Chunk) -> tuple[Chunk, dict[str, Status]]:
        """`chunk` without what comes after a stop string, and the requests that one ends, which the engine
        does not know of.
        """
        watch, rows = self._watch, []
        if watch is None:
            return chunk, {}
        ended: dict[str, Status] = {}
        for row, (uid, token) in enumerate(zip(chunk.uids, chunk.token_ids.tolist(), strict=True)):
            if uid not in ended:
                rows.append(row)
                if watch.add(uid, token):
                    ended[uid] = Status.COMPLETED
        return (chunk.part(rows, chunk.finished | ended) if ended else chunk), ended

    def accept(self, step: Chunk) -> None:
        """Log a step of an engine and make it ready.

        `step` holds only tokens that are due, and only ends in the sense of `ENDS`.
        """
        self.version = step.policy_version
        if not step.uids and not step.finished:
            return
        if self._keeping.log is not None:
            self._keeping.log.append(step)
        self.transcript.add(step)
        self._keeping.counters["tokens"] += len(step.uids)
        self._end(step.finished)
        self.transcript.end(step.finished)
        self._ready.append(step)

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a chunk."""
        if self._keeping.log is not None:
            self._keeping.log.close(uid, status, reason)
        if reason is not None:
            self._keeping.failures[uid] = reason
        self._end({uid: status})
        self.transcript.end([uid])
        self._ready.append(_ending(self.version, {uid: status}))

    def _end(self, finished: Mapping[str, Status]) -> None:
        self.ended.update(finished)
        for status in finished.values():
            self._keeping.counters[status.value] += 1

    def _read(self, log: TokenLog, requests: Sequence[RolloutRequest], version: int) -> dict[str, Tokens]:
        """Take over what the log holds, to be told first, and open the requests it does not know."""
        keeping = self._keeping
        newest = None if keeping.accept_newer else version
        found, unknown = look_up(log, requests, newest, keeping.owner)
        own = {} if keeping.owner is None else {OWNER: keeping.owner}
        _open(log, [(plain(request), {**keeping.describe(request), **own}) for request in unknown])
        known = {uid: Tokens.logged(logged) for uid, logged in found.items()}
        skip = {uid: len(self.requests[uid].prefix_ids) for uid in found}
        self._told, self._telling = replay(known, skip), True
        ended = {uid: r.status for uid, r in found.items() if r.status is not Status.PENDING}
        if ended:
            self._ready.append(_ending(version, ended))
            self._end(ended)
        keeping.failures |= {uid: found[uid].failure or "" for uid in ended if found[uid].failure}
        self.resumed = [uid for uid in found if uid not in ended and len(known[uid])]
        told = {uid: len(tokens) - skip[uid] for uid, tokens in known.items()}
        self.recovered = any(told[uid] for uid in self.resumed)
        keeping.counters["replayed_requests"] += len(ended)
        keeping.counters["resumed_requests"] += sum(told[uid] > 0 for uid in self.resumed)
        keeping.counters["replayed_tokens"] += sum(told.values())
        return known


def _open(log: TokenLog, requests: list[tuple[RolloutRequest, Mapping[str, Any]]]) -> None:
    """Log new requests, as one commit where the log can."""
    open_many = getattr(log, "open_many", None)
    if open_many is not None:
        open_many(requests)
        return
    for request, metadata in requests:
        log.open(request, metadata)


def look_up(
    log: TokenLog, requests: Sequence[RolloutRequest], version: int | None, owner: str | None = None
) -> tuple[dict[str, LoggedRequest], list[RolloutRequest]]:
    """What `log` knows of `requests`, and those it does not know.

    Raises `RolloutError` if the log holds one of them with another prompt, sampling or seed, or with tokens
    of a policy later than `version` (`None`: any), or of another `owner`, or if a request brings a prefix of
    its own that the log does not hold.
    """
    found: dict[str, LoggedRequest] = {}
    unknown = []
    for request in requests:
        logged = log.find(request.uid)
        if logged is not None:
            _check_same(request, logged, version)
            if logged.metadata.get(OWNER) != owner:
                raise _foreign(request.uid, "of another owner")
            found[request.uid] = logged
            continue
        if len(request.prefix_ids):
            raise RolloutError(
                f"request {request.uid!r} brings {len(request.prefix_ids)} tokens that the log does not hold;"
                " give it without prefix_ids: the log continues what it knows."
            )
        unknown.append(request)
    return found, unknown


def _check_same(request: RolloutRequest, logged: LoggedRequest, version: int | None) -> None:
    opened, length = logged.request, len(request.prefix_ids)
    wrong = None
    if not np.array_equal(opened.prompt_ids, request.prompt_ids):
        wrong = "another prompt"
    elif opened.sampling != request.sampling:
        wrong = "other sampling settings"
    elif opened.seed != request.seed:
        wrong = "another seed"
    elif not np.array_equal(logged.token_ids[:length], request.prefix_ids):
        wrong = "other response tokens"
    elif version is not None and logged.policy_versions.max(initial=version) > version:
        wrong = f"tokens of policy version {logged.policy_versions.max()}, later than {version},"
    if wrong:
        raise _foreign(request.uid, f"with {wrong}")


def _foreign(uid: str, what: str) -> RolloutError:
    return RolloutError(
        f"the log holds request {uid!r} {what}, which is not what is asked for now: model, tokenizer, data"
        " and settings must be those it was written with; restore them, or start a new run."
    )


def plain(request: RolloutRequest) -> RolloutRequest:
    """`request` as it was before any token."""
    return replace(request, prefix_ids=no_ids()) if len(request.prefix_ids) else request


def replay(known: dict[str, Tokens], skip: dict[str, int]) -> Iterator[Chunk]:
    """The tokens again, in steps of one position and one policy version, but for the first `skip` of each.
    Every request's tokens come in order.
    """
    tokens = {uid: held for uid, held in known.items() if len(held) > skip[uid]}
    if not tokens:
        return
    uids = list(tokens)
    parts = [tokens[uid].cut(slice(skip[uid], None)) for uid in uids]
    owner = np.repeat(np.arange(len(uids)), [len(part) for part in parts])
    position = np.concatenate(
        [np.arange(skip[uid], skip[uid] + len(part)) for uid, part in zip(uids, parts, strict=True)]
    )
    joined = Tokens.join(parts)
    order = np.lexsort((joined.policy_versions, position))
    joined, owner, position = joined.cut(order), owner[order], position[order]
    changed = (np.diff(position) != 0) | (np.diff(joined.policy_versions) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(owner)]])
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = slice(start, stop)
        yield _step([uids[i] for i in owner[rows]], position[rows], joined.cut(rows))


def _step(uids: list[str], positions: np.ndarray, tokens: Tokens) -> Chunk:
    version = int(tokens.policy_versions[0])
    return Chunk(uids, positions.astype(np.int32), tokens.token_ids, tokens.logprobs, version, {})


def _ending(version: int, finished: dict[str, Status]) -> Chunk:
    """A step without tokens."""
    return Chunk([], no_ids(), no_ids(), np.zeros(0, dtype=np.float32), version, finished)
