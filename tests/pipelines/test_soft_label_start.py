"""A merge that begins with soft labels where the first step says foreign: decided, stopped, killed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attempts import interrupted_merge, killed_merge, merged, run_distill, write_recipe_of
from recipes import NO_CURVE, tiny_recipe
from safetensors.torch import load_file

from opd.config import Recipe
from opd.config.rl import FullVocabularyKL
from opd.errors import CheckpointError, ConfigError
from opd.metrics import read_metrics
from opd.pipelines.stages.domain_steering import SoftLabelStart
from opd.storage.wal import TokenWAL
from opd.train.distill_terms import FullVocabularyTerm
from opd.types import Sample

STEPS = 3


def recipe_of(models: Path, warm_up: dict[str, Any] | None, kind: str = "streamed", **changes) -> Recipe:
    """The teacher of `sort` is foreign. That of `add3` is what the student begins as."""
    distill = {"steps": 7, "prompts_per_domain": 4, "samples_per_prompt": 2, "checkpoint_every": 2}
    paths = {"sort": models / "sort", "add3": models / "base"}
    settings = {
        "model": {"path": str(models / "base")},
        "base": None,
        "teachers": {name: {"path": str(path), "type": kind} for name, path in paths.items()},
        "distill": distill | {"warm_up": warm_up} | changes.pop("distill", {}),
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }
    return tiny_recipe(**settings | changes)


FAR = {"steps": STEPS, "min_kl": 1e-5}
WRITTEN = ("reward/mean", "length/mean", "length/p50", "truncated")


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """Tokens of each chunk that is logged."""
    append, sizes = TokenWAL.append, []

    def counted(log: TokenWAL, chunk: Any) -> Any:
        sizes.append(len(chunk.token_ids))
        return append(log, chunk)

    monkeypatch.setattr(TokenWAL, "append", counted)
    return sizes


def test_the_first_step_decides_and_a_stopped_run_goes_on(models, tmp_path, capfd, written):
    recipe = recipe_of(models, FAR)
    weights, rows = merged(recipe, tmp_path / "whole")
    begun = [{key for key in row if key.startswith("warm_up/")} for row in rows]
    assert begun == [set(), *[{"warm_up/sort"}] * STEPS, *[set()] * 3]
    assert rows[0]["kl/sort"] >= FAR["min_kl"] > rows[0]["kl/add3"]
    told = capfd.readouterr().err
    decided = (
        f"are sort {rows[0]['kl/sort']:.2f}, add3 0.00, so 3 steps of soft labels on teachers' answers begin"
    )
    assert f"{decided} sort\n" in told
    assert all("staleness/max" not in row and row["mismatch/max_abs"] < 1e-4 for row in rows)
    tokens, written[:] = sum(written), []
    stopped = interrupted_merge(recipe, tmp_path / "stopped")
    assert all(torch.equal(weights[name], stopped[name]) for name in weights)
    assert sum(written) == tokens, "what a teacher has written for later steps stays in the log"


@pytest.mark.slow
def test_teachers_write_what_they_would_in_place_of_the_student(models, tmp_path):
    """All domains begin so: answers are those of a merge on the teachers' prefixes, and then are not."""
    _, rows = merged(recipe_of(models, {"steps": STEPS, "min_kl": 0.0}), tmp_path / "begins")
    prefixes = recipe_of(models, None, distill={"prefixes": "teacher", "warm_up": None})
    _, taught = merged(prefixes, tmp_path / "taught")
    alike = [
        [one[key] for key in WRITTEN] == [other[key] for key in WRITTEN]
        for one, other in zip(rows, taught, strict=True)
    ]
    assert alike[1 : STEPS + 1] == [True] * STEPS
    assert not all(alike[STEPS + 1 :])
    assert all("mismatch/max_abs" not in row for row in rows[1 : STEPS + 1])


def test_without_a_foreign_teacher_it_is_the_merge_without(models, tmp_path):
    weights, rows = merged(recipe_of(models, {"steps": STEPS, "min_kl": 5.0}), tmp_path / "near")
    plain, _ = merged(recipe_of(models, None), tmp_path / "plain")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert not any(key.startswith("warm_up/") for row in rows for key in row)


def test_soft_labels_are_the_forward_kl_whatever_the_loss():
    term = FullVocabularyTerm(
        lambda micro: [], "one_hot", FullVocabularyKL(kind="jsd", later=[(2, "reverse")])
    )
    micro: Any = SimpleNamespace(samples=[Sample("a/0", "a", "sort", torch.zeros(1).numpy())])
    kinds = []
    for term.step, term.soft_domains in ((0, ()), (1, {"sort"}), (3, {"sort"}), (3, {"add3"})):
        kinds.append(term.loss_of(micro).kind)
    assert kinds == ["jsd", "forward", "forward", "reverse"]


