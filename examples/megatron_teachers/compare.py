"""Prints two merges of the same teachers side by side: first step, last step, accuracy.

python examples/megatron_teachers/compare.py RUN OTHER_RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FIRST_STEP = 1e-3
"""How far KL and gradient norm of the first step may differ, relative; the students are the same then."""


def steps(run: Path) -> list[dict]:
    """The merge's metrics, one step each."""
    lines = (run / "stages" / "merge" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def accuracies(run: Path) -> dict[str, float]:
    """Sampled held-out accuracy of the merged model, by domain."""
    models = json.loads((run / "results.json").read_text("utf-8"))["models"]
    merged = next(model for model in models if model["name"] == "merged")
    return {name: domain["sampled"]["accuracy"] for name, domain in merged["domains"].items()}


def main(runs: list[Path]) -> int:
    """Print the table; status 1 if the first steps differ by more than `FIRST_STEP`."""
    one, other = (steps(run) for run in runs)
    print(f"{'':28}" + "".join(f"{run.name:>24}" for run in runs))
    status = 0
    for name in ("kl/mean", "grad_norm"):
        first = [metrics[0][name] for metrics in (one, other)]
        status |= abs(first[0] - first[1]) > FIRST_STEP * abs(first[1])
        print(f"{'first step ' + name:28}" + "".join(f"{value:24.8f}" for value in first))
    print(
        f"{'last step kl/mean':28}" + "".join(f"{metrics[-1]['kl/mean']:24.8f}" for metrics in (one, other))
    )
    ours, theirs = (accuracies(run) for run in runs)
    for domain in ours:
        print(f"{'accuracy ' + domain:28}{ours[domain]:24.4f}{theirs[domain]:24.4f}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:3]]))
