"""One request, one coroutine. Episodes await the tokens of an engine, and single answers are generated
concurrently.

The caller's thread reads the engine. Each domain's episodes run in an event loop of their own. So an
environment that blocks its loop blocks neither the engine nor another domain.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from opd.errors import RolloutError
from opd.loop_thread import CANCEL_SECONDS, LoopThread
from opd.progress import set_activity
from opd.rollout.request_state import ENDS, OtherRequestError
from opd.rollout.streams import More
from opd.storage.transcript import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, SampleGroup, SamplingParams, Status

if TYPE_CHECKING:
    from opd.rollout.collect import EncodedPrompt, SamplingEngine

_log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_SECONDS = 0.1
"""Seconds a stream with nothing in flight waits for an environment before it checks for news."""
ANSWER_SECONDS = 0.002
CLOSING_SECONDS = 10.0
"""Seconds that environments may take to close after an error or an interrupt."""


class EpisodeKind(ABC):
    """A `Generate` whose responses are coroutines."""

    def __call__(
        self,
        engine: SamplingEngine,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        """Return `group_size` episodes of each prompt. Raises `RolloutError` if one fails."""
        with RequestWriter(engine) as writer:
            play = writer.start_coroutine(self.play(writer, prompts, group_size, sampling, seed))
            writer.finish()
            return play.result()

    @abstractmethod
    async def play(
        self,
        writer: RequestWriter,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        """Return `group_size` episodes of each prompt, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """A request and its callbacks. All three are called in the engine's thread."""

    request: RolloutRequest
    deliver: Callable[[Tokens, Status | None], None]
    """Called with all tokens so far, and the request's status if it has ended."""
    live: Callable[[], bool]
    """If it returns True, `deliver` is called at each chunk, not only at the end."""
    explain: Callable[[OtherRequestError], RolloutError]
    """Returns the error to raise if the log's request differs."""


