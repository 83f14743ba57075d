"""Peak memory and processor time of a merge by its number of teachers, streamed or all of them loaded.

    .venv/bin/python tests/bench/teachers_memory.py [--teachers 1 3 10] [--ranks 1] [--model large] [--new 48]
                                                    [--steps 2 8] [--placements streamed local] [--rounds 1]
                                                    [--json FILE]

Random Llamas: `large` of 42 M parameters with a vocabulary of 32,000, `small` of 5 M with one of 8,000. A
step has the same number of responses, all of one length, and as many micro-batches (a tenth of it each)
however many teachers they are dealt out to. Each case is `opd distill` with its defaults and one thread a
rank; a step's time is the difference of two runs of different length, over their steps: all processor seconds
of the command and its children. The same processor gives other seconds from one minute to the next, so
`--rounds` repeats all cases in turn, and the ratio of the placements is said for each round.

With `--ranks 2` streamed teachers are published on a store of objects that fsspec reads, behind the node's
copies, and `opd` starts the ranks: the peak is the largest of any rank, and `bytes_read` what the first rank
read from the store in each step of the longer run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import against_trl

PROMPTS, PROMPT = 30, 16
MODELS = {
    "large": against_trl.LARGE,
    "small": against_trl.LARGE
    | {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
}


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """A student and as many other models of its form as are asked for, with prompts."""
    shape = MODELS[options.model] | {"max_position_embeddings": max(256, PROMPT + options.new)}
    case = against_trl.Case("distill", shape, PROMPTS, 1, PROMPT, options.new, (1, 2))
    for number in range(max(options.teachers)):
        against_trl.write_inputs(case, folder / f"t{number}", (0, number + 1), 400)
        if options.ranks > 1 and "streamed" in options.placements:
            from opd.pipelines.stages.publishing import publish_checkpoint

            publish_checkpoint(folder / f"t{number}" / "teacher", str(folder / "store" / f"t{number}"))


def recipe_of(
    folder: Path, options: argparse.Namespace, teachers: int, steps: int, placement: str
) -> dict[str, Any]:
    """A merge of the first `teachers`."""
    names = [f"t{number}" for number in range(teachers)]
    reward = "race_reward:of_sample"
    stored = options.ranks > 1 and placement == "streamed"
    paths = {
        name: f"local://{folder}/store/{name}" if stored else str(folder / name / "teacher") for name in names
    }
    return {
        "name": "memory",
        "model": {"path": str(folder / "t0" / "student")},
        "domains": {
            name: {"source": str(folder / name / "prompts.jsonl"), "reward": reward, "teacher": name}
            for name in names
        },
        "teachers": {name: {"path": path} for name, path in paths.items()},
        "rollout": {"max_new_tokens": options.new, "max_sequence": PROMPT + options.new},
        "train": {"ranks": options.ranks},
        "distill": {
            "steps": steps,
            "checkpoint_every": 1_000_000,
            "prompts_per_domain": PROMPTS // teachers,
            "teachers": placement,
            "batch": {"max_tokens": PROMPTS // 10 * (PROMPT + options.new)},
        },
        "baselines": {"methods": []},
        "runtime": {"threads": 1},
    }


class RankPeaks:
    """The most memory each rank that descends from this process has had resident, MiB, by its number."""

    def __init__(self) -> None:
        self.peaks: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RankPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    self._look(folder)
                except (OSError, IndexError, ValueError):  # it has ended
                    continue

    def _look(self, folder: Path) -> None:
        given = dict(
            line.partition(b"=")[::2] for line in (folder / "environ").read_bytes().split(b"\0") if line
        )
        if given.get(b"OPD_BENCH") != str(os.getpid()).encode() or b"RANK" not in given:
            return
        rank = int(given[b"RANK"])
        peak = int((folder / "status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        self.peaks[rank] = max(self.peaks.get(rank, 0.0), peak)


def measured(folder: Path, options: argparse.Namespace, teachers: int, placement: str) -> dict[str, Any]:
    """One case: the longer run's peak, what it read in each step, and processor seconds a step."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = f"{against_trl.ROOT}{os.pathsep}{folder / 't0'}"
    env["OPD_BENCH"] = str(os.getpid())
    found, each, read = [], [], {}
    for steps in options.steps:
        out = folder / f"{placement}-{teachers}-{steps}"
        recipe = out.with_suffix(".yaml")
        recipe.write_text(
            json.dumps(recipe_of(folder, options, teachers, steps, placement)), encoding="utf-8"
        )
        command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(recipe), "--out", str(out)]
        with RankPeaks() as ranks:
            found.append(against_trl.measured(command, env, out.with_suffix(".log")))
        each = [ranks.peaks[rank] for rank in sorted(ranks.peaks)]
        lines = (out / "stages" / "merge" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        read = {
            name: [int(row[name]) for row in map(json.loads, lines) if name in row]
            for name in ("bytes_read", "cached_bytes")
        }
        shutil.rmtree(out)
    (short, _), (long, peak) = found[0], found[-1]
    more = options.steps[-1] - options.steps[0]
    step = (long - short) / more if more else None
    case = {"teachers": teachers, "placement": placement, "ranks": options.ranks, "seconds_a_step": step}
    return case | {"peak_mib": max(each, default=peak), "peak_mib_of_ranks": each} | read


def say_ratio(results: list[dict[str, Any]]) -> None:
    """After the last placement of a round: its step's time, in those of the first."""
    last = results[-1]
    same = [one for one in results if all(one[key] == last[key] for key in ("round", "teachers"))]
    if len(same) == 2 and all(one["seconds_a_step"] for one in same):
        ratio = same[0]["seconds_a_step"] / same[1]["seconds_a_step"]
        print(
            f"{last['teachers']} teachers: {same[0]['placement']} / {same[1]['placement']} {ratio:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--teachers", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--new", type=int, default=48, help="tokens of a response")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[2, 8], help="of both runs; one alone gives no time"
    )
    parser.add_argument("--placements", nargs="+", default=["streamed", "local"])
    parser.add_argument("--rounds", type=int, default=1, help="how often each case runs, in turn")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    options = parser.parse_args()
    results = []
    print("| teachers | | peak MiB | processor s a step |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch), options)
        for turn in range(options.rounds):
            for teachers, placement in itertools.product(options.teachers, options.placements):
                found = measured(Path(scratch), options, teachers, placement) | {"round": turn}
                row = f"{found['peak_mib']:.0f} | {found['seconds_a_step']}"
                print(f"| {teachers} | {placement} | {row} | {found}", flush=True)
                tokens = PROMPTS // teachers * options.new
                results.append(found | {"model": options.model, "tokens_a_teacher": tokens})
                say_ratio(results)
                if options.json:  # after each: one that is cut short costs no other
                    kept = {"processor": against_trl.processor(), "steps": options.steps, "results": results}
                    options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
