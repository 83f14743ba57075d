"""The heavy fields a store keeps of each trajectory, and the file that says so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from opd.errors import StorageError
from opd.foreign import decoding, read_document, whole

if TYPE_CHECKING:
    from opd.storage.trajectories.table import TrajectoryTable

FORMAT = 2
HEADER = "store.json"
MAX_HEADER_BYTES = 2**20
MAX_FIELDS = 32
_MAX_NAME, _MAX_WIDTH = 100, 1 << 24
_MAX_BLOCK = 1 << 40
_DTYPES = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One heavy field: a row for each token of a trajectory."""

    name: str
    dtype: str
    """`bool`, `uint8`, `int32`, `int64`, `float16`, `float32`, or `bfloat16` (as its uint16 bits)."""
    width: int = 0
    """0: rows are numbers and arrays `[R]`; `D`: rows are vectors and arrays `[R, D]`."""
    rows: Literal["sequence", "response"] = "response"
    """Whether there is a row for prompt and response tokens, or for response tokens alone."""

    def __post_init__(self) -> None:
        if (
            not self.name.isidentifier()
            or len(self.name.encode()) > _MAX_NAME
            or self.name == "checks"
            or self.dtype not in _DTYPES
            or not 0 <= self.width <= _MAX_WIDTH
            or self.rows not in ("sequence", "response")
        ):
            raise ValueError(
                f"field {self.name!r} of {self.dtype!r}, width {self.width}: give an identifier, one of"
                f" {', '.join(_DTYPES)}, and a width that is not negative"
            )

    @property
    def numpy(self) -> np.dtype:
        """How its numbers lie in memory."""
        return _DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.numpy.itemsize * max(1, self.width)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of an array of so many rows."""
        return (rows, self.width) if self.width else (rows,)

    def bytes_of(self, values: np.ndarray) -> memoryview:
        """The bytes of `values` (`[R]` or `[R, D]`). Raises `ValueError` for another shape or dtype."""
        array = np.asarray(values)
        if array.dtype != self.numpy or array.shape[1:] != self.shape(0)[1:] or array.ndim == 0:
            raise ValueError(
                f"field {self.name} takes {self.numpy} {['R', *self.shape(0)[1:]]}, not {array.dtype}"
                f" {list(array.shape)}; convert it"
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


SAMPLE_FIELDS = (
    Field("token_ids", "int32", rows="sequence"),
    Field("rollout_logprobs", "float32"),
    Field("policy_versions", "int32"),
    Field("loss_mask", "bool"),
)
"""What a `Sample` holds of each token."""


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What is fixed when a store is made."""

    fields: tuple[Field, ...]
    block_bytes: int
    """Most bytes under one checksum; a block holds whole rows."""

    def index(self, name: str) -> int:
        """The place of field `name`. Raises `StorageError` if the store has no such field."""
        for place, field in enumerate(self.fields):
            if field.name == name:
                return place
        known = ", ".join(field.name for field in self.fields)
        raise StorageError(
            f"this trajectory store has no field {name}; it has {known or 'none'}, which is fixed when a"
            " store is made"
        )

    def block_rows(self, field: Field) -> int:
        """Rows under one checksum."""
        return max(1, self.block_bytes // field.row_bytes)

    def rows(self, field: Field, table: TrajectoryTable, row: Any) -> Any:
        """How many rows of `field` a trajectory (or each of several) of `table` has."""
        prompt = table.prompt_tokens[row] if field.rows == "sequence" else 0
        return prompt + table.response_tokens[row]

    def encode(self) -> bytes:
        document = {"format": FORMAT, "block_bytes": self.block_bytes}
        document |= {"fields": [asdict(field) for field in self.fields]}
        return json.dumps(document | {"checksum": _checksum(document)}, indent=1).encode()


def decode_header(data: bytes, where: str) -> StoreHeader:
    """The header. Raises `StorageError` for a newer format or other content."""

    def refusal(cause: str) -> StorageError:
        return StorageError(
            f"{where} is not the header of a trajectory store ({cause}); check the path, or restore the file"
        )

    with decoding(refusal):
        document = read_document(data, MAX_HEADER_BYTES)
        written = int(document["format"])
        if written != FORMAT:
            mend = "update opd" if written > FORMAT else "an older release wrote it: write the store again"
            raise StorageError(
                f"{where} has format {written} of trajectory stores, this version reads {FORMAT}; {mend}"
            )
        if document.pop("checksum") != _checksum(document):
            raise ValueError("wrong checksum")
        fields = tuple(Field(**entry) for entry in document["fields"])
        block = whole(document["block_bytes"], 1, _MAX_BLOCK, "block_bytes")
        if any(type(field.width) is not int for field in fields):
            raise ValueError("a width that is no whole number")
        return StoreHeader(check_fields(fields), block)


def _checksum(document: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def find_header(path: Path, fields: Sequence[Field]) -> StoreHeader | None:
    """The header of the store whose file is at `path`; None if there is none. Raises `StorageError` if it was
    made with other fields than `fields`.
    """
    if not path.exists():
        return None
    header = decode_header(path.read_bytes(), str(path))
    if header.fields != tuple(fields):
        raise StorageError(
            f"{path} was made with other fields ({', '.join(field.name for field in header.fields)}) than are"
            f" asked for ({', '.join(field.name for field in fields)}); use another folder"
        )
    return header


def refuse_lost(path: Path, trajectories: int) -> None:
    """Raises `StorageError` if there are trajectories but no header at `path`: a new one would not fit."""
    if trajectories:
        raise StorageError(
            f"{path} is missing, but there are {trajectories} trajectories; restore the file from a copy, or"
            " use another folder"
        )


@contextlib.contextmanager
def reporting(store: str | Path, action: str) -> Iterator[None]:
    """Any `OSError` of the block as a `StorageError`: "STORE cannot be ACTION (cause); ..."."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the trajectory store {store} cannot be {action} ({error.strerror or error}); check its disk and"
            " permissions, or use another folder"
        ) from error


def check_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """`fields`, unless two share a name or there are too many (`ValueError`)."""
    names = [field.name for field in fields]
    if len(set(names)) < len(names) or len(names) > MAX_FIELDS:
        raise ValueError(f"fields {names}: give at most {MAX_FIELDS}, each with a name of its own")
    return tuple(fields)
