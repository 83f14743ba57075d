"""Which prompts a specialist asks: more of them until a batch carries signal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from recipes import shaped_specialist, tiny_recipe

from opd.config import Recipe, SpecialistConfig
from opd.errors import TrainingError
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.domains import DomainSet, load_domains, student_tokenizer
from opd.pipelines.stages.prompt_choice import Judge, PromptChoice
from opd.pipelines.stages.samples import StepSamples
from opd.rollout.collect import EncodedPrompt
from opd.train.advantages import drop_zero_variance
from opd.types import SampleGroup


@pytest.fixture(scope="module")
def data() -> DomainSet:
    recipe = tiny_recipe()
    return DomainSet.open(recipe, student_tokenizer(recipe, load_domains(recipe).values()))


def choice_of(data: DomainSet, signal: Sequence[bool], asked: list[EncodedPrompt], **config) -> PromptChoice:
    """Of which the prompt number `i` of `asked` has signal where `signal[i]` says so."""

    def reward(samples: StepSamples) -> None:
        numbers = {prompt.uid: number for number, prompt in enumerate(asked)}
        for group in samples.groups:
            for place, sample in enumerate(group.samples):
                assert sample.reward is None, "rewarded twice"
                sample.reward = float(place * signal[numbers[group.uid] % len(signal)])

    judge = Judge(reward, lambda samples, counters: {}, lambda s: drop_zero_variance(s.groups)[0])
    settings = SpecialistConfig.model_validate({"group_size": 2, **config})
    return PromptChoice(data, ["sort", "add3"], "stage", settings, judge)


def groups_of(prompts: Sequence[EncodedPrompt]) -> list[SampleGroup]:
    return [SampleGroup(p.uid, p.domain, [p.sample(place) for place in range(2)]) for p in prompts]


def take_step(choice: PromptChoice, asked: list[EncodedPrompt], counters: dict[str, float], shuffle: Any):
    """One step; groups come in whatever order. Returns its samples and metrics."""
    choice.begin(counters)
    new = choice.first()
    groups: list[SampleGroup] = []
    while new:
        asked += new
        groups = [*groups, *groups_of(new)]
        samples = StepSamples([groups[i] for i in shuffle.permutation(len(groups))], None)  # type: ignore[arg-type]
        new = choice.more(samples)
    return samples, choice.settle(samples, counters)


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(0, 2**32 - 1),
)
def test_the_first_groups_with_signal_are_learned_from(data, signal, wanted, limit, seed):
    """In the order of the prompts, whatever order they end in and however many are asked together; the next
    step goes on behind them.
    """
    asked: list[EncodedPrompt] = []
    choice = choice_of(data, signal, asked, prompts_per_step=wanted, refill={"limit": limit})
    counters: dict[str, float] = {}
    for _ in range(3):
        start = len(asked)
        samples, metrics = take_step(choice, asked, counters, np.random.default_rng(seed))
        carrying = [prompt.uid for i, prompt in enumerate(asked[start:], start) if signal[i % len(signal)]]
        assert [group.uid for group in samples.groups] == carrying[:wanted]
        assert len(asked) - start <= limit * wanted
        assert len(carrying) >= wanted or len(asked) - start == limit * wanted
        assert metrics["refill/taken"] == len(asked) - start
        assert metrics["refill/kept"] == len(samples.groups)
        assert metrics["refill/surplus"] == len(carrying) - len(samples.groups)
        assert counters == {"prompts_taken": len(asked)}
        assert len({prompt.uid for prompt in asked}) == len(asked)
    plain = [data.mixed(["sort", "add3"], number, 1, "stage")[0].uid for number in range(len(asked))]
    assert [prompt.uid for prompt in asked] == plain


def outcome(folder: Path, recipe: Recipe, stage: str = "specialist-sort") -> tuple[str, list[dict[str, Any]]]:
    """Digest and metrics of a stage."""
    with RunFolder.create(folder, recipe) as run:
        run_stage(recipe, run, stage)
        done = run.stage_done(stage)
    assert done is not None
    rows = read_metrics(folder / "stages" / stage / "metrics.jsonl")
    same = ("reward", "shaping", "refill", "frac", "length", "lr", "entropy", "tokens", "step")
    return done["digest"], [{key: row[key] for key in row if key.startswith(same)} for row in rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """Warmed up a little: some prompts carry signal, some do not."""
    root = tmp_path_factory.mktemp("base")
    recipe = tiny_recipe(base=tiny_recipe().base.model_copy(update={"steps": 120}).model_dump())  # type: ignore[union-attr]
    with RunFolder.create(root / "run", recipe) as folder:
        run_stage(recipe, folder, "base")
    return str(root / "run" / "base")


def recipe_of(base: str, specialist: dict[str, Any], **changes: Any) -> Recipe:
    return tiny_recipe(base=None, model={"path": base}, specialist=specialist, **changes)


def test_a_step_is_refilled_alike_in_memory_and_on_disk(base, tmp_path):
    """With rewards that are shaped by all of a step, and a filter of the user's own that sees tokens once."""
    specialist = shaped_specialist() | {
        "refill": {"limit": 3},
        "group_filter": f"{__name__}:begins_with_digits",
    }
    found = []
    for home in ("memory", "disk"):
        SEEN.clear()
        found.append(outcome(tmp_path / home, recipe_of(base, specialist, storage={"trajectories": home})))
        assert len(SEEN) == len(set(SEEN))
    assert found[0] == found[1]
    rows = found[0][1]
    assert all(8 <= row["refill/taken"] <= 24 for row in rows)
    assert any(row["refill/taken"] > 8 for row in rows)
    assert all(row["refill/kept"] <= 8 for row in rows)
    written = sum(row["refill/taken"] for row in rows)
    assert written * 4 <= rows[-1]["tokens/student"] <= written * 4 * 5


