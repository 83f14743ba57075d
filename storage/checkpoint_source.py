"""The tensors of a Hugging Face folder as byte ranges of its safetensors files; nothing is loaded whole."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.errors import StorageError
from opd.foreign import is_file_name, read_document, whole
from opd.storage.manifest import DTYPE_BYTES, TensorEntry
from opd.storage.sealed import read_object

_MAX_HEADER = 100 * 2**20
MEND = "copy the folder again."


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor lies in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_headers(folder: Path) -> dict[str, TensorSource]:
    """Every tensor of the folder's safetensors files, by name.

    The files are those of `model.safetensors.index.json`, else `model.safetensors`. Raises `StorageError`
    naming the file that is missing, truncated or not safetensors.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index, MEND, StorageError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StorageError(f"{index} has no weight_map; copy the file again from its source.")
        if odd := [name for name in weight_map.values() if not is_file_name(name)]:
            raise StorageError(
                f"{index} names {str(odd[0])[:100]!r}, which is no file beside it; copy it again."
            )
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    found: dict[str, TensorSource] = {}
    for name in names:
        found.update(_read_header(folder / name))
    return found


def _read_header(path: Path) -> dict[str, TensorSource]:
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(_MAX_HEADER, total - 8):
                raise ValueError("its header is cut off")
            header = read_document(file.read(length), _MAX_HEADER)
        header.pop("__metadata__", None)
        return {name: _source(path, 8 + length, total, name, entry) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing; copy it again from the model's source.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is truncated or is no safetensors file ({error}); copy it again from its source."
        ) from error


def _source(path: Path, base: int, total: int, name: str, entry: Mapping[str, Any]) -> TensorSource:
    begin, end = entry["data_offsets"]
    sides = [whole(side, 0, 2**48, f"a side of {name}") for side in entry["shape"]]
    nbytes = DTYPE_BYTES.get(entry["dtype"], 0) * math.prod(sides)
    if not 0 <= begin <= end <= total - base:
        raise ValueError(f"the data of {name} ends beyond the file")
    if entry["dtype"] in DTYPE_BYTES and nbytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes where its shape asks for {nbytes}")
    return TensorSource(path, entry["dtype"], tuple(entry["shape"]), base + begin, end - begin)


class UnitSource:
    """The flat buffer of one unit, read from the checkpoint range by range.

    Safe between threads; close it, or use `with`.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], sources: Mapping[str, TensorSource], nbytes: int
    ) -> None:
        """`sources` holds, under the names of `entries`, where each tensor's bytes come from."""
        self.nbytes = nbytes
        self._pieces = [(entry, sources[name]) for name, entry in entries.items()]
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start ... stop - 1` of the buffer; gaps between tensors are zero."""
        buffer = bytearray(stop - start)
        view = memoryview(buffer)
        for entry, source in self._pieces:
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.nbytes)
            if low < high:
                self._pread(source, low - entry.offset, view[low - start : high - start])
        return buffer

    def _pread(self, source: TensorSource, offset: int, into: memoryview) -> None:
        try:
            descriptor = self._descriptor(source.path)
            done = 0
            while done < len(into):
                received = os.preadv(descriptor, [into[done:]], source.start + offset + done)
                if not received:
                    raise StorageError(f"{source.path} became shorter while it was read; copy it again.")
                done += received
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{source.path} cannot be read ({error.strerror or error}); copy it again."
            ) from error

    def _descriptor(self, path: Path) -> int:
        with self._opening:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> UnitSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
