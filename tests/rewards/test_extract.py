"""Where in a response the answer stands."""

import pytest

from opd.rewards.verifier import extract_answer

CASES = [
    ("boxed", r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ("boxed", r"\boxed{a} and cut \boxed{\frac{1", "a"),
    ("boxed", r"\fbox {x\}y}", r"x\}y"),
    ("boxed", "none", None),
    ("boxed", r"\boxed 3", None),
    ("answer", "Answer: 7\nmore", "7"),
    ("answer", "the answer is 7.", "7"),
    ("answer", "**Answer:** 1\n**Final Answer:** 2", "2"),
    ("answer", "Answer:\n\n  8", "8"),
    ("answer", "so 3 + 4 = 7\n#### 7", "7"),
    ("answer", "<answer>\n7\n</answer>", "7"),
    ("answer", "answers vary", None),
    ("answer", "the answer is **7**.", "7"),
    ("answer", "\u7b54\u6848\uff1a7", "7"),
    ("answer", "Antwort:\n\nAntwort: 7", "7"),
    ("answer", "reanswer: 7", None),
    ("number", "from 3 to 1,234.5 apples", "1234.5"),
    ("number", "it is \u22127", "-7"),
    ("number", "none", None),
    ("last_line", "a\nb\n**c**\n", "c"),
    ("code", "x\n```python\na = 1\n```\ny\n```sh\nls\n```", "a = 1"),
    ("code", "```\nold\n```\n```py\nnew\n", "new"),
    ("code", "~~~python\na = 1\n~~~\nb", "a = 1"),
    ("code", "~~~\na = '```'\n```\nb = 1\n~~~", "a = '```'\n```\nb = 1"),
    ("code", "```py\na = 1\n~~~\nb = 1\n```", "a = 1\n~~~\nb = 1"),
    ("code", "a = 1", None),
    ("json", 'so ```json {"a": 1}', '{"a": 1}'),
    ("json", 'so\n```json\n{"a": 1}\n```', '{"a": 1}'),
    ("json", 'so\n~~~json\n{"a": 1}\n~~~', '{"a": 1}'),
    ("json", 'it is {"a": [1]} .', '{"a": [1]}'),
    ("whole", " a \n", "a"),
]


@pytest.mark.parametrize(("way", "text", "found"), CASES)
def test_each_way(way, text, found):
    assert extract_answer(text, [way]) == found


def test_the_first_way_counts_that_finds_something():
    assert extract_answer(r"Answer: 3 \boxed{4}", ["boxed", "answer"]) == "4"
    assert extract_answer("Answer: 3", ["boxed", "answer"]) == "3"
    assert extract_answer(r"\boxed{ }", ["boxed"]) is None


def test_thoughts_are_no_answers():
    assert extract_answer(r"<think>\boxed{1}</think>\boxed{2}", ["boxed"]) == "2"
    assert extract_answer(r"\boxed{1}</think>It is 2", ["boxed"]) is None
    assert extract_answer(r"<think>I guess \boxed{1}", ["boxed"]) is None
    assert extract_answer(r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", ["boxed"]) == "2"
    assert extract_answer(r"a</think>\boxed{1}</think>2", ["boxed"]) is None


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "text", ["\\boxed{", "{", "answer is", "answer   ", "1,", "```\n", "<think>", "#", "\\"]
)
def test_a_long_text_of_anything_is_read(text):
    """In linear time: a quadratic one would take minutes."""
    for way in ("boxed", "answer", "number", "last_line", "code", "json", "whole"):
        extract_answer(text * (1_000_000 // len(text)), [way])
