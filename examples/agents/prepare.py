"""Writes what the recipe reads to a folder: tasks, demonstrations of mixed quality, and a tokenizer.

The demonstrations are what a base has seen before anyone trains it for a task: searches that guess anywhere
in what is left instead of in its middle, sums and sorted digits of which half are wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worlds import LETTERS

from opd.models.tokenizers import character_tokenizer

ROLES = ["<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEMONSTRATIONS = 6000
RIGHT = 0.5


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation: the question, then the model and its world in turn."""
    roles = ["user"] + ["assistant", "user"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


def guess_tasks(draw: random.Random) -> Iterator[dict[str, Any]]:
    for low in range(61):
        for size in range(32, 40):
            yield {"prompt": said(f"{low}-{low + size - 1}"), "label": str(draw.randrange(low, low + size))}


def guess_demonstration(draw: random.Random) -> list[dict[str, str]]:
    low = draw.randrange(61)
    high = low + draw.randrange(31, 39)
    number, turns = draw.randint(low, high), [f"{low}-{high}"]
    while True:
        guess = draw.randint(low, high)
        turns.append(str(guess))
        if guess == number:
            return said(*turns)
        turns.append("<" if number < guess else ">")
        low, high = (low, guess - 1) if number < guess else (guess + 1, high)


def table_tasks(draw: random.Random) -> Iterator[dict[str, Any]]:
    for a in LETTERS:
        for b in LETTERS:
            if a != b:
                yield {"prompt": said(f"{a}+{b}"), "label": a + b}


def table_demonstration(draw: random.Random) -> list[dict[str, str]]:
    a, b = draw.sample(LETTERS, 2)
    first, second = draw.randrange(10), draw.randrange(10)
    total = first + second if draw.random() < RIGHT else draw.randrange(19)
    return said(f"{a}+{b}", f"?{a}", str(first), f"?{b}", str(second), f"={total}")


def digits(draw: random.Random) -> str:
    return "".join(str(draw.randrange(10)) for _ in range(6))


def sort_tasks(draw: random.Random) -> Iterator[dict[str, Any]]:
    for text in sorted({digits(draw) for _ in range(1500)}):
        yield {"prompt": said(f"sort {text}"), "label": "".join(sorted(text))}


def sort_demonstration(draw: random.Random) -> list[dict[str, str]]:
    text = digits(draw)
    return said(f"sort {text}", "".join(sorted(text, reverse=draw.random() > RIGHT)))


def main(folder: Path) -> None:
    """Write everything; the same files every time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    kinds = {
        "guess": (guess_tasks, guess_demonstration),
        "table": (table_tasks, table_demonstration),
        "sort": (sort_tasks, sort_demonstration),
    }
    for name, (tasks, _) in kinds.items():
        rows = [json.dumps(row) for row in tasks(draw)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    demonstrations = [demonstrate(draw) for _ in range(DEMONSTRATIONS) for _, demonstrate in kinds.values()]
    rows = [json.dumps({"messages": messages}) for messages in demonstrations]
    (folder / "demonstrations.jsonl").write_text("\n".join(rows) + "\n")
    made = character_tokenizer("0123456789abcdefghijklmnopqrst -+=?<>!", ROLES)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
