"""Numbers as people read them."""

from __future__ import annotations

import pytest

from opd.pipelines.evaluation.statistics import Interval
from opd.pipelines.report import words
from opd.pipelines.report.charts import Axis


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1 k"), (1728, "1.73 k"), (206_976, "207 k"), (1_630_000, "1.63 M")],
)
def test_amounts_keep_three_digits(value: float, text: str) -> None:
    assert words.amount(value).replace(words.NARROW, " ") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3725, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds).replace(words.NARROW, " ") == text


def test_points_are_signed_and_zero_is_not() -> None:
    assert [words.points(v) for v in (0.149, -0.003, -0.0002)] == ["+14.9", "\u22120.3", "0.0"]
    assert words.point_bounds(Interval(0, -0.01, 0.02)) == "\u22121.0 to +2.0"


def test_axis_values() -> None:
    assert Axis().write(2.1e-7) == "2\u00d710⁻⁷"
    assert Axis().write(-0.25) == "-0.25"
    assert Axis(percent=True).write(0.125) == "12.5\u202f%"


def test_names_inside_a_sentence() -> None:
    names = ["Weight average", "TIES", "Mixed-domain GRPO (all tokens)"]
    assert words.listing([words.in_sentence(name) for name in names]) == (
        "weight average, TIES and mixed-domain GRPO on all tokens"
    )
    assert words.model_label("specialist:sort") == "Specialist, sort"
    assert words.stage_label("baseline-dare") == "DARE"
    names = ["base", "sft-sort", "specialist-a-b", "merge", "evaluate", "mine", "sft"]
    assert [words.stage_label(name) for name in names] == [
        "Base", "Demonstrations, sort", "Specialist, a-b", "Merge", "Evaluation", "mine", "sft",
    ]  # fmt: skip
