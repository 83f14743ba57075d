"""Routing replay: an engine in bfloat16, a trainer in float32, and a router that is nearly undecided.

.venv/bin/python examples/routing_replay/study.py --seeds 0 1 2    # goes on where it stopped
.venv/bin/python examples/routing_replay/study.py --seeds          # the tables of what is kept
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from opd.config import PolicyLossConfig, Recipe
from opd.config.load import load_recipe
from opd.config.train import BatchConfig, OptimConfig
from opd.models.attention import PackedAttention
from opd.models.causal_lm import CausalLM
from opd.pipelines.evaluation.statistics import paired_interval
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.pipelines.stages.student import load_model, sampling_params, tokenizer_of
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.torch_engine import TorchEngine
from opd.train.advantages import GroupNormalisedEstimator
from opd.train.backend import TrainingSettings
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, SampleGroup, SamplingParams, TokenTerms

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ARMS = {"exact": ("float32", True), "replay": ("bfloat16", True), "free": ("bfloat16", False)}
"""Name -> the engine's dtype, and whether the trainer replays its choices. The trainer is in float32."""
LABELS = {
    "exact": "engine in float32",
    "replay": "engine in bfloat16, replayed",
    "free": "engine in bfloat16, chosen again",
}
LEVELS = (0.0, 0.9, 0.97, 0.99, 0.997)
"""How far routers' rows are moved to their mean; see `undecide`."""
TRAINED = {"0.99": (0.99, True), "0.997": (0.997, True), "0.997, kept": (0.997, False)}
"""Name -> the level that is trained at, and whether routers learn. If not, they stay undecided."""
STEPS, PROMPTS, GROUP, LR = 60, 32, 8, 1e-3
LAST = 10
HELD_OUT = 500


@torch.no_grad()
def undecide(model: CausalLM, level: float) -> CausalLM:
    """Move each router's rows to their mean by `level`. In exact arithmetic every token keeps its experts,
    whose scores are nearly equal then.
    """
    for name, weight in model.module.named_parameters():
        if name.endswith("gate.weight"):
            weight.lerp_(weight.mean(0, keepdim=True), level)
    return model


@dataclass(frozen=True, slots=True)
class Setting:
    """What a seed's arms share."""

    recipe: Recipe
    folder: Path
    """Of the base."""
    data: DomainSet
    sampling: SamplingParams

    @classmethod
    def open(cls, out: Path, seed: int) -> Setting:
        """Train the base of `seed` in `out`, unless that is done."""
        recipe = load_recipe([HERE / "recipe-base.yaml"], ["--seed", str(seed)])
        opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
        with opened as folder:
            for stage in with_needs(plan_stages(recipe), "base"):
                if folder.stage_done(stage.name) is None:
                    execute_stage(recipe, folder, stage, lambda done, total, headline: None)
        tokenizer = tokenizer_of(recipe, out / "base")
        data = DomainSet.open(recipe, tokenizer)
        return cls(recipe, out / "base", data, sampling_params(recipe, tokenizer))

    def trainer(self, level: float, replay: bool, routers: bool = True) -> TorchBackend:
        """Return a back end in float32. `routers`: they learn, too."""
        terms = [PolicyTerm(PolicyLossConfig())]
        settings = TrainingSettings(OptimConfig(lr=LR), BatchConfig(), self.sampling.temperature, terms)
        model = undecide(load_model(self.recipe, self.folder), level)
        for name, weight in model.module.named_parameters():
            weight.requires_grad_(routers or not name.endswith("gate.weight"))
        backend = TorchBackend(model, settings)
        backend.replay_experts(replay)
        return backend

    def engine(self, backend: TorchBackend, dtype: str) -> TorchEngine:
        """Return an engine that computes in `dtype` with the trainer's weights."""
        model = load_model(self.recipe, self.folder, dtype)
        engine = TorchEngine(model, max_sequence=24, vocab_size=model.vocabulary, record_experts=True)
        push(backend, engine, 1)
        return engine

    def write(
        self, engine: TorchEngine, prompts: Sequence[EncodedPrompt], each: int, seed: int
    ) -> list[SampleGroup]:
        """Return `each` rewarded responses to every prompt."""
        groups = collect(engine, prompts, each, self.sampling, seed)
        for group in groups:
            for sample in group.samples:
                text = str(self.data.tokenizer.decode(sample.response_ids, skip_special_tokens=True))
                sample.reward = float(text == sample.label)
        return groups


