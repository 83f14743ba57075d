"""Samples on disk: a lot is a file that is written once, atomically, and read a block at a time.

A lot is safetensors, which other programs open too:

    token_ids            [sum of prompt and response tokens] int32, one sample after another
    rollout_logprobs     [sum of response tokens] float32
    policy_versions      the same, int32
    loss_mask            the same, bool
    expert_choices       [sum of N, L, K] uint8 or uint16, only if a sample has some
    sampling_masks       [sum of R + M] int32, only if a sample has some
    NAME.rows            [n] int64: the rows of field NAME that each sample has
    NAME.digests         [blocks, 16] uint8: the xxh3-128 of every `BLOCK_BYTES` of field NAME
    records              [bytes] uint8: the samples' `SampleRecord`s as JSON
    __metadata__         the format, the file's name, uids that earlier lots give up, and the xxh3-128 of all
                         of this but the fields

Shapes: `n` samples, `R` rows of a field. `N, L, K`: see `Sample.expert_choices`.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.numpy
import xxhash
from pydantic import Field, TypeAdapter

from opd.errors import StorageError
from opd.storage.files import MappedFile, open_plain
from opd.storage.weight_folder import TensorSource, sources_in
from opd.types import Sample, Status
from opd.untrusted import convert_decode_errors, no_constant, read_document, safe_excerpt

_MAX_BYTES = 1 << 28
"""Limit of the records of a lot."""

Count = Annotated[int, Field(strict=True, ge=0, le=1 << 48)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Version = Annotated[int, Field(strict=True, ge=-(1 << 31), lt=1 << 31)]


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """The record of one sample that has ended."""

    uid: str
    prompt_tokens: Count
    response_tokens: Count
    group_uid: str = ""
    domain: str = ""
    teacher: str = ""
    reward: float | None = None
    status: Status = Status.COMPLETED
    trainable_tokens: Count = 0
    """Response tokens the loss counts."""
    first_version: Version = 0
    last_version: Version = 0
    """Oldest and newest policy that wrote one of its tokens."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other small values, JSON-able."""

    @property
    def token_count(self) -> int:
        """Prompt and response tokens."""
        return self.prompt_tokens + self.response_tokens


_NAMES = tuple(SampleRecord.__slots__)
_COLUMNS = {
    **{name: TypeAdapter(list[str]) for name in ("uid", "group_uid", "domain", "teacher", "extra")},
    **{name: TypeAdapter(list[Count]) for name in ("prompt_tokens", "response_tokens", "trainable_tokens")},
    **{name: TypeAdapter(list[Version]) for name in ("first_version", "last_version")},
    "reward": TypeAdapter(list[Number | None]),
    "status": TypeAdapter(list[Status]),
}
"""By field: how its column is checked. A column of JSON is read in a fifth of a list of objects' time."""
_EXTRAS = {
    "reward_parts": TypeAdapter(dict[str, Number]),
    "metadata": TypeAdapter(dict[str, Any]),
    **{name: TypeAdapter(str) for name in ("failure", "branch_of")},
}
"""How values of `extra` are checked, by name."""


def encode_records(records: Sequence[SampleRecord]) -> bytes:
    """Return `records` as JSON, column by column. Raises `StorageError` for values that it cannot hold, and
    `ValueError` for too many at once.
    """
    columns = {name: [getattr(record, name) for record in records] for name in _NAMES}
    columns["extra"] = [_encode_extra(record) if record.extra else "" for record in records]
    try:
        data = json.dumps(columns, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"what a sample carries cannot be kept on the disk ({safe_excerpt(error)})"
        ) from error
    if len(data) > _MAX_BYTES:
        raise ValueError(f"records of these samples take more than {_MAX_BYTES} bytes; write fewer together")
    return data


def _encode_extra(record: SampleRecord) -> str:
    try:
        return json.dumps(record.extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"what sample {safe_excerpt(record.uid)} carries cannot be kept on the disk"
            f" ({safe_excerpt(error)}); keep label"
            " and metadata to what JSON can hold, or set storage.trajectories to memory"
        ) from error


