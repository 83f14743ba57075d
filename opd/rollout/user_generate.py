"""A rollout of the user's own in place of `collect`: turns, tools, search, anything that ends in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import ConfigError, RolloutError
from opd.imports import GENERATE, calling, import_function
from opd.rollout.collect import EncodedPrompt, collect
from opd.types import Sample, SampleGroup, SamplingParams, Status

if TYPE_CHECKING:
    from opd.rollout.collect import Generates

Generate = Callable[..., list[SampleGroup]]
"""`generate(engine, prompts, group_size, sampling, seed) -> groups`, as `collect`.

It may call `engine.generate` as often as it likes, each request with a uid of its own that a resumed run
gives again. A response of several turns is one `Sample`: what the student wrote has `loss_mask` True and the
engine's log-probabilities, what an environment answered has `loss_mask` False and zeros.
"""

_ARRAYS = {
    "response_ids": ("iu", "token ids"),
    "rollout_logprobs": ("f", "log-probabilities"),
    "policy_versions": ("iu", "versions"),
    "loss_mask": ("b", "booleans"),
}
"""Of a sample: the kinds of numbers that each holds."""
_ENDED = (Status.COMPLETED, Status.TRUNCATED)


def load_generate(path: str | None) -> Generate:
    """The function at `path`, its results checked; `collect` for `None`.

    Raises `ConfigError` if it cannot be loaded. What it returns raises `RolloutError`, naming the group or
    sample, unless every prompt has its group under its own uid and every sample has ended and is complete.
    """
    if path is None:
        return collect
    found: Any = import_function(path, "rollout.generate", ConfigError, GENERATE)

    def generate(
        engine: Generates,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        with calling(f"rollout.generate {path}", RolloutError):
            groups = found(engine, prompts, group_size, sampling, seed)
        with calling(f"rollout.generate {path}: checking what it returned", RolloutError):
            _check(path, groups, prompts, group_size)
        return groups

    return generate


def _check(path: str, groups: Any, prompts: Sequence[EncodedPrompt], group_size: int) -> None:
    if not isinstance(groups, list | tuple) or not all(isinstance(group, SampleGroup) for group in groups):
        raise RolloutError(
            f"rollout.generate {path} returned {_shown(groups)}; return a list of SampleGroup, one a prompt."
        )
    returned = [group.uid for group in groups]
    asked = [prompt.uid for prompt in prompts]
    if returned != asked:
        odd = next((uid for uid in asked if uid not in returned), "in another order")
        raise RolloutError(
            f"rollout.generate {path} did not return one group for each prompt, in their order ({odd})."
        )
    for group in groups:
        if len(group.samples) != group_size:
            raise RolloutError(
                f"rollout.generate {path} returned {len(group.samples)} samples for prompt {group.uid}, but"
                f" {group_size} were asked for."
            )
        for sample in group.samples:
            if not isinstance(sample, Sample):
                raise RolloutError(
                    f"rollout.generate {path}: group {group.uid} holds {_shown(sample)}; give it samples."
                )
            _check_sample(path, sample, group)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__


def _check_sample(path: str, sample: Sample, group: SampleGroup) -> None:
    for name, (kinds, meant) in _ARRAYS.items():
        value = getattr(sample, name)
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is {type(value).__name__}; give a"
                " NumPy array with one entry a response token."
            )
        if value.dtype.kind not in kinds or not np.isfinite(value).all():
            raise RolloutError(
                f"rollout.generate {path}: {name} of sample {sample.uid} is of {value.dtype}, or not all of"
                f" it is finite; give {meant}."
            )
        setattr(sample, name, np.asarray(value))  # no class of the user's own
    tokens = len(sample.response_ids)
    lengths = {
        "rollout_logprobs": len(sample.rollout_logprobs),
        "policy_versions": len(sample.policy_versions),
        "loss_mask": len(sample.loss_mask),
    }
    for name, length in lengths.items():
        if length != tokens:
            raise RolloutError(
                f"rollout.generate {path}: sample {sample.uid} has {tokens} response tokens and {length} of"
                f" {name}; give one each."
            )
    if sample.group_uid != group.uid or sample.status not in _ENDED:
        raise RolloutError(
            f"rollout.generate {path}: sample {sample.uid} needs group_uid {group.uid} (has"
            f" {sample.group_uid}) and a status completed or truncated (has {sample.status})."
        )
