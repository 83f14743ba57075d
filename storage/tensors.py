"""Named tensors in safetensors files, with a sha256: complete, or split over processes. Also the cache's
arrays as tensors.

A file of slices holds each as `[n]` elements, and in its metadata `pieces`: `{name: [shape, first]}`, the
shape of the full tensor and the number of the slice's first element in row-major order.

The only file of `storage/` that needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from opd.errors import CheckpointError, limit_fix, reason_of
from opd.storage.files import atomic_file, fill_from, open_plain, read_plain
from opd.storage.leases import Lease
from opd.storage.weight_folder import TensorSource, convert_read_errors, no_number, read_header
from opd.untrusted import bounded_integer, is_file_name, read_document

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by safetensors' names."""
FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point and dtype.itemsize > 1}
"""Those of numbers that models are computed in."""
COPIED_BYTES = 4 << 20
"""Bytes read at a time, on the way to the target."""


_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.int16: "I16", torch.int8: "I8"}
_WRITTEN_BYTES = 8 << 20
"""Bytes hashed and written at a time."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One process's slice of a tensor."""

    values: Tensor
    """[n] elements, in row-major order."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    first: int
    """Number of the first element."""


def copy_to_host(values: Tensor, shape: Sequence[int], first: int) -> Tensor | TensorPiece:
    """Copy to the host's memory the elements `values` from number `first` on of a tensor of `shape`. If these
    are all, the copy has that shape.
    """
    copied = values.detach().reshape(-1).to("cpu", copy=True)
    if copied.numel() == math.prod(shape):
        return copied.view(tuple(shape))
    return TensorPiece(copied, tuple(shape), first)


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor | TensorPiece]) -> str:
    """Write `tensors` (any shapes, devices, dtypes of `DTYPES`) to `path`, atomically. Return the file's
    sha256 in hex. Needs a few MiB of memory beyond the tensors.

    Raises `OSError` if the file cannot be written, for example on a full disk.
    """
    values = {name: t.values if isinstance(t, TensorPiece) else t for name, t in tensors.items()}
    pieces = {name: [list(t.shape), t.first] for name, t in tensors.items() if isinstance(t, TensorPiece)}
    metadata = {"pieces": json.dumps(pieces)} if pieces else {}
    # As safetensors orders them: the widest elements first, so that all are aligned.
    order = sorted(values, key=lambda name: (-values[name].dtype.itemsize, name))
    digest = hashlib.sha256()
    with atomic_file(path) as file:

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        write(header_of({name: values[name] for name in order}, metadata))
        for name in order:
            for part in values[name].detach().reshape(-1).split(_WRITTEN_BYTES):
                write(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_files(
    draft: Path, tensors: Mapping[str, Mapping[str, Tensor | TensorPiece]], rank: int = 0, ranks: int = 1
) -> dict[str, str]:
    """Write the tensors of `rank` of `ranks` into `draft`. Return the sha256 of each file by name without
    suffix.

    Raises `CheckpointError` for a name that leads elsewhere, `OSError` for a failed write.
    """
    digests = {}
    for name, values in tensors.items():
        if not is_file_name(name):
            raise CheckpointError(f"{name!r} cannot name a checkpoint file; use letters, digits, _ . and -")
        file = name if ranks == 1 else f"{name}-{rank:05d}-of-{ranks:05d}"
        digests[file] = save_tensors(draft / f"{file}.safetensors", values)
    return digests


def header_of(values: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file of these, back to back. They may be on no device."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in values.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_tensors(path: str | os.PathLike[str], expected_digest: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of `path` onto the CPU. With `expected_digest`, the file's sha256 must be that.

    Raises `CheckpointError` naming `path` if it is missing, truncated, no safetensors, or has another digest.
    """
    try:
        data = read_plain(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error});"
            f" {limit_fix(error, 'restore it or use an older checkpoint')}"
        ) from error
    if expected_digest is not None and (digest := hashlib.sha256(data).hexdigest()) != expected_digest:
        raise CheckpointError(
            f"{path} is corrupt: its sha256 is {digest[:16]}... where {expected_digest[:16]}... was written; "
            "restore it or use an older checkpoint"
        )
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated or is no safetensors file ({reason_of(error)}); restore it or use an"
            " older checkpoint"
        ) from error


