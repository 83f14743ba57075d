"""Procedural tasks: rules against independent definitions, shares of demonstrations, disjoint splits."""

import sys
import types
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.config import DomainConfig
from opd.data.load import load_domain
from opd.data.procedural import ALPHABET, TASKS, DigitTask, register
from opd.errors import DataError
from opd.rollout.prompts import Domain, Prompt

digit_strings = st.text("0123456789", min_size=2, max_size=12)

# Worked out by hand for 31415926.
RIGHT_AND_WRONG = {
    "sort": ("11234569", "96543211"),
    "reverse": ("62951413", "31415926"),
    "add3": ("64748259", "53637148"),
    "rotate": ("41592631", "14159263"),
    "complement": ("68584073", "79695184"),
    "swap_halves": ("59263141", "13149562"),
    "parity": ("11011100", "00001101"),
    "running_sum": ("34894351", "34556418"),
    "unique": ("3145926", "31415926"),
}


def _load(source: str = "procedural:sort", *, seed: int = 0, held_out: int = 50, **fields: object) -> Domain:
    config = DomainConfig.model_validate({"source": source, "prompts": 300, **fields})
    return load_domain("d", config, seed=seed, held_out_prompts=held_out)


def test_every_task_is_in_the_table() -> None:
    ours = {name for name, task in TASKS.items() if task.__module__.startswith("opd.")}  # examples add others
    assert set(RIGHT_AND_WRONG) == ours


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
def test_rules_on_a_known_string(name: str) -> None:
    task = TASKS[name]()
    assert (task.right("31415926"), task.wrong_rule("31415926")) == RIGHT_AND_WRONG[name]
    assert task.prompt("31415926") == f"<{name}>31415926="
    assert task.digits(task.prompt("31415926")) == "31415926"


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
@given(digits=digit_strings, seed=st.integers(0, 2**32 - 1))
def test_answers_stay_in_the_alphabet_and_corruption_is_never_right(
    name: str, digits: str, seed: int
) -> None:
    task = TASKS[name]()
    right = task.right(digits)
    corrupted = task.corrupt(right, np.random.default_rng(seed))
    for answer in (right, task.wrong_rule(digits), corrupted):
        assert set(answer) <= set(ALPHABET) - {"="}
        assert answer
    changed = sum(a != b for a, b in zip(corrupted, right, strict=True))
    assert 1 <= changed <= 3


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
def test_the_wrong_rule_is_wrong_on_most_prompts(name: str) -> None:
    domain = _load(f"procedural:{name}")
    task = TASKS[name]()
    wrong = [task.wrong_rule(task.digits(p.text or "")) != p.label for p in domain.train]
    assert np.mean(wrong) > 0.5


def test_checker_is_exact() -> None:
    domain = _load()
    assert domain.checker is not None
    assert domain.checker("11234569", "11234569") == 1.0
    for wrong in ("", "1123456", "11234569 ", "112345699", "96543211"):
        assert domain.checker(wrong, "11234569") == 0.0


def test_demonstrations_have_the_asked_shares() -> None:
    domain = _load(held_out=0)
    task = TASKS["sort"]()
    assert domain.demonstrations is not None
    rng = np.random.default_rng(0)
    prompts = [p.text or "" for p in domain.train] * 10
    answers = [(p, domain.demonstrations(p, rng, 0.30, 0.45)) for p in prompts]
    right = np.mean([a == task.right(task.digits(p)) for p, a in answers])
    wrong = np.mean([a == task.wrong_rule(task.digits(p)) for p, a in answers])
    assert abs(right - 0.30) < 0.03  # 3.6 standard deviations of 3,000 draws
    assert abs(wrong - 0.45) < 0.03
    again = np.random.default_rng(0)
    assert answers == [(p, domain.demonstrations(p, again, 0.30, 0.45)) for p in prompts]


def test_domain_is_reproducible_distinct_and_tagged() -> None:
    domain, again, other = _load(), _load(), _load(seed=1)
    assert (domain.train, domain.held_out) == (again.train, again.held_out)
    assert domain.train != other.train
    keys = [prompt.key for prompt in [*domain.train, *domain.held_out]]
    assert len(set(keys)) == len(keys) == 350
    assert all(p.text and len(p.text) == len("<sort>31415926=") for p in domain.train)
    assert all(p.label == "".join(sorted((p.text or "")[6:14])) for p in domain.held_out)
    assert (domain.alphabet, domain.tags) == ("0123456789=", ["<sort>"])


def test_held_out_strings_are_never_trained_on_by_any_task_or_seed() -> None:
    def strings(prompts: Sequence[Prompt]) -> set[str]:
        return {(prompt.text or "").partition(">")[2] for prompt in prompts}

    sort = [_load("procedural:sort", seed=s, params={"digits": 3}, prompts=500, held_out=40) for s in (0, 1)]
    reverse = [
        _load("procedural:reverse", seed=s, params={"digits": 3}, prompts=500, held_out=40) for s in (0, 1)
    ]
    trained = set().union(*(strings(domain.train) for domain in sort + reverse))
    held_out = set().union(*(strings(domain.held_out) for domain in sort + reverse))
    assert trained.isdisjoint(held_out)
    assert strings(_load("procedural:sort").train) == strings(_load("procedural:reverse").train)


@pytest.mark.parametrize(
    ("source", "params", "told"),
    [
        ("procedural:srot", {}, "did you mean sort"),
        ("procedural:quicksand", {}, "there is no procedural task 'quicksand'; there are add3"),
        ("procedural:sort", {"digit": 8}, "unknown parameter 'digit'"),
        ("procedural:sort", {"digits": 1}, "whole number from 2 to 18"),
        ("procedural:sort", {"digits": "8"}, "whole number"),
        ("procedural:sort", {"digits": 2}, "with 2 digits there are"),
        ("procedural:no.such.module:Task", {}, "cannot be loaded"),
        ("procedural:opd.rollout.prompts:Domain", {}, "is no DigitTask"),
    ],
)
def test_bad_tasks_and_parameters_are_one_sentence(source: str, params: dict, told: str) -> None:
    with pytest.raises(DataError, match=told):
        _load(source, params=params)


class Same(DigitTask):
    """A task of a user's own."""

    name = "same"

    def right(self, digits: str) -> str:
        return digits

    def wrong_rule(self, digits: str) -> str:
        return digits[::-1]


def test_a_task_of_ones_own_by_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_tasks_for_this_test")
    module.Same = Same  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    domain = _load("procedural:own_tasks_for_this_test:Same")
    assert domain.tags == ["<same>"]
    assert all(p.text == f"<same>{p.label}=" for p in domain.train)


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register("sort")(Same)
    assert TASKS["sort"] is not Same
