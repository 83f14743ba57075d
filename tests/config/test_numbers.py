"""Every number of a recipe, with values that no setting means: each is refused by a sentence naming it."""

import re
from typing import Any

import pytest
from bad_recipes import MINIMAL, numbers

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.errors import ConfigError


@pytest.fixture
def loaded(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)

    def load(key: str, value: str) -> Recipe | str:
        """The recipe with `value` at `key`, or what is said of it."""
        try:
            return load_recipe([path], [f"--{key}={value}"])
        except ConfigError as error:
            return str(error)

    return load


OTHERS = [pytest.param(value, marks=pytest.mark.long) for value in ("-1e-45", "1e300", "-.inf", "true")]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["1e-320", ".nan", *OTHERS])
def test_no_number_is_what_no_setting_means(loaded, value):
    taken = {}
    for key, form in numbers():
        said: Any = loaded(key, form.format(value))
        if not isinstance(said, str) or key.rpartition(".")[2] not in said:
            taken[key] = str(said)[:200]
    assert not taken


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "rollout.stop_ids",
            "[-1]",
            r"`rollout\.stop_ids\[0\]` is -1: input should be greater than or equal to 0",
        ),
        ("rollout.stop_ids", "[1, -100]", r"`rollout\.stop_ids\[1\]` is -100"),
        ("rollout.stop_ids", "[1.5]", "valid integer"),
        ("rollout.stop_ids", "[true]", "true"),
        ("rollout.stop", "['']", "at least 1 character"),
        ("baselines.scales", "[-0.5]", "greater than or equal to 0"),
        ("baselines.scales", "[]", "at least 1 item"),
        ("launch.trainer.custom", "{h200: -1}", "."),
        (
            "domains.sort.teacher",
            "{sort: 1e-320}",
            r"no setting can mean so little; give 0 or at least 1e-30",
        ),
        ("domains.sort.teacher", "{sort: 0}", "positive weights"),
        ("domains.sort.teacher", "{sort: -1}", "positive weights"),
        ("domains.sort.teacher", "{}", "positive weights"),
        ("domains.sort.teacher", "{sort: 1, b: 1e-9}", "'b' has less than a millionth of the weight"),
        ("domains.sort.teacher", "{sort: 1e8, b: 1}", "'b' has less than a millionth of the weight"),
        ("specialist.opd.teacher", "{sort: 1, b: 1e-9}", "less than a millionth"),
        ("specialist.opd.teacher", "{}", "positive weights"),
        ("specialist.shaping.clip", "[1, 0]", "lower bound first"),
        ("rollout.temperature", "1e-320", "rollout.temperature"),
        ("distill.optim.lr", "1e-320", "distill.optim.lr"),
    ],
)
def test_lists_and_weights_of_numbers_are_looked_at_one_by_one(loaded, key, value, said):
    found = loaded(key, value)
    assert isinstance(found, str), found
    assert re.search(said, found), found


def test_the_smallest_are_taken(loaded):
    for key, value in (
        ("domains.sort.teacher", "{sort: 1e-20}"),
        ("distill.kl_coef", "1e-12"),
        ("distill.optim.weight_decay", "0"),
        ("specialist.entropy_coef", "-0.0"),
    ):
        assert isinstance(loaded(key, value), Recipe), loaded(key, value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1e9", None),
        ("1000000001.0", "no setting can mean more than 1,000,000,000; give less"),
        ("1e-30", None),
        ("9e-31", "no setting can mean so little; give 0 or at least 1e-30"),
    ],
)
def test_the_last_numbers_that_mean_something_are_taken(loaded, value, said):
    found = loaded("distill.kl_coef", value)
    assert isinstance(found, Recipe) if said is None else said in found, found


@pytest.mark.parametrize(
    ("key", "taken", "refused"),
    [
        ("rollout.top_p", ("1", "0.01"), ("1.01", "0", "2")),
        ("rollout.temperature", ("0.001", "1000"), ("0.0009", "1001")),
        ("rollout.top_k", ("0",), ("-1",)),
        ("baselines.density", ("1", "0.001"), ("1.001", "0", "2")),
        ("distill.optim.final_lr_fraction", ("0", "1"), ("-0.1", "1.1", "2")),
        ("specialist.group_size", ("2", "4096"), ("0", "-1")),
    ],
)
def test_a_range_ends_where_it_says(loaded, key, taken, refused):
    for value in taken:
        assert isinstance(loaded(key, value), Recipe), loaded(key, value)
    for value in refused:
        assert re.search(rf"`{re.escape(key)}` is {value}", str(loaded(key, value))), loaded(key, value)
