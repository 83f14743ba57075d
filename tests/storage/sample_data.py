"""What the tests of samples on disk share: samples that follow from a number, and a look from outside."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from opd.storage.sample_lot import SampleItem, SampleRecord
from opd.storage.sample_store import SampleStore, SampleWriter


def lengths(number: int) -> tuple[int, int]:
    """(prompt, response) tokens of sample `number`; every eleventh has no response."""
    chooser = np.random.default_rng([number, 1])
    return int(chooser.integers(1, 40)), 0 if number % 11 == 10 else int(chooser.integers(1, 400))


def record(number: int) -> SampleRecord:
    prompt, response = lengths(number)
    return SampleRecord(
        uid=f"run/{number}",
        prompt_tokens=prompt,
        response_tokens=response,
        group_uid=f"g{number // 4}",
        domain=("math", "code", "größe")[number % 3],
        teacher=f"t{number % 2}",
        reward=None if number % 5 == 0 else number / 3,
        trainable_tokens=response // 2,
        first_version=number,
        last_version=number + 2,
        extra={"label": number} if number % 2 else {},
    )


def values(number: int) -> dict[str, np.ndarray]:
    """Every field of sample `number`, in arrays that no other number gives; every seventh has no
    log-probabilities.
    """
    prompt, response = lengths(number)
    chooser = np.random.default_rng([number, 2])
    made = {
        "token_ids": chooser.integers(0, 1 << 30, prompt + response).astype(np.int32),
        "rollout_logprobs": chooser.standard_normal(response).astype(np.float32),
        "policy_versions": np.full(response, number, np.int32),
        "loss_mask": chooser.random(response) < 0.5,
    }
    if number % 7 == 6:
        del made["rollout_logprobs"]
    return made


def choices(number: int, experts: int = 256) -> np.ndarray:
    """[N, 3, 2]: expert choices of sample `number`, of all positions but the last, or of fewer."""
    chooser = np.random.default_rng([number, 3])
    count = max(1, sum(lengths(number)) - 1 - number % 3)
    dtype = np.uint8 if experts <= 256 else np.uint16
    return chooser.integers(0, experts, (count, 3, 2)).astype(dtype)


def items(numbers: Iterable[int]) -> list[SampleItem]:
    return [(record(number), values(number)) for number in numbers]


def write(folder: Path, numbers: Iterable[int], batch: int = 0) -> None:
    """A lot of these samples in `folder`."""
    with SampleWriter(folder, durable=False) as writer:
        writer.put(items(numbers), batch)


def assert_right(store: SampleStore) -> list[int]:
    """Every sample of `store` is, in every bit, what was written; returns their numbers."""
    numbers = []
    for row, kept in enumerate(store.records):
        number = int(kept.uid.removeprefix("run/"))
        numbers.append(number)
        with store.lease([row]) as batch:
            for name, expected in values(number).items():
                found = batch.read(row, name)
                assert found.dtype == expected.dtype
                assert np.array_equal(found, expected), (number, name)
        assert kept == record(number)
    return numbers
