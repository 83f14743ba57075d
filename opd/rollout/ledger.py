"""The books of one call: every token goes into the log, then into the transcript, then to the caller."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from opd.errors import RolloutError
from opd.protocols import TokenLog
from opd.rollout.recovery import OWNER, look_up, plain, replay, turn_of
from opd.rollout.stop_strings import StopStrings, StopWatch
from opd.rollout.transcript import ObservationStep, Tokens, Transcript
from opd.types import DecodeStep, RolloutRequest, Status, no_ids

ENDS = (Status.COMPLETED, Status.TRUNCATED)
"""What an engine may call an end; anything else only says that it stopped."""


class Environment(Protocol):
    """Answers the student's turns."""

    def observe(self, request: RolloutRequest, response: Tokens) -> np.ndarray | None:
        """Tokens `[K]` int32 to append after a turn that ended on a stop id; `None` ends the response.

        `response` is everything so far. After a crash the same turn may be asked about again.
        """
        ...


@dataclass(slots=True)
class Books:
    """What outlives a call."""

    log: TokenLog | None
    describe: Callable[[RolloutRequest], Mapping[str, Any]]
    environment: Environment | None
    stops: StopStrings | None
    counters: Counter[str]
    failures: dict[str, str]
    accept_newer: bool = False
    owner: str | None = None
    """Whose requests they are: those of another in the log are refused."""


