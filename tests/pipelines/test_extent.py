"""A stage with a budget of tokens ends with it."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import tiny_recipe

from opd.config import Recipe
from opd.pipelines.stages import pipeline_plan
from opd.pipelines.stages.loop import Extent, LoopState
from opd.pipelines.stages.samples import StepSamples
from opd.types import Sample, SampleGroup

lengths = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), min_size=1, max_size=8)


def step_of(counts: list[int]) -> StepSamples:
    """The samples of a step: one answer of each of `counts` tokens."""
    groups = []
    for count in counts:
        sample = Sample("a", "a", "sort", np.zeros(1, np.int32), loss_mask=np.ones(count, bool))
        groups.append(SampleGroup("a", "sort", [sample]))
    return StepSamples(groups, None)  # type: ignore[arg-type]


@settings(derandomize=True, deadline=None)
@given(lengths, st.integers(1, 400))
def test_the_last_step_is_cut_where_the_budget_ends(steps, budget):
    state, extent, last = LoopState(), Extent(tokens=budget), 0
    for step in steps:
        if extent.progress(state) >= 1.0:
            break
        left = budget - state.student_tokens
        samples = step_of(step)
        samples.limit_tokens(left)
        kept = [sample.trainable_tokens for sample in samples.samples]
        assert kept == step[: len(kept)]
        assert kept
        assert len(kept) == len(step) or sum(kept) >= left
        ended = sum(kept) >= left  # how a step knows that it is the last
        state.student_tokens += sum(kept)
        assert ended == (extent.progress(state) >= 1.0)
        last = kept[-1]
    whole = sum(map(sum, steps))
    assert state.student_tokens == whole if whole < budget else 0 <= state.student_tokens - budget < last


TOKENS = {"merge": 1000, "specialist-sort": 200, "specialist-add3": 30}
"""What finished stages have written."""


@dataclass(frozen=True)
class Finished:
    """As much of a stage's context as a baseline needs to know its budget."""

    recipe: Recipe

    @property
    def folder(self) -> Any:
        return SimpleNamespace(stage_done=lambda stage: {"student_tokens": TOKENS[stage]})

    def checked_model(self, name: str) -> Path:
        return Path(name)

    model_path = checked_model


@pytest.mark.parametrize(
    ("method", "tokens"), [("off_policy", 1000), ("mixed_grpo", 1000), ("mixed_grpo_all", 1230)]
)
def test_baselines_have_the_tokens_of_what_they_are_compared_with(method, tokens, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(pipeline_plan, "train_grpo", lambda *given: told.append(given[-1].tokens))
    monkeypatch.setattr(pipeline_plan, "distill_off_policy", lambda *given: told.append(given[-1]))
    own = {"methods": ["off_policy", "mixed_grpo"], "mixed_grpo_all_tokens": True}
    recipe = tiny_recipe(baselines=own)
    pipeline_plan.plan_stages(recipe)[f"baseline-{method}"].run(Finished(recipe))  # type: ignore[arg-type]
    assert told == [tokens]
