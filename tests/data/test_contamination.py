"""What counts as an evaluation prompt in training, and what only looks like one."""

import random

import numpy as np
import pytest

from opd.data import contamination
from opd.data.contamination import ContaminationIndex, messages_text, text_hash, word_tokens

WORDS = [f"w{number}" for number in range(500)]


def sentence(seed: int, length: int = 40) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def count(index: ContaminationIndex, name: str = "set") -> int:
    return index.report_matches()[name]["contaminated"]


def test_thirteen_words_in_a_row_are_found_whatever_case_and_signs_and_twelve_are_not():
    asked = sentence(0).split()
    shared = asked[7:20]
    loud = ", ".join(shared).upper() + "!"
    index = ContaminationIndex({"set": [" ".join(asked), sentence(1)]}, 13)
    index.compare_text(f"{sentence(2)} {' '.join(shared[:12])} {sentence(3)}", "a")
    assert count(index) == 0
    index.compare_text(f"{sentence(2)} {loud} {sentence(3)}", "file.jsonl:7")
    found = index.report_matches()["set"]
    assert (found["prompts"], found["contaminated"]) == (2, 1)
    assert found["examples"] == [
        {"prompt": " ".join(asked), "shared": " ".join(shared), "where": "file.jsonl:7"}
    ]
    assert index.seen == 2


@pytest.mark.parametrize("seed", range(5))
def test_as_enumeration_says(seed):
    """Against the sets of all n-grams, on few words, so that much is shared."""
    rng, size = random.Random(seed), 3
    texts = [" ".join(rng.choices("abcdef", k=rng.randint(1, 9))) for _ in range(60)]
    asked, trained = texts[:20], texts[20:28]

    def grams(text: str) -> set[tuple[str, ...]]:
        found = text.split()
        return {tuple(found[i : i + size]) for i in range(len(found) - size + 1)}

    known = set().union(*map(grams, trained))
    index = ContaminationIndex({"set": asked}, size)
    for text in trained:
        index.compare_text(text, "x")
    assert count(index) == sum(bool(grams(text) & known) or text in trained for text in asked)


def test_short_prompts_are_compared_whole_with_their_signs():
    index = ContaminationIndex({"set": ["2 + 3", "<sort>31415926=", "What  IS it?", "="]}, 13)
    for text in ("2 - 3", "<sort>31415927=", "<reverse>31415926=", "what is it", "2 + 3 = ?", "=="):
        index.compare_text(text, "x")
    assert count(index) == 0
    index.compare_text("what is it?", "here")
    index.compare_text("2 + 3", "there")
    assert [e["where"] for e in index.report_matches()["set"]["examples"]] == ["there", "here"]


def test_what_many_training_texts_say_is_how_tasks_are_put():
    put = sentence(9, 20)
    index = ContaminationIndex({"set": [f"{put} {sentence(100 + i, 30)}" for i in range(5)]}, 13)
    for number in range(200):
        index.compare_text(f"{put} {sentence(1000 + number, 30)}", "x")
    assert count(index) == 0
    index.compare_text(f"{put} {sentence(102, 30)}", "the same prompt")
    assert count(index) == 1
    # The same text many times over is one text.
    few = ContaminationIndex({"set": [sentence(5)]}, 13)
    for _ in range(50):
        few.compare_text(f"{sentence(5)} and more", "x")
    assert count(few) == 1
    # Eleven different texts make it common. Each has a bit of its own among 64.
    texts = {text_hash(text) % 64: text for text in (f"{put} {sentence(n)}" for n in range(99))}
    index = ContaminationIndex({"set": [put]}, 13)
    for number, text in enumerate([*texts.values()][:11], start=1):
        index.compare_text(text, "x")
        assert count(index) == (number <= 10)


@pytest.mark.parametrize("size", [4, 5])
def test_a_passage_counts_if_half_of_it_or_more_is_in_no_common_one(size):
    """Of words of which the first are how tasks are put, and the rest was seen once."""
    for common in range(1, size):
        put, rest = WORDS[:size], WORDS[size : 2 * size - common]
        index = ContaminationIndex({"set": [" ".join([*put, *rest])]}, size)
        for number in range(200):
            index.compare_text(f"{' '.join(put)} {sentence(number)}", "x")
        assert count(index) == 0
        index.compare_text(f"and {' '.join([*put[size - common :], *rest])} or", "y")
        assert count(index) == (2 * common <= size), common


def test_an_answer_that_holds_the_question_counts_and_messages_are_read():
    index = ContaminationIndex({"set": [sentence(4)], "none": []}, 13)
    index.compare_text("a question", "x", answer=f"as in: {sentence(4)}")
    assert count(index) == 1
    assert index.report_matches()["none"] == {"prompts": 0, "contaminated": 0, "examples": []}
    parts = [{"type": "text", "text": "one"}, {"type": "image"}, "odd"]
    assert messages_text([{"content": "zero"}, {"content": parts}, {"content": None}, {}]) == "zero\none"
    assert word_tokens("Zwölf ﬁsche, 東京へ don't") == ["zwölf", "fische", "東", "京", "へ", "don", "t"]


def test_the_index_is_bounded_and_still_finds_what_is_a_little_longer(monkeypatch):
    monkeypatch.setattr(contamination, "_MOST", 100)
    asked = [sentence(number, 60) for number in range(10)]
    index = ContaminationIndex({"set": asked}, 13)
    assert index.stride == 5
    assert len(index._keys) <= 100
    for number, text in enumerate(asked):
        start = number * 3
        index.compare_text(" ".join(text.split()[start : start + 13 + index.stride - 1]), "x")
    assert count(index) == 10
    assert index._marks.dtype == np.uint64
