"""What the trajectory tests share: trajectories that follow from a number, and a look from outside."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from opd.storage.trajectories import (
    SAMPLE_FIELDS,
    Field,
    TrajectoryRecord,
    TrajectoryStore,
    TrajectoryWriter,
)

HIDDEN = Field("hidden", "bfloat16", 12)
FIELDS = (*SAMPLE_FIELDS, HIDDEN)
SMALL = {"block_bytes": 256, "segment_bytes": 20_000, "durable": False}


def lengths(number: int) -> tuple[int, int]:
    """(prompt, response) tokens of trajectory `number`; every eleventh has no response."""
    chooser = np.random.default_rng([number, 1])
    return int(chooser.integers(1, 40)), 0 if number % 11 == 10 else int(chooser.integers(1, 400))


def record(number: int) -> TrajectoryRecord:
    prompt, response = lengths(number)
    return TrajectoryRecord(
        uid=f"run/{number}",
        prompt_tokens=prompt,
        response_tokens=response,
        group_uid=f"g{number // 4}",
        domain=("math", "code", "größe")[number % 3],
        teacher=f"t{number % 2}",
        reward=float("nan") if number % 5 == 0 else number / 3,
        trainable_tokens=response // 2,
        first_version=number,
        last_version=number + 2,
        extra={"label": number} if number % 2 else {},
    )


def values(number: int, hidden: bool = False) -> dict[str, np.ndarray]:
    """Every field of trajectory `number`, in arrays that no other number gives."""
    prompt, response = lengths(number)
    chooser = np.random.default_rng([number, 2])
    made = {
        "token_ids": chooser.integers(0, 1 << 30, prompt + response).astype(np.int32),
        "rollout_logprobs": chooser.standard_normal(response).astype(np.float32),
        "policy_versions": np.full(response, number, np.int32),
        "loss_mask": chooser.random(response) < 0.5,
    }
    states = chooser.integers(0, 1 << 16, (response, HIDDEN.width)).astype(np.uint16)
    return made | {"hidden": states} if hidden else made


def write(folder: Path, numbers: range, **options) -> None:
    """A closed store of these trajectories, with hidden states."""
    with TrajectoryWriter(folder, **{"fields": FIELDS, **SMALL, **options}) as writer:
        writer.put_many([(record(n), values(n, hidden=True)) for n in numbers])


def number_of(store: TrajectoryStore, row: int) -> int:
    return int(store.table.uid[row].removeprefix("run/"))


def assert_right(store: TrajectoryStore, hidden: bool | None = None) -> list[int]:
    """Every trajectory of `store` is, in every bit, what was written; returns their numbers. `hidden`: all
    have hidden states, or none; by default those that have must have the right ones.
    """
    numbers = []
    for row in range(len(store.table)):
        number = number_of(store, row)
        numbers.append(number)
        with store.lease([row]) as batch:
            has = batch.has(row, "hidden") if any(f.name == "hidden" for f in store.fields) else False
            assert hidden is None or has == hidden or lengths(number)[1] == 0
            for name, expected in values(number, has).items():
                found = batch.read(row, name)
                assert found.dtype == expected.dtype
                assert np.array_equal(found, expected), (number, name)
        kept, wanted = store.table.record(row), record(number)
        assert (np.isnan(kept.reward) and np.isnan(wanted.reward)) or kept.reward == wanted.reward
        assert [getattr(kept, n) for n in _PLAIN] == [getattr(wanted, n) for n in _PLAIN]
    return numbers


_PLAIN = [name for name in TrajectoryRecord.__slots__ if name != "reward"]


def disk_bytes(folder: Path) -> int:
    """Bytes of disk under `folder`."""
    found = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return sum(path.stat().st_blocks * 512 for path in found)


def resident(kind: str = "RSS") -> int:
    """Bytes of this process in memory: RSS now, or its peak `HWM`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"Vm{kind}:")[1].split()[0])
