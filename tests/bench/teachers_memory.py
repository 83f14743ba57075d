"""Peak memory and processor time of a merge by its number of teachers, streamed or all of them loaded.

    .venv/bin/python tests/bench/teachers_memory.py [--teachers 1 3 10] [--json FILE]

Random Llamas of 42 M parameters with a vocabulary of 32,000. A step has the same number of responses, all of
one length, and as many micro-batches (`MICRO`) however many teachers they are dealt out to. Each case is
`opd distill` with its defaults and one thread, in a process of its own; a step's time is the difference of
two runs of different length, over their steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import against_trl

PROMPTS, PROMPT, NEW = 30, 16, 48
MICRO = 3 * (PROMPT + NEW)
"""Tokens of a micro-batch: a tenth of a step."""
STEPS = (2, 8)
"""Of the short and the long run."""


def write_inputs(folder: Path, teachers: int) -> None:
    """A student and `teachers` other models of its form, with prompts."""
    case = against_trl.Case("distill", against_trl.LARGE, PROMPTS, 1, PROMPT, NEW, (1, 2))
    for number in range(teachers):
        against_trl.write_inputs(case, folder / f"t{number}", (0, number + 1), 400)


def recipe_of(folder: Path, teachers: int, steps: int, placement: str) -> dict[str, Any]:
    """A merge of the first `teachers`."""
    names = [f"t{number}" for number in range(teachers)]
    reward = "race_reward:of_sample"
    return {
        "name": "memory",
        "model": {"path": str(folder / "t0" / "student")},
        "domains": {
            name: {"source": str(folder / name / "prompts.jsonl"), "reward": reward, "teacher": name}
            for name in names
        },
        "teachers": {name: {"path": str(folder / name / "teacher")} for name in names},
        "rollout": {"max_new_tokens": NEW, "max_sequence": PROMPT + NEW},
        "distill": {
            "steps": steps,
            "checkpoint_every": 1_000_000,
            "prompts_per_domain": PROMPTS // teachers,
            "teachers": placement,
            "batch": {"max_tokens": MICRO},
        },
        "baselines": {"methods": []},
        "runtime": {"threads": 1},
    }


def measured(folder: Path, teachers: int, placement: str) -> dict[str, Any]:
    """One case: the longer run's peak, and processor seconds a step."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = f"{against_trl.ROOT}{os.pathsep}{folder / 't0'}"
    found = []
    for steps in STEPS:
        out = folder / f"{placement}-{teachers}-{steps}"
        recipe = out.with_suffix(".yaml")
        recipe.write_text(json.dumps(recipe_of(folder, teachers, steps, placement)), encoding="utf-8")
        command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(recipe), "--out", str(out)]
        found.append(against_trl.measured(command, env, out.with_suffix(".log")))
    (short, _), (long, peak) = found
    step = (long - short) / (STEPS[1] - STEPS[0])
    return {"teachers": teachers, "placement": placement, "peak_mib": peak, "seconds_a_step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--teachers", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    options = parser.parse_args()
    results = []
    print("| teachers | | peak MiB | processor s a step |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch), max(options.teachers))
        for placement in ("streamed", "local"):
            for teachers in options.teachers:
                found = measured(Path(scratch), teachers, placement)
                row = f"{found['peak_mib']:.0f} | {found['seconds_a_step']:.2f}"
                print(f"| {teachers} | {placement} | {row} |", flush=True)
                results.append(found)
    if options.json:
        kept = {"processor": against_trl.processor(), "steps": STEPS, "results": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
