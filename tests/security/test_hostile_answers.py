"""Answers that want to hang, fill the memory or be taken for right, where no code of theirs is run."""

import json

import pytest

from opd.config.rewards import JSONSchemaReward, MathReward, RegexReward
from opd.rewards.registry import verifier_of
from opd.rewards.verifier import Answered

RIGHT = (r"\boxed{\frac{2}{4}}", "0.5")
FORMULAS = {
    "a tower": (r"\boxed{10^{10^{10}}}", "3"),
    "a tower in words": ("Answer: 10**10**10**10", "3"),
    "factorials": (r"\boxed{(((99!)!)!)!}", "3"),
    "deep fractions": (r"\boxed{" + r"\frac{1}{" * 800 + "2" + "}" * 800 + "}", "3"),
    "deep brackets": ("$" + "(" * 1900 + "1" + ")" * 1900 + "$", "2"),
    "open braces": (r"\boxed{" * 2000, "3"),
    "a long sum": (r"\boxed{" + "+".join(["x"] * 1900) + "}", "3"),
    "a long number": (r"\boxed{" + "9" * 3900 + "}", "3"),
    "a hard integral": (r"\boxed{\int_0^1 \frac{\sin(x^{x^x})}{x} dx}", "1"),
    "every number": (r"\boxed{1,2,3,4,5}", "3"),
    "not a number": (r"\boxed{\frac{0}{0}}", "3"),
    "no text": ("\0\x1b[2J\ud800", "3"),
    "code": (r"\boxed{__import__('os').system('true')}", "3"),
}


@pytest.mark.slow
def test_a_hostile_formula_is_wrong_and_the_next_answer_is_read():
    pytest.importorskip("math_verify")
    settings = MathReward(seconds=0.7)
    answers = [one for hostile in FORMULAS.values() for one in (RIGHT, hostile)]
    found = verifier_of(settings).score(settings, [Answered(*one) for one in answers])
    assert found[::2] == [1.0] * len(FORMULAS)
    assert dict(zip(FORMULAS, found[1::2], strict=True)) == dict.fromkeys(FORMULAS, 0.0)


def test_an_expression_that_goes_back_without_end_is_wrong():
    settings = RegexReward(seconds=0.3)
    evil = Answered("a" * 60 + "b", r"^(a+)+$")
    found = verifier_of(settings).score(settings, [evil, Answered("aa", r"^(a+)+$"), evil])
    assert found == [0.0, 1.0, 0.0]


def test_a_schema_fetches_nothing_and_ends():
    pytest.importorskip("jsonschema")
    settings = JSONSchemaReward(seconds=0.5)
    nested = "[" * 100_000 + "]" * 100_000
    cases = [
        ('{"a": 1}', {"$ref": "http://127.0.0.1:9/schema"}),
        ('{"a": 1}', {"$ref": "file:///etc/passwd"}),
        ('"' + "a" * 60 + 'b"', {"pattern": "^(a+)+$"}),
        (nested, {}),
        ("1" * 100_000, {"type": "integer", "multipleOf": 7}),
        ('{"a": 1}', {"$ref": "#"}),
        ("1", {"type": "number"}),
    ]
    answers = [Answered(text, json.dumps(schema)) for text, schema in cases]
    *wrong, right = verifier_of(settings).score(settings, answers)
    assert [one["reward"] for one in wrong] == [0.0] * (len(cases) - 1)
    assert right == 1.0
