"""Rules of `watch`: laid over the default set by name, and refused early where they could never fire."""

import ast
import re
from pathlib import Path

import pytest

from opd.config.load import dump_recipe, load_recipe
from opd.config.watch import DEFAULT_RULES, covers_metric, metrics_of
from opd.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: watched
model: {path: base}
teachers: {math: {path: m}, code: {path: c}}
domains:
  math: {source: a.jsonl, reward: math}
  both: {source: b.jsonl, reward: math, teacher: {math: 1, code: 1}}
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str = "", *words: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text if text.startswith(RECIPE[:8]) else RECIPE + text)
        return load_recipe([path], words)

    return load


def test_the_default_set_is_on_and_an_entry_changes_what_it_says(load):
    assert load().watch == DEFAULT_RULES
    rules = load("watch: {dead_groups: null, entropy_collapse: {action: stop, also: {below: 0.3}}}").watch
    known = DEFAULT_RULES["entropy_collapse"]
    assert known.also is not None
    also = known.also.model_copy(update={"below": 0.3})
    assert rules["entropy_collapse"] == known.model_copy(update={"action": "stop", "also": also})
    assert rules["dead_groups"] is None
    others = [name for name in DEFAULT_RULES if name not in ("dead_groups", "entropy_collapse")]
    assert {name: rules[name] for name in others} == {name: DEFAULT_RULES[name] for name in others}
    assert load("watch: null").watch is None


def test_own_rules_come_after_the_default_ones_and_are_read_back(load, tmp_path):
    recipe = load("watch: {mine: {metric: kl/math+code, above: 2, steps: 3}}", "--watch.mine.action", "stop")
    assert list(recipe.watch) == [*DEFAULT_RULES, "mine"]
    assert recipe.watch["mine"].action == "stop"
    written = tmp_path / "written.yaml"
    written.write_text(dump_recipe(recipe))
    assert load_recipe([written]) == recipe


def test_a_teacher_that_specialists_alone_follow_has_metrics(load):
    followed = "specialist: {opd: {teacher: code}}"
    lone = RECIPE.replace(
        "  both: {source: b.jsonl, reward: math, teacher: {math: 1, code: 1}}\n",
        "  new: {source: b.jsonl, reward: math}\n",
    )
    rule = "watch: {mine: {metric: kl/code, above: 2}}"
    assert load(f"{lone}{followed}\n{rule}").watch["mine"].metric == "kl/code"
    with pytest.raises(ConfigError, match="no stage logs 'kl/code'"):
        load(f"{lone}{rule}")


@pytest.mark.parametrize("weights", ["{}", "{math: 0}", "{math: 1, code: -1}"])
def test_teachers_whose_weights_are_not_positive_are_refused_first(load, weights):
    with pytest.raises(ConfigError, match="several with positive weights"):
        load(RECIPE.replace("{math: 1, code: 1}", weights))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{mine: {metric: entrpy, above: 1}}", "no stage logs 'entrpy'; did you mean 'entropy'?"),
        ("{mine: {metric: reward/mth, above: 1}}", "did you mean 'reward/math'?"),
        ("{mine: {metric: 'klx/*', above: 1}}", "watch.mine.metric: no stage logs 'klx/*'"),
        ("{mine: {metric: entropy, above: 1, also: {metric: lrs, below: 1}}}", "watch.mine.also.metric: no"),
        ("{dead_groups: {metric: frac_zero_std}}", "did you mean 'frac_reward_zero_std'?"),
        ("{entropy_colapse: {action: stop}}", "did you mean watch.entropy_collapse?"),
        ("{mine: {metric: entropy}}", "needs a bound; give above or below"),
        ("{mine: {metric: entropy, above: 1, below: 2}}", "swap the bounds"),
        ("{dead_groups: {action: halt}}", "must be one of warn, lower_rate, stop"),
        ("{dead_groups: {actoin: stop}}", "did you mean `watch.dead_groups.action`?"),
        ("{dead_groups: {factor: 1.5}}", "less than 1"),
        ("{'a/b': {metric: entropy, above: 1}}", "should match pattern"),
        ("{dead_groups: {above: .nan}}", "is no finite number"),
        ("{dead_groups: 3}", "`watch.dead_groups` is 3"),
        ("[dead_groups]", "takes a mapping"),
    ],
)
def test_what_could_never_fire_is_refused_with_one_sentence(load, text, said):
    with pytest.raises(ConfigError) as refused:
        load(f"watch: {text}")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_option_of_a_rule_that_is_misspelt_names_the_nearest(load):
    with pytest.raises(ConfigError, match=r"did you mean --watch\.dead_groups\.action"):
        load("", "--watch.dead_groups.actoin", "stop")


def test_a_star_stands_for_names():
    assert covers_metric("kl/*", "kl/math")
    assert not covers_metric("kl/*", "kl/mean")
    assert not covers_metric("kl/*", "kl_at/1")
    assert covers_metric("kl/mean", "kl/mean")
    assert covers_metric("reward/math/*", "reward/math/format")
    assert covers_metric("odd[name]", "odd[name]")


def test_every_default_rule_is_of_a_metric_that_is_logged():
    known = list(metrics_of(["math"], ["math"]))
    for rule in DEFAULT_RULES.values():
        asked = [rule.metric, *([] if rule.also is None else [rule.also.metric])]
        assert all(any(covers_metric(pattern, name) for name in known) for pattern in asked)
        assert rule.action == "warn"


def provoked() -> dict[str, set[str]]:
    """Test of `test_watch_provoked.py` -> the rules that fire, as it asserts: by name, or that of a case."""
    tree = ast.parse((ROOT / "tests/pipelines/test_watch_provoked.py").read_text("utf-8"))
    cases = {
        node.targets[0].id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            of_asserts = [
                part for each in ast.walk(test) if isinstance(each, ast.Assert) for part in ast.walk(each)
            ]
            sides = [
                part.left
                for part in of_asserts
                if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In | ast.LtE)
            ]
            words = {
                node.value for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant)
            }
            for decorator in test.decorator_list:
                for node in ast.walk(decorator):
                    words |= cases.get(node.id, set()) if isinstance(node, ast.Name) else set()
            found[test.name] = {word for word in words if isinstance(word, str)} & set(DEFAULT_RULES)
    return found


def test_rules_the_table_of_failures_and_the_tests_that_provoke_them_agree():
    text = (ROOT / "docs/reference/watch.md").read_text("utf-8")
    table = text.partition("## What goes wrong, and what catches it")[2]
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", table, re.M)[2:]]
    told: dict[str, set[str]] = {}
    for row in rows:
        rules = [name for name in re.findall(r"`(\w+)`", row[2]) if name in DEFAULT_RULES]
        (test,) = re.findall(r"`(test_\w+)`", row[4])
        assert rules, f"no rule catches {row[0].strip()!r}"
        # What comes after the first ones, or at times, is not what the test is for.
        told.setdefault(test, set()).update(rules if "then" not in row[2] else rules[:1])
    tests = {name: rules for name, rules in provoked().items() if rules}
    assert told == tests
    assert set().union(*tests.values()) == set(DEFAULT_RULES)