def push(backend: TorchBackend, engine: TorchEngine, version: int) -> None:
    """Give the engine the trainer's weights, rounded to its dtype."""
    engine.pause()
    engine.update_weights(backend.weights(), version)
    engine.resume()


def samples_of(groups: Sequence[SampleGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def differences(backend: TorchBackend, samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean and largest |difference| of log-probabilities, trainer against engine."""
    ours = np.concatenate(backend.recompute_logprobs(samples))
    theirs = np.concatenate([sample.rollout_logprobs for sample in samples])
    apart = np.abs(ours - theirs)
    return {"mean": float(apart.mean()), "max": float(apart.max())}


@torch.no_grad()
def same_choices(model: CausalLM, samples: Sequence[Sample]) -> float:
    """Return the share of choices (a position in a layer) for which `model` takes the engine's experts."""
    routing, same = model.routing, list[np.ndarray]()
    assert routing is not None
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with routing.record(routing.new_choices(len(ids))) as choices:
            model.run(ids, torch.arange(len(ids)), PackedAttention([0, len(ids)]))
        assert sample.expert_choices is not None
        own = choices.numpy()[: len(sample.expert_choices)]
        same.append((np.sort(own, -1) == np.sort(sample.expert_choices, -1)).all(-1))
    return float(np.concatenate(same).mean())


def mismatch(setting: Setting, level: float) -> dict[str, Any]:
    """Return what engine and trainer of the base differ in at one level, with replay and without."""
    backend = setting.trainer(level, replay=True)
    prompts = setting.data.next_prompts("sort", 0, PROMPTS, "mismatch")
    samples = samples_of(setting.write(setting.engine(backend, "bfloat16"), prompts, GROUP, seed=0))
    return {
        "same": same_choices(backend.model, samples),
        "replay": differences(backend, samples),
        "free": differences(setting.trainer(level, replay=False), samples),
        "right": mean(sample.reward or 0.0 for sample in samples),
    }


def batch_of(groups: Sequence[SampleGroup]) -> RolloutBatch:
    """Return GRPO's batch: normalised advantages of groups, every token with the same weight."""
    estimate = GroupNormalisedEstimator()
    advantages = [values for group in groups for values in estimate(group)]
    samples = samples_of(groups)
    tokens = sum(len(sample.response_ids) for sample in samples)
    terms = []
    for sample, values in zip(samples, advantages, strict=True):
        term = TokenTerms.zeros(len(sample.response_ids))
        term.advantages, term.old_logprobs = values, None
        term.policy_weight = np.full(len(sample.response_ids), 1 / tokens, np.float32)
        terms.append(term)
    return RolloutBatch(samples, terms)


def learn(setting: Setting, arm: str, level: float, routers: bool) -> dict[str, Any]:
    """Train an arm. Return its rewards, its mismatch by step, and what it reaches on held-out prompts."""
    dtype, replay = ARMS[arm]
    backend = setting.trainer(level, replay, routers)
    engine = setting.engine(backend, dtype)
    rewards, apart = [], []
    for step in range(STEPS):
        prompts = setting.data.next_prompts("sort", step * PROMPTS, PROMPTS, "learn")
        groups = setting.write(engine, prompts, GROUP, seed=setting.recipe.seed * 1000 + step)
        samples = samples_of(groups)
        rewards.append(round(mean(sample.reward or 0.0 for sample in samples), 4))
        apart.append({key: round(value, 6) for key, value in differences(backend, samples).items()})
        backend.forward_backward(batch_of(groups))
        backend.step(LR)
        push(backend, engine, step + 2)
    same = same_choices(backend.model, samples_of(setting.write(engine, prompts, GROUP, seed=1)))
    judge = setting.engine(backend, "float32")
    held_out = setting.data.held_out("sort", HELD_OUT, "evaluate")
    right = mean(one.reward or 0.0 for one in samples_of(setting.write(judge, held_out, 1, seed=0)))
    return {"rewards": rewards, "apart": apart, "same": same, "right": right}


def study(out: Path, seed: int) -> None:
    """Measure and train all of one seed, whose results are kept after each part."""
    file = RESULTS / f"seed-{seed}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    parts = [(f"{level:g}", "", level, True) for level in LEVELS]
    parts += [(f"{arm} {name}", arm, *how) for name, how in TRAINED.items() for arm in ARMS]
    setting = None
    for name, arm, level, routers in parts:
        if name in found:
            continue
        setting = setting or Setting.open(out / f"seed-{seed}", seed)
        print(f"seed {seed}: {name}", flush=True)
        found[name] = learn(setting, arm, level, routers) if arm else mismatch(setting, level)
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(found) + "\n", "utf-8")


def load() -> list[dict[str, Any]]:
    """Return what is kept of every seed."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("seed-*.json"))]


def mismatch_table(seeds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of Markdown: a row a level, means of seeds."""
    sides = "chosen again: mean, max | replayed: mean, max"
    yield f"| moved to the mean | right, % | same experts, % | {sides} | mean falls |"
    yield "|---|---|---|---|---|---|"
    for level in (f"{level:g}" for level in LEVELS):
        found = [seed[level] for seed in seeds]
        right, same = (100 * mean(one[key] for one in found) for key in ("right", "same"))
        both = [
            tuple(mean(one[side][key] for one in found) for key in ("mean", "max"))
            for side in ("free", "replay")
        ]
        cells = " | ".join(f"{average:.4f}, {largest:.3f}" for average, largest in both)
        falls = mean(one["free"]["mean"] / one["replay"]["mean"] for one in found)
        yield f"| {level} | {right:.1f} | {same:.2f} | {cells} | {falls:.1f} times |"


def ahead(arm: str, values: dict[str, list[float]]) -> str:
    """Return by how many points an arm is ahead of exact routing, paired by seed, with a 95 % interval."""
    if arm == "exact" or len(values[arm]) < 2:
        return ""
    pairs = zip(values[arm], values["exact"], strict=True)
    value, low, high = paired_interval([one - other for one, other in pairs])
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def training_table(seeds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of Markdown: a row an arm at each level."""
    yield (
        f"| moved | arm, {len(seeds)} seeds | mean difference, first, last step | same experts, last, % |"
        f" reward, all steps | ahead | last {LAST} steps | held out, % (sd) | ahead |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in TRAINED:
        found = {arm: [seed[f"{arm} {name}"] for seed in seeds] for arm in ARMS}
        whole = {arm: [100 * mean(one["rewards"]) for one in found[arm]] for arm in ARMS}
        right = {arm: [100 * one["right"] for one in found[arm]] for arm in ARMS}
        for arm in ARMS:
            first, last = (mean(one["apart"][at]["mean"] for one in found[arm]) for at in (0, -1))
            same = 100 * mean(one["same"] for one in found[arm])
            end = 100 * mean(mean(one["rewards"][-LAST:]) for one in found[arm])
            deviation = f" ({stdev(right[arm]):.1f})" if len(seeds) > 1 else ""
            yield (
                f"| {name} | {LABELS[arm]} | {first:.4f}, {last:.4f} | {same:.2f} |"
                f" {mean(whole[arm]):.1f} | {ahead(arm, whole)} | {end:.1f} |"
                f" {mean(right[arm]):.1f}{deviation} | {ahead(arm, right)} |"
            )


def main() -> None:
    """Measure what the command line asks for, and print the tables of all that is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/routing-replay"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        study(options.out, seed)
    seeds = load()
    if not seeds:
        parser.error(f"{RESULTS} holds no results; name a seed")
    print("\n".join(mismatch_table(seeds)), "", "\n".join(training_table(seeds)), sep="\n")


if __name__ == "__main__":
    main()