class Ledger:
    """State of all requests of one call; `take` gives the steps that are logged and wait for the caller."""

    def __init__(self, requests: Sequence[RolloutRequest], books: Books, version: int) -> None:
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
        self._books = books
        self.ended: dict[str, Status] = {}
        self._ready: deque[DecodeStep] = deque()
        self._told: Iterator[DecodeStep] = iter(())
        """What the log held, made as it is taken: as objects, a long response's steps are large."""
        self._telling = False
        self.version = version
        """Policy version of the newest step."""
        known = {r.uid: _prefix(r, version) for r in requests}
        self.resumed = [r.uid for r in requests if len(r.prefix_ids)]
        self.recovered = False
        """Whether the log held tokens that the caller has not seen."""
        books.counters["requests"] += len(requests) - len(self.resumed)
        if books.log is not None:
            known |= self._read(books.log, requests, version)
        self.transcript = Transcript(known)
        self.transcript.end(self.ended)
        self._watch = StopWatch(books.stops) if books.stops is not None else None
        self._stopped: set[str] = set()
        """Requests that were interrupted after a stop string, before its end was dealt with."""
        for uid in self.resumed:
            if self._watch is not None and self._watch.begin(uid, _turn(known[uid])):
                self._stopped.add(uid)
            # Interrupted after an observation that filled the response, before its end was logged.
            tokens, limit = known[uid], self.requests[uid].sampling.max_new_tokens
            if len(tokens) >= limit and not tokens.loss_mask[-1]:
                self.close(uid, Status.TRUNCATED)
            elif uid in self._stopped and books.environment is None:
                self.close(uid, Status.COMPLETED)

    def take(self) -> DecodeStep | None:
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

    def ask(self, uid: str) -> tuple[RolloutRequest, int]:
        """What to ask an engine for, and the response position its turn begins at."""
        return turn_of(self.requests[uid], self.transcript.tokens(uid))

    def stopped(self, step: DecodeStep) -> dict[str, Status]:
        """The requests that `step` ends by a stop string, which the engine does not know of."""
        watch = self._watch
        if watch is None:
            return {}
        columns = zip(step.uids, step.token_ids.tolist(), strict=True)
        return {uid: Status.COMPLETED for uid, token in columns if watch.add(uid, token)}

    def accept(self, step: DecodeStep) -> list[str]:
        """Log a step of an engine and make it ready; returns the requests whose next turn is to be written.

        `step` holds only tokens that are due, and only ends in the sense of `ENDS`.
        """
        books, turns = self._books, []
        if books.environment is not None:
            turns = [uid for uid, status in step.finished.items() if status is Status.COMPLETED]
            if turns:
                rest = {uid: status for uid, status in step.finished.items() if uid not in turns}
                step = replace(step, finished=rest)
        self.version = step.policy_version
        if step.uids or step.finished:
            if books.log is not None:
                books.log.append(step)
            self.transcript.add(step)
            books.counters["tokens"] += len(step.uids)
            self._end(step.finished)
            self.transcript.end(step.finished)
            self._ready.append(step)
        return [uid for uid in turns if self.next_turn(uid)]

    def next_turn(self, uid: str) -> bool:
        """Ask the environment about a turn that ended; whether there is another turn to write."""
        books, request = self._books, self.requests[uid]
        assert books.environment is not None
        tokens = self.transcript.tokens(uid)
        observed = books.environment.observe(request, tokens)
        if observed is None or len(observed) == 0:
            self.close(uid, Status.COMPLETED)
            return False
        step = ObservationStep.of(uid, len(tokens), observed, self.version)
        if books.log is not None:
            books.log.append_observation(uid, step.token_ids, self.version)
        self.transcript.add(step)
        books.counters["observation_tokens"] += len(step.uids)
        self._ready.append(step)
        if self.transcript.length(uid) >= request.sampling.max_new_tokens:
            self.close(uid, Status.TRUNCATED)
            return False
        if self._watch is not None:
            self._watch.begin(uid, [])
        return True

    def turn_has_ended(self, uid: str) -> bool:
        """Whether a request that was interrupted stands between a turn and the environment's answer."""
        known = self.transcript.tokens(uid)
        stops = self.requests[uid].sampling.stop_ids
        if self._books.environment is None or not len(known) or not known.loss_mask[-1]:
            return False
        return int(known.token_ids[-1]) in stops or uid in self._stopped

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a decode step."""
        if self._books.log is not None:
            self._books.log.close(uid, status, reason)
        if reason is not None:
            self._books.failures[uid] = reason
        self._end({uid: status})
        self.transcript.end([uid])
        self._ready.append(_ending(self.version, {uid: status}))

    def _end(self, finished: Mapping[str, Status]) -> None:
        self.ended.update(finished)
        for status in finished.values():
            self._books.counters[status.value] += 1

    def _read(self, log: TokenLog, requests: Sequence[RolloutRequest], version: int) -> dict[str, Tokens]:
        """Take over what the log holds, to be told first, and open the requests it does not know."""
        books = self._books
        newest = None if books.accept_newer else version
        found, unknown = look_up(log, requests, newest, books.owner)
        own = {} if books.owner is None else {OWNER: books.owner}
        _open(log, [(plain(request), {**books.describe(request), **own}) for request in unknown])
        known = {uid: Tokens.logged(logged) for uid, logged in found.items()}
        skip = {uid: len(self.requests[uid].prefix_ids) for uid in found}
        self._told, self._telling = replay(known, skip), True
        ended = {uid: r.status for uid, r in found.items() if r.status is not Status.PENDING}
        if ended:
            self._ready.append(_ending(version, ended))
            self._end(ended)
        books.failures |= {uid: found[uid].failure or "" for uid in ended if found[uid].failure}
        self.resumed = [uid for uid in found if uid not in ended and len(known[uid])]
        told = {uid: len(tokens) - skip[uid] for uid, tokens in known.items()}
        self.recovered = any(told[uid] for uid in self.resumed)
        books.counters["replayed_requests"] += len(ended)
        books.counters["resumed_requests"] += sum(told[uid] > 0 for uid in self.resumed)
        books.counters["replayed_tokens"] += sum(told.values())
        return known


def _open(log: TokenLog, requests: list[tuple[RolloutRequest, Mapping[str, Any]]]) -> None:
    """Log new requests, as one commit where the log can."""
    open_many = getattr(log, "open_many", None)
    if open_many is not None:
        open_many(requests)
        return
    for request, metadata in requests:
        log.open(request, metadata)


def _turn(known: Tokens) -> list[int]:
    """The tokens after the environment's last."""
    seen = np.flatnonzero(~known.loss_mask)
    return known.token_ids[seen[-1] + 1 if len(seen) else 0 :].tolist()


def _prefix(request: RolloutRequest, version: int) -> Tokens:
    """The prefix a caller gives without a log: only its ids are known."""
    count = len(request.prefix_ids)
    if not count:
        return Tokens.empty()
    return Tokens(
        request.prefix_ids,
        np.zeros(count, dtype=np.float32),
        np.full(count, version, dtype=np.int32),
        np.ones(count, dtype=bool),
    )


def _ending(version: int, finished: dict[str, Status]) -> DecodeStep:
    """A step without tokens."""
    return DecodeStep([], no_ids(), no_ids(), np.zeros(0, dtype=np.float32), version, finished)
