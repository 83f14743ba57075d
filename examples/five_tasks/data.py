"""Write the student's tokenizer, and demonstrations of mixed quality for its warm-up.

The tokenizer reads characters. What is the same in all questions of a task is one token. A demonstration's
question is one that no evaluation asks. Its answer is right, follows a wrong habit near the right rule, or is
right but for some characters.

.venv/bin/python examples/five_tasks/data.py runs/five-tasks-inputs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from opd.config.load import load_recipe
from opd.data.load import load_domain
from opd.models.tokenizers import character_tokenizer
from opd.rollout.prompts import Domain

RECIPE = Path(__file__).with_name("recipe.yaml")
ROWS, SEED = 8_000, 1000
RIGHT, HABIT = 0.50, 0.20
"""Shares of right answers and of those by the wrong habit. The others are right but for some characters."""
MARKS = (
    "ascending order: ",
    "descending order: ",
    "['",
    ".0', '",
    ".0']",
    "', '",
    "']",
    ".0, ",
    ", ",
    " + ",
    " - ",
)
"""Tokens of several characters, beside what all questions of a task share."""
ALPHABET = "0123456789-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n"


def shared_begin(texts: Sequence[str]) -> str:
    """Return how all `texts` begin."""
    same = takewhile(lambda signs: len(set(signs)) == 1, zip(*texts, strict=False))
    return "".join(signs[0] for signs in same)


def shared_ends(questions: Sequence[str]) -> tuple[str, str]:
    """Return how all `questions` begin and how all end."""
    begin = shared_begin(questions)
    return begin, shared_begin([question[len(begin) :][::-1] for question in questions])[::-1]


def asked(question: str, ends: tuple[str, str]) -> str:
    """Return what a question has of its own."""
    return question.removeprefix(ends[0]).removesuffix(ends[1])


def habit(task: str, own: str, answer: str) -> str:
    """Return the answer by a wrong habit, to a question that has `own` of its own."""
    if task == "spell_backward":  # as it stands there
        return own
    if task == "number_sorting":  # in the other direction
        return "['" + "', '".join(answer[2:-2].split("', '")[::-1]) + "']"
    if task == "chain_sum":  # plus for minus, and minus for plus
        terms = own.translate(str.maketrans("+-", "-+")).split(" ")
        return str(
            int(terms[0]) + sum(int(sign + n) for sign, n in zip(terms[1::2], terms[2::2], strict=True))
        )
    if task == "caesar_cipher":  # three letters on, not back
        return "".join(chr((ord(letter) - ord("A") + 3) % 26 + ord("A")) for letter in own)
    return own.replace(", ", "")  # palindrome_generation: the letters as they stand there


def corrupted(answer: str, rng: np.random.Generator) -> str:
    """Return `answer` with one or two of its letters or digits replaced by others of their kind."""
    places = [place for place, sign in enumerate(answer) if sign.isalnum()]
    signs = list(answer)
    for place in rng.choice(places, size=min(int(rng.integers(1, 3)), len(places)), replace=False):
        kind = next(k for k in ("0123456789", "abcdefghijklmnopqrstuvwxyz") if signs[place].lower() in k)
        kind = kind.upper() if signs[place].isupper() else kind
        signs[place] = kind[(kind.index(signs[place]) + int(rng.integers(1, len(kind)))) % len(kind)]
    return "".join(signs)


def rows(name: str, domain: Domain, ends: tuple[str, str], rng: np.random.Generator) -> list[dict[str, str]]:
    """Return `ROWS` demonstrations of a domain."""
    made = []
    for index in rng.integers(0, len(domain.train), ROWS):
        prompt = domain.train[index]
        question, answer, draw = prompt.text or "", prompt.label["answer"], rng.random()
        if RIGHT <= draw < RIGHT + HABIT:
            answer = habit(name, asked(question, ends), answer)
        elif draw >= RIGHT:
            answer = corrupted(answer, rng)
        made.append({"prompt": question, "completion": answer, "domain": name})
    return made


def main() -> None:
    """Write `tokenizer/` and `demonstrations.jsonl`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    recipe, rng = load_recipe([RECIPE]), np.random.default_rng(SEED)
    tags, shown = list(MARKS), []
    for name, config in recipe.domains.items():
        config = config.model_copy(update={"prompts": ROWS})
        domain = load_domain(name, config, seed=SEED, held_out_prompts=1)
        ends = shared_ends([prompt.text or "" for prompt in domain.train])
        tags += [end for end in ends if len(end) > 1]
        shown += rows(name, domain, ends, rng)
    character_tokenizer(ALPHABET, list(dict.fromkeys(tags))).save_pretrained(folder / "tokenizer")
    with (folder / "demonstrations.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in shown)


if __name__ == "__main__":
    main()
