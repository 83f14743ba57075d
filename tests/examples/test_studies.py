"""The studies of `examples/`: their pages have the tables of their results, and their arms are what they are
called.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from loaded import load_example

from examples.warm_up.tasks import MarkedAdd3, MarkedSort
from opd.config.load import load_recipe
from opd.config.rl import DrGRPOAdvantage, GAEAdvantage, GRPOAdvantage
from opd.metrics import MetricsWriter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def seeds_of(study: ModuleType) -> list[dict[str, Any]]:
    """The results of its three seeds."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(study.RESULTS.glob("seed-*.json"))]
    assert len(found) == 3
    return found


TABLES: dict[str, Callable[[Any], list[list[str]]]] = {
    "budget/study.py": lambda study: [study.tables()],
    "mixtures/table.py": lambda table: [
        of(table.load()) for of in (table.accuracies, table.routing, table.divergences)
    ],
    "quantised/study.py": lambda study: [study.table(seeds_of(study))],
    "rounds/study.py": lambda study: [study.tables()],
    "routing_replay/study.py": lambda study: [
        of(study.load()) for of in (study.mismatch_table, study.training_table)
    ],
    "warm_up/study.py": lambda study: [study.tables(study.read_results())],
    "which_estimator/table.py": lambda table: [table.table(table.results())],
}


@pytest.mark.parametrize("script", TABLES)
def test_the_page_has_the_tables_of_the_results(script):
    page = (EXAMPLES / script).with_name("README.md").read_text("utf-8")
    for lines in TABLES[script](load_example(script)):
        assert "\n".join(lines) in page, f"write the tables anew with {script}, and put them there"


def test_every_arm_has_its_budget():
    study, found = load_example("budget/study.py"), {}
    for name, words in study.ARMS.items():
        recipe = load_recipe([EXAMPLES / "budget/recipe.yaml"], list(words))
        budget = recipe.distill.budget
        found[name] = (budget.type, getattr(budget, "moves", None), recipe.domains["sort"].weight)
    assert found == {
        "static": ("static", None, 1),
        "by hand": ("static", None, 2),
        "gap": ("gap", "loss", 1),
        "gap, prompts": ("gap", "prompts", 1),
        "progress": ("progress", "loss", 1),
        "gradient": ("gradient", "loss", 1),
    }


def test_the_table_of_budgets_compares_by_seed(tmp_path, monkeypatch):
    study = load_example("budget/study.py")
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    even = dict.fromkeys(study.DOMAINS, 0.9)
    for seed, worst in enumerate((0.75, 0.65)):
        arms = {name: {"accuracy": even | {"sort": 0.7}, "tokens": 5000, "shares": {}} for name in study.ARMS}
        arms["gap"] = arms["gap"] | {
            "accuracy": even | {"sort": worst},
            "shares": {"sort": 0.5, "reverse": 0.25, "add3": 0.25},
        }
        found = {"base": even, "specialists": even, "arms": arms}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(found))
    lines = study.tables()
    gap = next(line for line in lines if line.startswith("| gap |"))
    assert "| 70.0 (7.1) | +5.0, -5.0 | 83.3 (2.4) |" in gap
    assert gap.endswith("| 50 %, 25 %, 25 % | 5,000 |")
    assert next(line for line in lines if line.startswith("| static |")).startswith(
        "| static | 70.0 (0.0) |  |"
    )


def test_the_tables_of_rounds_have_every_arm(tmp_path, monkeypatch):
    study = load_example("rounds/study.py")
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    arm = {"base": 0.2, "specialist:sort": 0.9, "specialist:add3": 0.8, "merged": 0.7, "tokens": 5000}
    starts = {name: {"start": 0.4, "end": 0.8, "tokens": None} for name in study.STARTS}
    starts["base"] = {"end": 0.7, "tokens": 1200}
    for seed, merged in enumerate((0.75, 0.65)):
        found = {"one": arm, "two": arm | {"merged": merged}, "first round of two": arm, "starts": starts}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(found))
    lines = study.tables()
    assert "| two | 20.0 (0.0) | 85.0 (0.0) | 70.0 (7.1) | 5 |" in lines
    assert "Two rounds minus one, by seed, points: +5.0, -5.0" in lines
    assert "| base | 20.0 (0.0) | 1200, 1200 | 70.0 (0.0) |" in lines
    assert "| ties | 40.0 (0.0) | never, never | 80.0 (0.0) |" in lines


