"""`SampleRecord`: what is known of a sample on disk without its tokens, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from opd.errors import StorageError
from opd.types import Sample, Status
from opd.untrusted import no_constant, read_document, safe_excerpt

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
