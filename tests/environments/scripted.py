"""An engine that writes fixed tokens, for models that nobody would train."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from opd.rollout.streams import Streaming
from opd.types import Chunk, RolloutRequest, Status


class Scripted(Streaming):
    """Writes `width` tokens of every request in each chunk, with log-probabilities of their own.

    Args:
        turns: Of each episode, by the uid of its sample, the tokens of its turns. The last one is repeated.
    """

    def __init__(self, turns: Mapping[str, Sequence[Sequence[int]]], width: int = 512) -> None:
        self._turns, self._width = turns, width
        self._running: dict[str, tuple[RolloutRequest, list[int], int]] = {}
        """By uid: the request, all that it is answered, and how much of it was written."""
        self.policy_version = 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            name, _, turn = request.uid.rpartition("/")
            script = self._turns[name]
            whole = list(script[min(int(turn), len(script) - 1)])[: request.sampling.max_new_tokens]
            self._running[request.uid] = (request, whole, len(request.prefix_ids))

    def next_chunk(self) -> Chunk | None:
        if not self._running:
            return None
        uids: list[str] = []
        ids: list[int] = []
        places: list[int] = []
        finished: dict[str, Status] = {}
        for uid, (request, whole, begin) in list(self._running.items()):
            end = min(begin + self._width, len(whole))
            uids += [uid] * (end - begin)
            ids += whole[begin:end]
            places += range(begin, end)
            self._running[uid] = (request, whole, end)
            if end == len(whole):
                del self._running[uid]
                ended = bool(whole) and whole[-1] in request.sampling.stop_ids
                finished[uid] = Status.COMPLETED if ended else Status.TRUNCATED
        logprobs = -1.0 - np.array(ids, np.float32) / 1000
        return Chunk(uids, np.array(places, np.int32), np.array(ids, np.int32), logprobs, 0, finished)

    def abort(self, uids: Collection[str]) -> None:
        for uid in uids:
            self._running.pop(uid, None)