def test_tokens_are_counted_to_the_first_point_that_is_there(tmp_path):
    folder = tmp_path / "stages" / "merge"
    folder.mkdir(parents=True)
    writer = MetricsWriter(folder)
    for step, share in enumerate((0.2, None, 0.6, 0.9)):
        curve = {} if share is None else {"accuracy/sort": share, "accuracy/add3": share + 0.1}
        writer.write(step + 1, {"tokens/student": 100 * step, **curve})
    writer.close()
    study = load_example("rounds/study.py")
    assert study.tokens_to_reach(tmp_path, 0.64) == 200
    assert study.tokens_to_reach(tmp_path, 0.99) is None


def test_a_mixture_and_a_dense_student_learn_alike():
    mixture, dense = (
        yaml.safe_load((EXAMPLES / "mixtures" / name).read_text("utf-8"))
        for name in ("recipe.yaml", "recipe-dense.yaml")
    )
    apart = ("name", "model", "baselines")
    assert {key: mixture[key] for key in mixture if key not in apart} == {
        key: dense[key] for key in dense if key not in apart
    }
    model = mixture["model"]["config"]
    active = model["num_experts_per_tok"] * model["moe_intermediate_size"]
    assert active == dense["model"]["config"]["intermediate_size"]


def test_a_kept_gain_is_that_of_the_teachers_of_the_run():
    table = load_example("mixtures/table.py")
    run = {
        "models": {
            "base": {"a": 0.1, "b": 0.3},
            "merged": {"a": 0.5, "b": 0.7},
            "specialist:a": {"a": 0.8, "b": 0.0},
            "specialist:b": {"a": 0.0, "b": 1.0},
        }
    }
    assert table.level(run["models"], "specialists") == pytest.approx(90.0)
    other = json.loads(json.dumps(run))
    other["models"]["specialist:a"]["a"] = 0.6
    seed = {"seed": 0, "runs": dict.fromkeys(table.RUNS, run) | {"-dense": other}}
    _, _, *rows = table.accuracies([seed])
    assert "| mixture, its own specialists | **OPD, full vocabulary** | 60.0 | 57.1 |" in rows
    assert "| mixture, dense specialists | **OPD, full vocabulary** | 60.0 | 66.7 |" in rows


def test_the_warm_ups_have_their_curves():
    assert (EXAMPLES / "warm_up/results/curves.png").stat().st_size > 1000


def test_every_arm_begins_as_it_is_called():
    study, found = load_example("warm_up/study.py"), {}
    for name, words in study.ARMS.items():
        distill = load_recipe([EXAMPLES / "warm_up/recipe.yaml"], list(words)).distill
        begins = None if distill.warm_up is None else (distill.warm_up.steps, distill.warm_up.min_kl)
        found[name] = (distill.steps, begins, distill.prefixes, distill.loss.kind)  # pyright: ignore[reportAttributeAccessIssue]
    assert found == {
        "none": (60, None, "student", "reverse"),
        "warm-up, 10 steps": (60, (10, 1.0), "student", "reverse"),
        "warm-up, 20 steps": (60, (20, 1.0), "student", "reverse"),
        "soft labels": (60, None, "teacher", "forward"),
        "none, 180 steps": (180, None, "student", "reverse"),
        "warm-up, 20 of 180 steps": (180, (20, 1.0), "student", "reverse"),
    }


def test_the_formats_share_no_token_at_any_place():
    task, rng = MarkedSort(), np.random.default_rng(0)
    theirs = task.demonstration(task.prompt("3142"), rng, 1.0, 0.0)
    ours = task.demonstration(task.prompt("3142"), rng, 1.0, 1.0)
    assert (theirs, ours) == (task.right("3142"), task.wrong_rule("3142")) == ("1=2=3=4=", "=1=2=3=4")
    assert MarkedAdd3().demonstration("<marked_add3>3142=", rng, 1.0, 1.0) == "6=4=7=5="


