"""The control of every study: whose answers the loss is taken on, times which loss. Each is a merge of `opd`.

One that was stopped goes on where it was, one that is done is not run again. What is kept of it are counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.evaluation.measure import is_right
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.grpo import train_grpo
from opd.pipelines.stages.loop import Extent
from opd.pipelines.stages.pipeline_plan import Stage, plan_stages, with_needs
from opd.pipelines.stages.student import load_model, make_writer, tokenizer_of, ways_of
from opd.rollout.collect import generate_groups
from opd.train.packing import of_packed
from opd.types import Sample

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

FORWARD, REVERSE = '{"type": "full", "kind": "forward"}', '{"type": "full", "kind": "reverse"}'
CELLS: dict[str, tuple[str, ...]] = {
    "teacher/sampled": ("--distill.loss", REVERSE, "--baselines.methods", '["off_policy"]'),
    "teacher/forward": ("--distill.loss", FORWARD, "--distill.prefixes", "teacher"),
    "teacher/reverse": ("--distill.loss", REVERSE, "--distill.prefixes", "teacher"),
    "student/sampled": ("--distill.loss", '{"type": "k1"}'),
    "student/forward": ("--distill.loss", FORWARD),
    "student/reverse": ("--distill.loss", REVERSE, "--baselines.methods", '["off_policy"]'),
}
"""Answers and loss -> what they are in a recipe. Two cells share a run: supervised on what the teacher drew
is the baseline of the merge, at its number of tokens."""
SAMPLED = "teacher/sampled"
DAMAGE = 0.3
"""Of the weights' standard deviation, tensor by tensor."""
ARMS = ("start", "teacher", *CELLS)
"""What is measured of a condition: also the model that the students begin as."""
MAX_TOKENS = 4096
"""Packed tokens of a forward pass that measures."""


def recipe_of(name: str, settings: Sequence[str]) -> Recipe:
    """The recipe `name` of this folder with `settings` as on the command line."""
    return load_recipe([HERE / name], list(settings))


def taught(start: Path, teachers: Mapping[str, Path]) -> tuple[str, ...]:
    """Settings of a merge of `teachers`, one a domain, into the model in `start`."""
    given = {domain: {"path": str(path), "type": "local"} for domain, path in teachers.items()}
    begin = ("--model.config", "null", "--base", "null", "--model.path", str(start))
    return (*begin, "--teachers", json.dumps(given))


def opened(out: Path, recipe: Recipe) -> RunFolder:
    """The run folder `out`, begun or gone on with."""
    return RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)


def run(out: Path, recipe: Recipe, stage: str) -> dict[str, Any]:
    """`stage` of a run in `out`, after those it needs, of which nothing that is done is done again; what it
    recorded.
    """
    with opened(out, recipe) as folder:
        for needed in with_needs(plan_stages(recipe), stage):
            if folder.stage_done(needed.name) is None:
                execute_stage(recipe, folder, needed, lambda done, total, headline: None)
        return folder.stage_done(stage) or {}


def mixed_grpo(out: Path, recipe: Recipe, start: Path, tokens: int) -> tuple[Path, list[dict[str, Any]]]:
    """GRPO on all domains of `recipe` at once, from `start`, for so many tokens: its model, and the metrics
    of each step.
    """
    model, name = out / "baselines" / "mixed_grpo", "baseline-mixed_grpo"

    def learn(context: StageContext) -> dict[str, Any]:
        return train_grpo(context, start, list(recipe.domains), model, Extent(tokens=tokens))

    with opened(out, recipe) as folder:
        if folder.stage_done(name) is None:
            execute_stage(recipe, folder, Stage(name, (), learn), lambda done, total, headline: None)
        return model, read_metrics(folder.metrics_path(name))


