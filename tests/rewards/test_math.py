"""`reward: math` on what people, models and tables type: signs, mixed numbers, units, two answers at once."""

# ruff: noqa: RUF001

from __future__ import annotations

import pytest

from opd.config.rewards import MathReward
from opd.rewards import math_reward
from opd.rewards.formulas import as_latex, measured, other_units
from opd.rewards.verifier import Answered

RIGHT = [
    ("3 1/2", "7/2"),
    (r"\boxed{3 1/2}", "7/2"),
    ("7/2", "3 1/2"),
    ("-3 1/2", "-7/2"),
    (r"\boxed{-3 1/2}", "-7/2"),
    (r"\boxed{3\frac12}", "3.5"),
    (r"\boxed{3\tfrac{1}{2}}", "3.5"),
    (r"\boxed{3 \frac{1}{2}}", "3.5"),
    ("√2", r"\sqrt{2}"),
    ("Answer: √2", r"\sqrt{2}"),
    ("The value is √2.", r"\sqrt{2}"),
    (r"\boxed{\sqrt{2}}", "√2"),
    (r"\boxed{\sqrt2}", "√2"),
    (r"\boxed{2√3}", r"2\sqrt{3}"),
    (r"\boxed{√(2)/2}", r"\frac{\sqrt2}{2}"),
    ("sqrt(2)", r"\sqrt{2}"),
    ("π", "pi"),
    (r"\boxed{\pi}", "pi"),
    (r"\boxed{pi}", r"\pi"),
    (r"\boxed{2pi/3}", "2π/3"),
    ("Answer: 2π", r"2\pi"),
    ("2**3", "8"),
    ("8", "2**3"),
    (r"\boxed{2**3}", "8"),
    (r"\boxed{2**10}", "1024"),
    (r"\boxed{2**-1}", "1/2"),
    ("答案：42。", "42"),
    ("答案是42。", "42"),
    ("答案：42。因为它是对的", "42"),
    (r"答案：\boxed{42}。", "42"),
    (r"\boxed{４２}", "42"),
    ("答案：４２", "42"),
    (r"\boxed{5 cm}", "5"),
    (r"\boxed{5}", "5 cm"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5 cm^2}", "5"),
    (r"\boxed{5 \text{ cm}^2}", "5"),
    (r"\boxed{5 m/s}", "5"),
    (r"\boxed{60 \text{ km/h}}", "60 km/h"),
    (r"\boxed{5 meters}", "5 m"),
    (r"\boxed{\$5}", "5"),
    ("$5", "5"),
    ("Answer: $5", "5"),
    (r"\boxed{5}", "$5"),
    (r"\boxed{5 dollars}", r"\$5"),
    (r"\boxed{€5}", "5"),
    (r"\boxed{5€}", "5"),
    (r"\boxed{5\%}", "5"),
    (r"\boxed{5%}", "5"),
    (r"\boxed{5\%}", "0.05"),
    (r"\boxed{50%}", "0.5"),
    (r"\boxed{5}", "5%"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{1 234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1'234'567}", "1234567"),
    (r"\boxed{1234}", "1 234"),
    (r"\boxed{\text{42}}", "42"),
    (r"\boxed{\text{yes}}", "yes"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{\dfrac12}", "1/2"),
    (r"\boxed{½}", "1/2"),
    (r"\boxed{3½}", "7/2"),
    (r"\boxed{2³}", "8"),
    (r"\boxed{x²}", "x^2"),
    (r"\boxed{90°}", "90"),
    (r"\boxed{90^\circ}", "90°"),
    (r"\boxed{5 apples}", "5"),
    (r"\boxed{\infty}", "∞"),
    (r"\boxed{∞}", r"\infty"),
    (r"\boxed{5.}", "5"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{\log_{10} 100}", "2"),
    (r"\boxed{|{-5}|}", "5"),
    (r"\boxed{1} or \boxed{2}", "1, 2"),
    ("x = 1 or x = 2", r"\{1,2\}"),
    ("\\boxed{42}\n\\boxed{42}", "42"),
    (r"First \boxed{3}, and then the answer \boxed{4}", "4"),
    (r"\boxed{x \leq 5}", "x≤5"),
    (r"\boxed{6 \cdot 7}", "42"),
    (r"\boxed{\begin{pmatrix}1 \\ 2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("It is 5 km away", "5"),
    ("so the total is 1,234 dollars", "1234"),
    (r"\boxed{1.5×10³}", "1500"),
    (r"\boxed{3.0}", 3),
    (r"\boxed{5 \mathrm{m}}", "5"),
    (r"\boxed{[1,2)}", "[1,2)"),
    (r"\boxed{(-\infty, 2]}", "(−∞, 2]"),
    (r"\boxed{5 million}", "5000000"),
    ("5000", "5 thousand dollars"),
    (r"\boxed{5 x}", "5x"),
    (r"\boxed{|x|}", "|x|"),
    ("Is it 1 or 2? It is 2", "2"),
    ("2 and 3 make 5", "5"),
    (r"\boxed{ln(e)}", "1"),
    (r"\boxed{5 and 6}", "5, 6"),
    (r"\boxed{50%}", "50"),
    (r"\boxed{5 kilometers}", "5 km"),
    (r"\boxed{10 000 000}", "10000000"),
    ("5 or 6", "5 or 6"),
]  # fmt: skip
RIGHT += [
    ("The answer is 18 dollars per day.", "18"),
    ("The answer is therefore 15", "15"),
    ("Answer: Tom has 15 apples.", "15"),
    ("The answer is 15 ✓", "15"),
    ("The answer is equal to 15.", "15"),
    (r"\boxed{15 dollars per day}", "15"),
    (r"\boxed{\text{15 apples}}", "15"),
    ("Answer: 1,234 people", "1234"),
    ("Answer: it is -5 degrees outside", "-5"),
    ("Answer: 1/2 of the cake", "0.5"),
    ("Answer: $18 for each of them", "18"),
    ("Answer: 15% of students", "15%"),
]
RIGHT += [
    ("The answer is 64 (sixty four).", "64"),
    ("The answer is `15`", "15"),
    ("Answer: <b>15</b>", "15"),
    ("Answer: 15<|im_end|>", "15"),
    ("<answer>The answer is 6.</answer>", "6"),
    ("Answer: 15;", "15"),
    ("Answer: 6 miles per hour", "6"),
    ("Final answer: 15 apples left", "15"),
]
WRONG = [
    (r"\boxed{5 \& 6}", "6"),
    ("The answer is at least 15.", "15"),
    ("The answer is not 15 apples.", "15"),
    ("Answer: Tom has 15 or 16 apples.", "15"),
    ("Answer: half of 15 apples", "15"),
    ("Answer: 15 people in 2020", "15"),
    ("Answer: on the 15th day", "15"),
    ("Answer: room B15 there", "15"),
    ("Answer: less than 15 apples", "15"),
    ("Answer: 15 metres long", "15 km"),
    (r"\boxed{\text{15 apples and 3 pears}}", "15"),
    (r"\boxed{\text{fifteen}}", "15"),
    ("3 1/2", "31/2"),
    (r"\boxed{3 1/2}", "3/2"),
    (r"\boxed{2**3}", "6"),
    (r"\boxed{√2}", "2"),
    ("√2", "2"),
    ("2π", "2"),
    ("π", "3.14159"),
    ("1 or 2", "2"),
    ("1 or 2", "1"),
    (r"\boxed{1 or 2}", "1"),
    (r"\boxed{1} and \boxed{2}", "2"),
    (r"\boxed{1} or \boxed{2}", "2"),
    ("\\boxed{1}\n\n\\boxed{2}", "2"),
    (r"\boxed{1}, \boxed{2}", "2"),
    (r"\boxed{5 cm}", "5 m"),
    (r"\boxed{5\%}", "500"),
    ("1.5 or 2", "1.5"),
    (r"\boxed{≤ 5}", "5"),
    (r"\boxed{1 (or 2)}", "2"),
    (r"\boxed{1 \text{ (or } 2)}", "2"),
    (r"\boxed{1 (\text{or } 2)}", "2"),
    ("-3 1/2", "-2.5"),
    (r"\boxed{-3 1/2}", "-5/2"),
    (r"\boxed{8 2}", "10"),
    (r"\boxed{3 5/2}", "11/2"),
    ("Answer: 1, 2", "2"),
    ("The answer is 1 or 2.", "2"),
    ("The answer is 1 or maybe 2.", "2"),
    ("so 3 or 4", "4"),
    (r"\boxed{5 m^2}", "5 m"),
    (r"\boxed{8²}", "82"),
    (r"\boxed{3½}", "31/2"),
    ("答案：42或43。", "43"),
    (r"\boxed{1 234}", "235"),
    ("The value is √2.", "2"),
    (r"\boxed{5 million}", "5"),
    (r"\boxed{5 \text{ hundred}}", "5"),
    (r"\boxed{7 mod 3}", "7"),
    (r"\boxed{1 | 2}", "2"),
    (r"\boxed{1; 2}", "2"),
    (r"\boxed{1 \\ 2}", "2"),
    (r"\boxed{1 vs 2}", "2"),
    (r"\boxed{\pm 2}", "2"),
    (r"\boxed{1 \quad 2}", "2"),
    (r"\boxed{<5}", "5"),
    (r"\boxed{\geq 5}", "5"),
    (r"\boxed{5 km} ", r"5 \text{ m}"),
    (r"\boxed{5 kg}", "5 pounds"),
    (r"\boxed{60 km/h}", "60 m/s"),
    ("1, 2, 3", "3"),
    ("it is $1$ or maybe $2$", "2"),
    ("It is either 1 or 2.", "1"),
]  # fmt: skip
"""Answers of another value, of several, and of another unit."""


@pytest.mark.parametrize(("cases", "worth"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_what_is_typed_is_read_as_it_is_meant(cases, worth):
    pytest.importorskip("math_verify")
    settings = MathReward()
    assert not [case for case in cases if math_reward.label_fault(settings, case[1])]
    scores = math_reward.score(settings, [Answered(text, label) for text, label in cases])
    assert [case for case, score in zip(cases, scores, strict=True) if score != worth] == []


def test_two_answers_are_none_of_both_and_a_list_of_both():
    pytest.importorskip("math_verify")
    joints = [" or ", ", ", " and ", "; ", " / ", "$ or $", "\n\n", " or maybe ", "，或"]
    boxes = [rf"$\boxed{{1}}{joint}\boxed{{2}}$" for joint in joints]
    texts = [f"I say 1{joint}2" for joint in (" or ", " and ", " or maybe ", " vs ")]
    asked = [Answered(text, label) for text in (*boxes, *texts) for label in ("1", "2")]
    assert math_reward.score(MathReward(), asked) == [0.0] * len(asked)
    both = [Answered(text, "1, 2") for text in boxes]
    assert math_reward.score(MathReward(), both) == [1.0] * len(both)


def test_numbers_and_their_units():
    assert measured("5 meters") == measured(r"5\text{ m}") == ("5", "m")
    assert measured(r"\$1,234.50") == ("1,234.50", "$")
    assert measured("5 x") is measured("2 n") is measured("5 or") is measured("x cm") is None
    assert other_units("5 cm", "5 m")
    assert not other_units("5 cm", "5")
    assert not other_units("5 metres", "5 m")
    assert as_latex(as_latex("3 1/2")) == as_latex("3 1/2")
