"""An engine for tests, written as a generator over the requests that were submitted together."""

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from opd.rollout.streams import Streaming
from opd.types import Chunk, RolloutRequest


class ByCalls(Streaming):
    """Requests that were submitted together are written by one `write`, and one of these after the other."""

    policy_version = 0

    def __init__(self) -> None:
        self._calls: deque[tuple[set[str], Iterator[Chunk]]] = deque()

    @abstractmethod
    def write(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """Their chunks."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._calls.append(({request.uid for request in requests}, iter(self.write(requests))))

    def next_chunk(self) -> Chunk | None:
        while self._calls:
            chunk = next(self._calls[0][1], None)
            if chunk is not None:
                return chunk
            self._calls.popleft()
        return None

    def abort(self, uids: Collection[str]) -> None:
        """Of calls that are let go as a whole."""
        self._calls = deque(call for call in self._calls if not call[0] <= set(uids))

    def pause(self) -> None:
        """It never samples by itself."""

    resume = flush = pause
