"""Built-in rewards in a recipe: short and long forms, what is refused, what the doctor says."""

import json

import pytest
import yaml
from recipes import tiny_recipe, write_recipe

from opd.config.load import dump_recipe, load_recipe
from opd.config.rewards import VERIFIERS, FunctionReward, MathReward, PythonReward
from opd.errors import ConfigError
from opd.pipelines.check.domains import check_domains, check_rewards, check_sandbox
from opd.rewards.registry import reward_sandboxes, verifier_of
from opd.rewards.verifier import Verifier
from opd.sandbox import answers
from opd.sandbox.substrates import Substrate

SORT = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}


def sorting(reward):
    return tiny_recipe(domains={"sort": SORT | {"reward": reward}})


def test_each_name_has_a_file():
    for name in VERIFIERS:
        own = {"urls": ["http://127.0.0.1:9/v1"]} if name in ("judge", "scorer") else {}
        settings = sorting({"type": name} | own).domains["sort"].reward
        assert settings.type == name
        assert isinstance(verifier_of(settings), Verifier)


def test_short_and_long_forms_are_one_and_come_back_from_a_file(tmp_path):
    assert sorting("math") == sorting({"type": "math"})
    assert sorting("math").domains["sort"].reward == MathReward()
    assert sorting("a.b:c").domains["sort"].reward == FunctionReward(path="a.b:c")
    assert sorting({"type": "exact", "extract": "boxed"}) == sorting({"type": "exact", "extract": ["boxed"]})
    path = write_recipe(tmp_path / "recipe.yaml", domains={"sort": SORT | {"reward": "a.b:c"}})
    for words in (
        [],
        ["--domains.sort.reward", "math"],
        ["--domains.sort.reward", "{type: python, seconds: 2}"],
    ):
        recipe = load_recipe([path], words)
        dumped = tmp_path / "dumped.yaml"
        dumped.write_text(dump_recipe(recipe))
        assert load_recipe([dumped]) == recipe
    assert recipe.domains["sort"].reward == PythonReward(seconds=2)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("maths", "'maths' is no reward: give package.module:function, or one of math, choice, exact, f1,"),
        ("maths", "did you mean 'math'?"),
        ({"type": "pyton"}, "`domains.sort.reward.type` is 'pyton', but must be one of function, math,"),
        ({"type": "pyton"}, "did you mean 'python'?"),
        ({"extract": "boxed"}, "`domains.sort.reward.type` is missing"),
        ({"type": "math", "extrakt": "boxed"}, "did you mean `domains.sort.reward.extract`?"),
        ({"type": "math", "extract": "box"}, "must be one of whole, boxed, answer"),
        ({"type": "math", "extract": []}, "domains.sort.reward.extract"),
        ({"type": "regex", "pattern": "("}, "is no regular expression"),
        ({"type": "python", "sandbox": "docker"}, "must be one of auto, bubblewrap, landlock, limits"),
        ({"type": "python", "memory_mb": 1}, "domains.sort.reward.memory_mb"),
        ({"type": "choice", "choices": 1}, "domains.sort.reward.choices"),
        ("judge", "`domains.sort.reward.urls` is missing"),
        ({"type": "judge", "urls": []}, "domains.sort.reward.urls"),
        ({"type": "judge", "urls": ["127.0.0.1:80"]}, "a URL of a reward is http://HOST:PORT/PATH"),
        ({"type": "scorer", "urls": ["file:///etc/passwd"]}, "a URL of a reward is http://HOST:PORT/PATH"),
        ({"type": "scorer", "urls": ["http://h/x?a=b"]}, "a URL of a reward is http://HOST:PORT/PATH"),
        ({"type": "judge", "urls": ["http://h"], "template": "{prompt}"}, "says the same of every answer"),
        (
            {"type": "judge", "urls": ["http://h"], "template": "{answer} {promt}"},
            "{promt} is no place of a template; did you mean {prompt}?",
        ),
        (
            {"type": "judge", "urls": ["http://h"], "range": [1, 1]},
            "a range is the lowest number and a higher",
        ),
        ({"type": "judge", "urls": ["http://h"], "pattern": "("}, "is no regular expression"),
        ({"type": "judge", "urls": ["http://h"], "request": {"n": 2}}, "n is set by opd"),
        ({"type": "judge", "urls": ["http://h"], "unreadable": ".nan"}, "domains.sort.reward.unreadable"),
        ({"type": "scorer", "urls": ["http://h"], "api": "tgi"}, "must be one of plain, sglang, vllm"),
        ({"type": "scorer", "urls": ["http://h"], "batch": 0}, "domains.sort.reward.batch"),
        (7, "domains.sort.reward"),
    ],
)
def test_what_is_no_reward_is_one_sentence_that_names_the_known(tmp_path, reward, told):
    path = write_recipe(tmp_path / "recipe.yaml", domains={"sort": SORT})
    written = yaml.safe_load(path.read_text())
    written["domains"]["sort"]["reward"] = reward
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError) as caught:
        load_recipe([path])
    assert told in str(caught.value)
    assert "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_doctor_calls_it_on_samples():
    recipe, loaded = sorting("exact"), {}
    (found,) = check_domains(recipe, loaded)
    assert (found.level, found.detail) == ("ok", "procedural:sort, scored by exact")
    (found,) = check_rewards(recipe, loaded)
    assert (found.level, found.detail) == ("ok", "0 for an empty answer, 0 for '0', 1 for its label")


@pytest.mark.parametrize("label", [None, "Z"])
def test_the_doctor_names_the_row_of_a_label_that_cannot_be_used(tmp_path, label):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"q{i}", "label": "A" if i else label}) for i in range(40))
    )
    domain = {"source": str(path), "reward": "choice"}
    recipe = tiny_recipe(domains={"sort": domain}, base=None, model={"path": "/base"})
    (found,) = check_domains(recipe, {})
    assert found.level == "error"
    assert "data.jsonl:1: the label, which domains.sort.reward choice needs, is " in found.detail


def test_the_doctor_says_which_sandbox_works(monkeypatch):
    recipe = sorting("python")
    assert check_sandbox(sorting("exact")) == []
    best = answers.find_sandbox()
    (found,) = check_sandbox(recipe)
    assert found.level == ("warning" if best.allowed_attempts else "ok")
    assert found.detail.startswith(best.name)
    assert reward_sandboxes(recipe.domains) == {"sort": best.name}
    weak = Substrate("limits", {"processes": True, "reading": False, "writing": False})
    monkeypatch.setattr(answers, "find_sandbox", lambda wanted: weak)
    (found,) = check_sandbox(recipe)
    assert found.level == "warning"
    assert "does not keep answers' code from reading and writing" in found.detail
