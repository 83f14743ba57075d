"""Two requests and their chunks, for tests of the token log."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, RolloutRequest, SamplingParams

UIDS = ["a", "b"]


def request(uid: str) -> RolloutRequest:
    return RolloutRequest(uid, np.array([1, 2, 3], np.int32), SamplingParams(), 7)


def chunk(position: int, uids: list[str] = UIDS) -> Chunk:
    at = np.full(len(uids), position, np.int32)
    return Chunk(uids, at, at + 100, np.full(len(uids), -1.0, np.float32), 1, {})


def started(folder: Path, chunks: int, **options) -> TokenWAL:
    log = TokenWAL(folder, **options)
    log.open_many([(request(uid), {}) for uid in UIDS])
    for position in range(chunks):
        log.append(chunk(position))
    return log


def tokens(folder: Path) -> dict[str, list[int]]:
    return {uid: logged.token_ids.tolist() for uid, logged in read_log(folder).requests().items()}
