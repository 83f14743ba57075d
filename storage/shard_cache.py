"""A node's copies of published weights: an object store is read once per node and run.

The cache holds the blocks of a model's manifest, in the checkpoint's dtype, as arrays of a node's cache
(`node_cache.py`). Only the manifest is trusted: a block is a hit if its bytes, in the target buffer, have the
checksum in the manifest. Each process claims missing blocks that nobody else is fetching, reads and stores
them, and waits for blocks that others fetch. A claim is a kernel lock and ends with its process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opd.errors import StorageError
from opd.storage.blobs import KEY_BYTES
from opd.storage.leases import LeaseTable
from opd.storage.node_cache import CacheRecord, NodeCache

if TYPE_CHECKING:
    from opd.storage.published import BlockPiece

_log = logging.getLogger(__name__)

_UNLIMITED = 1 << 62
_LOT = 128
"""Blocks claimed at a time, so that processes which want the same share the reading of it."""
_PATIENCE = 30.0
"""Seconds without a block from other processes after which theirs are read here too."""
_LOOK = 0.02
"""Seconds between two checks for blocks that others are fetching."""

Fetch = Callable[[Sequence["BlockPiece"], Callable[["BlockPiece"], None]], None]
"""Fills and verifies blocks, and calls the function with each of them, in any thread. May raise."""
_KeyedBlock = tuple[bytes, "BlockPiece"]


class ShardCache:
    """Blocks of published models on a disk of this node, for all processes and threads given its folder.

    Nothing is made before a block is requested. If the folder cannot be used, now or later, one warning says
    so and everything comes from the store. Blocks for which there is no capacity come from the store too.

    Args:
        folder: This user's own, or not yet existing. Its content may be damaged, or of anybody's making.
        budget_bytes: Most bytes of disk. `None`: as many as are requested. The least recently used blocks go
            first. Blocks used since this object was made stay.
    """

    def __init__(self, folder: str | Path, budget_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self._budget = budget_bytes or _UNLIMITED
        self._since = time.time_ns()
        self._opening = threading.Lock()
        self._tried = False
        self._files: NodeCache | None = None
        self._claims: LeaseTable | None = None
        self._stack = contextlib.ExitStack()
        self._warned: set[str] = set()

    def fill_blocks(self, digest: str, pieces: Sequence[BlockPiece], fetch: Fetch) -> int:
        """Fill all `pieces` of the model of that digest. Return the bytes that came from here.

        Missing blocks are read by `fetch`, and stored. Raises as `fetch` raises.
        """
        self._open_cache()
        missing = self._fill_cached([(_block_key(digest, piece), piece) for piece in pieces])
        fetched, since = 0, time.monotonic()
        while missing:
            claims = self._claims
            claimed, others = self._claim_batch(missing, claims)
            try:
                fetched += self._fetch_blocks(self._fill_cached(claimed), fetch)  # unless present by now
            finally:
                for key, _ in claimed:
                    if claims is not None:
                        claims.release(key, os.getpid())
            missing = self._fill_cached(others)
            if claimed or len(missing) < len(others):
                since = time.monotonic()
            elif time.monotonic() - since > _PATIENCE:  # the process that fetches them hangs
                fetched += self._fetch_blocks(missing, fetch)
                break
            else:
                time.sleep(_LOOK)
        return sum(len(piece.into) for piece in pieces) - fetched

    def close(self) -> None:
        """Close the folder. From now on everything comes from the store."""
        with self._opening:
            self._tried, self._files, self._claims = True, None, None
            self._stack.close()

    def _open_cache(self) -> None:
        with self._opening:
            if self._tried:
                return
            self._tried = True
            try:
                _make_own(self.folder)
                files = NodeCache(self.folder, quota_bytes=self._budget, kept_since=self._since)
                self._stack.callback(files.close)
                claims = LeaseTable(self.folder / "claims")
                self._stack.callback(claims.close)
                self._files, self._claims = files, claims
            except (StorageError, OSError) as error:
                self._give_up(error)

    def _fill_cached(self, blocks: Sequence[_KeyedBlock]) -> list[_KeyedBlock]:
        """Fill those of `blocks` that are here, and return the others."""
        return [(key, piece) for key, piece in blocks if not self._read_block(key, piece)]

    def _read_block(self, key: bytes, piece: BlockPiece) -> bool:
        files = self._files
        if files is None:
            return False
        try:
            is_here = files.read_into(key, piece.into, piece.checksum)
        except (StorageError, OSError) as error:
            self._give_up(error)
            return False
        if not is_here and files.counters.corrupt:
            self._warn_once(
                "damage", "holds what is not what was published, which is read from the store again"
            )
        return is_here

    def _claim_batch(
        self, blocks: Sequence[_KeyedBlock], claims: LeaseTable | None
    ) -> tuple[list[_KeyedBlock], list[_KeyedBlock]]:
        """Claim a batch of `blocks` that nobody else fetches, and return it and the others."""
        claimed: list[_KeyedBlock] = []
        others: list[_KeyedBlock] = []
        for key, piece in blocks:
            try:
                free = claims is None or (len(claimed) < _LOT and claims.claim(key))
            except OSError as error:
                self._give_up(error)
                free = True
            (claimed if free else others).append((key, piece))
        return claimed, others

    def _fetch_blocks(self, blocks: Sequence[_KeyedBlock], fetch: Fetch) -> int:
        """Read `blocks` from the store, and keep them. Return their bytes."""
        keys = {id(piece): key for key, piece in blocks}
        if blocks:
            fetch([piece for _, piece in blocks], lambda piece: self._store_block(keys[id(piece)], piece))
        return sum(len(piece.into) for _, piece in blocks)

    def _store_block(self, key: bytes, piece: BlockPiece) -> None:
        files = self._files
        if files is None or "full" in self._warned:
            return
        try:
            record = CacheRecord(piece.unit.name, "", piece.index)
            stored = files.put(key, np.frombuffer(piece.into, np.uint8)[None], record)
        except (StorageError, OSError) as error:
            self._give_up(error)
            return
        if not stored:
            self._warn_once(
                "full",
                "has no room for all of them, by runtime.weights_cache_mb or on its disk; the rest is read"
                " from the store each time",
            )

    def _give_up(self, error: Exception) -> None:
        self._files = self._claims = None
        self._warn_once("error", f"is not used, {error}; they are read from the store each time")

    def _warn_once(self, kind: str, fault: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("the cache of teachers' weights %s %s", self.folder, fault)


def _block_key(digest: str, piece: BlockPiece) -> bytes:
    """Return the 32-byte key of a block's bytes. A tied head is the embedding's, and has its key."""
    unit, (start, stop) = piece.unit, piece.unit.block_range(piece.index)
    name = hashlib.blake2b(digest_size=KEY_BYTES, person=b"opd.weights.1")
    name.update(f"{digest} {unit.checksum} {start} {stop} ".encode() + piece.checksum)
    return name.digest()


def _make_own(folder: Path) -> None:
    """Make `folder` unless it exists. Raises `StorageError` if it is not this user's alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StorageError("it is a link, somebody else's, or others may write to it: remove it")
