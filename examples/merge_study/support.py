"""Who chooses the few tokens of a top-k divergence: the teacher, the student, or both?

    .venv/bin/python examples/merge_study/support.py --seeds 0 1 2

Trains the study's specialists of each seed, merges them with the full divergence and with each support of
`k` = 4 tokens, and writes the table and its numbers beside the study's. A study that was interrupted goes on
where it stopped when it is started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from study import DOMAINS, HERE, environment, opd_run

K = 4
LOSSES = {
    "full vocabulary": {"type": "full"},
    **{
        f"{support}, {form}": {"type": "topk", "k": K, "support": support, "form": form}
        for support, form in (
            ("teacher", "tail"),
            ("student", "tail"),
            ("union", "tail"),
            ("teacher", "hybrid"),
            ("student", "hybrid"),
        )
    },
}
SAID = {"teacher": "the teacher's", "student": "the student's", "union": "both"}


def specialists(out: Path, seed: int) -> None:
    """The base and its specialists, as `study.py` trains them."""
    for domain in DOMAINS:
        command = [sys.executable, "-m", "opd.pipelines.cli", "specialist", str(HERE / "recipe.yaml")]
        command += ["--domain", domain, "--seed", str(seed), "--out", str(out)]
        if out.exists():
            command.append("--resume")
        subprocess.run(command, check=True, env=environment())


def merge(root: Path, seed: int, name: str) -> Path:
    """Merge the specialists of one seed with one loss; returns the run's folder."""
    teachers = {domain: {"path": str(root / f"seed-{seed}" / "specialists" / domain)} for domain in DOMAINS}
    out = root / f"seed-{seed}-{name.replace(', ', '-').replace(' ', '-')}"
    opd_run(
        out,
        *(str(HERE / part) for part in ("recipe.yaml", "merge_only.yaml")),
        *("--seed", str(seed), "--model.path", str(root / f"seed-{seed}" / "base")),
        *("--teachers", json.dumps(teachers), "--distill.loss", json.dumps(LOSSES[name])),
    )
    return out


def accuracy(run: Path) -> dict[str, float]:
    """Sampled accuracy of the merged model by domain, in %."""
    results = json.loads((run / "results.json").read_text())
    merged = next(model for model in results["models"] if model["name"] == "merged")
    return {domain: 100 * merged["domains"][domain]["sampled"]["accuracy"] for domain in DOMAINS}


def table(found: dict[str, list[dict[str, float]]], seeds: list[int]) -> str:
    """Markdown, a row for each loss."""
    lines = [f"Sampled accuracy in %, mean over seeds {', '.join(map(str, seeds))} (sd); {K} tokens.", ""]
    lines += ["| whose tokens | form | sampled (sd) | sort / reverse / add3 |", "|---|---|---|---|"]
    for name, each in found.items():
        support, _, form = name.partition(", ")
        whole = [mean(one.values()) for one in each]
        spread = f" ({stdev(whole):.1f})" if len(whole) > 1 else ""
        parts = " / ".join(f"{mean(one[domain] for one in each):.1f}" for domain in DOMAINS)
        lines.append(f"| {SAID.get(support, support)} | {form} | {mean(whole):.1f}{spread} | {parts} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/merge-study-support"))
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOSSES}
    for seed in options.seeds:
        specialists(options.out / f"seed-{seed}", seed)
        for name in LOSSES:
            found[name].append(accuracy(merge(options.out, seed, name)))
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    results = HERE / "results"
    (results / "support.json").write_text(
        json.dumps({"seeds": options.seeds, "found": found}, indent=1) + "\n"
    )
    (results / "support.md").write_text(table(found, options.seeds))
    print(f"the table is in {results / 'support.md'}")


if __name__ == "__main__":
    main()
