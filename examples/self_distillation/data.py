"""Write demonstrations of a wrong habit: sort descending, unless the answer is in the prompt.

.venv/bin/python examples/self_distillation/data.py runs/self-distillation-demonstrations.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from opd.data.procedural import TASKS

ROWS, DIGITS = 12_000, 6


def main() -> None:
    """Write `ROWS` rows, half of them with the right answer before the question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    task, rng = TASKS["sort"](), np.random.default_rng(args.seed)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with args.file.open("w") as rows:
        for number in range(ROWS):
            digits = "".join(map(str, rng.integers(0, 10, DIGITS)))
            question, answer = task.prompt(digits), task.right(digits)
            if number % 2:
                row = {"prompt": f"{answer}={question}", "completion": answer}
            else:
                row = {"prompt": question, "completion": task.wrong_rule(digits)}
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