def test_an_arm_is_compared_with_the_default_of_its_own_seeds(tmp_path, monkeypatch):
    table = load_example("which_estimator/table.py")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for seed, (first, second) in enumerate([(0.5, 0.7), (0.6, 0.7), (0.1, None)]):
        found = {"grpo": first} if second is None else {"grpo": first, "other": second}
        both = {
            arm: {task: {"reward": value, "right": value} for task in ("sort", "unique")}
            for arm, value in found.items()
        }
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(both))
    value, low, high = table.ahead(table.results(), "other", "sort")
    assert value == pytest.approx(15.0)
    assert low < 10.0 < 20.0 < high
    assert list(table.table(table.results()))[-1].startswith("| `other` | 2 | 70.0 | +15.0 (")


def test_all_arms_have_the_same_samples():
    study = load_example("which_estimator/study.py")
    recipes = {arm: study.recipe_of(arm).specialist for arm in study.ARMS}
    sizes = {(own.steps, own.prompts_per_step, own.group_size, own.minibatches) for own in recipes.values()}
    assert len(sizes) == 1
    assert recipes["grpo"].advantage == GRPOAdvantage()
    assert recipes["dr_grpo"].advantage == DrGRPOAdvantage()
    assert recipes["dr_grpo"].policy_loss.aggregation == "constant"
    assert recipes["ppo_gae"].advantage == GAEAdvantage()
    assert [recipes[name].policy_loss.type for name in ("gspo", "cispo")] == ["gspo", "cispo"]
    filtered = {name for name, own in recipes.items() if own.filter_zero_variance}
    assert filtered == {"grpo, filtered", "grpo, refilled"}
    refilled = recipes["grpo, refilled"]
    assert refilled.refill is not None
    assert study.fewer_steps(refilled, [refilled.prompts_per_step] * refilled.steps) == refilled.steps
    assert study.fewer_steps(refilled, [16.0, 24.0, 20.0]) == refilled.steps * 16 / 20
    assert recipes["grpo, overlong"].shaping.overlong_buffer == 4
    assert recipes["grpo, equal bounds"].policy_loss.clip_high == recipes["grpo"].policy_loss.clip_low


@pytest.mark.parametrize(
    ("text", "label", "share"),
    [
        ("1234", "1234", 1.0),
        ("1299", "1234", 0.5),
        ("12", "1234", 0.5),
        ("12345678", "1234", 0.5),
        ("", "1", 0),
    ],
)
def test_an_answer_is_worth_what_it_begins_with(text, label, share):
    assert load_example("which_estimator/study.py").begun_right(text, label) == share


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    return load_example("routing_replay/study.py")


def test_undecided_routers_keep_the_order_of_their_scores(replay):
    mixture = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
    model = tiny.model(**mixture, moe_intermediate_size=16).module.double()
    gate = model.model.layers[0].mlp.gate.weight
    hidden = torch.randn(50, gate.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = hidden @ gate.detach().clone().T
    wrapped = type("Model", (), {"module": model})()
    replay.undecide(wrapped, 0.99)
    after = hidden @ gate.detach().T
    assert torch.equal(before.argsort(-1), after.argsort(-1))
    spread = float(
        (after.max(-1)[0] - after.min(-1)[0]).mean() / (before.max(-1)[0] - before.min(-1)[0]).mean()
    )
    assert spread == pytest.approx(0.01, rel=1e-6)


def test_an_arm_is_compared_with_exact_routing_of_its_own_seed(replay):
    values = {"exact": [10.0, 50.0, 30.0], "free": [12.0, 53.0, 31.0]}
    assert replay.ahead("exact", values) == ""
    assert replay.ahead("free", values).startswith("+2.0 (")


def test_kept_results_have_every_arm_and_level(replay):
    for found in seeds_of(replay):
        arms = [f"{arm} {name}" for name in replay.TRAINED for arm in replay.ARMS]
        assert {f"{level:g}" for level in replay.LEVELS} | {*arms} == found.keys()
        assert all(len(found[arm]["rewards"]) == replay.STEPS for arm in arms)


def test_a_folder_without_a_run_is_named(tmp_path):
    example = EXAMPLES / "self_distillation"
    kept = (example / "results" / "rarely.json").read_bytes()
    command = [sys.executable, example / "table.py", tmp_path / "none"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"there is no {tmp_path}/none-grpo/stages" in ended.stderr
    assert (example / "results" / "rarely.json").read_bytes() == kept