SEEN: list[str] = []


def begins_with_digits(group: SampleGroup) -> bool:
    SEEN.append(group.uid)
    return all(len(sample.response_ids) == 0 or sample.response_ids[0] >= 0 for sample in group.samples)


def test_nothing_changes_where_every_group_has_signal(base, tmp_path):
    """The same prompts, the same weights."""
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["reward"] = f"{__name__}:varied"
    specialist = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "checkpoint_every": 2}
    found = [
        outcome(tmp_path / name, recipe_of(base, specialist | own, domains=domains))
        for name, own in (("plain", {}), ("refilled", {"refill": {"limit": 2}}))
    ]
    assert found[0][0] == found[1][0]
    assert all(row["refill/taken"] == row["refill/kept"] == 4 for row in found[1][1])


def varied(sample) -> float:
    return sum(map(ord, sample.text)) / 100 + len(sample.text)


def test_prompts_without_any_signal_end_with_a_sentence(base, tmp_path):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["reward"] = f"{__name__}:never"
    specialist = {"steps": 3, "prompts_per_step": 2, "group_size": 2, "max_steps_without_signal": 2}
    recipe = recipe_of(base, specialist | {"refill": {"limit": 2}}, domains=domains)
    with (
        pytest.raises(TrainingError, match="every group of the last 2 steps had equal rewards"),
        RunFolder.create(tmp_path / "run", recipe) as run,
    ):
        run_stage(recipe, run, "specialist-sort")
    (row,) = read_metrics(tmp_path / "run" / "stages" / "specialist-sort" / "metrics.jsonl")
    assert (row["refill/taken"], row["refill/kept"]) == (4, 0)


def never(sample) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"specialist": {"refill": {}, "filter_zero_variance": False}},
            "refill replaces groups that a filter",
        ),
        ({"specialist": {"refill": {"limit": 1}}}, "greater than or equal to 2"),
        ({"specialist": {"refill": {}}, "rollout": {"schedule": "ahead"}}, "needs rollout.schedule in_turn"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(**changes)
