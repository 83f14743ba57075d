"""`Sample`s into a store; `TrajectoryBatch.sample` is the way back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.storage.trajectories.table import TrajectoryRecord
from opd.storage.trajectories.writer import TrajectoryWriter
from opd.types import Sample


def record_of(sample: Sample) -> TrajectoryRecord:
    """What the metadata says of a finished sample."""
    versions = sample.policy_versions
    extra = {
        "label": sample.label,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "metadata": sample.metadata,
    }
    return TrajectoryRecord(
        uid=sample.uid,
        prompt_tokens=len(sample.prompt_ids),
        response_tokens=len(sample.response_ids),
        group_uid=sample.group_uid,
        domain=sample.domain,
        teacher=sample.teacher or "",
        reward=float("nan") if sample.reward is None else float(sample.reward),
        status=sample.status,
        trainable_tokens=sample.trainable_tokens,
        first_version=int(versions.min()) if len(versions) else 0,
        last_version=int(versions.max()) if len(versions) else 0,
        extra={name: value for name, value in extra.items() if value},
    )


def put_samples(
    writer: TrajectoryWriter, samples: Sequence[Sample], records: Sequence[TrajectoryRecord] | None = None
) -> None:
    """Write finished samples, in a store of `SAMPLE_FIELDS`, and seal them together.

    `records`: what the metadata is to say of each; by default what `record_of` does.
    """
    items = []
    for sample, record in zip(samples, records or map(record_of, samples), strict=True):
        values: dict[str, np.ndarray] = {"token_ids": sample.token_ids.astype(np.int32, copy=False)}
        for name, dtype in (("rollout_logprobs", "f4"), ("policy_versions", "i4"), ("loss_mask", "?")):
            array = getattr(sample, name)
            if len(array):
                values[name] = np.asarray(array, dtype)
        items.append((record, values))
    writer.put_many(items)
