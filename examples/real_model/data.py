"""Three domains of English text, each as prompts with labels and as a few demonstrations.

`words`: arithmetic in a sentence. `case`: sentences of Python's own documentation, as it lies on this
machine, whose capitals and punctuation are to be restored. `facts`: name, age and city of a person out of a
sentence, as JSON. Everything is drawn from one seed.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

SEED = 20
PROMPTS, DEMONSTRATIONS = 2400, 320
NAMES = [
    "Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leon",
    "Mara", "Nils", "Olga", "Paul", "Rosa", "Sven",
]  # fmt: skip
FAMILIES = [
    "Keller", "Moreau", "Rossi", "Novak", "Silva", "Jensen", "Ortega", "Lindt", "Bauer", "Costa", "Varga",
    "Ivers", "Duran", "Falk",
]  # fmt: skip
CITIES = [
    "Lyon", "Oslo", "Porto", "Turin", "Ghent", "Graz", "Malaga", "Bergen", "Leiden", "Krakow", "Dublin",
    "Split", "Bern", "Riga", "Tartu",
]  # fmt: skip
THINGS = ["apples", "books", "coins", "cards", "stamps", "pencils", "shells", "marbles"]

SHOWN = {
    "words": [
        "Answer with the sum.",
        ("Ada has 5 cups and gets 3 more.", "5 + 3 = 8"),
        ("Tom has 9 balls and gives 2 to Ada.", "9 - 2 = 7"),
    ],
    "case": [
        "Repeat each sentence with capitals and punctuation.",
        ("the file is closed", "The file is closed."),
        ("if it is empty python raises an error", "If it is empty, Python raises an error."),
    ],
    "facts": [
        "Who is it, how old, and in which city is the person's home? Answer as JSON.",
        (
            "Tom Weber, 31, was born in Basel and lives in Wien.",
            '{"name": "Tom Weber", "age": 31, "city": "Wien"}',
        ),
    ],
}
"""What each prompt of a domain begins with: what is asked for, and examples, so that the base knows, too."""

Example = tuple[str, str, str]
"""What is asked, the label a reward compares with, and an answer that is right."""


def words(draw: random.Random) -> Example:
    """A sum in one or two steps."""
    who, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    a, b, c = draw.randint(6, 30), draw.randint(2, 9), draw.randint(2, 9)
    kinds = [
        (f"{who} has {a} {thing} and gets {b} more.", f"{a} + {b} = {a + b}", a + b),
        (f"{who} has {a + b} {thing} and gives {b} to {other}.", f"{a + b} - {b} = {a}", a),
        (f"{who} packs {b} {thing} into each of {c} boxes.", f"{b} x {c} = {b * c}", b * c),
        (f"{who} has {a} {thing}, gets {b} more and loses {c}.", f"{a} + {b} - {c} = {a + b - c}", a + b - c),
    ]
    asked, worked, result = draw.choice(kinds)
    return asked, str(result), worked


def facts(draw: random.Random) -> Example:
    """A person in a sentence."""
    name = f"{draw.choice(NAMES)} {draw.choice(FAMILIES)}"
    city, born, age = draw.choice(CITIES), draw.choice(CITIES), draw.randint(19, 88)
    said = draw.choice(
        [
            f"{name}, {age}, was born in {born} and lives in {city}.",
            f"At {age}, {name} left {born} for {city}, and stayed there.",
            f"In {city} we met {name} of {born}, who is {age}.",
            f"{name} turned {age} in {city}, far from {born}.",
        ]
    )
    found = json.dumps({"name": name, "age": age, "city": city})
    return said, found, found


def sentences() -> list[str]:
    """Short sentences of Python's documentation, in alphabetical order."""
    texts = list(topics.values())
    for module in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(module.read_text("utf-8", "replace"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append(ast.get_docstring(node) or "")
    found = set()
    for text in texts:
        for sentence in re.split(r"(?<=[.])\s+", " ".join(text.split())):
            if 25 <= len(sentence) <= 72 and re.fullmatch(r"[A-Z][a-z]* [A-Za-z ,']+\.", sentence):
                found.add(sentence)
    return sorted(found)


def case(known: list[str]) -> Callable[[random.Random], Example]:
    """A sentence without its capitals and punctuation."""

    def one(draw: random.Random) -> Example:
        sentence = draw.choice(known)
        plain = re.sub(r"[^a-z ]", "", sentence.lower())
        return plain, sentence, sentence

    return one


def distinct(make: Callable[[random.Random], Example], draw: random.Random) -> Iterator[Example]:
    """Examples that ask different things, while there are new ones."""
    seen: set[str] = set()
    for _ in range(100_000):
        example = make(draw)
        if example[0] not in seen:
            seen.add(example[0])
            yield example


def main(folder: Path) -> None:
    """Write `DOMAIN.jsonl` and `DOMAIN_shown.jsonl` for each domain into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in {"words": words, "case": case(sentences()), "facts": facts}.items():
        examples = distinct(make, random.Random(f"{SEED} {name}"))
        found = [example for _, example in zip(range(PROMPTS + DEMONSTRATIONS), examples, strict=False)]
        shown = found[:DEMONSTRATIONS]
        with (folder / f"{name}_shown.jsonl").open("w") as file:
            for asked, _, right in shown:
                file.write(json.dumps({"prompt": chat(name, asked), "completion": right}) + "\n")
        with (folder / f"{name}.jsonl").open("w") as file:
            for asked, label, _ in found[DEMONSTRATIONS:]:
                file.write(json.dumps({"prompt": chat(name, asked), "label": label}) + "\n")
        print(f"{name}: {len(found) - DEMONSTRATIONS} prompts, {DEMONSTRATIONS} demonstrations in {folder}")


def chat(domain: str, asked: str) -> list[dict[str, str]]:
    """As messages, after the domain's examples."""
    system, *examples = SHOWN[domain]
    turns = [turn for example in examples for turn in zip(("user", "assistant"), example, strict=True)]
    said = [("system", system), *turns, ("user", asked)]
    return [{"role": role, "content": text} for role, text in said]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
