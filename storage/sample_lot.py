"""Samples on disk: a lot is a file that is written once, atomically, and read a block at a time.

A lot is safetensors, which other programs open too:

    token_ids            [sum of prompt and response tokens] int32, one sample after another
    rollout_logprobs     [sum of response tokens] float32
    policy_versions      the same, int32
    loss_mask            the same, bool
    expert_choices       [sum of N, L, K] uint8 or uint16, only if a sample has some; with it come
                         expert_choices.rows [n] int64, the N of each sample, and
                         expert_choices.form [3] int64: L, K, bytes of a number
    NAME.digests         [blocks, 16] uint8: the xxh3-128 of every `BLOCK_BYTES` of field NAME
    COLUMN               a column of the `SampleTable`
    __metadata__         the format, the file's name, names of domains and teachers, uids that earlier lots
                         give up, and the xxh3-128 of all of this but the fields

Shapes: `n` samples, `R` rows of a field. `N, L, K`: see `Sample.expert_choices`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

from opd.errors import StorageError
from opd.storage.files import MappedFile, open_plain
from opd.storage.sample_table import SampleRecord, SampleTable
from opd.storage.weight_folder import TensorSource, sources_in
from opd.untrusted import convert_decode_errors, read_document, safe_excerpt

FIELDS = {
    "token_ids": np.dtype("<i4"),
    "rollout_logprobs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
    "loss_mask": np.dtype(np.bool_),
}
"""Fields of a `Sample` with a row per token: prompt and response in the first, response in the others."""
EXPERT_CHOICES = "expert_choices"
"""The field of a `Sample` with a row per position, of the form [L, K]. All samples of a lot have one form."""
EVERY_FIELD = (*FIELDS, EXPERT_CHOICES)
"""All fields, by the number of their bit in `SampleTable.fields`."""
TOKEN_BYTES = sum(dtype.itemsize for dtype in FIELDS.values())
BLOCK_BYTES = 1 << 20
"""Bytes under one digest."""
_FORMAT = 1
_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(np.bool_),
}
"""dtypes by safetensors' names."""
_MAX_TEXT = 16 << 20
"""Limit of a text in the header, in bytes."""
_NAMES = {*FIELDS, *(f"{name}.digests" for name in FIELDS), *SampleTable.from_records([]).to_arrays()[0]}
_CHOICE_NAMES = {EXPERT_CHOICES, *(f"{EXPERT_CHOICES}.{part}" for part in ("digests", "rows", "form"))}
"""Arrays of a lot whose samples have expert choices."""

SampleItem = tuple[SampleRecord, Mapping[str, np.ndarray]]
"""A sample's record, and its fields: `[R]`, dtypes of `FIELDS`, and `EXPERT_CHOICES` [N, L, K]."""


def encode_lot(items: Sequence[SampleItem], drops: Sequence[str], file: str) -> bytes:
    """Return the lot of samples that becomes `file`.

    `drops`: uids of earlier lots to remove. Raises `ValueError` for a field of another length or dtype, and
    `StorageError` for values JSON cannot hold.
    """
    written = [_check_fields(record, values) for record, values in items]
    try:
        light, names = SampleTable.from_records([record for record, _ in items], written).to_arrays()
    except (UnicodeEncodeError, OverflowError) as error:
        raise StorageError(
            f"what a sample carries cannot be kept on the disk ({safe_excerpt(error)})"
        ) from error
    fields = {}
    for name, dtype in FIELDS.items():
        parts = [values[name] for _, values in items if name in values]
        fields[name] = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])
    choices = [values.get(EXPERT_CHOICES) for _, values in items]
    if recorded := [array for array in choices if array is not None]:
        dtype, form = recorded[0].dtype, recorded[0].shape[1:]
        odd = next((one for one in recorded if (one.dtype, one.shape[1:]) != (dtype, form)), None)
        if odd is not None:
            raise ValueError(
                f"expert choices {odd.dtype} {list(odd.shape[1:])} beside {dtype} {list(form)}; give all"
                " samples of a lot one form"
            )
        fields[EXPERT_CHOICES] = recorded[0] if len(recorded) == 1 else np.concatenate(recorded)
        light[f"{EXPERT_CHOICES}.rows"] = np.array(
            [0 if array is None else len(array) for array in choices], "<i8"
        )
        light[f"{EXPERT_CHOICES}.form"] = np.array([*form, dtype.itemsize], "<i8")
    for name, array in fields.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        starts = range(0, len(data), BLOCK_BYTES)
        digests = b"".join(xxhash.xxh3_128_digest(data[start : start + BLOCK_BYTES].data) for start in starts)
        light[f"{name}.digests"] = np.frombuffer(digests, np.uint8).reshape(-1, 16)
    metadata = {"opd.samples": str(_FORMAT), "file": file}
    metadata |= {"names": json.dumps(names), "drops": json.dumps(list(drops))}
    if long := [key for key, text in metadata.items() if len(text) > _MAX_TEXT]:
        raise ValueError(f"{long[0]} of these samples take more than {_MAX_TEXT} bytes; write fewer together")
    metadata["digest"] = _table_digest(light, metadata)
    return safetensors.numpy.save(fields | light, metadata)


