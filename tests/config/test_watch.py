"""Rules of `watch`: laid over the default set by name, and refused early where they could never fire."""

from __future__ import annotations

import pytest

from opd.config.load import dump_recipe, load_recipe
from opd.config.watch import DEFAULT_RULES, covers, metrics_of
from opd.errors import ConfigError

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
    with pytest.raises(ConfigError, match="give teachers with positive weights"):
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
        ("{dead_groups: {above: .nan}}", "valid number"),
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
    assert covers("kl/*", "kl/math")
    assert not covers("kl/*", "kl/mean")
    assert not covers("kl/*", "kl_at/1")
    assert covers("kl/mean", "kl/mean")
    assert covers("reward/math/*", "reward/math/format")
    assert covers("odd[name]", "odd[name]")


def test_every_default_rule_is_of_a_metric_that_is_logged():
    known = list(metrics_of(["math"], ["math"]))
    for rule in DEFAULT_RULES.values():
        asked = [rule.metric, *([] if rule.also is None else [rule.also.metric])]
        assert all(any(covers(pattern, name) for name in known) for pattern in asked)
        assert rule.action == "warn"