def decode_records(data: bytes) -> list[SampleRecord]:
    """Return the records in the result of `encode_records`. Raises `ValueError` and its like for others."""
    document = read_document(data, _MAX_BYTES)
    columns = {name: check.validate_python(document[name]) for name, check in _COLUMNS.items()}
    columns["extra"] = [
        json.loads(text, parse_constant=no_constant) if text else {} for text in columns["extra"]
    ]
    if len(document) != len(_NAMES) or not all(isinstance(extra, dict) for extra in columns["extra"]):
        raise ValueError("records that no sample has")
    if len(set(columns["uid"])) < len(columns["uid"]):
        raise ValueError("two records of one sample")
    for extra in columns["extra"]:
        for name in extra.keys() & _EXTRAS.keys():
            _EXTRAS[name].validate_python(extra[name])
    rows = zip(*(columns[name] for name in _NAMES), strict=True)
    return [SampleRecord(*row) for row in rows]


def record_of(sample: Sample) -> SampleRecord:
    """Return the record of a sample that has ended."""
    versions = sample.policy_versions
    extra = {
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "metadata": sample.metadata,
        "branch_of": sample.branch_of,
    }
    extra = {name: value for name, value in extra.items() if value}
    if sample.label is not None:  # 0 and "" are labels, too
        extra["label"] = sample.label
    return SampleRecord(
        uid=sample.uid,
        prompt_tokens=len(sample.prompt_ids),
        response_tokens=len(sample.response_ids),
        group_uid=sample.group_uid,
        domain=sample.domain,
        teacher=sample.teacher or "",
        reward=None if sample.reward is None else float(sample.reward),
        status=sample.status,
        trainable_tokens=sample.trainable_tokens,
        first_version=int(versions.min()) if len(versions) else 0,
        last_version=int(versions.max()) if len(versions) else 0,
        extra=extra,
    )