def _check_fields(record: SampleRecord, values: Mapping[str, np.ndarray]) -> int:
    """Return the bits of the fields in `values`. Raises `ValueError` for one of another length or dtype."""
    for name, array in values.items():
        if name == EXPERT_CHOICES:
            most = record.prompt_tokens + record.response_tokens
            if array.ndim != 3 or not 0 < len(array) <= most or array.dtype not in _CHOICE_DTYPES:
                raise ValueError(
                    f"{name} of sample {record.uid} is {array.dtype} {list(array.shape)}; give uint8 or"
                    f" uint16 [N, L, K] with N of 1 to {most}"
                )
            continue
        due = _row_count(name, record.prompt_tokens, record.response_tokens)
        if array.shape != (due,) or array.dtype != FIELDS[name]:
            raise ValueError(
                f"{name} of sample {record.uid} is {array.dtype} {list(array.shape)}, and its record asks"
                f" for {FIELDS[name]} [{due}]"
            )
    return sum(1 << bit for bit, name in enumerate(EVERY_FIELD) if name in values)


_CHOICE_DTYPES = (np.dtype("u1"), np.dtype("<u2"))


def _row_count(name: str, prompt_tokens: Any, response_tokens: Any) -> Any:
    return prompt_tokens + response_tokens if name == "token_ids" else response_tokens


def rows_written(table: SampleTable, name: str) -> np.ndarray:
    """Return [n] int64: the number of rows of field `name` written for each sample."""
    written = table.fields >> list(FIELDS).index(name) & 1
    return _row_count(name, table.prompt_tokens, table.response_tokens) * written


