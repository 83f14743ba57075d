"""Who holds how much memory in each phase of a merge's step, as it is and with `runtime.offload`.

    .venv/bin/python tests/bench/memory_by_phase.py [--json FILE] [--figure FILE.svg]

A random Llama of 20 M parameters and two streamed teachers of its form. Each case is `opd distill` with one
thread in a process of its own. By phase: the most that a step's metrics say was held together; of the
process: `VmHWM`. Runs of two lengths tell a step's processor time.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import against_trl
import teachers_memory

FORM = {
    "vocab_size": 16000,
    "hidden_size": 384,
    "intermediate_size": 1056,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
CASES = {"as it is": {}, "handed over": {"engine": True, "trainer": True}}
OPTIONS = argparse.Namespace(ranks=1, new=48)
"""As those of `teachers_memory`."""
STEPS = (1, 4)
"""Of the short and the long run."""
PHASES = ("rollout", "score", "train", "sync")
COLOURS = {
    "engine_weights": "#3b6ea8",
    "engine_kv": "#8fb3d9",
    "trainer_weights": "#b3502d",
    "trainer_gradients": "#d98f6f",
    "trainer_moments": "#e8c4b0",
    "teacher_weights": "#6a8f4e",
    "teacher_heads": "#a9c492",
    "hidden_states": "#c9a227",
}
MIB = 1 << 20


def write_inputs(folder: Path) -> None:
    """A student, and two models of its form to follow, with prompts."""
    case = against_trl.Case("distill", FORM, 12, 1, teachers_memory.PROMPT, OPTIONS.new, (1, 2))
    for number in range(2):
        against_trl.write_inputs(case, folder / f"t{number}", (0, number + 1), 100)


def measured(folder: Path, case: str) -> dict[str, Any]:
    """One case."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = f"{against_trl.ROOT}{os.pathsep}{folder / 't0'}"
    took, peak, rows = [], 0.0, []
    for steps in STEPS:
        recipe = teachers_memory.recipe_of(folder, OPTIONS, 2, steps, "streamed")
        recipe["distill"]["prompts_per_domain"] = 6
        recipe["runtime"]["offload"] = CASES[case]
        out = folder / f"{case.replace(' ', '-')}-{steps}"
        out.with_suffix(".yaml").write_text(json.dumps(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(out.with_suffix(".yaml"))]
        seconds, peak = against_trl.measured([*command, "--out", str(out)], env, out.with_suffix(".log"))
        took.append(seconds)
        lines = (out / "stages/merge/metrics.jsonl").read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    held = {phase: max((of_phase(row, phase) for row in rows), key=total) for phase in PHASES}
    largest = max(total(found) for found in held.values())
    step = (took[1] - took[0]) / (STEPS[1] - STEPS[0])
    return {"phases": held, "largest_mib": largest / MIB, "peak_mib": peak, "seconds_a_step": step}


def of_phase(row: dict[str, Any], phase: str) -> dict[str, int]:
    """Bytes by kind."""
    return {kind: int(row.get(f"memory/{phase}/{kind}", 0)) for kind in COLOURS}


def total(held: dict[str, int]) -> int:
    return sum(held.values())


def draw(results: dict[str, dict[str, Any]]) -> str:
    """Stacked bars of every phase of both cases, as SVG."""
    bars = [(case, phase, held) for case, one in results.items() for phase, held in one["phases"].items()]
    width, row, left = 420.0, 26, 170
    scale = width / max(total(held) for *_, held in bars)
    height = row * len(bars) + 62
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif"'
        ' font-size="12"><title>Memory by phase of a merge</title>',
        f'<rect width="720" height="{height}" fill="white"/>',
    ]
    for index, (case, phase, held) in enumerate(bars):
        y, x = 10 + row * index, float(left)
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{case}: {phase}</text>')
        for kind, size in held.items():
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="18" fill="{COLOURS[kind]}"/>'
            )
            x += size * scale
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{total(held) / MIB:.0f} MiB</text>')
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x, y = 20 + 175 * (index % 4), row * len(bars) + 22 + 20 * (index // 4)
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}">{kind.replace("_", " ")}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--figure", type=Path, help="where to draw them")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch))
        for case in CASES:
            results[case] = found = measured(Path(scratch), case)
            phases = ", ".join(f"{phase} {total(held) / MIB:.0f}" for phase, held in found["phases"].items())
            print(
                f"{case}: {phases} MiB; process {found['peak_mib']:.0f} MiB,"
                f" {found['seconds_a_step']:.2f} processor s a step",
                flush=True,
            )
    if options.json:
        kept = {"processor": against_trl.processor(), "steps": STEPS, "form": FORM, "results": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        options.figure.write_text(draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
