"""Domains side by side: single answers and the turns of all domains of episodes, in one call of the engine.

Each domain by itself has a tail in which a few slow environments keep the engine waiting. Together others
are decoded meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from opd.errors import RolloutError
from opd.rollout.ledger import OtherRequestError
from opd.rollout.streams import More, several
from opd.types import Chunk, RolloutRequest, SampleGroup, SamplingParams

if TYPE_CHECKING:
    from opd.rollout.collect import EncodedPrompt, Generates

WAIT = 0.1
"""Seconds that a stream with nothing in flight waits for an environment before it looks up."""


class Writing(Protocol):
    """Responses on their way that ask for one request after another. All calls come from one thread."""

    def due(self) -> Sequence[RolloutRequest] | None:
        """Requests that are to be written now; `None` once there will be no other."""
        ...

    def take(self, chunk: Chunk) -> None:
        """What the engine has written to them."""
        ...

    def groups(self) -> list[SampleGroup]:
        """All of them, in the order of their prompts, once they have ended. Raises `RolloutError` before."""
        ...

    def explained(self, error: OtherRequestError) -> RolloutError:
        """What to raise where one of its requests is in the log otherwise."""
        ...

    def close(self) -> None:
        """Let go of all that it holds."""
        ...


class Begins(Protocol):
    """A `Generate` whose prompts may be written beside others'."""

    def begin(
        self,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
        news: threading.Event,
    ) -> Writing:
        """Begin `group_size` responses to each prompt. `news` is set whenever something may be due."""
        ...


class Beside:
    """Stands before an engine: what others ask for is written beside what is asked of it.

    Args:
        engine: What writes.
        writings: The others, to whom their chunks are dealt.
        news: Set when one of them may have something due.
    """

    def __init__(self, engine: Generates, writings: Sequence[Writing], news: threading.Event) -> None:
        self._engine, self._news = engine, news
        self._open = list(writings)
        self._owner: dict[str, Writing] = {}
        """By uid of a request in flight."""
        self.asked: list[str] = []
        """Uids of the requests of others."""

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        """What is written to `requests`, until they and all others have ended. It takes no `more`: who asks
        for one request after another is a `Writing`.
        """
        assert more is None
        chunks = self._engine.generate(requests, self._more)
        while True:
            try:
                chunk = next(chunks, None)
            except OtherRequestError as error:
                owner = self._owner.get(error.uid)
                if owner is None:
                    raise
                raise owner.explained(error) from error
            if chunk is None:
                return
            own = self._deal(chunk)
            if own is not None:
                yield own

    def finish(self) -> None:
        """Until the others have ended."""
        if self._open:
            for _ in self.generate(several(())):
                pass

    def _more(self, idle: bool) -> Sequence[RolloutRequest] | None:
        self._news.clear()
        asked = self._due()
        if idle and asked is not None and not asked:
            self._news.wait(WAIT)
            asked = self._due()
        return asked

    def _due(self) -> list[RolloutRequest] | None:
        asked: list[RolloutRequest] = []
        for writing in list(self._open):
            due = writing.due()
            if due is None:
                self._open.remove(writing)
                continue
            asked += due
            self._owner |= {request.uid: writing for request in due}
        self.asked += [request.uid for request in asked]
        return asked if self._open or asked else None

    def _deal(self, chunk: Chunk) -> Chunk | None:
        """Give the others what is theirs; returns the rest, if there is any."""
        whose = list(dict.fromkeys(map(self._owner.get, (*chunk.uids, *chunk.finished))))
        one = len(whose) == 1
        parts = {who: chunk if one else self._part(chunk, who) for who in whose}
        for uid in chunk.finished:
            self._owner.pop(uid, None)
        for who, part in parts.items():
            if who is not None:
                who.take(part)
        return parts.get(None)

    def _part(self, chunk: Chunk, who: Writing | None) -> Chunk:
        """What is `who`'s."""
        rows = [row for row, uid in enumerate(chunk.uids) if self._owner.get(uid) is who]
        ended = {uid: status for uid, status in chunk.finished.items() if self._owner.get(uid) is who}
        return chunk.part(rows, ended)


def write_alone(
    begins: Begins,
    engine: Generates,
    prompts: Sequence[EncodedPrompt],
    group_size: int,
    sampling: SamplingParams,
    seed: int,
) -> list[SampleGroup]:
    """`group_size` responses to each prompt of one domain."""
    news = threading.Event()
    writing = begins.begin(prompts, group_size, sampling, seed, news)
    try:
        Beside(engine, [writing], news).finish()
        return writing.groups()
    finally:
        writing.close()
