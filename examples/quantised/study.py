"""FP8 at the end of training against training for FP8, in the quick start's merge.

.venv/bin/python examples/quantised/study.py --seeds 0 1 2    # merges; goes on where it stopped
.venv/bin/python examples/quantised/study.py --seeds          # the table of what is kept
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.models.causal_lm import CausalLM
from opd.models.converted_folder import FP8Weights
from opd.pipelines.evaluation.statistics import paired_interval
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.pipelines.stages.student import load_model, sampling_params, tokenizer_of
from opd.rollout.collect import collect
from opd.rollout.torch_engine import TorchEngine
from opd.types import Sample

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LABELS = {
    "plain": "float32",
    "rounded": "float32, rounded to FP8 at its end",
    "trained": "**trained for FP8** (`model.quantize`)",
}
"""Arms of the merge."""
MERGES = {"plain": [], "trained": ["--model.quantize", "fp8"]}
"""Arms that are trained, and their options."""
SHORT = [
    *("--baselines.methods", "[]", "--evaluation.every", "0", "--evaluation.prompts_per_domain", "20"),
    *("--runtime.workers", "1", "--specialist.steps", "40", "--specialist.prompts_per_step", "32"),
    *("--distill.steps", "160"),
]
"""A shorter quick start."""
BASE = ["--base.steps", "240", "--base.batch_size", "128"]
HELD_OUT = 1000
"""Prompts of each domain."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all merges share."""

    out: Path
    """Of the run with base and specialists."""
    recipe: Recipe
    data: DomainSet

    @classmethod
    def open(cls, out: Path) -> Setting:
        """Train base and specialists in float32, unless that is done."""
        recipe = load_recipe([HERE.parent / "quickstart/recipe.yaml"], [*SHORT, *BASE])
        run(recipe, out, *(f"specialist-{domain}" for domain in recipe.domains))
        asked = recipe.evaluation.model_copy(update={"prompts_per_domain": HELD_OUT})
        measured = recipe.model_copy(update={"evaluation": asked})
        return cls(out, recipe, DomainSet.open(measured, tokenizer_of(recipe, out / "base")))

    def folder(self, arm: str, seed: int) -> Path:
        """Return the folder of the run that merges an arm."""
        return self.out.with_name(f"{arm}-{seed}")

    def merge(self, arm: str, seed: int) -> CausalLM:
        """Return the student of an arm, trained on the prompts and draws of `seed` unless that is done."""
        if arm == "rounded":
            model = self.merge("plain", seed)
            model.load_weights(FP8Weights(model.module.config).of_weights(model.weights()))
            return model
        out = self.folder(arm, seed)
        teachers = {domain: {"path": str(self.specialist(domain))} for domain in self.recipe.domains}
        start = ["--base", "null", "--model.config", "null", "--model.path", str(self.out / "base")]
        options = [*SHORT, "--seed", str(seed), *start, "--teachers", json.dumps(teachers)]
        recipe = load_recipe([HERE.parent / "quickstart/recipe.yaml"], [*options, *MERGES[arm]])
        run(recipe, out, "merge")
        return load_model(recipe, out / "merged")

    def specialist(self, domain: str) -> Path:
        """Return the folder of a domain's teacher."""
        return self.out.absolute() / "specialists" / domain

    def answers(self, model: CausalLM, domain: str) -> list[Sample]:
        """Return a response to each held-out prompt, with reward 1 if it is right."""
        engine = TorchEngine(model, max_sequence=32, vocab_size=model.vocabulary)
        prompts = self.data.held_out(domain, HELD_OUT, "evaluate")
        groups = collect(engine, prompts, 1, sampling_params(self.recipe, self.data.tokenizer), 0)
        samples = [sample for group in groups for sample in group.samples]
        for sample in samples:
            text = str(self.data.tokenizer.decode(sample.response_ids, skip_special_tokens=True))
            sample.reward = float(text == sample.label)
        return samples


def run(recipe: Recipe, out: Path, *wanted: str) -> None:
    """Run the stages `wanted` and what they need in `out`, unless they are done."""
    opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
    with opened as folder:
        for name in wanted:
            for stage in with_needs(plan_stages(recipe), name):
                if folder.stage_done(stage.name) is None:
                    execute_stage(recipe, folder, stage, lambda done, total, headline: None)


