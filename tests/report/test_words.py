"""Numbers as people read them."""

import pytest

from opd.pipelines.evaluation.statistics import Interval
from opd.pipelines.report import display_text
from opd.pipelines.report.charts import Axis


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1 k"), (1728, "1.73 k"), (206_976, "207 k"), (1_630_000, "1.63 M")],
)
def test_amounts_keep_three_digits(value: float, text: str) -> None:
    assert display_text.amount(value).replace(display_text.NARROW, " ") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3725, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert display_text.format_duration(seconds).replace(display_text.NARROW, " ") == text


def test_points_are_signed_and_zero_is_not() -> None:
    assert [display_text.points(v) for v in (0.149, -0.003, -0.0002)] == ["+14.9", "\u22120.3", "0.0"]
    assert display_text.point_bounds(Interval(0, -0.01, 0.02)) == "\u22121.0 to +2.0"


def test_axis_values() -> None:
    assert Axis().format_value(2.1e-7) == "2\u00d710⁻⁷"
    assert Axis().format_value(-0.25) == "-0.25"
    assert Axis(percent=True).format_value(0.125) == "12.5\u202f%"


def test_names_inside_a_sentence() -> None:
    names = ["Weight average", "TIES", "Mixed-domain GRPO (all tokens)"]
    assert display_text.join_items([display_text.lower_label(name) for name in names]) == (
        "weight average, TIES and mixed-domain GRPO on all tokens"
    )
    assert display_text.model_label("specialist:sort") == "Specialist, sort"
    assert display_text.stage_label("baseline-dare") == "DARE"
    names = ["base", "sft-sort", "specialist-a-b", "merge", "evaluate", "mine", "sft"]
    assert [display_text.stage_label(name) for name in names] == [
        "Base", "Demonstrations, sort", "Specialist, a-b", "Merge", "Evaluation", "mine", "sft",
    ]  # fmt: skip
