"""What the merged agent keeps of each specialist's success, from the `results.json` of finished runs.

.venv/bin/python examples/agents/table.py                  # of what is in examples/agents/results/
.venv/bin/python examples/agents/table.py runs/agents*     # first takes the finished ones there

Ends with status 1 if it keeps less than 95 % of any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from opd.pipelines.evaluation.statistics import Count, mean_difference, paired_interval

RESULTS = Path(__file__).parent / "results"
LEAST = 0.95


def count(run: dict, model: str, domain: str) -> Count:
    """Sampled answers of a model that are right; of how many independent ones they are worth."""
    found = next(one for one in run["models"] if one["name"] == model)["domains"][domain]["sampled"]
    return Count(found["correct"], found["total"], found.get("worth"))


def kept(runs: Sequence[dict], domain: str) -> tuple[float, float, float]:
    """Merged / specialist with the ends of a 95 % interval: paired by seed, of fewer than three seeds that of
    their answers' noise alone.
    """
    pairs = [(count(run, "merged", domain), count(run, f"specialist:{domain}", domain)) for run in runs]
    level = mean(specialist.accuracy for _, specialist in pairs)
    if len(pairs) > 2:
        difference = paired_interval([merged.accuracy - specialist.accuracy for merged, specialist in pairs])
    else:
        sides = zip(*pairs, strict=True)
        difference = mean_difference(*(list(side) for side in sides))
    value, low, high = (1 + bound / level for bound in difference)
    return value, low, high


def table(runs: Sequence[dict]) -> Iterator[str]:
    """Lines of Markdown."""
    seeds = ", ".join(str(run["seed"]) for run in runs)
    yield f"| seed {seeds} | base | specialist | merged | weight average | merged / specialist |"
    yield "|---|---|---|---|---|---|"
    for domain in runs[0]["domains"]:
        models = ("base", f"specialist:{domain}", "merged", "average")
        levels = [f"{100 * mean(count(run, one, domain).accuracy for run in runs):.1f}" for one in models]
        value, low, high = kept(runs, domain)
        yield f"| `{domain}` | {' | '.join(levels)} | {value:.3f} ({low:.3f} to {high:.3f}) |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders")
    for run in parser.parse_args().runs:
        if not (run / "results.json").is_file():
            print(f"{run} is no finished run and is left out: it has no results.json", file=sys.stderr)
            continue
        told = (run / "results.json").read_text("utf-8")
        told = told.replace(f"{run.resolve()}", ".").replace(f"{Path.cwd()}/", "")
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"seed-{json.loads(told)['seed']}.json").write_text(told, "utf-8")
    runs = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("seed-*.json"))]
    if not runs:
        parser.error(f"{RESULTS} holds no results; name finished run folders")
    print("\n".join(table(runs)))
    lost = [domain for domain in runs[0]["domains"] if kept(runs, domain)[0] < LEAST]
    if lost:
        print(f"less than {LEAST:.0%} is kept of {', '.join(lost)}", file=sys.stderr)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
