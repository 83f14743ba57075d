"""Labels as spreadsheets, Parquet and libraries make them, and answers as models write them."""

import datetime
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from opd.config import DomainConfig
from opd.data.load import load_domain, prompt_of
from opd.errors import DataError
from opd.rewards.registry import check_labels, own_reward, reward_of
from opd.rollout.prompts import Prompt, plain_label
from opd.rollout.rewards import RewardSample

PLAIN = [
    (4.0, 4),
    (-2.0, -2),
    (0.5, 0.5),
    (5e-05, 5e-05),
    (1e300, 1e300),
    (float("nan"), None),
    (Decimal("4.00"), 4),
    (Decimal("4.5"), 4.5),
    (Decimal("12345678901234567890"), 12345678901234567890),
    (Decimal("NaN"), None),
    (np.int64(3), 3),
    (np.float32(4.0), 4),
    (np.float64("nan"), None),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array([1.0, 2.0]), [1, 2]),
    ((1.0, "a"), [1, "a"]),
    ([4.0, [2.5]], [4, [2.5]]),
    (b"4", "4"),
    (b"\xff", b"\xff"),
    (True, True),
    ("4.0", "4.0"),
    ({"tests": ["x"]}, {"tests": ["x"]}),
    (None, None),
]


@pytest.mark.parametrize(("made", "meant"), PLAIN, ids=map(repr, range(len(PLAIN))))
def test_a_label_is_what_its_column_meant(made, meant):
    found = plain_label(made)
    assert found == meant
    assert type(found) is type(meant)
    assert Prompt.from_content("q", made, "d").label == meant


SQUAD = {"type": "exact", "normalise": "squad"}
NUMBER = {"type": "exact", "extract": "number"}
GROUP = {"type": "regex", "pattern": r"x=(?P<answer>\S+)"}
RIGHT = [
    *[("choice", text, 2.0, 1) for text in ("C", "(C)", "C.", "**C**", "Option C", "Choice C", "OPTION C")],
    *[("choice", text, "C", 1) for text in ("option (C)", "The correct option is C.", "choice: c", "C)")],
    *[("choice", rf"\boxed{{{text}}}", "C", 1) for text in (r"\text{C}", r"\textbf{(C)}\ 12", r"\bf C")],
    *[("choice", rf"\boxed{{{text}}}", "C", 1) for text in (r"\text{Option C}", r"\mathrm{C}", "C")],
    *[("choice", "C", label, 1) for label in ("Option C", "Choice C", "(C)", "C.", r"\boxed{\text{C}}")],
    *[("choice", "C", label, 1) for label in ("c", "**C**", "The answer is C", "2", "2.0", 2, "$C$")],
    *[("choice", "B", label, 0) for label in ("Option C", 2.0, "2.0", "(C)")],
    *[("choice", text, "C", 0) for text in ("Option B", "Optional C", "Cat", "")],
    *[("exact", text, 4.0, 1) for text in ("4", "4.0", "04.00", "4e0")],
    *[("exact", text, 4.0, 0) for text in ("5", "four", "40", "")],
    *[("exact", text, 5e-05, 1) for text in ("0.00005", "5e-05", "5e-5", ".00005")],
    *[("exact", text, 1234567, 1) for text in ("1234567", "1,234,567", "1234567.0")],
    *[("exact", "4", label, 1) for label in ("4.0", [4.0, "four"], Decimal("4.00"), np.int64(4), b"4")],
    *[("exact", "1234", label, 1) for label in ("1,234", "1,234.0", 1234.0)],
    *[("exact", "7", label, 0) for label in ("007", "7.5", "7a")],
    ("exact", "4.1", "4.10", 0),
    (NUMBER, "it is 1,234.", "1,234", 1),
    (NUMBER, "so 4 apples", 4.0, 1),
    (SQUAD, "the 4.", 4.0, 1),
    ("f1", "4", 4.0, 1),
    (GROUP, "x=4", 4.0, 1),
    (GROUP, "x=4.0", 4.0, 1),
    (GROUP, "x=0.00005", 5e-05, 1),
    (GROUP, "x=5", 4.0, 0),
]  # fmt: skip
MATH = [
    *[(rf"\boxed{{{text}}}", 4.0, 1) for text in ("4", "4.0", r"\frac{8}{2}", "5")[:3]],
    (r"\boxed{5}", 4.0, 0),
    *[
        (rf"\boxed{{{text}}}", 5e-05, 1)
        for text in ("5e-05", "0.00005", r"5 \times 10^{-5}", "5e-5", "5E-05")
    ],
    *[(rf"\boxed{{{text}}}", "5e-05", 1) for text in ("5e-05", "0.00005", "$5e-05$")],
    *[(rf"\boxed{{{text}}}", 5e-05, 0) for text in ("-5e-05", "5e+05", "0.5", "5e-04")],
    ("The answer is 5e-05.", 5e-05, 1),
    ("It is $5e-05$", 0.00005, 1),
    (r"\boxed{1e+20}", 1e20, 1),
    (r"\boxed{1{,}234}", "1,234", 1),
    (r"\boxed{1234}", "1,234", 1),
    (r"\boxed{1234}", "1_234", 1),
    (r"\boxed{1_234}", 1234.0, 1),
    (r"\boxed{2e-1}", "2e-1", 1),
    (r"\boxed{2e - 1}", "2e-1", 1),
    (r"\boxed{4}", Decimal("4.00"), 1),
    (r"\boxed{4}", np.float32(4), 1),
    (r"\boxed{4}", b"4", 1),
    (r"\boxed{0.5}", 0.5, 1),
]


