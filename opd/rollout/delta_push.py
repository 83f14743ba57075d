"""New weights for workers that have a mirror of them on their own node: first in full, then the changes.

No file system is shared. Each worker has a `Receiver` next to it, which maintains a folder that the worker
reads. A receiver's weights are known by their digest. So a receiver that lost some, or was restarted, is sent
everything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from opd.errors import RolloutError
from opd.models.causal_lm import weights_digest
from opd.models.hf_folder import INDEX
from opd.rollout.served_workers import Ask, PreparedWeights, Read, copy_to_cpu
from opd.rollout.weight_delta import (
    BLOCK_ELEMENTS,
    all_blocks,
    changed_blocks,
    form_as_json,
    form_of,
    group_blocks,
    pack_blocks,
)
from opd.rollout.weight_sync import Weights
from opd.served.http_client import Server, UnavailableError
from opd.untrusted import is_file_name

_log = logging.getLogger(__name__)

Share = Callable[[bytes], Any]
"""Put a part in a store that every receiver can read. It lives as long as the returned reference."""
WORTH = 0.5
"""Share of all bytes. Larger changes are not collected, and everything is sent."""


class Receiver(Protocol):
    """A `WeightMirror` next to a worker, as another process sees it. See there for its methods.

    Each raises `RolloutError` if it declines, and `UnavailableError` if it cannot be reached.
    """

    def held(self) -> str | None: ...

    def folder(self) -> str | None: ...

    def begin(self, form: Any, files: Mapping[str, bytes]) -> bool: ...

    def change(self, base: str) -> bool: ...

    def take(self, part: Any) -> None: ...

    def settle(self, digest: str) -> str | None: ...


class _SharedChunks:
    """Parts that receivers take in turn. Each part is shared once for all receivers that are at it at the
    same time, and dropped when the last one has it. All parts together may not fit in the store.
    """

    def __init__(self, parts: Sequence[Callable[[], bytes]]) -> None:
        self._parts = parts
        self._shared: dict[int, tuple[Any, int]] = {}
        self._at: dict[object, int] = {}
        """The part that each receiver takes now."""
        self._lock = threading.Lock()

    @contextmanager
    def iterate_shared(self, share: Share) -> Iterator[Iterator[tuple[Any, int]]]:
        """Iterate over all parts and their bytes in their order, for one receiver, in the block."""
        receiver = object()
        try:
            yield (self._share_at(receiver, number, share) for number in range(len(self._parts)))
        finally:
            with self._lock:
                self._at.pop(receiver, None)
                self._drop_shared()

    def _share_at(self, receiver: object, number: int, share: Share) -> tuple[Any, int]:
        with self._lock:
            self._at[receiver] = number
            self._drop_shared()
            if number not in self._shared:
                part = self._parts[number]()
                self._shared[number] = share(part), len(part)
            return self._shared[number]

    def _drop_shared(self) -> None:
        """Drop the parts that all receivers have taken."""
        first = min(self._at.values(), default=len(self._parts))
        for number in [number for number in self._shared if number < first]:
            del self._shared[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SendableWeights(PreparedWeights):
    """One version with its digest, and the parts that build it from nothing or from the version before."""

    everything: _SharedChunks
    base: str | None = None
    """Digest of the weights that `changes` apply to."""
    changes: _SharedChunks | None = None
    """`None` if there are no changes, or if they are nearly as large as everything."""


class DeltaPush:
    """Implements `opd.rollout.served_workers.Push`.

    Args:
        receivers: By the URL of the worker that each is next to.
        share: Puts a part where receivers can read it.
        read: Has a worker load a folder.
        model: A Hugging Face folder, whose configuration and tokenizer are sent with the weights.
        part_bytes: About the largest size of a part.
    """

    def __init__(
        self,
        receivers: Mapping[str, Receiver],
        share: Share,
        read: Read,
        model: Path,
        part_bytes: int,
    ) -> None:
        self._receivers, self._read, self._part_bytes = receivers, read, part_bytes
        self._elements = max(1, min(BLOCK_ELEMENTS, part_bytes // 8))
        self._put = share
        documents = (file for file in model.iterdir() if file.suffix == ".json" and is_file_name(file.name))
        self._files = {file.name: file.read_bytes() for file in documents if file.name != INDEX}
        self._last: _SendableWeights | None = None
        self._counting = threading.Lock()
        self.sent_bytes = 0
        """Bytes of all parts so far, each counted once however many workers took it."""

    def prepare(self, weights: Weights, version: int) -> PreparedWeights:
        """See `Push`: find the changes since the version before."""
        last, tensors = self._last, copy_to_cpu(weights)
        digest = weights_digest(tensors, quick=True)
        changes = None if last is None else self._pack_changes(last.weights, tensors)
        prepared = _SendableWeights(tensors, digest=digest, everything=self._pack_all(tensors))
        if last is not None and changes is not None:
            prepared = replace(prepared, base=last.digest, changes=changes)
        self._last = prepared
        return prepared

    def prepare_static(self, weights: Weights) -> PreparedWeights:
        tensors = [(name, tensor.detach().cpu().contiguous()) for name, tensor in weights]
        return _SendableWeights(
            tensors, digest=weights_digest(tensors, quick=True), everything=self._pack_all(tensors)
        )

    async def load(self, send: Ask, server: Server, name: str, prepared: PreparedWeights) -> int:
        assert isinstance(prepared, _SendableWeights)
        receiver = self._receivers.get(server.url)
        if receiver is None:
            raise RolloutError(
                f"{server.url} is no server that the run has started on the cluster, which alone are given"
                " what has changed; leave rollout.engine.sync out."
            )
        folder, size = await asyncio.to_thread(self._push_to, server.url, receiver, prepared)
        await self._read(send, server, name, Path(folder))
        return size

    def _push_to(self, url: str, receiver: Receiver, due: _SendableWeights) -> tuple[str, int]:
        """Bring the receiver to these weights. Return its folder, and the bytes that it took."""
        digest, sizes = receiver.held(), []
        folder = receiver.folder() if digest == due.digest else None
        if folder is None and digest is not None and digest == due.base and due.changes is not None:
            try:
                if receiver.change(digest):
                    folder = self._send_chunks(receiver, due.changes, due.digest, sizes)
            except RolloutError as refusal:
                _log.warning("%s could not be given what has changed: %s", url, refusal)
        if folder is None:
            mib = sum(tensor.nbytes for _, tensor in due.weights) / 2**20
            _log.info("%s is sent all weights, %.0f MiB", url, mib)
            if receiver.begin(form_as_json(form_of(due.weights)), self._files):
                folder = self._send_chunks(receiver, due.everything, due.digest, sizes)
        if folder is None:
            raise UnavailableError(f"{url} has gone while new weights came", answered=False)
        return folder, sum(sizes)

    def _send_chunks(
        self, receiver: Receiver, parts: _SharedChunks, digest: str, sizes: list[int]
    ) -> str | None:
        with parts.iterate_shared(self._share_counted) as shared:
            for part, size in shared:
                receiver.take(part)
                sizes.append(size)
        return receiver.settle(digest)

    def _share_counted(self, part: bytes) -> Any:
        with self._counting:
            self.sent_bytes += len(part)
        return self._put(part)

    def _pack_all(self, weights: list[tuple[str, Tensor]]) -> _SharedChunks:
        """Return parts that take no memory until they are taken."""
        blocks = all_blocks(weights, self._elements)
        return _SharedChunks(
            [partial(pack_blocks, group) for group in group_blocks(blocks, self._part_bytes)]
        )

    def _pack_changes(
        self, base: list[tuple[str, Tensor]], weights: list[tuple[str, Tensor]]
    ) -> _SharedChunks | None:
        """Return None if sending the changes is not worth it."""
        if form_of(base) != form_of(weights):
            return None
        most, size, parts = WORTH * sum(tensor.nbytes for _, tensor in weights), 0, []
        for blocks in group_blocks(changed_blocks(base, weights, self._elements), self._part_bytes):
            part = pack_blocks(blocks)
            size += len(part)
            if size > most:
                return None
            parts.append(partial(bytes, part))
        return _SharedChunks(parts)
