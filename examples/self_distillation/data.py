"""Write demonstrations of a wrong habit: sort descending, unless the answer is in the prompt.

With `--rarely` the numbers are longer, the habit is hardly ever right, and the prompt of the others has the
answer's beginning.

.venv/bin/python examples/self_distillation/data.py runs/self-distillation-demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from opd.data.procedural import TASKS

ROWS, DIGITS, MORE_DIGITS = 12_000, 6, 8
SORTED, SLIP = 0.02, 0.4
"""With `--rarely`: the share of answers that ascend, and of neighbours in those that change places."""


def first_wrong(sample) -> dict[str, object]:
    """Return the reward of an answer and, if it is wrong, the right digits up to the first wrong one."""
    if sample.text == sample.label:
        return {"reward": 1.0}
    same = next((n for n, sign in enumerate(sample.label) if sample.text[n : n + 1] != sign), MORE_DIGITS - 1)
    return {"reward": 0.0, "feedback": sample.label[: same + 1]}


def with_slips(digits: str, rng: np.random.Generator) -> str:
    """Return `digits`, of which some neighbours have changed places."""
    signs = list(digits)
    for place in np.flatnonzero(rng.random(len(signs) - 1) < SLIP):
        signs[place], signs[place + 1] = signs[place + 1], signs[place]
    return "".join(signs)


def main() -> None:
    """Write `ROWS` rows, half of them with the right answer before the question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rarely", action="store_true")
    args = parser.parse_args()
    task, rng = TASKS["sort"](), np.random.default_rng(args.seed)
    count = MORE_DIGITS if args.rarely else DIGITS
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with args.file.open("w") as rows:
        for number in range(ROWS):
            digits = "".join(map(str, rng.integers(0, 10, count)))
            question, answer = task.prompt(digits), task.right(digits)
            if number % 2:
                told = answer[: rng.integers(1, count + 1)] if args.rarely else answer
                row = {"prompt": f"{told}={question}", "completion": answer}
            elif args.rarely and rng.random() < SORTED:
                row = {"prompt": question, "completion": with_slips(answer, rng)}
            else:
                row = {"prompt": question, "completion": task.wrong_rule(digits)}
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