def scored(reward: Any, text: str, label: Any) -> float:
    config = DomainConfig.model_validate({"source": "x.jsonl", "reward": reward})
    prompt = Prompt.from_content("q", label, "d", where="x.jsonl:1")
    check_labels(config, "d", [prompt])
    function = own_reward(config)
    assert function is not None
    (score,) = function.call([RewardSample("u", text, "q", prompt.label, "d")])
    return score


@pytest.mark.parametrize(("reward", "text", "label", "worth"), RIGHT)
def test_rewards_are_right_on_what_tables_make_of_labels(reward, text, label, worth):
    assert scored(reward, text, label) == worth


@pytest.mark.parametrize(("text", "label", "worth"), MATH)
def test_numbers_are_equal_however_they_are_written(text, label, worth):
    pytest.importorskip("math_verify")
    assert scored("math", text, label) == worth


@pytest.mark.parametrize(
    ("reward", "label", "said"),
    [
        *[(kind, label, "is missing") for kind in ("choice", "exact", "f1", "regex", "python", "math")
          for label in (None, float("nan"), "nan", "NaN", "<NA>", np.float64("nan"), Decimal("NaN"))],
        *[("math", label, "no formula") for label in ("None", "null")],
        *[(kind, float("inf"), "give a number that is finite") for kind in ("exact", "f1", "math")],
        *[(kind, True, "is a bool") for kind in ("exact", "f1", "math")],
        ("math", 4e-07, "is 0.0000004, which is 0 to 6 places; raise the reward's digits"),
        ("math", "4e-07", "which is 0 to 6 places"),
        *[("choice", label, "give a letter from A to J")
          for label in (True, 2.5, -1.0, 10.0, "Paris", "A dog", "CC", "", "Option")],
        ("math", b"\xff", "is a bytes"),
        ("exact", [float("nan")], "is a NoneType"),
    ],
)  # fmt: skip
def test_labels_that_are_none_are_named_with_their_row(reward, label, said):
    config = DomainConfig.model_validate({"source": "x.jsonl", "reward": reward})
    with pytest.raises(DataError, match=rf"x\.jsonl:7: the label, .*{said}"):
        check_labels(config, "d", [Prompt.from_content("q", label, "d", where="x.jsonl:7")])


def test_what_is_nothing_of_json_is_named_with_its_row():
    for label in (datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2), b"\xff", {"a": {1}}):
        with pytest.raises(DataError, match=r"a\.parquet: row 3: its `label` is .*; write it as a text"):
            prompt_of("a.parquet: row 3", {"prompt": "q", "label": label}, "d")


def test_a_column_of_numbers_with_a_gap_is_told_and_else_right(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path, rows = tmp_path / "a.parquet", [{"prompt": f"q{i}", "label": float(i % 4)} for i in range(40)]

    def opened():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        config = DomainConfig.model_validate({"source": str(path), "reward": "choice"})
        loaded = load_domain("d", config, seed=0, held_out_prompts=9)
        return loaded, reward_of(config, loaded)

    loaded, function = opened()
    samples = [RewardSample("u", "Answer: C", "q", one.label, "d") for one in loaded.train]
    assert function.call(samples) == [float(one.label == 2) for one in loaded.train]
    assert json.dumps([one.label for one in loaded.train]).count(".") == 0
    rows[11]["label"] = None
    with pytest.raises(DataError, match=r"a\.parquet: row 12: the label, .* is missing"):
        opened()