@dataclass(frozen=True, slots=True)
class _Stored:
    """A run of a tensor's elements in a file."""

    source: TensorSource
    shape: tuple[int, ...]
    first: int
    last: int
    """One past the last of them."""


class TensorParts(Mapping[str, Tensor]):
    """Tensors of safetensors `paths` by name. Only requested elements are read, when they are requested.

    As a mapping it returns full tensors, each read again. The caller must compare digests before.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises `StorageError` naming a file that is missing, truncated or no safetensors, `CheckpointError`
        if slices of a tensor are missing.
        """
        self._stored: dict[str, list[_Stored]] = {}
        self.bytes_read = 0
        for path in paths:
            for name, stored in _stored_in(path):
                self._stored.setdefault(name, []).append(stored)
        for name, pieces in self._stored.items():
            pieces.sort(key=lambda piece: piece.first)
            first = pieces[0]
            starts = [0, *(piece.last for piece in pieces)]
            is_full = starts.pop() == math.prod(first.shape)
            for piece, start in zip(pieces, starts, strict=True):
                form = (piece.first, piece.shape, piece.source.dtype)
                is_full = is_full and form == (start, first.shape, first.source.dtype)
            if not is_full:
                raise CheckpointError(
                    f"{first.source.path.parent} lacks a part of {name}, or holds one twice; restore its"
                    " files or use an older checkpoint."
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read(name, 0, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._stored[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype. Raises `CheckpointError` for an element type that is not read here."""
        return self._stored_dtype(name)

    def _stored_dtype(self, name: str) -> torch.dtype:
        source = self._stored[name][0].source
        if source.dtype not in DTYPES:
            raise CheckpointError(
                f"{source.path} holds {name} as {source.dtype}, which is not read here; give the model's"
                " unquantised folder."
            )
        return DTYPES[source.dtype]

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill `into` (contiguous, any shape, dtype and device) with the elements of `name` from number
        `start` on, in row-major order. Raises `CheckpointError` if there are not so many, or a file cannot be
        read.
        """
        dtype, flat = self._stored_dtype(name), into.detach().view(-1)
        stop, pieces = start + flat.numel(), self._stored[name]
        if stop > pieces[-1].last:
            raise CheckpointError(
                f"{pieces[-1].source.path} has {name} in the shape {list(pieces[0].shape)}, which is too"
                " small; copy it again."
            )
        for piece in pieces:
            low, high = max(start, piece.first), min(stop, piece.last)
            if low < high:
                self.bytes_read += (high - low) * dtype.itemsize
                offset = piece.source.start + (low - piece.first) * dtype.itemsize
                _copy_elements(piece.source.path, offset, dtype, flat[low - start : high - start])


def require_numbers(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `CheckpointError` naming one of `tensors`, read from `folder`, that holds NaN or infinity."""
    for name, tensor in tensors:
        if not tensor.is_meta and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise no_number(folder, name)


def part_of(saved: Mapping[str, Tensor], name: str, start: int, into: Tensor) -> None:
    """`TensorParts.read`, also for tensors in memory."""
    if isinstance(saved, TensorParts):
        saved.read(name, start, into)
    else:
        into.view(-1).copy_(saved[name].reshape(-1)[start : start + into.numel()])


def shape_of(saved: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor without reading it."""
    return saved.shape(name) if isinstance(saved, TensorParts) else tuple(saved[name].shape)


State = Mapping[str, Mapping[str, Tensor | TensorPiece]]
"""The files of a checkpoint, by name, with this rank's tensors in each."""
Saved = Mapping[str, Mapping[str, Tensor]]
"""A checkpoint whose tensors are read on first use."""


class OptimizerFields(Mapping[str, Tensor]):
    """The optimiser's state of one parameter in a checkpoint, read on first use."""

    def __init__(self, saved: Mapping[str, Tensor], name: str, fields: Sequence[str]) -> None:
        self.saved, self._name, self._fields = saved, name, fields

    def __getitem__(self, key: str) -> Tensor:
        return self.saved[f"{self._name}/{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def optimizer_fields(
    saved: Mapping[str, Tensor], parameters: Mapping[str, object]
) -> dict[str, OptimizerFields]:
    """Group the entries `NAME/FIELD` of a checkpoint by parameter.

    Raises `CheckpointError` for a name that is not among `parameters`.
    """
    by_name: dict[str, list[str]] = {}
    for key in saved:
        name, _, field = key.rpartition("/")
        by_name.setdefault(name, []).append(field)
    unknown = sorted(set(by_name) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds optimiser state for {unknown[0]}, which this model does not have;"
            " resume with the recipe the run was started with."
        )
    return {name: OptimizerFields(saved, name, fields) for name, fields in by_name.items()}


def check_tensors(saved: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], model: str) -> None:
    """Raise `CheckpointError` unless `saved` has exactly the tensors of `model`, in these `shapes`."""
    stored = {name: shape_of(saved, name) for name in saved}
    different = sorted(name for name in saved.keys() | shapes.keys() if stored.get(name) != shapes.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint and {model} do not have the same tensors, {different[0]} among them; resume with"
            " the recipe the run was started with."
        )


_MAX_PIECES_BYTES = 64 << 20
_MAX_SIDE = 1 << 48


def _stored_in(path: Path) -> Iterator[tuple[str, _Stored]]:
    metadata: dict[str, Any] = {}
    sources = read_header(path, metadata)
    try:
        described = read_document(str(metadata.get("pieces", "{}")).encode(), _MAX_PIECES_BYTES)
        for name, source in sources.items():
            shape, first = described.get(name, (source.shape, 0))
            shape = tuple(bounded_integer(side, 0, _MAX_SIDE, f"a side of {name}") for side in shape)
            first = bounded_integer(first, 0, _MAX_SIDE, f"the first element of {name}")
            yield name, _Stored(source, shape, first, first + math.prod(source.shape))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not say what its pieces are of ({reason_of(error)}); restore it or use an older"
            " checkpoint."
        ) from error


def _copy_elements(path: Path, offset: int, dtype: torch.dtype, into: Tensor) -> None:
    """Fill `into` [n] with elements of `dtype` from byte `offset` of a file on.

    It reads a few MiB at a time, even if these could be read straight into it: torch can never free memory
    again that numpy has viewed.
    """
    buffer = torch.empty(min(into.numel(), COPIED_BYTES // dtype.itemsize), dtype=dtype)
    with convert_read_errors(path, CheckpointError), os.fdopen(open_plain(path, follow=True), "rb") as file:
        for part in into.split(max(1, len(buffer))):
            elements = buffer[: part.numel()]
            fill_from(file.fileno(), offset, elements.view(torch.uint8).numpy().data)
            offset += elements.nbytes
            part.copy_(elements)


def rows_tensor(lease: Lease) -> Tensor:
    """Return [R, D] the leased rows on the CPU, in their own dtype, without a copy.

    The tensor stays readable after the lease has ended. Writing to it changes the tensor, not the cache.
    """
    rows = torch.from_numpy(lease.private_rows)
    return rows.view(torch.bfloat16) if lease.record.dtype == "bfloat16" else rows


def rows_array(rows: Tensor) -> np.ndarray:
    """Return `rows` (`[R, D]` bfloat16, float16 or float32) as `NodeCache.put` takes them: bfloat16 as its
    uint16 bit pattern. Shares memory with a contiguous tensor on the CPU.
    """
    plain = rows.detach().cpu().contiguous()
    return plain.view(torch.uint16).numpy() if plain.dtype == torch.bfloat16 else plain.numpy()
