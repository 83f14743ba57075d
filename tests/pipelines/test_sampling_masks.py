"""Sampling masks through the stages: a specialist learns over what its engine kept, a merge does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from recipes import tiny_recipe

from opd.config import Recipe
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.checks import check_sampling
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage

TOKENIZER = character_tokenizer("0123456789=", ["<sort>", "<add3>"])

WAITS = ("time", "memory", "rollout/", "stall_seconds", "bytes_read", "cached_bytes")
"""Beginnings of metrics that tell times, or how far a teacher was read ahead."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "sort", "add3")):
        model = CausalLM.from_config(tiny.LLAMA | {"initializer_range": 0.2}, tokenizer=TOKENIZER, seed=seed)
        save_checkpoint(model, TOKENIZER, folder / name, {})
    return folder


def recipe_of(models: Path, stage: str, rollout: dict[str, Any], **changes: Any) -> Recipe:
    teachers = {name: {"path": str(models / name)} for name in ("sort", "add3")}
    own = {"params": {"digits": 3}, "prompts": 50, "reward": "recipes:varied"}
    settings = {
        "model": {"path": str(models / "base")},
        "base": None,
        "domains": {name: own | {"source": f"procedural:{name}"} for name in teachers},
        "teachers": {} if stage.startswith("specialist") else teachers,
        "rollout": {"max_new_tokens": 8, "max_sequence": 24} | rollout,
        "specialist": {"steps": 2, "prompts_per_step": 8, "group_size": 4, "reference_kl": {"coef": 0.1}},
        "distill": {"steps": 2, "prompts_per_domain": 8},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 2, "every": 0},
    }
    return tiny_recipe(**settings | changes)


def stage_rows(path: Path, models: Path, stage: str, rollout: dict[str, Any], **changes: Any) -> Any:
    recipe = recipe_of(models, stage, rollout, **changes)
    with RunFolder.create(path, recipe) as folder:
        run_stage(recipe, folder, stage)
        rows = folder.read_metrics(stage)
    return [
        {name: value for name, value in row.items() if not name.startswith(WAITS) and "/wait_" not in name}
        for row in rows
    ]


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 3}])
def test_a_specialist_learns_over_the_kept_tokens(tmp_path, models, cut):
    rows = stage_rows(tmp_path / "on", models, "specialist-sort", cut)
    off = stage_rows(tmp_path / "off", models, "specialist-sort", cut | {"replay_masks": False})
    for row, plain in zip(rows, off, strict=True):
        assert 1 < row["sampling/kept"] <= cut.get("top_k", 12)
        assert row["sampling/masked"] == 1.0
        assert cut.get("top_p", 0) - 1e-6 < row["sampling/mass"] < 1
        assert row["mismatch/mean_abs"] < 2e-6
        assert row["entropy"] < plain["entropy"]
        assert not any(name.startswith("sampling/") for name in plain)
    assert rows[0]["tokens/student"] == off[0]["tokens/student"]  # the same samples
    assert rows[0]["grad_norm"] != off[0]["grad_norm"]
    disk = {"storage": {"trajectories": "disk"}}
    assert stage_rows(tmp_path / "disk", models, "specialist-sort", cut, **disk) == rows


@pytest.mark.parametrize(("stage", "rollout"), [("specialist-sort", {}), ("merge", {"top_p": 0.8})])
def test_what_is_not_cut_and_a_merge_learn_over_the_whole_vocabulary(tmp_path, models, stage, rollout):
    auto = stage_rows(tmp_path / "auto", models, stage, rollout)
    off = stage_rows(tmp_path / "off", models, stage, rollout | {"replay_masks": False})
    differ = {k for row, other in zip(auto, off, strict=True) for k in row if row[k] != other[k]}
    assert not differ
    assert not any(name.startswith("sampling/") for row in auto for name in row)


TRUE = {"replay_masks": True, "top_p": 0.9}
SERVED = {"type": "sglang", "urls": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("rollout", "changes", "words"),
    [
        (TRUE | {"engine": SERVED}, {}, "sglang's streams do not tell them; take rollout.engine torch"),
        (TRUE | {"engine": SERVED | {"type": "vllm"}}, {}, "vllm's streams do not tell them"),
        (TRUE | {"top_k": 1025}, {}, "top_k is 1025, but masks have at most 1024 tokens; lower it"),
        (
            TRUE,
            {"specialist": {"opd": {"teacher": "sort", "loss": {"type": "k1"}}}},
            "opd.loss k1 compares sampled tokens with a teacher's whole vocabulary; set it to full",
        ),
    ],
)
def test_masks_that_nobody_tells_or_replays_are_refused_if_asked_for(models, rollout, changes, words):
    with pytest.raises(ValueError, match=f"rollout.replay_masks is true, and .*{words}"):
        recipe_of(models, "merge", rollout, **changes)
    assert recipe_of(models, "merge", rollout | {"replay_masks": "auto"}, **changes).replays_masks is (
        rollout.get("top_k") == 1025
    )


def test_the_doctor_says_what_masks_take(models):
    (found,) = check_sampling(recipe_of(models, "specialist-sort", {"top_k": 5}))
    assert found.level == "ok"
    assert "rollout.top_k = 5: specialists learn over what it keeps (at most 20 bytes a token" in found.detail
    (found,) = check_sampling(recipe_of(models, "specialist-sort", {"top_p": 0.9}))
    assert "at most 4,096 bytes a token of the log" in found.detail
    for stage, rollout, words in (
        ("specialist-sort", {"top_p": 0.9, "replay_masks": False}, "biases every estimator"),
        ("merge", {"top_p": 0.9}, "biases every estimator"),
        ("specialist-sort", {"top_k": 1}, "with top_k 1 all answers to a prompt of sort are the same"),
    ):
        (found,) = check_sampling(recipe_of(models, stage, rollout))
        assert found.level == "warning"
        assert words in found.detail


def test_a_rollout_of_ones_own_that_drops_masks_learns_over_the_whole_vocabulary(tmp_path, models, capsys):
    """Its log-probabilities are then of the whole vocabulary, too. If it is asked for masks, a line says that
    it has none, at the first step.
    """
    own = {"generate": "my_code:two_turns", "top_p": 0.8, "max_sequence": 40}
    for row in stage_rows(tmp_path / "auto", models, "specialist-sort", own):
        assert row["mismatch/mean_abs"] < 2e-6
    assert not recipe_of(models, "specialist-sort", own).replays_masks
    asked = own | {"replay_masks": True}
    assert recipe_of(models, "specialist-sort", asked).replays_masks
    for path, stage, rollout, count in (
        ("uncut", "specialist-sort", asked | {"top_p": 1.0}, 0),
        ("merge", "merge", asked, 0),
        ("asked", "specialist-sort", asked, 1),
    ):
        stage_rows(tmp_path / path, models, stage, rollout)
        lines = capsys.readouterr().err.splitlines()
        assert len(said := [line for line in lines if "sampling_masks" in line]) == count
    assert said[0].startswith("rollout.generate my_code:two_turns gives 32 of 32 samples, such as ")
    assert said[0].endswith("of their tokens, or rollout.replay_masks to false")
