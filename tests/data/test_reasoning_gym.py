"""Prompts and verifiers of reasoning-gym."""

import sys
from typing import Any

import pytest

from opd.config import DomainConfig
from opd.data.load import load_domain
from opd.errors import DataError, MissingExtraError
from opd.rollout.prompts import Domain


def _load(task: str = "chain_sum", *, seed: int = 0, **fields: Any) -> Domain:
    config = DomainConfig.model_validate({"source": f"reasoning-gym:{task}", "prompts": 100, **fields})
    return load_domain("gym", config, seed=seed, held_out_prompts=20)


@pytest.fixture
def _library() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


@pytest.mark.usefixtures("_library")
def test_questions_are_distinct_reproducible_and_verified() -> None:
    domain = _load()
    assert (len(domain.train), len(domain.held_out)) == (100, 20)
    assert len({p.key for p in [*domain.train, *domain.held_out]}) == 120
    assert domain.train == _load().train
    assert domain.train != _load(seed=1).train
    assert domain.checker is not None
    for prompt in domain.held_out:
        assert prompt.text
        assert domain.checker(f" {prompt.label['answer']}\n", prompt.label) == 1.0
        assert domain.checker("no idea", prompt.label) < 1.0


@pytest.mark.usefixtures("_library")
def test_with_full_marks_a_nearly_right_answer_is_wrong() -> None:
    for full_marks in (False, True):
        domain = _load("spell_backward", params={"min_word_len": 9, "full_marks": full_marks})
        prompt = domain.held_out[0]
        assert domain.checker is not None
        assert domain.checker(prompt.label["answer"], prompt.label) == 1.0
        assert (domain.checker(prompt.label["answer"] + "a", prompt.label) > 0.5) is not full_marks


@pytest.mark.usefixtures("_library")
def test_params_reach_the_task_and_chat_asks_as_a_user() -> None:
    domain = _load(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "chat": True})
    prompt = domain.train[0]
    assert prompt.text is None
    assert prompt.messages is not None
    assert prompt.messages[0]["role"] == "user"
    assert sum(prompt.messages[0]["content"].count(sign) for sign in "+-") <= 3


@pytest.mark.usefixtures("_library")
def test_a_task_with_few_questions_gives_what_it_has() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    domain = _load(params=params, prompts=5000)
    assert 50 < len(domain.train) < 400


@pytest.mark.usefixtures("_library")
def test_bad_tasks_and_params_are_one_sentence() -> None:
    with pytest.raises(DataError, match="did you mean chain_sum"):
        _load("chain_sun")
    with pytest.raises(DataError, match=r"domains\.gym\.params do not fit"):
        _load(params={"terms": 3})


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"opd\[reasoning-gym\]"):
        _load()