def run_cell(out: Path, name: str, cell: str, settings: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The arm of `cell` under `out`: its model, and what its stage recorded."""
    shared = "student/reverse" if cell == SAMPLED else cell
    folder = out / shared.replace("/", "-")
    recipe = recipe_of(name, [*settings, *CELLS[cell]])
    if cell == SAMPLED:
        return folder / "baselines" / "off_policy", run(folder, recipe, "baseline-off_policy")
    return folder / "merged", run(folder, recipe, "merge")


def changed(model: Path, out: Path, about: str, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A copy of `model` in `out` with other weights, made unless it is there."""
    if not out.exists():
        found = CausalLM.from_pretrained(model)
        found.load_weights([(name, change(name, weight)) for name, weight in found.weights()])
        save_checkpoint(found, load_tokenizer(model), out, {"about": about})
    return out


class Answer(NamedTuple):
    """What was written to one prompt, rewarded."""

    sample: Sample
    text: str
    label: Any


Answers = Mapping[str, Sequence[Answer]]
"""By domain."""


def written(recipe: Recipe, model: Path, domains: Sequence[str], *, greedy: bool = False) -> Answers:
    """What `model` answers to the held-out prompts of each domain."""
    tokenizer = tokenizer_of(recipe, model)
    data, ways = DomainSet.open(recipe, tokenizer), ways_of(recipe, tokenizer, greedy=greedy)
    engine, found = make_writer(recipe, load_model(recipe, model), tokenizer), {}
    for domain in domains:
        prompts = data.held_out(domain, recipe.evaluation.prompts_per_domain, "evaluate")
        samples = [group.samples[0] for group in generate_groups(engine, prompts, 1, ways, recipe.seed)]
        data.rewards.score(samples)
        found[domain] = [
            Answer(sample, str(tokenizer.decode(sample.response_ids, skip_special_tokens=True)), prompt.label)
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
    return found


def answers(recipe: Recipe, model: Path, domain: str, *, greedy: bool = False) -> list[tuple[str, Any]]:
    """What `model` answers to the held-out prompts of `domain`, as text, each with its label."""
    found = written(recipe, model, [domain], greedy=greedy)[domain]
    return [(answer.text, answer.label) for answer in found]


def right(found: Answers) -> dict[str, int]:
    """How many are right, by domain."""
    return {name: sum(is_right(answer.sample) for answer in own) for name, own in found.items()}


@lru_cache(maxsize=4)
def _loaded(model: Path) -> CausalLM:
    return CausalLM.from_pretrained(model)


@torch.no_grad()
def distance(found: Answers, writer: Path, other: Path, domains: Sequence[str]) -> dict[str, float]:
    """KL(writer || other) in nats a token, exact at every place of what `writer` has written, by domain."""
    models = [_loaded(writer), _loaded(other)]

    def divergence(ids: Tensor, positions: Tensor, bounds: Tensor, rows: Tensor) -> Tensor:
        hidden = [model.hidden(ids, positions, bounds)[rows] for model in models]
        own, theirs = (m.head().logits(h).log_softmax(-1) for m, h in zip(models, hidden, strict=True))
        return (own.exp() * (own - theirs)).sum(-1)

    def mean(domain: str) -> float:
        samples = [answer.sample for answer in found[domain]]
        every = of_packed(samples, MAX_TOKENS, models[0].device, divergence)
        return round(float(np.concatenate(every).mean()), 4)

    return {domain: mean(domain) for domain in domains}


def by_place(recipe: Recipe, model: Path, domain: str) -> dict[str, Any]:
    """How many answers are right at each place of the label, sampled and greedily, and of how many."""
    found: dict[str, Any] = {}
    for way in ("sampled", "greedy"):
        pairs = answers(recipe, model, domain, greedy=way == "greedy")
        right = [
            [a == b for a, b in zip(text.ljust(len(label)), label, strict=False)] for text, label in pairs
        ]
        found[way] = np.array(right).sum(0).tolist()
        found["of"] = len(pairs)
    return found


def damaged(model: Path, out: Path, seed: int) -> Path:
    """A copy of `model` in `out` with noise on its weights: what all students of a seed begin as."""
    draws = torch.Generator().manual_seed(seed)

    def damage(name: str, weight: Tensor) -> Tensor:
        if weight.ndim < 2:  # norms
            return weight
        return weight + DAMAGE * weight.std() * torch.randn(weight.shape, generator=draws)

    about = f"Another model, with noise of {DAMAGE} standard deviations on its weights."
    return changed(model, out, about, damage)


class Kept:
    """The results of one seed, written after each arm: condition -> cell -> what was measured.

    Args:
        study: Names the folder below `results/`.
        seed: Of the runs.
    """

    def __init__(self, study: str, seed: int) -> None:
        self._file = RESULTS / study / f"seed-{seed}.json"
        self.found: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self.found = json.loads(self._file.read_text("utf-8"))

    def add(self, condition: str, cell: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure, unless that is done."""
        of = self.found.setdefault(condition, {})
        if cell not in of:
            of[cell] = dict(measure())
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.found) + "\n", "utf-8")

    def add_cells(
        self,
        condition: str,
        out: Path,
        name: str,
        settings: Sequence[str],
        count: Callable[[Path], Mapping[str, Any]],
        cells: Iterable[str] = CELLS,
    ) -> None:
        """Run and measure the cells of a condition: merges in `out` by the recipe `name` with `settings`."""
        for cell in cells:

            def arm(cell: str = cell) -> dict[str, Any]:
                print(f"{out}: {cell}", flush=True)
                model, done = run_cell(out, name, cell, settings)
                took = {"tokens": done["student_tokens"], "seconds": round(done["seconds"], 1)}
                return {**count(model), **took}

            self.add(condition, cell, arm)


def main(study: str, measure: Callable[[Path, int, str, Kept], None], conditions: Sequence[str]) -> None:
    """Measure every seed of every condition that the command line asks for; by default all."""
    parser = argparse.ArgumentParser(description=f"The runs of the study {study}.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=conditions, default=list(conditions))
    parser.add_argument("--out", type=Path, default=Path("runs/when-on-policy") / study)
    options = parser.parse_args()
    for condition in options.conditions:
        for seed in options.seeds:
            measure(options.out, seed, condition, Kept(study, seed))