class RequestWriter:
    """Generates for the requests of coroutines with one engine, concurrently with its caller's requests.

    Args:
        engine: Its chunks are read in the thread that calls `generate` or `finish`.
    """

    def __init__(self, engine: SamplingEngine) -> None:
        self._engine = engine
        self._news = threading.Event()
        """Set when a request arrives or a coroutine has ended."""
        self._new: deque[_PendingRequest] = deque()
        """Requests of any thread that have not begun."""
        self._open: dict[str, _PendingRequest] = {}
        """Requests in flight, by uid."""
        self._transcript = Transcript()
        self._loops: list[LoopThread] = []
        self._plays: list[Future[Any]] = []
        """Coroutines that have not ended."""
        self._answering = 0
        """Number of turns that ended with the last chunk."""
        self.asked: list[str] = []
        """Uids of all requests of coroutines."""

    def __enter__(self) -> RequestWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel coroutines that have not ended. After an error they have `CLOSING_SECONDS` to close."""
        patience = CANCEL_SECONDS if kind is None else CLOSING_SECONDS
        until = time.monotonic() + patience + CANCEL_SECONDS
        with set_activity("closing environments"):
            begun = [(loop, loop.begin_close(patience)) for loop in self._loops]
            for loop, closing in begun:
                if not loop.end_close(closing, max(0.0, until - time.monotonic())):
                    _log.warning("an environment holds up its event loop and is left behind")

    def start_coroutine(self, play: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `play` in an event loop of its own, until the block ends."""
        self._loops.append(LoopThread("environments"))
        future = self._loops[-1].start(play)
        self._plays.append(future)
        future.add_done_callback(lambda _: self._news.set())
        return future

    async def complete_request(self, request: RolloutRequest) -> tuple[Tokens, Status]:
        """Return all tokens generated for `request`, and its status, completed or truncated."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[tuple[Tokens, Status | None]] = loop.create_future()

        def deliver_tokens(tokens: Tokens, status: Status | None) -> None:
            loop.call_soon_threadsafe(_set_result, written, (tokens, status))

        self.queue_request(request, deliver_tokens)
        tokens, status = await written
        assert status is not None
        return tokens, status

    def queue_request(
        self,
        request: RolloutRequest,
        deliver: Callable[[Tokens, Status | None], None],
        live: Callable[[], bool] = lambda: False,
        explain: Callable[[OtherRequestError], RolloutError] = lambda error: error,
    ) -> None:
        """Queue `request`. `deliver` is called at its end, or for each chunk while `live`. Thread-safe."""
        self._new.append(_PendingRequest(request, deliver, live, explain))
        self._news.set()

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        """Stream the chunks of `requests`, until they and all coroutines have ended. `more` must be None,
        because a coroutine is the way to add one request after another.

        Raises errors of the engine or of a coroutine.
        """
        assert more is None
        chunks = self._engine.generate(requests, self._more_requests)
        while True:
            try:
                chunk = next(chunks, None)
            except OtherRequestError as error:
                if (pending := self._open.get(error.uid)) is None:
                    raise
                raise pending.explain(error) from error
            if chunk is None:
                break
            if (own_part := self._route_chunk(chunk)) is not None:
                yield own_part
        if self._open:
            raise RolloutError(
                f"the engine ended without finishing request {min(self._open)}; restart with --resume."
            )

    def finish(self) -> None:
        """Generate until all coroutines have ended."""
        if self._plays:
            for _ in self.generate([]):
                pass

    def _more_requests(self, idle: bool) -> Sequence[RolloutRequest] | None:
        """See `opd.rollout.streams.More`. Waits a moment for the next turns of requests that have just ended.
        Most environments answer at once, and turns that come at the same time are decoded in one batch.
        """
        until = time.monotonic() + ANSWER_SECONDS
        while len(self._new) < self._answering and (remaining := until - time.monotonic()) > 0:
            self._news.clear()
            if len(self._new) < self._answering:
                self._news.wait(remaining)
        self._answering = 0
        self._news.clear()
        ended = self._end_plays()
        requests = self._begin_new()
        if idle and not ended and not requests:
            self._news.wait(IDLE_SECONDS)
            ended = self._end_plays()
            requests = self._begin_new()
        return None if ended and not requests else requests

    def _end_plays(self) -> bool:
        """Return True if all coroutines have ended. Raises the error of one that failed."""
        for play in [play for play in self._plays if play.done()]:
            self._plays.remove(play)
            try:
                play.result()
            except CancelledError as error:
                raise RolloutError(
                    "the code of an environment has cancelled all episodes; mend it."
                ) from error
        return not self._plays

    def _begin_new(self) -> list[RolloutRequest]:
        new: list[_PendingRequest] = []
        while self._new:
            new.append(self._new.popleft())
        self._open |= {pending.request.uid: pending for pending in new}
        requests = [pending.request for pending in new]
        self._transcript.add_requests({request.uid: Tokens.empty() for request in requests})
        self.asked += [request.uid for request in requests]
        return requests

    def _route_chunk(self, chunk: Chunk) -> Chunk | None:
        """Call the requests' callbacks. Returns the caller's part of the chunk, if any."""
        uids = dict.fromkeys((*chunk.uids, *chunk.finished))
        others = uids.keys() & self._open.keys()
        caller_part = None
        if len(others) < len(uids):
            caller_part = chunk.without_requests(others) if others else chunk
            chunk = chunk.without_requests(uids.keys() - others)
        self._transcript.add_chunk(chunk)
        for uid in uids:
            if uid not in others:
                continue
            status = chunk.finished.get(uid)
            if status is not None and status not in ENDS:
                raise RolloutError(f"request {uid} ended as {status}; restart with --resume.")
            self._answering += status is not None
            pending = self._open[uid] if status is None else self._open.pop(uid)
            if status is not None or pending.live():
                pending.deliver(self._transcript.request_tokens(uid), status)
        self._transcript.drop_requests(chunk.finished)
        return caller_part


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # the waiting coroutine was cancelled
        future.set_result(value)


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `works`. If one raises, cancel the others, let them clean up, and raise it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
        raise
