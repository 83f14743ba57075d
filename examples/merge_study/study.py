"""Runs the study: several seeds, every estimator, every other way to merge; then the table and the plots.

    .venv/bin/python examples/merge_study/study.py --seeds 0 1 2

Each run is an ordinary `opd run`; a study that was interrupted goes on where it stopped when it is started
again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
DOMAINS = ("sort", "reverse", "add3")
VARIANTS = sorted(path.stem for path in (HERE / "variants").glob("*.yaml"))
ESTIMATORS = [name for name in VARIANTS if name != "longer"]


def opd_run(out: Path, *words: str) -> None:
    """One `opd run` into `out`, continued if it was begun, skipped if it is finished."""
    if (out / "report.html").exists():
        return
    resume = ["--resume"] if out.exists() else []
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", *words, "--out", str(out), *resume]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.log").open("a") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment()).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}; see {log.name}")
    print(f"{out.name}: done", flush=True)


def environment() -> dict[str, str]:
    """Threads that wait without spinning: runs share the cores."""
    return os.environ | {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}


def whole_run(root: Path, seed: int, *words: str) -> None:
    """One seed from its base to its report."""
    opd_run(root / f"seed-{seed}", str(HERE / "recipe.yaml"), "--seed", str(seed), *words)


def words_of_merge(root: Path, seed: int, *files: str) -> list[str]:
    """Of `opd run`: merge the specialists of one seed, with more `files` of this folder."""
    whole = root / f"seed-{seed}"
    teachers = {domain: {"path": str(whole / "specialists" / domain)} for domain in DOMAINS}
    recipes = [str(HERE / file) for file in ("recipe.yaml", "merge_only.yaml", *files)]
    words = ["--seed", str(seed), "--model.path", str(whole / "base"), "--teachers", json.dumps(teachers)]
    return recipes + words


def variant(root: Path, seed: int, name: str) -> None:
    """Merge the specialists of one seed with another estimator."""
    opd_run(root / f"seed-{seed}-{name}", *words_of_merge(root, seed, f"variants/{name}.yaml"))


def main() -> None:
    """Run, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/merge-study"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="variants run side by side")
    options = parser.parse_args()
    for seed in options.seeds:
        whole_run(options.out, seed)
    jobs = [(seed, name) for seed in options.seeds for name in VARIANTS]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda job: variant(options.out, *job), jobs))
    noise = options.out / "gradient_noise.json"
    if not noise.exists():
        command = [sys.executable, str(HERE / "gradient_noise.py"), "--run"]
        command.append(str(options.out / f"seed-{options.seeds[0]}"))
        subprocess.run([*command, "--json", str(noise)], check=True, env=environment())
    subprocess.run([sys.executable, str(HERE / "summarise.py"), "--study", str(options.out)], check=True)


if __name__ == "__main__":
    main()
