"""The comparison of estimators: its table is of its results, and its arms are what their names say."""

import json
from pathlib import Path

import pytest
from loaded import load_example

from opd.config.rl import DrGRPOAdvantage, GAEAdvantage, GRPOAdvantage

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "which_estimator"


def test_the_readme_has_the_table_of_the_results():
    table = load_example("which_estimator/table.py")
    written = "\n".join(table.table(table.results()))
    assert written in (FOLDER / "README.md").read_text("utf-8"), "run table.py, and put it into the README"


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