@pytest.mark.parametrize("state", [None, {}, ["sort", "sort"], ["sorts"], [1], "sort"])
def test_a_state_of_no_step_is_refused(models, state):
    recipe = recipe_of(models, FAR)
    start = SoftLabelStart(SimpleNamespace(recipe=recipe, stage="merge"), None, {}, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="the checkpoint of merge holds what no step has left"):
        start.begin_step(SimpleNamespace(index=1, memory={"warm_up": state}))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_warm_up(models, tmp_path):
    distill = {"steps": 40, "checkpoint_every": 3}
    recipe = recipe_of(models, {"steps": 15, "min_kl": 1e-5}, distill=distill)
    runs = killed_merge(recipe, tmp_path)
    ours, others = (load_file(one / "merged" / "model.safetensors") for one in runs)
    assert all(torch.equal(ours[name], others[name]) for name in others)
    rows = read_metrics(runs[0] / "stages/merge/metrics.jsonl")
    assert [row["step"] for row in rows if "warm_up/sort" in row] == [*range(2, 17)]


@pytest.mark.slow
def test_local_teachers_and_two_ranks_do_the_same(models, tmp_path):
    weights, rows = merged(recipe_of(models, FAR), tmp_path / "streamed")
    local, _ = merged(recipe_of(models, FAR, "local"), tmp_path / "local")
    assert all(torch.equal(weights[name], local[name]) for name in weights)
    ranks = recipe_of(models, FAR, train={"ranks": 2})
    run_distill(write_recipe_of(ranks, tmp_path / "recipe.yaml"), tmp_path / "ranks")
    shared = read_metrics(tmp_path / "ranks" / "stages" / "merge" / "metrics.jsonl")
    for name in ("kl/sort", "kl/mean", "length/mean"):
        assert [row[name] for row in shared] == pytest.approx([row[name] for row in rows], rel=1e-4)
    assert ["warm_up/sort" in row for row in shared] == ["warm_up/sort" in row for row in rows]


ROLLOUT = {"max_new_tokens": 5, "max_sequence": 16}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"distill": {"loss": {"type": "k1"}}}, "loss k1 is an expectation .* with warm_up it draws none"),
        ({"distill": {"loss": {"type": "topk"}}}, "loss topk has none; take a loss of type full"),
        ({"distill": {"rl_coef": 0.1}}, "rl_coef is an expectation"),
        ({"distill": {"prefixes": "teacher"}}, "warm_up has no effect with prefixes teacher"),
        ({"distill": {"steps": 4}}, "warm_up.steps 3 leaves none of 4 steps after it"),
        ({"distill": {"mixture": "arithmetic"}}, "mixture arithmetic is defined for"),
        ({"distill": {"budget": {"type": "progress"}}}, "budget progress compares each KL with the first"),
        ({"distill": {"budget": {"type": "gap", "moves": "prompts"}}}, "the prompts of many steps at once"),
        ({"rollout": ROLLOUT | {"schedule": "ahead"}}, "distill.warm_up needs rollout.schedule in_turn"),
        ({"rollout": ROLLOUT | {"over_sample": 1.25}}, "distill.warm_up needs rollout.over_sample 1.0"),
        ({"storage": {"trajectories": "disk"}}, "distill.warm_up needs storage.trajectories memory"),
        (
            {"teachers": {"sort": {"type": "student", "moving_average": 0.9}, "add3": {"path": "/m"}}},
            "of type student has no model of its own, which distill.warm_up needs",
        ),
    ],
)
def test_what_has_no_answers_to_begin_with_is_refused(models, changes, told):
    with pytest.raises((ConfigError, ValueError), match=told):
        recipe_of(models, FAR, **changes)


@pytest.mark.parametrize(
    ("teachers", "told"),
    [
        ({"sort": "sort", "add3": "sort"}, "domains sort and add3 have the same; merge the two domains"),
        ({"sort": {"sort": 0.5, "add3": 0.5}, "add3": "add3"}, "domain sort has several in turn"),
    ],
)
def test_each_domains_own_divergence_decides(models, teachers, told):
    domains = recipe_of(models, None).model_dump(mode="json", exclude_none=True)["domains"]
    domains = {name: domain | {"teacher": teachers[name]} for name, domain in domains.items()}
    with pytest.raises(ValueError, match=told):
        recipe_of(models, FAR, domains=domains)