def _table_digest(light: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Return the digest of everything in a lot but its fields, which have digests of their own there."""
    digest = xxhash.xxh3_128()
    for name in sorted(light):
        array = np.ascontiguousarray(light[name])
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(array.tobytes())
    entries = sorted((key, metadata[key]) for key in metadata if key != "digest")
    digest.update(json.dumps(entries).encode())
    return digest.hexdigest()


class ReadCounters:
    """Counts of field bytes read. Safe for threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.bytes_read = 0
        """Bytes of rows handed out."""
        self.bytes_checked = 0
        """Bytes of blocks whose digest was compared."""

    def add_bytes(self, read: int = 0, checked: int = 0) -> None:
        """Count bytes."""
        with self._mutex:
            self.bytes_read += read
            self.bytes_checked += checked


class SampleLot:
    """A mapped lot. It stays readable when its file has been unlinked. Safe for threads."""

    def __init__(self, path: Path, counters: ReadCounters) -> None:
        """Read and check all but the fields. Raises `FileNotFoundError`, `OSError`, and `StorageError` if the
        file is damaged or no lot.
        """
        self.path, self._counters = path, counters
        with os.fdopen(open_plain(path), "rb") as file, convert_decode_errors(self._damage_error):
            metadata: dict[str, Any] = {}
            sources = sources_in(file, path, metadata)
            self._map = MappedFile(file.fileno(), os.fstat(file.fileno()).st_size, shared=True)
        with convert_decode_errors(self._damage_error):
            self._check_layout(metadata, sources)
            self._load_table(metadata, sources)
        self._map.release_pages()

    def _check_layout(self, metadata: dict[str, Any], sources: Mapping[str, TensorSource]) -> None:
        if (form := str(metadata["opd.samples"])) != str(_FORMAT):
            raise StorageError(
                f"{self.path} has format {safe_excerpt(form)} of samples, this version reads {_FORMAT};"
                " update opd"
            )
        if metadata["file"] != self.path.name:
            raise ValueError(f"it was written as {safe_excerpt(metadata['file'])}")
        names = _NAMES | _CHOICE_NAMES if EXPERT_CHOICES in sources else _NAMES
        if unknown := sources.keys() ^ names:
            raise ValueError(f"{safe_excerpt(min(unknown))} is missing, or does not belong into it")
        if max(source.start + source.nbytes for source in sources.values()) != self._map.size:
            raise ValueError("it goes on after its end")
        if sum(source.nbytes for source in sources.values()) > self._map.size:
            raise ValueError("its arrays lie over each other")

    def _load_table(self, metadata: dict[str, Any], sources: Mapping[str, TensorSource]) -> None:
        light: dict[str, np.ndarray] = {}
        for name, source in sources.items():
            if name not in EVERY_FIELD:
                dtype, stop = _DTYPES[source.dtype], source.start + source.nbytes
                self._load_bytes(source.start, stop)
                data = np.asarray(self._map)[source.start : stop]
                light[name] = np.array(np.frombuffer(data, dtype).reshape(source.shape))
        if metadata["digest"] != _table_digest(light, metadata):
            raise ValueError("its table does not have its digest")
        documents = (read_document(str(metadata[key]).encode(), _MAX_TEXT) for key in ("names", "drops"))
        names, self.drops = documents
        if not isinstance(self.drops, list) or not all(isinstance(uid, str) for uid in self.drops):
            raise ValueError("no list of uids")
        self.table = SampleTable.from_arrays(light, names)
        self._source = {name: sources[name] for name in EVERY_FIELD if name in sources}
        self._form: dict[str, tuple[np.dtype, tuple[int, ...]]] = {n: (t, ()) for n, t in FIELDS.items()}
        """By field: dtype and shape of a row."""
        self.rows = {name: rows_written(self.table, name) for name in FIELDS}
        """By field, [n] int64: the rows written of each sample."""
        if EXPERT_CHOICES in sources:
            self._load_choice_form(light)
        self._first: dict[str, np.ndarray] = {}
        """By field, [n + 1] int64: the row at which each sample begins."""
        self._expected: dict[str, np.ndarray] = {}
        self._right: dict[str, set[int]] = {name: set() for name in self._source}
        """By field: blocks that had their digest."""
        for name, source in self._source.items():
            (dtype, form), rows = self._form[name], self.rows[name]
            self._first[name] = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
            digests = light[f"{name}.digests"]
            self._expected[name] = digests
            blocks, count = -(-source.nbytes // BLOCK_BYTES), int(self._first[name][-1])
            if _DTYPES.get(source.dtype) != dtype or digests.shape != (blocks, 16):
                raise ValueError(f"{name} is {source.dtype} with {len(digests)} digests")
            if (rows > source.nbytes).any() or tuple(source.shape) != (count, *form):
                raise ValueError(f"{name} has {source.nbytes} bytes, which its table does not")

    def _load_choice_form(self, light: Mapping[str, np.ndarray]) -> None:
        """Read rows and form of the expert choices. Raises `ValueError` for impossible ones."""
        rows, form = (light[f"{EXPERT_CHOICES}.{part}"] for part in ("rows", "form"))
        written = self.table.fields >> EVERY_FIELD.index(EXPERT_CHOICES) & 1
        if rows.dtype != np.dtype("<i8") or rows.shape != written.shape or form.shape != (3,):
            raise ValueError("expert choices of another form")
        if ((rows < 0) | (rows > self.table.token_counts) | ((rows > 0) != (written > 0))).any():
            raise ValueError("expert choices of positions that no sample has")
        layers, per_token, width = form.tolist()
        if not (0 < layers < 1 << 20 and 0 < per_token < 1 << 20 and width in (1, 2)):
            raise ValueError("expert choices of another form")
        self._form[EXPERT_CHOICES] = _CHOICE_DTYPES[width - 1], (layers, per_token)
        self.rows[EXPERT_CHOICES] = rows

    def has_field(self, row: int, name: str) -> bool:
        """Return whether field `name` of sample `row` was written, or has no rows."""
        if name == EXPERT_CHOICES:
            return name in self._first and bool(self.rows[name][row])
        return bool(self.rows[name][row]) or not self.field_length(row, name)

    def field_length(self, row: int, name: str) -> int:
        """Return the number of rows of field `name` of sample `row`, written or not."""
        if name == EXPERT_CHOICES:
            return int(self.rows[name][row]) if name in self.rows else 0
        return int(_row_count(name, self.table.prompt_tokens[row], self.table.response_tokens[row]))

    def field_form(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a row of field `name`, which a sample of this lot has."""
        return self._form[name]

    def field_bytes(self) -> np.ndarray:
        """Return [n] int64: bytes of the written fields of each sample."""
        return np.sum([rows * self._row_bytes(name) for name, rows in self.rows.items()], axis=0)

    def read(self, row: int, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows `start ... stop - 1` of a written field of sample `row`: a read-only view of the file's
        pages. Blocks that were not read before are compared with their digests first. Raises `StorageError`
        for a wrong one.
        """
        low, high = self._byte_range(row, name, start, stop)
        for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            if block not in self._right[name]:
                self._verify_block(name, block)
        self._counters.add_bytes(read=high - low)
        offset = self._source[name].start
        dtype, form = self._form[name]
        return np.asarray(self._map)[offset + low : offset + high].view(dtype).reshape(-1, *form)

    def release_field(self, row: int, name: str) -> None:
        """Free the memory of a field of a sample. Views of it stay right and take it again."""
        if self.has_field(row, name):
            low, high = self._byte_range(row, name, 0, self.field_length(row, name))
            offset = self._source[name].start
            self._map.release_pages(offset + low, offset + high)

    def _byte_range(self, row: int, name: str, start: int, stop: int) -> tuple[int, int]:
        first, width = int(self._first[name][row]), self._row_bytes(name)
        return (first + start) * width, (first + stop) * width

    def _row_bytes(self, name: str) -> int:
        dtype, form = self._form[name]
        return dtype.itemsize * int(np.prod(form, dtype=np.int64))

    def _verify_block(self, name: str, block: int) -> None:
        source = self._source[name]
        start = source.start + block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, source.start + source.nbytes)
        self._load_bytes(start, stop)
        digest = xxhash.xxh3_128_digest(np.asarray(self._map)[start:stop].data)
        self._map.release_pages(start, stop)  # most of it may belong to other samples
        self._counters.add_bytes(checked=stop - start)
        if digest != self._expected[name][block].tobytes():
            raise self._damage_error(f"bytes {start}-{stop} do not have their digest")
        self._right[name].add(block)

    def _load_bytes(self, start: int, stop: int) -> None:
        """Load these bytes into memory: touching bytes that a file has no longer would end the process."""
        if not self._map.load(start, stop):
            raise self._damage_error(f"the disk cannot read bytes {start}-{stop}")

    def _damage_error(self, cause: str) -> StorageError:
        return StorageError(
            f"{self.path} is damaged, or holds no samples ({cause}); restore it from a copy, or remove it: a"
            " run that is resumed writes its responses again"
        )
