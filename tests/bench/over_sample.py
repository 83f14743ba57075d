"""What waiting for the longest response costs in decode steps and empty slots, and what `over_sample` saves.

    export PYTHONPATH=tests/pipelines
    python tests/bench/over_sample.py [--steps 12] [--prompts 24] [--hidden 64] [--layers 2] [--models FOLDER]
                                      [--json FILE] [--asynchronous [--rounds 3]]

With `--asynchronous` the student writes while the trainer learns, in one process, and what is counted are the
decode steps for which the trainer waits. How many these are depends on how fast each is. So there are rounds.

Merges of the long-tailed student of `async_student.py` with two local teachers, in turn, on the same prompts.
Everything is counted, nothing is timed, so one round is enough and load does not matter. A slot is a response
that may be decoded beside the others: as many as are in flight at the beginning of a step.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from async_gain import merge_recipe
from async_student import make_models, model_config

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.sample_source import AsyncRollouts, Rollouts
from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk

SHARES = (1.0, 1.1, 1.25, 1.5, 2.0)
WAYS = ((1, 1.0), (2, 1.0), (4, 1.0), (2, 1.25), (4, 1.25), (4, 1.5), (4, 2.0))
"""`max_ahead` and `over_sample` of asynchronous merges."""


@contextmanager
def recorded() -> Iterator[list[list[int]]]:
    """Record, by step of the merge, the responses decoded in each decode step."""
    decode, write, steps = TorchEngine._decode_step, Rollouts.write, []

    def counted(engine: TorchEngine) -> Chunk:
        chunk = decode(engine)
        steps[-1].append(len(chunk.uids))
        return chunk

    def begun(*given: Any) -> Any:
        steps.append([])
        return write(*given)

    TorchEngine._decode_step, Rollouts.write = counted, begun  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        TorchEngine._decode_step, Rollouts.write = decode, write  # type: ignore[method-assign]


def measure(own: Recipe, out: Path, share: float) -> dict[str, float]:
    """Return the counts of one merge, of the steps in its middle."""
    settings = own.model_dump(mode="json")
    settings["rollout"] |= {"over_sample": share, "log": {}}
    changed = Recipe.model_validate(settings)
    with RunFolder.create(out, changed) as folder, recorded() as steps:
        run_stage(changed, folder, "merge")
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    middle = slice(len(steps) // 4, -(len(steps) // 4))  # no lead yet, and then nothing new begins
    counted, logged = steps[middle], rows[middle]
    decoded, slots = sum(map(sum, counted)), sum(len(one) * max(one) for one in counted)
    return {
        "decode_steps": sum(map(len, counted)) / len(counted),
        "decode_steps_of_all": sum(map(len, steps)),
        "idle_slots": (slots - decoded) / len(counted),
        "idle_share": 1 - decoded / slots,
        "rows": decoded / sum(map(len, counted)),
        "tokens": rows[-1]["tokens/student"],
        "prefilled": sum(row["rollout/prefilled_tokens"] for row in logged) / len(logged),
        "carried": sum(row.get("rollout/carried", 0.0) for row in logged) / len(logged),
        "oldest": max(row.get("rollout/age", 0.0) for row in logged),
        "mean_age": sum(row.get("staleness/mean", 0.0) for row in logged) / len(logged),
    }


@contextmanager
def waited() -> Iterator[list[tuple[int, int]]]:
    """Record, by step of an asynchronous merge, the decode steps made when the trainer asks for its samples,
    and when it has them.
    """
    decode, take, rows, steps = TorchEngine._decode_step, AsyncRollouts.step_samples, [0], []

    def counted(engine: TorchEngine) -> Chunk:
        rows[0] += 1
        return decode(engine)

    def taken(source: AsyncRollouts, index: int) -> Any:
        before = rows[0]
        samples = take(source, index)
        steps.append((before, rows[0]))
        return samples

    TorchEngine._decode_step, AsyncRollouts.step_samples = counted, taken  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        TorchEngine._decode_step, AsyncRollouts.step_samples = decode, take  # type: ignore[method-assign]


def measure_async(own: Recipe, out: Path, max_ahead: int, share: float) -> dict[str, float]:
    """Return the counts of one asynchronous merge, of the steps in its middle."""
    settings = own.model_dump(mode="json")
    settings["rollout"] |= {"over_sample": share, "log": {}, "schedule": "async", "max_ahead": max_ahead}
    changed = Recipe.model_validate(settings)
    with RunFolder.create(out, changed) as folder, waited() as steps:
        run_stage(changed, folder, "merge")
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    middle = slice(len(steps) // 4, -(len(steps) // 4))
    logged, counted = rows[middle], steps[middle]
    return {
        "waited": statistics.mean(after - before for before, after in counted),
        "most_waited": max(after - before for before, after in counted),
        "decode_steps": (counted[-1][1] - counted[0][1]) / (len(counted) - 1),
        "wait_share": sum(row["time/rollout"] for row in logged)
        / (logged[-1]["time"] - rows[middle.start - 1]["time"]),
        "tokens": rows[-1]["tokens/student"],
        "prefilled": sum(row.get("rollout/prefilled_tokens", 0.0) for row in logged) / len(logged),
        "oldest": max(row.get("staleness/max", 0.0) for row in rows),
        "mean_age": sum(row.get("staleness/mean", 0.0) for row in logged) / len(logged),
    }


def table_async(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians of the rounds, and the range of what varies most."""
    lines = [
        "| `max_ahead`, `over_sample` | decode steps waited for a step (rounds) | most | decode steps a step"
        " | share of the time waited | mean age, oldest | tokens prefilled a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, rounds in found.items():
        one = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        low, high = (bound(each["waited"] for each in rounds) for bound in (min, max))
        lines.append(
            f"| {way} | {one['waited']:.0f} ({low:.0f} to {high:.0f}) | {one['most_waited']:.0f}"
            f" | {one['decode_steps']:.0f} | {one['wait_share']:.0%}"
            f" | {one['mean_age']:.2f}, {max(each['oldest'] for each in rounds):.0f}"
            f" | {one['prefilled']:,.0f} |"
        )
    return "\n".join(lines)


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        "| `over_sample` | decode steps a step | empty slots x decode steps | share of slots empty | rows"
        " a decode step | groups carried | mean age of tokens, oldest group's | tokens prefilled a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for share, one in found.items():
        lines.append(
            f"| {share} | {one['decode_steps']:.0f} | {one['idle_slots']:,.0f} | {one['idle_share']:.0%}"
            f" | {one['rows']:.1f} | {one['carried']:.1f} | {one['mean_age']:.2f}, {one['oldest']:.0f}"
            f" | {one['prefilled']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of a merge")
    parser.add_argument("--prompts", type=int, default=24, help="of each of two domains")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--models", type=Path, default=Path("runs/async-gain"), help="made where missing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of asynchronous merges")
    options = parser.parse_args()
    models = make_models(options.models, options.hidden, options.layers)
    own = merge_recipe(models, model_config(options.hidden, options.layers), options)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        if options.asynchronous:
            for number in range(options.rounds):
                for way in WAYS:
                    one = measure_async(own, Path(place, f"{number}-{way}"), *way)
                    found.setdefault(f"{way[0]}, {way[1]}", []).append(one)
        else:
            found = {str(share): measure(own, Path(place, str(share)), share) for share in SHARES}
    print(table_async(found) if options.asynchronous else table(found))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if type(value) is int}
        options.json.write_text(json.dumps({"settings": settings, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
