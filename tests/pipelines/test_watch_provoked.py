"""Each failure that RL runs are known for, on a tiny run: its rule fires within 20 steps, and on healthy
runs none does. `docs/reference/watch.md` has the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attempts import made_base
from recipes import tiny_recipe

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.errors import TrainingError
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.student import Student

STAGE, STEPS = "specialist-add3", 20
FAST = {"optim": {"lr": 0.01}}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Right about half of the time, in four tokens."""
    return made_base(tmp_path_factory.mktemp("base") / "run", tiny_recipe())


def recipe_of(base: Path, reward: str | None = None, **changes: Any) -> Recipe:
    """One domain, whose answers are scored by the function `reward` of this module, if one is named."""
    own = {"steps": STEPS, "prompts_per_step": 8, "group_size": 4, "minibatches": 2, "checkpoint_every": 50}
    domain: dict[str, Any] = {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 200}
    if reward is not None:
        domain["reward"] = f"{__name__}:{reward}"
    given = {"base": None, "model": {"path": str(base)}, "domains": {"add3": domain}} | changes
    return tiny_recipe(**given | {"specialist": own | changes.get("specialist", {})})


def flags_of(path: Path, recipe: Recipe, stage: str = STAGE) -> tuple[set[str], list[dict[str, Any]]]:
    """The rules that fired in the first 20 steps of a stage, and its metrics."""
    with RunFolder.create(path, recipe) as folder:
        try:
            run_stage(recipe, folder, stage)
        except TrainingError:  # without any signal it ends soon
            assert len(folder.read_metrics(stage)) > 5
        rows = folder.read_metrics(stage)
        assert len(rows) <= STEPS
        return {flag["rule"] for flag in folder.read_flags(stage)}, rows


def long_ones(sample) -> float:
    """Longer answers are better ones."""
    return sample.length / 16


def test_reward_hacking_by_length(base, tmp_path):
    rollout = {"max_new_tokens": 16, "max_sequence": 28}
    fired, rows = flags_of(tmp_path / "run", recipe_of(base, "long_ones", specialist=FAST, rollout=rollout))
    assert "truncation" in fired
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]  # a success, as the reward has it


def many_ones(sample) -> float:
    """Best is one and the same answer to every prompt, and it is not right."""
    return 0.4 * sample.text[:3].count("1") / 3


def test_entropy_collapse(base, tmp_path):
    fired, rows = flags_of(tmp_path / "run", recipe_of(base, "many_ones", specialist=FAST))
    assert "entropy_collapse" in fired
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]


def always_zero(sample) -> float:
    """It looks for what no answer has."""
    return float("\\boxed" in sample.text)


def test_a_broken_reward(base, tmp_path):
    fired, _ = flags_of(tmp_path / "run", recipe_of(base, "always_zero"))
    assert {"flat_reward", "dead_groups"} <= fired


TEMPLATES = {"right": "<add3>{{ messages[0].content }}=", "wrong": "{{ messages[0].content }}<sort>"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_mismatch(base, tmp_path, template):
    """The same messages in the template that the model knows, and in another one."""
    (tmp_path / "t.jinja").write_text(TEMPLATES[template])
    digits = [f"{number:03}" for number in range(0, 1000, 7)]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "label": "".join(str((int(sign) + 3) % 10) for sign in text),
        }
        for text in digits
    ]
    (tmp_path / "add3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = {"add3": {"source": str(tmp_path / "add3.jsonl"), "reward": "exact"}}
    model = {"path": str(base), "chat_template": str(tmp_path / "t.jinja")}
    fired, _ = flags_of(tmp_path / "run", recipe_of(base, domains=domains, model=model))
    assert ("flat_reward" in fired) == (template == "wrong")
    assert not fired or template == "wrong"


def test_an_engine_with_stale_weights(base, tmp_path, monkeypatch):
    """Nothing reaches the engine, which says that all is well."""
    monkeypatch.setattr(Student, "sync", lambda student, version: None)
    fired, rows = flags_of(tmp_path / "run", recipe_of(base, specialist={"optim": {"lr": 0.003}}))
    assert "engine_mismatch" in fired
    assert rows[0]["mismatch/mean_abs"] < 1e-5  # the first samples are its own


def test_a_dead_teacher(base, tmp_path):
    """Its specialist has learnt nothing: it is still the base."""
    distill = {"steps": STEPS, "prompts_per_domain": 8, "checkpoint_every": 50}
    recipe = recipe_of(base, teachers={"add3": {"path": str(base)}}, distill=distill)
    fired, rows = flags_of(tmp_path / "run", recipe, "merge")
    assert "idle_teacher" in fired
    assert max(row["kl/add3"] for row in rows) < 1e-6


def known_by_heart(sample) -> float:
    """Learnt on the prompts that are trained on, of no use to others."""
    return sample.text[:3].count("1") / 3 * (not sample.uid.startswith("evaluate/"))


def test_a_reward_that_held_out_prompts_do_not_share(base, tmp_path):
    own = FAST | {"evaluate_every": 2}
    evaluation = {"prompts_per_domain": 20, "curve_prompts": 10, "base_kl_every": 5}
    recipe = recipe_of(base, "known_by_heart", specialist=own, evaluation=evaluation)
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert "held_out_flat" in fired
    assert [row["step"] for row in rows if "accuracy/add3" in row] == list(range(2, STEPS + 1, 2))
    measured = {row["step"]: row["base_kl"] for row in rows if "base_kl" in row}
    assert set(measured) <= {5, 10, 15, 20}  # not where nothing is learnt
    assert measured[5] > 0.01


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_fires_none(base, tmp_path, seed):
    distill = {"steps": STEPS, "prompts_per_domain": 8, "checkpoint_every": 50}
    recipe = recipe_of(base, seed=seed, distill=distill)
    fired, _ = flags_of(tmp_path / "run", recipe)
    assert fired == set()
    with RunFolder.resume(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "merge")
        assert folder.read_flags("merge") == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quick_start_fires_none(tmp_path, seed):
    """The committed recipe, all its stages."""
    recipe = load_recipe(
        [Path(__file__).parents[2] / "examples" / "quickstart" / "recipe.yaml"],
        ["--seed", str(seed), "--runtime.workers", "1", "--evaluation.prompts_per_domain", "20"],
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "baseline-mixed_grpo")
        for path in (tmp_path / "run" / "stages").iterdir():
            assert folder.read_flags(path.name) == [], path.name
