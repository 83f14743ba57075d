"""A stage with a budget of tokens ends with it."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import tiny_recipe

from opd.config import Recipe
from opd.pipelines.stages import pipeline_plan
from opd.pipelines.stages.loop import Extent, LoopState
from opd.pipelines.stages.samples import limit_items

lengths = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(derandomize=True, deadline=None)
@given(lengths, st.integers(1, 400))
def test_the_last_step_is_cut_where_the_budget_ends(steps, budget):
    state, extent, last = LoopState(), Extent(tokens=budget), 0
    for step in steps:
        if extent.progress(state) >= 1.0:
            break
        kept = limit_items(step, lambda tokens: tokens, extent.remaining_tokens(state))
        assert kept == step[: len(kept)]
        assert kept
        assert len(kept) == len(step) or sum(kept) >= budget - state.student_tokens
        left = extent.remaining_tokens(state)
        assert left is not None
        ended = sum(kept) >= left  # how a step knows that it is the last
        state.student_tokens += sum(kept)
        assert ended == (extent.progress(state) >= 1.0)
        last = kept[-1]
    whole = sum(map(sum, steps))
    assert state.student_tokens == whole if whole < budget else 0 <= state.student_tokens - budget < last
    assert limit_items(steps[0], lambda tokens: tokens, None) == steps[0]
    assert Extent(steps=3).remaining_tokens(state) is None


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