FIELDS = {
    "token_ids": np.dtype("<i4"),
    "rollout_logprobs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
    "loss_mask": np.dtype(np.bool_),
}
"""Fields of a `Sample` with a row per token: prompt and response in the first, response in the others."""
EXPERT_CHOICES = "expert_choices"
"""The field of a `Sample` with a row per position, of the form [L, K]. All samples of a lot have one form."""
SAMPLING_MASKS = "sampling_masks"
"""The field of a `Sample` with a row per response token and one per token of its masks."""
OPTIONAL = (EXPERT_CHOICES, SAMPLING_MASKS)
EVERY_FIELD = (*FIELDS, *OPTIONAL)
TOKEN_BYTES = sum(dtype.itemsize for dtype in FIELDS.values())
BLOCK_BYTES = 1 << 20
"""Bytes under one digest."""
_FORMAT = 2
_MASK_DTYPE = np.dtype("<i4")
_CHOICE_DTYPES = (np.dtype("u1"), np.dtype("<u2"))
_DTYPES = {
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
_RECORDS = "records"

SampleItem = tuple[SampleRecord, Mapping[str, np.ndarray]]
"""A sample's record, and its fields: `[R]`, dtypes of `FIELDS`, and those of `OPTIONAL`."""


def encode_lot(items: Sequence[SampleItem], drops: Sequence[str], file: str) -> bytes:
    """Return the lot of samples that becomes `file`.

    `drops`: uids of earlier lots to remove. Raises `ValueError` for a field of another length or dtype, and
    `StorageError` for values JSON cannot hold.
    """
    for record, values in items:
        _check_fields(record, values)
    light = {_RECORDS: np.frombuffer(encode_records([record for record, _ in items]), np.uint8)}
    fields = {}
    for name in EVERY_FIELD:
        parts = [values.get(name) for _, values in items]
        given = [array for array in parts if array is not None]
        if name in OPTIONAL and not given:
            continue
        like = given[0] if given else np.zeros(0, FIELDS[name])
        odd = next((one for one in given if (one.dtype, one.shape[1:]) != (like.dtype, like.shape[1:])), None)
        if odd is not None:
            raise ValueError(
                f"{name} is {odd.dtype} {list(odd.shape[1:])} beside {like.dtype} {list(like.shape[1:])};"
                " give all samples of a lot one form"
            )
        array = fields[name] = given[0] if len(given) == 1 else np.concatenate([like[:0], *given])
        light[f"{name}.rows"] = np.array([0 if part is None else len(part) for part in parts], "<i8")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        starts = range(0, len(data), BLOCK_BYTES)
        digests = b"".join(xxhash.xxh3_128_digest(data[start : start + BLOCK_BYTES].data) for start in starts)
        light[f"{name}.digests"] = np.frombuffer(digests, np.uint8).reshape(-1, 16)
    metadata = {"opd.samples": str(_FORMAT), "file": file, "drops": json.dumps(list(drops))}
    if len(metadata["drops"]) > _MAX_TEXT:
        raise ValueError(f"drops of these samples take more than {_MAX_TEXT} bytes; write fewer together")
    metadata["digest"] = _table_digest(light, metadata)
    return safetensors.numpy.save(fields | light, metadata)


def _check_fields(record: SampleRecord, values: Mapping[str, np.ndarray]) -> None:
    """Raise `ValueError` for a field in `values` of another length or dtype."""
    for name, array in values.items():
        if name == EXPERT_CHOICES:
            most = record.token_count
            if array.ndim != 3 or not 0 < len(array) <= most or array.dtype not in _CHOICE_DTYPES:
                raise ValueError(
                    f"{name} of sample {record.uid} is {array.dtype} {list(array.shape)}; give uint8 or"
                    f" uint16 [N, L, K] with N of 1 to {most}"
                )
            continue
        due = _row_count(name, record)
        if name == SAMPLING_MASKS:
            if array.ndim != 1 or len(array) < due or array.dtype != _MASK_DTYPE:
                raise ValueError(
                    f"{name} of sample {record.uid} is {array.dtype} {list(array.shape)}; give int32 with"
                    f" {due} counts, and ids behind them"
                )
            continue
        if array.shape != (due,) or array.dtype != FIELDS[name]:
            raise ValueError(
                f"{name} of sample {record.uid} is {array.dtype} {list(array.shape)}, and its record asks"
                f" for {FIELDS[name]} [{due}]"
            )


def _row_count(name: str, record: SampleRecord) -> int:
    """Return the number of rows of field `name` of a sample: of expert choices the most, of masks least."""
    return record.token_count if name in ("token_ids", EXPERT_CHOICES) else record.response_tokens


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
        with self._mutex:
            self.bytes_read += read
            self.bytes_checked += checked


@dataclass(frozen=True, slots=True)
class _Field:
    source: TensorSource
    dtype: np.dtype
    rows: np.ndarray
    """[n] int64: the rows of each sample."""
    digests: np.ndarray
    """[blocks, 16] uint8."""
    first: np.ndarray
    """[n + 1] int64: the row at which each sample begins."""
    right: set[int] = field(default_factory=set)
    """Blocks that had their digest."""

    @property
    def form(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.source.shape[1:]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.form)

    def byte_range(self, row: int, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of rows `start ... stop - 1` of sample `row`, from the field's first on."""
        first, width = int(self.first[row]), self.row_bytes
        return (first + start) * width, (first + stop) * width


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
                f"{self.path} has format {safe_excerpt(form)} of samples, this version reads {_FORMAT}; use"
                " the version that wrote it, or remove it: a run that is resumed writes its responses again"
            )
        if metadata["file"] != self.path.name:
            raise ValueError(f"it was written as {safe_excerpt(metadata['file'])}")
        names = (*FIELDS, *(name for name in OPTIONAL if name in sources))
        due = {_RECORDS, *(f"{name}{part}" for name in names for part in ("", ".rows", ".digests"))}
        if unknown := sources.keys() ^ due:
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
        self.drops = read_document(str(metadata["drops"]).encode(), _MAX_TEXT)
        if not isinstance(self.drops, list) or not all(isinstance(uid, str) for uid in self.drops):
            raise ValueError("no list of uids")
        self.records = decode_records(light[_RECORDS].tobytes())
        names = [name for name in EVERY_FIELD if name in sources]
        self._fields = {name: self._open_field(name, sources[name], light) for name in names}

    def _open_field(self, name: str, source: TensorSource, light: Mapping[str, np.ndarray]) -> _Field:
        """Return field `name`. Raises `ValueError` if it is not what the records ask for."""
        dtype, form = _DTYPES[source.dtype], source.shape[1:]
        rows, digests = light[f"{name}.rows"], light[f"{name}.digests"]
        most = np.array([_row_count(name, record) for record in self.records], np.int64)
        if rows.dtype != np.dtype("<i8") or rows.shape != most.shape:
            raise ValueError(f"the rows of {name} are not those of its records")
        if name == EXPERT_CHOICES:
            fits = dtype in _CHOICE_DTYPES and len(form) == 2 and all(0 < side < 1 << 20 for side in form)
            wrong = (rows < 0) | (rows > most)
        elif name == SAMPLING_MASKS:
            fits, wrong = dtype == _MASK_DTYPE and form == (), (rows != 0) & (rows < most)
        else:
            fits = dtype == FIELDS[name] and form == ()
            wrong = (rows != 0) & (rows != most)
        if not fits or wrong.any() or (rows > source.nbytes).any():  # the last first: sums overflow
            raise ValueError(f"{name} is {source.dtype} {list(form)} with rows that its records do not have")
        first = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        if source.shape[0] != first[-1] or digests.shape != (-(-source.nbytes // BLOCK_BYTES), 16):
            raise ValueError(f"{name} has {source.nbytes} bytes and {len(digests)} digests")
        return _Field(source, dtype, rows, digests, first)

    def has_field(self, row: int, name: str) -> bool:
        """Return whether field `name` of sample `row` was written, or has no rows."""
        if name not in self._fields:
            return False
        return bool(self._fields[name].rows[row]) or (name in FIELDS and not self.field_length(row, name))

    def field_length(self, row: int, name: str) -> int:
        """Return the number of rows of field `name` of sample `row`, written or not."""
        if name in FIELDS:
            return _row_count(name, self.records[row])
        return int(self._fields[name].rows[row]) if name in self._fields else 0

    def field_form(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a row of field `name`, which a sample of this lot has."""
        return self._fields[name].dtype, self._fields[name].form

    def field_bytes(self) -> np.ndarray:
        """Return [n] int64: bytes of the written fields of each sample."""
        return np.sum([one.rows * one.row_bytes for one in self._fields.values()], axis=0)

    def read(self, row: int, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows `start ... stop - 1` of a written field of sample `row`: a read-only view of the file's
        pages. Blocks that were not read before are compared with their digests first. Raises `StorageError`
        for a wrong one.
        """
        one = self._fields[name]
        low, high = one.byte_range(row, start, stop)
        for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            if block not in one.right:
                self._verify_block(one, block)
        self._counters.add_bytes(read=high - low)
        offset = one.source.start
        return np.asarray(self._map)[offset + low : offset + high].view(one.dtype).reshape(-1, *one.form)

    def release_field(self, row: int, name: str) -> None:
        """Free the memory of a field of a sample. Views of it stay right and take it again."""
        if self.has_field(row, name):
            one = self._fields[name]
            low, high = one.byte_range(row, 0, self.field_length(row, name))
            self._map.release_pages(one.source.start + low, one.source.start + high)

    def _verify_block(self, one: _Field, block: int) -> None:
        start = one.source.start + block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, one.source.start + one.source.nbytes)
        self._load_bytes(start, stop)
        digest = xxhash.xxh3_128_digest(np.asarray(self._map)[start:stop].data)
        self._map.release_pages(start, stop)  # most of it may belong to other samples
        self._counters.add_bytes(checked=stop - start)
        if digest != one.digests[block].tobytes():
            raise self._damage_error(f"bytes {start}-{stop} do not have their digest")
        one.right.add(block)

    def _load_bytes(self, start: int, stop: int) -> None:
        """Load these bytes into memory: touching bytes that a file has no longer would end the process."""
        if not self._map.load(start, stop):
            raise self._damage_error(f"the disk cannot read bytes {start}-{stop}")

    def _damage_error(self, cause: str) -> StorageError:
        return StorageError(
            f"{self.path} is damaged, or holds no samples ({cause}); restore it from a copy, or remove it: a"
            " run that is resumed writes its responses again"
        )
