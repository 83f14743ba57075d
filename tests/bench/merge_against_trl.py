"""A merge of three teachers by `opd` and by TRL: held-out accuracy against processor seconds.

    .venv/bin/python tests/bench/merge_against_trl.py [--seeds 0 1 2] [--folder DIR] [--json FILE]
    .venv/bin/python tests/bench/merge_against_trl.py --plot FIGURE.png --json FILE
    .venv/bin/python tests/bench/merge_against_trl.py --passes [--json FILE]

A run of the quick start gives base and specialists. Both sides start from its base, learn from its
specialists on its prompts, 24 answers a step of 480, by the exact reverse KL in fp32 on one thread. `opd`
merges by the quick start's recipe, and once more at another rate. TRL's DistillationTrainer has one teacher.
Here the teachers take turns in it: each `turn` steps another, with the moments of AdamW kept, at each of
several rates. Rates and moments decay as in the quick start.

Models are measured in the same way: `opd`'s sampled accuracy on the same held-out prompts. Processor seconds
are those of training alone. For `opd` they are the difference of two runs of different length, an evaluation
apart, over their steps. For TRL they are those of `train()`, without what is saved. Goes on where it stopped.

`--passes` times a step of `opd` alone, in one process: by turns with one pass through the student for all
teachers, and with a pass for each. Of the quick start's student and one of 3 M parameters, with teachers that
have learnt nothing.
"""

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np

# against_trl is imported where it is used: TRL's process does not look for modules in this folder, since
# benchmarks have the names of packages.
ROOT = Path(__file__).resolve().parents[2]
QUICK = ROOT / "examples" / "quickstart" / "recipe.yaml"
STEPS, PROMPTS, EVERY, HELD_OUT = 480, 24, 60, 500
TURNS = {1: "another teacher each step", 20: "another each 20 steps", STEPS: "one teacher after another"}
RATES = {1: (1e-4, 2.5e-4, 5e-4, 1e-3), 20: (2.5e-4, 5e-4), STEPS: (2.5e-4, 5e-4)}
"""By turns: the peak rates that are tried."""
OWN_RATE = 5e-4
"""Peak rate of a second merge by `opd`."""
TIMED = (40, 160)
"""Steps of the short and the long run that time a step of `opd`."""
SIZES = {"0.33 M": (96, 256, 3, 320), "3 M": (256, 768, 4, 160)}
"""Of `--passes`: hidden size, intermediate size, layers and steps."""