@torch.no_grad()
def logprobs(model: CausalLM, samples: Sequence[Sample]) -> Tensor:
    """Return [T, V]: log-probabilities at each response token."""
    found = []
    for start in range(0, len(samples), 200):
        part = samples[start : start + 200]
        lengths = torch.tensor([len(sample.token_ids) for sample in part])
        ids = torch.cat([torch.from_numpy(sample.token_ids).long() for sample in part])
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        ends = [0, *lengths.cumsum(0).tolist()]
        rows = torch.cat(
            [
                torch.arange(first + len(sample.prompt_ids) - 1, last - 1)
                for sample, first, last in zip(part, ends, ends[1:], strict=False)
            ]
        )
        found.append(model.head().logits(model.hidden(ids, positions, ends)[rows]).log_softmax(-1))
    return torch.cat(found)


def divergence(model: CausalLM, other: CausalLM, samples: Sequence[Sample]) -> float:
    """Return KL(model || other) in nats a token, over the whole vocabulary, on the responses `samples`."""
    ours, theirs = logprobs(model, samples), logprobs(other, samples)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def measure(setting: Setting, arm: str, seed: int) -> dict[str, Any]:
    """Return what an arm reaches: right answers by domain, its KL to teachers, and to the float32 student of
    its own `seed` and of the next one, whose prompts and draws are others.
    """
    model, plain, other = (setting.merge(*one) for one in ((arm, seed), ("plain", seed), ("plain", seed + 1)))
    right, taught, apart, beside = {}, [], [], []
    for domain in setting.recipe.domains:
        samples = setting.answers(model, domain)
        right[domain] = mean(sample.reward or 0.0 for sample in samples)
        teacher = load_model(setting.recipe, setting.specialist(domain))
        taught.append(divergence(model, teacher, samples))
        apart.append(divergence(model, plain, samples))
        beside.append(divergence(model, other, samples))
    kls = {"teacher_kl": taught, "plain_kl": apart, "other_kl": beside}
    return {"right": right} | {name: mean(values) for name, values in kls.items()}


def study(out: Path, seed: int) -> None:
    """Merge and measure all arms of one seed, whose results are kept one by one."""
    file = RESULTS / f"seed-{seed}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for arm in LABELS:
        if arm not in found:
            print(f"seed {seed}: {arm}", flush=True)
            found[arm] = measure(Setting.open(out / "specialists"), arm, seed)
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps(found) + "\n", "utf-8")


def ahead(values: Sequence[float], others: Sequence[float], form: str) -> str:
    """Return how far values are ahead of others, paired by seed, with a 95 % interval."""
    if len(values) < 2 or values == others:
        return ""
    value, low, high = paired_interval([one - other for one, other in zip(values, others, strict=True)])
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def table(seeds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of Markdown: a row an arm, means of seeds."""
    yield (
        f"| student, {len(seeds)} merges | right, % (sd) | ahead of float32, points | KL to the teachers |"
        " above float32 | KL to the float32 student | to one of other draws |"
    )
    yield "|---|---|---|---|---|---|---|"
    right = {arm: [100 * mean(seed[arm]["right"].values()) for seed in seeds] for arm in LABELS}
    taught = {arm: [seed[arm]["teacher_kl"] for seed in seeds] for arm in LABELS}
    for arm, label in LABELS.items():
        deviation = f" ({stdev(right[arm]):.1f})" if len(seeds) > 1 else ""
        yield (
            f"| {label} | {mean(right[arm]):.1f}{deviation} | {ahead(right[arm], right['plain'], '+.1f')} |"
            f" {mean(taught[arm]):.4f} | {ahead(taught[arm], taught['plain'], '+.4f')} |"
            f" {mean(seed[arm]['plain_kl'] for seed in seeds):.4f} |"
            f" {mean(seed[arm]['other_kl'] for seed in seeds):.4f} |"
        )


def main() -> None:
    """Measure what the command line asks for, and print the table of all that is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/quantised"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        study(options.out, seed)
    kept = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("seed-*.json"))]
    if not kept:
        parser.error(f"{RESULTS} holds no results; name a seed")
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
