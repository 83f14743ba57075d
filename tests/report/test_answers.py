"""Answers side by side: the right ones of the right kind, whatever the models wrote."""

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.pipelines.evaluation.measure import (
    CHARACTERS,
    KINDS,
    PROMPTS,
    SHOWN,
    length_quantiles,
    select_answers,
    side_by_side,
)
from opd.pipelines.report.page import draw_template
from opd.pipelines.report.results import Run
from opd.types import Sample, Status

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
RIGHTS = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=40)


def told(number: int, right: bool, text: str = "answer") -> dict:
    return {"uid": f"{number}", "prompt": "p", "label": "l", "text": text, "right": right, "cut": False}


def page_of(found: dict) -> str:
    return draw_template("answers.html", run=Run("r", {}, list(found), [], {}, [], {}, {}, {}, answers=found))


@given(rights=RIGHTS, base=st.booleans(), teacher=st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_kind_is_counted_and_each_example_is_of_its_kind(rights, base: bool, teacher: bool) -> None:
    sides = {"merged": 2} | ({"base": 0} if base else {}) | ({"specialist:d": 1} if teacher else {})
    kept = {m: {"d": [told(i, row[side]) for i, row in enumerate(rights)]} for m, side in sides.items()}
    found = side_by_side(kept, ["d", "empty"], {"d": "specialist:d"})
    assert list(found) == (["d"] if rights else [])
    if not rights:
        return
    rule = {
        "wins": lambda b, t, m: base and m and not b,
        "losses": lambda b, t, m: teacher and t and not m,
        "regressions": lambda b, t, m: base and b and not m,
    }
    seen = 0
    for kind in KINDS:
        assert found["d"][kind]["count"] == sum(bool(rule[kind](*row)) for row in rights)
        assert len(found["d"][kind]["shown"]) <= SHOWN
        for row in found["d"][kind]["shown"]:
            b, t, m = (row[side]["right"] if row[side] else False for side in ("base", "teacher", "merged"))
            assert rule[kind](b, t, m)
            seen += 1
    assert page_of(found).count('<dl class="answer">') == seen
    assert f"{len(rights)} held-out prompts" in page_of(found)


@given(prompt=TEXTS, label=TEXTS, text=TEXTS)
@settings(deadline=None, max_examples=60)
def test_what_models_write_cannot_become_markup(prompt: str, label: str, text: str) -> None:
    bad = "<script>alert('&')</script>"
    row = {"prompt": prompt + bad, "label": label + bad}
    row |= {side: {"text": text + bad, "right": False, "cut": True} for side in ("base", "teacher", "merged")}
    kind = {"count": 1, "shown": [row]}
    page = page_of({bad: {"compared": 1, "wins": kind, "losses": kind, "regressions": kind}})
    tags = {"section", "h2", "h3", "h4", "div", "p", "dl", "dt", "dd", "span", "i"}
    assert set(re.findall(r"</?(\w+)", page)) <= tags
    assert page.count("&lt;script&gt;") >= 5


@given(number=st.integers(1, 400), each=st.integers(1, 3), length=st.integers(1, 3000))
@settings(deadline=None, max_examples=20)
def test_what_is_kept_is_bounded(number: int, each: int, length: int) -> None:
    samples = [
        Sample(
            f"{n}/{k}", f"{n}", "d", np.zeros(1, np.int32), label={"a": "x" * length}, reward=float(k == 0),
            response_ids=np.zeros(n % 7 + 1, np.int32), loss_mask=np.ones(n % 7 + 1, bool),
            status=Status.COMPLETED,
            metadata={"messages": [{"role": "user", "content": "y" * length}]},
        )
        for n in range(number)
        for k in range(each)
    ]  # fmt: skip
    kept = select_answers(
        samples, lambda sample: sample.uid * length, lambda sample: (sample.reward or 0.0) > 0.5
    )
    assert [answer["uid"] for answer in kept] == [f"{n}" for n in range(min(number, PROMPTS))]
    assert all(answer["right"] for answer in kept), "the first of each prompt's answers"
    assert all(len(a[key]) <= CHARACTERS + 2 for a in kept for key in ("prompt", "label", "text"))
    assert all(answer["prompt"].startswith("user: y") for answer in kept)
    found = length_quantiles(samples)
    assert 1 <= found["p10"] <= found["p50"] <= found["p90"] <= found["max"] == min(7, number)