def turns_of(domains: dict[str, int], turn: int) -> list[str]:
    """Return the domain of each step. `domains`: their shares. Turns of `STEPS` are one after another."""
    cycle = [name for name, share in domains.items() for _ in range(share)]
    if turn == STEPS:
        return [cycle[step * len(cycle) // STEPS] for step in range(STEPS)]
    return [cycle[step // turn % len(cycle)] for step in range(STEPS)]


def opd(words: list[str], out: Path, log: Path) -> float:
    """Run a command of `opd` on one thread, and return its processor seconds."""
    from against_trl import measured

    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "opd.pipelines.cli", words[0], str(QUICK), *words[1:], "--out", str(out)]
    return measured(command, env, log)[0]


def make_models(folder: Path, seed: int) -> Path:
    """Run the quick start without baselines, and return its folder. Its merge is `opd`'s side."""
    run = folder / f"run-{seed}"
    if not (run / "results.json").exists():
        words = ["run", "--seed", str(seed), "--baselines.methods", "[]", "--evaluation.every", str(EVERY)]
        words += ["--evaluation.curve_prompts", str(HELD_OUT), "--runtime.workers", "1"]
        opd([*words, *(["--resume"] if run.exists() else [])], run, folder / f"run-{seed}.log")
    return run


def merge_words(run: Path, seed: int) -> list[str]:
    """Return the command that merges the specialists of `run` again."""
    words = ["distill", "--seed", str(seed), "--base", "null", "--model.config", "null"]
    words += ["--model.path", str(run / "base"), "--baselines.methods", "[]"]
    for name in shares():
        words += [
            f"--teachers.{name}.path",
            str(run / "specialists" / name),
            f"--domains.{name}.teacher",
            name,
        ]
    return words


def step_seconds(folder: Path, run: Path, seed: int) -> float:
    """Return the processor seconds of a step of `opd`'s merge, by two runs without evaluations."""
    seconds = []
    for steps in TIMED:
        out = folder / f"timed-{seed}-{steps}-{time.time_ns()}"
        words = [*merge_words(run, seed), "--evaluation.every", "0", "--distill.steps", str(steps)]
        seconds.append(opd(words, out, out.with_suffix(".log")))
    return (seconds[1] - seconds[0]) / (TIMED[1] - TIMED[0])


def random_models(folder: Path, size: str) -> Path:
    """Write a base and specialists of `size` with random weights, and return their folder."""
    from opd.config.load import load_recipe
    from opd.models.causal_lm import CausalLM
    from opd.models.checkpoint import save_checkpoint
    from opd.pipelines.stages.domains import load_domains, student_tokenizer

    recipe, out = load_recipe([QUICK], []), folder / f"random-{size.replace(' ', '')}"
    hidden, inner, layers, _ = SIZES[size]
    config = dict(recipe.model.config or {}) | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers
    }  # fmt: skip
    tokenizer = student_tokenizer(recipe, load_domains(recipe).values())
    for seed, name in enumerate(("base", *(f"specialists/{one}" for one in recipe.domains))):
        save_checkpoint(
            CausalLM.from_config(config, tokenizer=tokenizer, seed=seed), tokenizer, out / name, {}
        )
    return out


def compare_passes(folder: Path, size: str) -> dict[str, dict[str, float]]:
    """Return the processor seconds of steps of `size`, whole and of forward and backward alone, with one pass
    for all teachers and with one for each: the median, and the lower quartile, which other work moves less.
    """
    from opd.pipelines.cli import main as run_opd
    from opd.train.backend import Backend

    run, out = random_models(folder, size), folder / f"passes-{time.time_ns()}"
    began: list[float] = []
    spent: list[float] = []
    accumulate = Backend.accumulate_gradient

    def timed(backend: Backend, *given: Any) -> dict[str, float]:
        backend.one_teacher = len(began) % 2 == 1
        began.append(time.process_time())
        metrics = accumulate(backend, *given)
        spent.append(time.process_time() - began[-1])
        return metrics

    words = ["distill", str(QUICK), *merge_words(run, 0)[1:], "--evaluation.every", "0", "--out", str(out)]
    words += ["--distill.steps", str(SIZES[size][-1]), "--evaluation.prompts_per_domain", "1"]
    with patch.object(Backend, "accumulate_gradient", timed):
        assert run_opd(words) == 0
    whole = [after - before for before, after in pairwise(began)]
    found = {}
    for name, first in (("one pass", 0), ("a pass for each", 1)):
        found[name] = {
            f"{what}, {share} %": float(np.percentile(seconds[20 + first :: 2], share))
            for what, seconds in (("step", whole), ("forward and backward", spent))
            for share in (25, 50)
        }
    return found


def merge_again(folder: Path, run: Path, seed: int) -> Path:
    """Merge at `OWN_RATE`, unless that is done, and return the run's folder."""
    out = folder / f"own-{seed}"
    if not (out / "stages" / "merge" / "done.json").exists():
        words = [*merge_words(run, seed), "--evaluation.every", str(EVERY), "--evaluation.curve_prompts"]
        words += [str(HELD_OUT), "--distill.optim.lr", str(OWN_RATE), *(["--resume"] if out.exists() else [])]
        opd(words, out, folder / f"own-{seed}.log")
    return out


def shares() -> dict[str, int]:
    """Return the quick start's domains with their shares of the prompts."""
    from opd.config.load import load_recipe

    return {name: int(config.weight) for name, config in load_recipe([QUICK], []).domains.items()}


class Measure:
    """Measures model folders as `opd`'s learning curve does, and writes the prompts of training."""

    def __init__(self, run: Path, seed: int) -> None:
        from opd.config.load import load_recipe
        from opd.models.tokenizers import load_tokenizer
        from opd.pipelines.stages.domains import DomainSet
        from opd.pipelines.stages.student import ways_of

        words = [
            "--seed",
            str(seed),
            "--base",
            "null",
            "--model.config",
            "null",
            "--model.path",
            str(run / "base"),
        ]
        self.recipe = load_recipe([QUICK], words)
        tokenizer = load_tokenizer(run / "base")
        self.data, self.ways = DomainSet.open(self.recipe, tokenizer), ways_of(self.recipe, tokenizer)

    def accuracies(self, folder: Path) -> dict[str, float]:
        """Return the sampled accuracy of a model on each domain's held-out prompts."""
        from opd.models.causal_lm import CausalLM
        from opd.pipelines.evaluation.measure import prompt_accuracy
        from opd.rollout.torch_engine import TorchEngine

        engine = TorchEngine(CausalLM.from_pretrained(folder), max_sequence=32)
        return {
            name: prompt_accuracy(
                engine, self.data, self.data.held_out(name, HELD_OUT, "evaluate"), self.ways[name],
                seed=self.recipe.seed,
            ).accuracy
            for name in self.recipe.domains
        }  # fmt: skip

    def write_prompts(self, turns: list[str], file: Path) -> None:
        """Write the prompts of all steps, in the order in which TRL is to read them."""
        taken: dict[str, int] = {}
        with open(file, "w", encoding="utf-8") as lines:
            for name in turns:
                step = taken[name] = taken.get(name, -1) + 1
                for prompt in self.data.next_prompts(name, step, PROMPTS, "merge"):
                    text = self.data.tokenizer.decode(prompt.token_ids)
                    assert self.data.tokenizer(text)["input_ids"] == prompt.token_ids.tolist(), text
                    lines.write(json.dumps({"prompt": text, "teacher": name}) + "\n")


def train_with_trl(run: Path, prompts: Path, rate: float, out: Path) -> None:
    """Train in TRL's environment, save the student each `EVERY` steps, and write the seconds until then."""
    import torch
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    data = load_dataset("json", data_files=str(prompts), split="train")
    turns = data["teacher"][::PROMPTS]
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    teachers = {name: load(run / "specialists" / name).eval() for name in set(turns)}
    seconds: dict[int, float] = {}
    spent, started = 0.0, 0.0

    class Turns(TrainerCallback):
        """Gives each step its teacher, and saves the student in time that is not counted."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            trainer.teacher_model = teachers[turns[state.global_step]]

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            nonlocal spent, started
            if state.global_step % EVERY == 0:
                spent += time.process_time() - started
                seconds[state.global_step] = spent
                more["model"].save_pretrained(out / str(state.global_step))
                tokenizer.save_pretrained(out / str(state.global_step))
                started = time.process_time()

    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": len(turns), "per_device_train_batch_size": PROMPTS,
        "learning_rate": rate, "max_completion_length": 10, "beta": 1.0, "adam_beta2": 0.99,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "shuffle_dataset": False,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(run / "base", padding_side="left")
    trainer = DistillationTrainer(
        model=load(run / "base"),
        teacher_model=teachers[turns[0]],
        args=DistillationConfig(**settings),
        train_dataset=data.remove_columns("teacher"),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    started = time.process_time()
    trainer.train()
    (out / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def trl_side(folder: Path, run: Path, seed: int, turn: int, rate: float, measure: Measure) -> dict[str, Any]:
    """Train one arm of TRL, unless it is there, and return its curve."""
    from against_trl import environment, measured

    out = folder / f"trl-{seed}-{turn}-{rate:g}"
    turns, prompts = turns_of(shares(), turn), folder / f"prompts-{seed}-{turn}.jsonl"
    if not (out / "seconds.json").exists():
        measure.write_prompts(turns, prompts)
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        words = [environment(folder), "-P", Path(__file__).resolve(), "--trl", run, prompts, rate, out]
        measured([str(word) for word in words], env, folder / f"{out.name}.log")
    seconds = json.loads((out / "seconds.json").read_text(encoding="utf-8"))
    curve = [
        {"step": int(step), "seconds": spent} | measure.accuracies(out / step)
        for step, spent in seconds.items()
    ]
    return {"turn": turn, "rate": rate, "curve": curve}


def race(folder: Path, seed: int) -> dict[str, Any]:
    """Run both sides of one seed."""
    from opd.metrics import read_metrics

    run = make_models(folder, seed)
    measure, names = Measure(run, seed), list(shares())
    each = min(step_seconds(folder, run, seed) for _ in range(2))

    def curve(out: Path) -> list[dict[str, Any]]:
        return [
            {"step": row["step"], "seconds": row["step"] * each}
            | {name: row[f"accuracy/{name}"] for name in names}
            for row in read_metrics(out / "stages" / "merge" / "metrics.jsonl")
            if f"accuracy/{names[0]}" in row
        ]

    taught = {name: measure.accuracies(run / "specialists" / name)[name] for name in names}
    found = {"seed": seed, "specialists": taught, "base": measure.accuracies(run / "base"), "opd": curve(run)}
    found["opd at another rate"] = curve(merge_again(folder, run, seed))
    found["trl"] = [
        trl_side(folder, run, seed, turn, rate, measure) for turn in TURNS for rate in RATES[turn]
    ]  # fmt: skip
    return found


def mean_of(row: dict[str, Any], names: list[str]) -> float:
    return fmean(row[name] for name in names)


def best_arms(results: list[dict[str, Any]]) -> dict[int, float]:
    """Return for each turn of TRL the rate with the best mean accuracy at the end over the seeds."""
    names, scores = list(results[0]["base"]), {}
    for found in results:
        for arm in found["trl"]:
            scores.setdefault((arm["turn"], arm["rate"]), []).append(mean_of(arm["curve"][-1], names))
    return {turn: max(RATES[turn], key=lambda rate: fmean(scores[turn, rate])) for turn in TURNS}


def time_to(curve: list[dict[str, Any]], goal: float, names: list[str]) -> float | None:
    """Return the seconds at which a curve reaches `goal`, `None` if it never does."""
    return next((row["seconds"] for row in curve if mean_of(row, names) >= goal), None)


def table(results: list[dict[str, Any]]) -> str:
    """Return a row for each arm: accuracy at the end, seconds, and seconds to 95 % of the specialists."""
    names, rates = list(results[0]["base"]), best_arms(results)
    arms = [
        ("`opd`, the quick start's recipe, rate 0.0015", [found["opd"] for found in results]),
        (f"`opd`, rate {OWN_RATE:g}", [found["opd at another rate"] for found in results]),
    ]
    for turn, text in TURNS.items():
        curves = [arm["curve"] for found in results for arm in found["trl"]
                  if (arm["turn"], arm["rate"]) == (turn, rates[turn])]  # fmt: skip
        arms.append((f"TRL, {text}, rate {rates[turn]:g}", curves))
    lines = [
        "| | accuracy after 480 steps | processor seconds | until 95 % of the specialists |",
        "|---|---|---|---|",
    ]
    goals = [0.95 * fmean(found["specialists"].values()) for found in results]
    for text, curves in arms:
        ends = " ".join(f"{100 * mean_of(curve[-1], names):.1f}" for curve in curves)
        seconds = " ".join(f"{curve[-1]['seconds']:.1f}" for curve in curves)
        reached = [time_to(curve, goal, names) for curve, goal in zip(curves, goals, strict=True)]
        until = " ".join("never" if one is None else f"{one:.1f}" for one in reached)
        lines.append(f"| {text} | {ends} | {seconds} | {until} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Write the figure: mean accuracy against processor seconds, a line for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names, rates = list(results[0]["base"]), best_arms(results)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = dict(zip([0, -1, *TURNS], ("#b3502d", "#e08a5f", "#3b6ea8", "#6a8f4e", "#c9a227"), strict=True))
    ours = {0: "opd: the quick start's recipe", -1: f"opd: rate {OWN_RATE:g}"}
    for number, found in enumerate(results):
        start = mean_of(found["base"], names)
        curves = {0: found["opd"], -1: found["opd at another rate"]} | {
            arm["turn"]: arm["curve"] for arm in found["trl"] if arm["rate"] == rates[arm["turn"]]
        }
        for turn, curve in curves.items():
            text = ours.get(turn) or f"TRL: {TURNS[turn]}, rate {rates[turn]:g}"
            axes.plot(
                [0.0, *(row["seconds"] for row in curve)], [start, *(mean_of(row, names) for row in curve)],
                color=colours[turn], label=None if number else text, linewidth=1.5,
            )  # fmt: skip
        axes.axhline(fmean(found["specialists"].values()), color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlabel("processor seconds of training (one thread)")
    axes.set_ylabel("held-out accuracy, mean of the three domains")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "opd" / "against_trl")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--plot", type=Path, help="draw the numbers of --json")
    parser.add_argument(
        "--passes", action="store_true", help="time one pass for all teachers, and one for each"
    )
    parser.add_argument("--trl", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        run, prompts, rate, out = options.trl
        train_with_trl(Path(run), Path(prompts), float(rate), Path(out))
        return
    if options.plot:
        results = json.loads(options.json.read_text(encoding="utf-8"))["results"]
        draw(results, options.plot)
        print(table(results))
        return
    from against_trl import TRL, environment, processor

    options.folder.mkdir(parents=True, exist_ok=True)
    if options.passes:
        steps = {size: compare_passes(options.folder, size) for size in SIZES}
        print(json.dumps(steps, indent=1))
        if options.json:  # beside the race
            kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
            options.json.write_text(json.dumps(kept | {"passes": steps}, indent=1) + "\n", encoding="utf-8")
        return
    environment(options.folder)
    results = []
    for seed in options.seeds:
        results.append(race(options.folder, seed))
        print(table(results), flush=True)
        if options.json:
            kept = {"processor": processor(), "trl": TRL, "results": results}
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
