"""Two requests and their chunks, for tests of the token log."""

import shutil
from collections.abc import Iterator
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


def cut_logs(path: Path, chunks: list[Chunk]) -> Iterator[Path]:
    """Yield a folder, which is removed after, with a log of two `chunks` whose last one is cut: once at each
    8 bytes.
    """
    with started(path / "whole", 0) as log:
        log.append(chunks[0])
        (file,) = (path / "whole").glob("*.wal")
        before = file.stat().st_size
        log.append(chunks[1])
        data = file.read_bytes()
    for size in range(before, len(data) + 1, 8):
        folder = path / str(size)
        folder.mkdir()
        (folder / file.name).write_bytes(data[:size])
        yield folder
        shutil.rmtree(folder)
