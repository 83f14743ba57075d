"""One merge three times, its teachers on torch, on SGLang servers and on Megatron-Core: do they end alike?

    export PYTHONPATH=tests/servers:tests/pipelines
    python tests/bench/teacher_backends.py RUN [--only torch] [--steps 480] [--json FILE]

RUN is a finished run of the quick start: its base and specialists are what is merged. Needs the extras
`sglang` and `megatron`; the servers' environment is installed on first use. The same prompts, seeds and
settings each time; results of other back ends that FILE holds already are kept.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from real_servers import SGLangServer

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("torch", "sglang", "megatron")
LIMIT = 3600
SGLangServer.start_seconds = 1200  # three at once, beside whatever else runs


@contextmanager
def servers(models: Mapping[str, Path], folder: Path) -> Iterator[dict[str, str]]:
    """One server a model, all starting at once; their URLs by name."""
    longest = {"context-length": 64}  # the quick start's models have no more positions
    started = {name: SGLangServer(path, folder / f"{name}.log", **longest) for name, path in models.items()}
    try:
        for server in started.values():
            server.launch()
        for server in started.values():
            server.wait()
        yield {name: server.url for name, server in started.items()}
    finally:
        for server in started.values():
            server.kill()


def merge(kind: str, run: Path, out: Path, urls: Mapping[str, str], steps: int) -> None:
    """The quick start's merge of the specialists in `run`, into the run folder `out`."""
    teachers = {}
    for path in sorted((run / "specialists").iterdir()):
        teachers[path.name] = {"path": str(path.absolute())}
        if path.name in urls:
            teachers[path.name] |= {"type": "sglang", "urls": [urls[path.name]]}
    changes = {
        "model": {"config": None, "path": str((run / "base").absolute())},
        "base": None,
        "teachers": teachers,
        "distill": {"steps": steps, "teachers": "megatron" if kind == "megatron" else "streamed"},
        "baselines": {"methods": []},
        "evaluation": {"every": 0},
        "runtime": {"workers": 1},
    }
    recipe = out.with_suffix(".yaml")
    recipe.write_text(json.dumps(changes))  # JSON is YAML
    command = [sys.executable, "-m", "opd.pipelines.cli", "run"]
    command += [str(ROOT / "examples/quickstart/recipe.yaml"), str(recipe), "--out", str(out)]
    subprocess.run(command, check=True, timeout=LIMIT, cwd=ROOT, stdout=subprocess.DEVNULL)


def measured(out: Path) -> dict:
    """What is compared of one merge."""
    lines = (out / "stages/merge/metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    models = json.loads((out / "results.json").read_text("utf-8"))["models"]
    merged = next(model for model in models if model["name"] == "merged")
    shares = {
        name.split("/")[1]: statistics.mean(step.get(name, 0.0) for step in steps)
        for name in steps[0]
        if name.endswith("/wait_share")
    }
    return {
        "steps": len(steps),
        "first_step": {name: steps[0][name] for name in ("kl/mean", "grad_norm", "tokens/student")},
        "last_kl": steps[-1]["kl/mean"],
        "student_tokens": steps[-1]["tokens/student"],
        "seconds": sum(value for name, value in merged_phases(out).items() if name != "evaluate"),
        "accuracy": {
            domain: {mode: numbers[mode] for mode in ("sampled", "greedy")}
            for domain, numbers in merged["domains"].items()
        },
        "wait_share": shares,
    }


def merged_phases(out: Path) -> dict[str, float]:
    return json.loads((out / "stages/merge/done.json").read_text("utf-8"))["phases"]


def apart(one: Mapping, other: Mapping) -> float:
    """The largest difference of two merges' sampled accuracies, in standard errors of such a difference."""
    worst = 0.0
    for domain, numbers in one["accuracy"].items():
        a, b = numbers["sampled"], other["accuracy"][domain]["sampled"]
        share = (a["correct"] + b["correct"]) / (a["total"] + b["total"])
        error = math.sqrt(share * (1 - share) * (1 / a["total"] + 1 / b["total"]))
        worst = max(worst, abs(a["accuracy"] - b["accuracy"]) / error if error else 0.0)
    return worst


def table(found: Mapping[str, Mapping]) -> str:
    """Markdown, one column a back end."""
    kinds = [kind for kind in BACKENDS if kind in found]
    domains = list(found[kinds[0]]["accuracy"])
    rows = {
        "first step: KL": [f"{found[k]['first_step']['kl/mean']:.7f}" for k in kinds],
        "first step: gradient norm": [f"{found[k]['first_step']['grad_norm']:.7f}" for k in kinds],
        "last step: KL": [f"{found[k]['last_kl']:.5f}" for k in kinds],
    }
    for domain in domains:
        cells = (found[k]["accuracy"][domain] for k in kinds)
        rows[f"{domain}: sampled, greedy"] = [
            f"{100 * c['sampled']['accuracy']:.1f} %, {100 * c['greedy']['accuracy']:.1f} %" for c in cells
        ]
    for name in found[kinds[0]]["wait_share"]:
        shares = [100 * found[k]["wait_share"][name] for k in kinds]
        rows[f"waiting for {name}, share of a step"] = [f"{share:.0f} %" for share in shares]
    rows["merge, s"] = [f"{found[k]['seconds']:.0f}" for k in kinds]
    if "torch" in found:
        rows["sampled accuracy against torch, standard errors"] = [
            f"{apart(found[k], found['torch']):.2f}" for k in kinds
        ]
    lines = ["| | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()])


def main() -> None:
    """Merge, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--only", choices=BACKENDS, action="append")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="opd-backends-"))
    try:
        for kind in options.only or BACKENDS:
            specialists = {path.name: path.absolute() for path in (options.run / "specialists").iterdir()}
            with servers(specialists if kind == "sglang" else {}, folder) as urls:
                merge(kind, options.run, folder / kind, urls, options.steps)
            found[kind] = measured(folder / kind)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(found))


if __name__ == "__main__":
    main()
