"""Which prompts a specialist asks: of middling difficulty, easy ones first, some again, more until a batch
carries signal.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from recipes import shaped_specialist, tiny_recipe

from opd.config import Recipe, SpecialistConfig
from opd.config.specialist import CurriculumConfig, DifficultyConfig, ReplayConfig
from opd.errors import CheckpointError, DataError, PreemptedError, RunFolderError, TrainingError
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import execute_stage, run_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.difficulty import DifficultyQuery, Rates, read_difficulty
from opd.pipelines.stages.domains import DomainSet, load_domains, student_tokenizer
from opd.pipelines.stages.loop import PhaseTimer, StepContext
from opd.pipelines.stages.pipeline_plan import plan_stages
from opd.pipelines.stages.prompt_choice import Judge, PromptChoice, curriculum_share
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import tokenizer_of
from opd.rollout.collect import EncodedPrompt
from opd.rollout.preemption import Preemption
from opd.storage.files import write_sealed
from opd.train.advantages import has_signal
from opd.types import SampleGroup


@pytest.fixture(scope="module")
def data() -> DomainSet:
    recipe = tiny_recipe()
    return DomainSet.open(recipe, student_tokenizer(recipe, load_domains(recipe).values()))


def test_each_round_has_another_order_of_prompts(data):
    first, second = (data.next_prompts("sort", 0, 20, stage) for stage in ("merge", "merge+2"))
    assert [one.token_ids.tolist() for one in first] != [one.token_ids.tolist() for one in second]


def choice_of(data: DomainSet, signal: Sequence[bool], asked: list[EncodedPrompt], **config) -> PromptChoice:
    """Of which the prompt number `i` of all `asked` has signal where `signal[i]` says so."""

    def reward(samples: StepSamples) -> None:
        numbers = {prompt.uid: number for number, prompt in enumerate(asked)}
        for group in samples.groups:
            for place, sample in enumerate(group.samples):
                assert sample.reward is None, "rewarded twice"
                sample.reward = float(place * signal[numbers[group.uid] % len(signal)])

    def shape(samples: StepSamples, counters: Any) -> None:
        for sample in samples.samples:
            sample.reward += 2.0

    judge = Judge(reward, shape, lambda s: list(filter(has_signal, s.groups)), lambda sample: False)
    settings = SpecialistConfig.model_validate({"group_size": 2, **config})
    return PromptChoice(data, ["sort", "add3"], "stage", settings, judge, tiny_recipe().seed)


def groups_of(prompts: Sequence[EncodedPrompt]) -> list[SampleGroup]:
    return [SampleGroup(p.uid, p.domain, [p.empty_sample(place) for place in range(2)]) for p in prompts]


def take_step(choice: PromptChoice, asked: list[EncodedPrompt], step: StepContext, shuffle: Any):
    """One step; groups come in whatever order. Returns its samples and metrics."""
    choice.begin_step(step)
    new = choice.first_prompts(step.index)
    groups: list[SampleGroup] = []
    while True:
        asked += new
        groups = [*groups, *groups_of(new)]
        samples = StepSamples([groups[i] for i in shuffle.permutation(len(groups))], None)  # type: ignore[arg-type]
        new = choice.more_prompts(samples)
        if not new:
            break
    if not choice.is_refilling:
        choice._judge.reward(samples)
    assert {sample.reward for sample in samples.samples} <= {0.0, 1.0}  # not shaped yet
    return samples, choice.select_groups(samples, step)


def step_of(index: int, counters: dict[str, float], memory: dict[str, Any]) -> StepContext:
    """As the loop makes it, from what a checkpoint holds."""
    return StepContext(index, 0.0, PhaseTimer(), counters, memory=memory)


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
    for index in range(3):
        start = len(asked)
        step = step_of(index, counters, {})
        samples, metrics = take_step(choice, asked, step, np.random.default_rng(seed))
        carrying = [prompt.uid for i, prompt in enumerate(asked[start:], start) if signal[i % len(signal)]]
        assert [group.uid for group in samples.groups] == carrying[:wanted]
        assert len(asked) - start <= limit * wanted
        assert len(carrying) >= wanted or len(asked) - start == limit * wanted
        assert metrics["refill/taken"] == len(asked) - start
        assert metrics["refill/kept"] == len(samples.groups)
        assert metrics["refill/surplus"] == len(carrying) - len(samples.groups)
        assert counters == {"prompts_taken": len(asked)}
        assert len({prompt.uid for prompt in asked}) == len(asked)
    plain = [data.mixed_prompts(["sort", "add3"], number, 1, "stage")[0].uid for number in range(len(asked))]
    assert [prompt.uid for prompt in asked] == plain


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(2, 8),
    st.sampled_from([0.2, 0.5, 0.9]),
    st.booleans(),
    st.integers(1, 6),
)
def test_prompts_with_signal_come_again_and_a_resumed_stage_asks_the_same(
    data, signal, wanted, share, refill, most
):
    """The oldest first; prompts without signal wait no more."""
    replay = ReplayConfig(share=share, most=most)
    if not replay.replay_count(wanted):
        return
    config = {"prompts_per_step": wanted, "replay": replay, "refill": {"limit": 2} if refill else None}
    asked: list[EncodedPrompt] = []
    choice, counters, memory = choice_of(data, signal, asked, **config), {}, {}
    waiting: list[list[Any]] = []
    for index in range(5):
        start, before = len(asked), json.dumps([counters, memory])
        step = step_of(index, counters, memory)
        _, metrics = take_step(choice, asked, step, np.random.default_rng(index))
        mine = asked[start:]
        again = [prompt for prompt in mine if "/again-" in prompt.uid]
        expected = waiting[: min(replay.replay_count(wanted), len(waiting))]
        assert [prompt.metadata["prompt"] for prompt in again] == [
            data.domains[domain].train[place].text for domain, place in expected
        ]
        assert metrics["replay/share"] == len(again) / len(mine)
        places = [place_of(data, prompt) for prompt in mine]
        carrying = [place for i, place in enumerate(places, start) if signal[i % len(signal)]]
        waiting = [*(entry for entry in waiting if entry not in places), *carrying][-most:]
        assert memory["replay"] == waiting
        resumed = [*asked[:start]]
        kept = json.loads(before)
        take_step(
            choice_of(data, signal, resumed, **config),
            resumed,
            step_of(index, *kept),
            np.random.default_rng(9),
        )
        assert [p.uid for p in resumed] == [p.uid for p in asked]
        assert kept == [counters, memory]
    assert len({prompt.uid for prompt in asked}) == len(asked)


@given(
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_no_uid_stands_for_two_prompts_where_rewards_are_not_the_same_again(
    data, first, second, refill, curriculum
):
    """Else the log, which holds what an attempt that was killed has asked, would refuse the next one."""
    config: dict[str, Any] = {"prompts_per_step": 4, "steps": 6, "replay": {"share": 0.5}}
    config |= {"refill": {"limit": 3}} if refill else {}
    config |= {"difficulty": {}, "curriculum": {"start": 0.2, "until": 1.0}} if curriculum else {}
    known: dict[str, str] = {}
    for signal in (first, second):
        asked: list[EncodedPrompt] = []
        choice, counters, memory = choice_of(data, signal, asked, **config), {}, {}
        for domain in ("sort", "add3") if curriculum else ():
            choice._rates[domain] = Rates(domain, 8, dict.fromkeys(range(60), 4))
            choice._pools[domain] = range(60)
        for index in range(5):
            take_step(choice, asked, step_of(index, counters, memory), np.random.default_rng(0))
        for prompt in asked:
            text = prompt.metadata["prompt"]
            assert known.setdefault(prompt.uid, text) == text


def place_of(data: DomainSet, prompt: EncodedPrompt) -> list[Any]:
    texts = [known.text for known in data.domains[prompt.domain].train]
    return [prompt.domain, texts.index(prompt.metadata["prompt"])]


def test_a_checkpoint_that_names_other_prompts_is_refused(data):
    choice = choice_of(data, [True], [], prompts_per_step=4, replay={"share": 0.5})
    for entry in (
        ["sort", 10_000],
        ["sort", -1],
        ["elsewhere", 0],
        ["sort", 1.0],
        ["sort"],
        [[], 0],
        3,
        None,
    ):
        with pytest.raises(CheckpointError, match="names training prompt"):
            choice.begin_step(step_of(1, {}, {"replay": [entry]}))
    for counters, memory in (
        ({}, {"replay": 3}),
        ({"prompts_taken": -1.0}, {}),
        ({"prompts_taken": math.nan}, {}),
        ({"prompts_taken": math.inf}, {}),
    ):
        with pytest.raises(CheckpointError, match="holds what no step has left there"):
            choice.begin_step(step_of(1, counters, memory))


def test_a_checkpoint_that_names_a_prompt_without_a_rate_is_refused(data):
    """Of those that were not measured nobody knows how hard they are."""
    config = {"prompts_per_step": 4, "replay": {"share": 0.5}, "difficulty": {"prompts": 3}}
    choice = choice_of(data, [True], [], **config)
    choice._rates["sort"] = Rates("sort", 8, {0: 4, 5: 4, 7: 4})
    choice.begin_step(step_of(1, {}, {"replay": [["sort", 5]]}))
    with pytest.raises(CheckpointError, match="names training prompt"):
        choice.begin_step(step_of(1, {}, {"replay": [["sort", 6]]}))


def test_easy_prompts_come_first(data):
    """From the easiest quarter to all at half of the steps; every step asks different ones."""
    config = {
        "steps": 8,
        "prompts_per_step": 4,
        "difficulty": {},
        "curriculum": {"start": 0.25, "until": 0.5},
    }
    asked: list[EncodedPrompt] = []
    choice, difficulty = choice_of(data, [True], asked, **config), DifficultyConfig()
    for domain in ("sort", "add3"):
        right = {index: 1 + index % 7 for index in range(0, 80, 2)}
        rates = Rates(domain, 8, right)
        choice._rates[domain], choice._pools[domain] = rates, rates.selected_indices(difficulty)
        assert [right[index] for index in rates.selected_indices(difficulty)] == sorted(
            right.values(), reverse=True
        )
    shares = []
    for index in range(8):
        step = step_of(index, {}, {})
        _, metrics = take_step(choice, asked, step, np.random.default_rng(0))
        shares.append(metrics["curriculum/share"])
        cursor = choice._prompt_cursor("sort", index)
        pool = choice._pools["sort"]
        allowed = set(pool[: math.ceil(shares[-1] * len(pool))])
        assert set(cursor.next_prompts(0, len(allowed))) == allowed
        assert metrics["difficulty/rate"] >= min(rates.rate_of(place) for place in allowed)
    assert shares == [0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0, 1.0, 1.0]
    assert curriculum_share(CurriculumConfig(start=0.5, until=1.0), 3, 4) == 0.875


def test_a_histogram_holds_every_prompt():
    rates = Rates("sort", 8, {3: 0, 5: 8, 4: 4, 9: 4, 1: 7})
    config = DifficultyConfig()
    assert dict(rates.histogram_bars())["4 of 8"] == 2
    assert rates.selected_indices(config) == [1, 4, 9]
    found = rates.summary_numbers(config)
    assert (found["too_hard"], found["too_easy"], found["kept"]) == (1, 1, 3)
    assert found["pass_at_1"] == 23 / 40
    assert found["pass_at_8"] == 4 / 5
    many = Rates("sort", 40, {i: i for i in range(41)})
    assert [count for _, count in many.histogram_bars()] == [4] * 9 + [5]
    bounded = DifficultyConfig(min_rate=0.25, max_rate=0.75)
    found = Rates("sort", 4, {0: 0, 1: 1, 2: 3, 3: 4}).summary_numbers(bounded)
    assert (found["too_hard"], found["kept"], found["too_easy"]) == (1, 2, 1)  # at either bound it is kept


def outcome(folder: Path, recipe: Recipe, stage: str = "specialist-sort") -> tuple[str, list[dict[str, Any]]]:
    """Digest and metrics of a stage."""
    with RunFolder.create(folder, recipe) as run:
        run_stage(recipe, run, stage)
        done = run.stage_done(stage)
    assert done is not None
    rows = read_metrics(folder / "stages" / stage / "metrics.jsonl")
    same = (
        "reward",
        "shaping",
        "refill",
        "replay",
        "difficulty",
        "curriculum",
        "frac",
        "length",
        "lr",
        "entropy",
        "tokens",
        "step",
    )
    return done["digest"], [{key: row[key] for key in row if key.startswith(same)} for row in rows]


@pytest.fixture(scope="module")
def base(tiny_run) -> str:
    """Warmed up: some prompts carry signal, some do not."""
    return str(tiny_run / "base")


def recipe_of(base: str, specialist: dict[str, Any], **changes: Any) -> Recipe:
    return tiny_recipe(base=None, model={"path": base}, specialist=specialist, **changes)


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_changes_where_every_group_has_signal(base, tmp_path):
    """The same prompts, the same weights."""
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["reward"] = "recipes:varied"
    specialist = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "checkpoint_every": 2}
    found = [
        outcome(tmp_path / name, recipe_of(base, specialist | own, domains=domains))
        for name, own in (("plain", {}), ("refilled", {"refill": {"limit": 2}}))
    ]
    assert found[0][0] == found[1][0]
    assert all(row["refill/taken"] == row["refill/kept"] == 4 for row in found[1][1])


MEASURED = {"samples": 4, "prompts": 40}
STEPS = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "checkpoint_every": 1}


def by_first_digit(sample) -> float:
    """Some prompts are always answered right, some never, the others by what is written."""
    digit = int(next(sign for sign in sample.prompt if sign.isdigit()))
    ASKED.append(digit)
    return 1.0 if digit < 3 else 0.0 if digit > 6 else float(sum(map(ord, sample.text)) % 2)


ASKED: list[int] = []


def measured_recipe(base: str, specialist: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["reward"] = f"{__name__}:by_first_digit"
    own = STEPS | {"difficulty": MEASURED} | (specialist or {})
    return recipe_of(base, own, domains=domains, **changes)


@pytest.mark.slow
def test_prompts_that_are_too_easy_or_too_hard_are_not_asked(base, tmp_path, caplog):
    """And the report shows how hard they were."""
    ASKED.clear()
    caplog.set_level("INFO", "opd")
    recipe = measured_recipe(
        base, {"curriculum": {}}, rollout={"max_new_tokens": 5, "max_sequence": 16, "schedule": "ahead"}
    )
    _, rows = outcome(tmp_path / "run", recipe)
    with RunFolder.resume(tmp_path / "run", recipe) as run:
        found = (run.stage_done("specialist-sort") or {})["difficulty"]["sort"]
        assert run.read_results()["difficulty"] == {"sort": found}
    assert found["prompts"] == 40
    assert found["kept"] + found["too_easy"] + found["too_hard"] == 40
    assert min(found["kept"], found["too_easy"], found["too_hard"]) > 0
    assert sum(found["histogram"].values()) == 40
    learned = ASKED[40 * 4 : 40 * 4 + 2 * 4 * 4]
    assert {digit for digit in learned if digit < 3 or digit > 6} == set()
    assert all(0.05 <= row["difficulty/rate"] <= 0.9 for row in rows)
    assert rows[0]["curriculum/share"] == 0.25
    assert "Prompts by difficulty" in write_report(tmp_path / "run").read_text()
    assert any("of 4 answers each so many were right: " in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["none", "cut", "flipped", "of another question", "of other prompts"])
def test_a_stage_that_stopped_while_it_measured_ends_the_same(base, tmp_path, damage):
    """Whatever became of what it had measured."""
    recipe = measured_recipe(base)
    expected = outcome(tmp_path / "undisturbed", recipe)
    asked = Preemption()
    reports: list[str] = []

    def report(done: int, total: int, headline: str) -> None:
        reports.append(headline)
        if done == 12:
            asked.stop()

    path = tmp_path / "run" / "stages" / "specialist-sort" / "difficulty.json"
    with RunFolder.create(tmp_path / "run", recipe) as run, pytest.raises(PreemptedError):
        execute_stage(recipe, run, plan_stages(recipe)["specialist-sort"], report, asked)
    assert len(reports) == 3
    kept = path.read_bytes()
    written = json.loads(kept)
    assert len(written["prompts"]) == 12
    if damage == "cut":
        path.write_bytes(kept[:-20])
    elif damage == "flipped":
        path.write_bytes(kept.replace(b'"prompts"', b'"promptz"'))
    elif damage == "of another question":
        write_sealed(path, {**without_seal(written), "question": written["question"] | {"seed": 5}})
    elif damage == "of other prompts":
        write_sealed(path, {**without_seal(written), "prompts": written["prompts"][1:]})
    ASKED.clear()
    with RunFolder.resume(tmp_path / "run", recipe) as run:
        run_stage(recipe, run, "specialist-sort")
        done = run.stage_done("specialist-sort") or {}
    assert len(ASKED) == 4 * (28 if damage == "none" else 40) + 2 * 4 * 4
    assert (tmp_path / "undisturbed" / "stages" / "specialist-sort" / "difficulty.json").exists()
    assert done["digest"] == expected[0]
    path.write_bytes(kept)
    with (
        RunFolder.resume(tmp_path / "run", recipe) as run,
        pytest.raises(RunFolderError, match="does not have the sha256"),
    ):
        run.stage_done("specialist-sort")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 5},
        {"rollout": {"temperature": 0.5}},
        {"rollout": {"top_p": 0.5}},
        {"rollout": {"top_k": 3}},
        {"rollout": {"max_new_tokens": 2}},
        {"difficulty": {"samples": 2}},
        {"reward": "exact"},
        {"start": "another"},
    ],
    ids=str,
)
def test_what_the_rates_depend_on_is_in_their_question(base, tmp_path, changes):
    def question(start: Path, difficulty: Any = {}, reward: Any = None, **given: Any) -> dict[str, Any]:  # noqa: B006
        recipe = measured_recipe(base, {"difficulty": MEASURED | difficulty}, **given)
        document = recipe.model_dump(mode="json", exclude_none=True)
        document["domains"]["sort"]["reward"] = reward or document["domains"]["sort"]["reward"]
        own = Recipe.model_validate(document).for_domain("sort")
        context: Any = SimpleNamespace(recipe=own, folder=folder, stage="specialist-sort")
        config = own.specialist.difficulty
        assert config is not None
        return DifficultyQuery.from_stage(context, load_domains(own)["sort"], config, start).question

    another = tmp_path / "another"
    shutil.copytree(base, another, ignore=shutil.ignore_patterns("checksums.json"))
    (another / "generation_config.json").write_text("{}")
    with RunFolder.create(tmp_path / "run", measured_recipe(base)) as folder:
        before = question(Path(base))
        assert question(Path(base)) == before
        given = {name: value for name, value in changes.items() if name != "start"}
        if "rollout" in given:  # and the others of its settings as they were
            given["rollout"] = tiny_recipe().rollout.model_dump(mode="json") | given["rollout"]
        assert question(another if "start" in changes else Path(base), **given) != before


def test_impossible_numbers_are_not_taken_for_rates(base, tmp_path, caplog):
    """From a file whose seal is right: a stage at work measures again, one that is done refuses them."""
    recipe = measured_recipe(base)
    with RunFolder.create(tmp_path / "run", recipe) as run:
        context = StageContext.open(recipe.for_domain("sort"), run, "specialist-sort", lambda *_: None)
        context.metrics.close()
        data = DomainSet.open(recipe, tokenizer_of(recipe, Path(base)))
        config = context.recipe.specialist.difficulty
        assert config is not None
        asked = DifficultyQuery.from_stage(context, data.domains["sort"], config, Path(base))
        rows: list[tuple[str, Any]] = [(key, 2) for key in asked.keys]
        asked.write(rows, 7)
        assert asked.read() == {"prompts": rows, "tokens": 7}
        other = replace(asked, question=asked.question | {"seed": 5})
        assert other.read() == {"prompts": [], "tokens": 0}
        assert read_difficulty(context, data, "sort") == Rates("sort", 4, dict.fromkeys(asked.order, 2))
        for wrong in (-1, 10**30, True, 1.0, "1", None):
            asked.write(rows, wrong)  # type: ignore[arg-type]
            assert asked.read() == {"prompts": [], "tokens": 0}
            asked.write([(rows[0][0], wrong), *rows[1:]], 7)
            assert asked.read() == {"prompts": [], "tokens": 0}
            with pytest.raises(RunFolderError, match="or impossible; restore it, or delete"):
                read_difficulty(context, data, "sort")
        assert "has impossible numbers; it is measured again" in caplog.text
        asked.path.unlink()
        asked.path.mkdir()
        with pytest.raises(RunFolderError, match="is a folder, where a file belongs"):
            asked.read()


def without_seal(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "sha256"}


def test_no_prompt_left_is_one_sentence(base, tmp_path):
    recipe = measured_recipe(base, {"difficulty": MEASURED | {"min_rate": 0.3, "max_rate": 0.4}})
    with (
        RunFolder.create(tmp_path / "run", recipe) as run,
        pytest.raises(DataError, match=r"no prompt is left to train on \(40 training prompts.*widen"),
    ):
        run_stage(recipe, run, "specialist-sort")


def test_prompts_without_any_signal_end_with_a_sentence(base, tmp_path):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["reward"] = f"{__name__}:never"
    specialist = {"steps": 3, "prompts_per_step": 2, "group_size": 2, "max_steps_without_signal": 2}
    recipe = recipe_of(base, specialist | {"refill": {"limit": 2}}, domains=domains)
    with (
        pytest.raises(TrainingError, match=r"2 steps had equal rewards.* a larger specialist\.refill\.limit"),
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
            "refill chooses prompts by what a fi",
        ),
        (
            {"specialist": {"refill": {}, "filter_zero_variance": False, "advantage": {"type": "gae"}}},
            "there is none; give a group_filter, or set refill to null",  # the other filter is refused there
        ),
        (
            {"specialist": {"replay": {}, "filter_zero_variance": False}},
            "replay chooses prompts by what a fi",
        ),
        ({"specialist": {"replay": {}}, "rollout": {"schedule": "async"}}, "needs rollout.schedule in_turn"),
        ({"specialist": {"replay": {"share": 0.1}, "prompts_per_step": 4}}, "comes to no prompt"),
        ({"specialist": {"replay": {"share": 1}}}, "less than 1"),
        ({"specialist": {"curriculum": {}}}, "curriculum orders prompts by what difficulty measures"),
        (
            {"specialist": {"difficulty": {"min_rate": 0.9, "max_rate": 0.1}}},
            "no rate is between min_rate 0.9",
        ),
        ({"specialist": {"refill": {"limit": 1}}}, "greater than or equal to 2"),
        ({"specialist": {"refill": {}}, "rollout": {"schedule": "ahead"}}, "needs rollout.schedule in_turn"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(**changes)
