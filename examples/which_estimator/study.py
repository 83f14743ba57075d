"""Which estimator? Specialists from one base a seed, each with another one, at equal samples.

    .venv/bin/python examples/which_estimator/study.py --seeds 0 1 2 3 4

Goes on where it stopped when it is started again; `table.py` makes the tables and the figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from opd.config import Recipe, SpecialistConfig
from opd.config.load import load_recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.pipelines.stages.student import load_model, make_writer, tokenizer_of, ways_of
from opd.rollout.collect import generate_groups

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TASKS = ("sort", "unique")


def _advantage(**settings: Any) -> dict[str, Any]:
    return {"advantage": settings}


def _loss(**settings: Any) -> dict[str, Any]:
    return {"policy_loss": settings}


ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": _advantage(type="dr_grpo") | _loss(aggregation="constant"),
    "rloo": _advantage(type="rloo"),
    "reinforce_plus_plus": _advantage(type="reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _advantage(type="reinforce_plus_plus_baseline"),
    "gspo": _loss(type="gspo"),
    "cispo": _loss(type="cispo"),
    "ppo_gae": _advantage(type="gae"),
    "grpo, equal bounds": _loss(clip_high=0.2),
    "grpo, by response": _loss(aggregation="sequence"),
    "grpo, filtered": {"filter_zero_variance": True},
    "grpo, refilled": {"filter_zero_variance": True, "refill": {"limit": 3}},
    "grpo, overlong": {"shaping": {"overlong_buffer": 4}},
}
"""Name -> what its specialists have in place of the defaults of `recipe.yaml`. The last five are DAPO's
parts: the default has unequal bounds, a mean over tokens and, but for this study, the filter."""


def begun_right(text: str, label: str) -> float:
    """The share of places before the first that is wrong, of the longer one of answer and label."""
    right = 0
    for written, wanted in zip(text, label, strict=False):
        if written != wanted:
            break
        right += 1
    return right / max(len(text), len(label))


def begins_right(sample: Any) -> float:
    """The reward of `unique`."""
    return begun_right(sample.text, sample.label)


def recipe_of(arm: str, words: Sequence[str] = ()) -> Recipe:
    """What an arm trains with, with `words` as on the command line."""
    own = [w for key, value in ARMS[arm].items() for w in (f"--specialist.{key}", json.dumps(value))]
    return load_recipe([HERE / "recipe.yaml"], [*own, *words])


def run(out: Path, recipe: Recipe, stage: str) -> RunFolder:
    """`stage` of a run in `out`, after those it needs; what is done is not done again."""
    opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
    with opened as folder:
        for needed in with_needs(plan_stages(recipe), stage):
            if folder.stage_done(needed.name) is None:
                execute_stage(recipe, folder, needed, lambda done, total, headline: None)
    return opened


def measure(recipe: Recipe, model: Path, task: str) -> dict[str, float]:
    """Of `model`'s sampled answers to the held-out prompts of `task`: the share that is right, and the mean
    reward.
    """
    tokenizer = tokenizer_of(recipe, model)
    prompts = DomainSet.open(recipe, tokenizer).held_out(
        task, recipe.evaluation.prompts_per_domain, "evaluate"
    )
    engine = make_writer(recipe, load_model(recipe, model), tokenizer)
    groups = generate_groups(engine, prompts, 1, ways_of(recipe, tokenizer), recipe.seed)
    texts = [
        str(tokenizer.decode(group.samples[0].response_ids, skip_special_tokens=True)) for group in groups
    ]
    pairs = [(text, str(prompt.label)) for text, prompt in zip(texts, prompts, strict=True)]
    right = [float(text == label) for text, label in pairs]
    rewards = right if task == "sort" else [begun_right(*pair) for pair in pairs]
    return {"right": fmean(right), "reward": fmean(rewards)}


def fewer_steps(specialist: SpecialistConfig, taken: Sequence[float]) -> int:
    """In how many steps as many prompts are taken as without refilling, where each took `taken`."""
    return round(specialist.steps * specialist.prompts_per_step / fmean(taken))


def trained(out: Path, recipe: Recipe, task: str) -> dict[str, Any]:
    """A specialist of `task`: what it reaches, and its mean reward in every step of training. Where steps are
    refilled, fewer of them take as many prompts as the others do: how many, a run with all steps says.
    """
    stage = f"specialist-{task}"
    folder = run(out, recipe, stage)
    rows = list(read_metrics(folder.stage_folder(stage) / "metrics.jsonl"))
    if recipe.specialist.refill is not None:
        fewer = {"steps": fewer_steps(recipe.specialist, [row["refill/taken"] for row in rows])}
        recipe = recipe.model_copy(update={"specialist": recipe.specialist.model_copy(update=fewer)})
        folder = run(out.with_name(f"{out.name}-{task}"), recipe, stage)
        rows = list(read_metrics(folder.stage_folder(stage) / "metrics.jsonl"))
    found: dict[str, Any] = dict(measure(recipe, folder.model_folder(recipe, f"specialist:{task}"), task))
    found["rewards"] = [round(row["reward/mean"], 4) for row in rows]
    if recipe.specialist.refill is not None:
        found["taken"] = sum(row["refill/taken"] for row in rows)
    values = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]
    return found | ({"explained": [round(value, 3) for value in values]} if values else {})


def seed_of(out: Path, seed: int, arms: Iterable[str]) -> None:
    """Every arm of one seed, whose results are kept after each."""
    words = ("--seed", str(seed))
    run(out / "base", load_recipe([HERE / "recipe-base.yaml"], words), "base")
    begin = out / "base" / "base"
    words += ("--model.path", str(begin))
    file = RESULTS / f"seed-{seed}.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def keep(arm: str, measured: Mapping[str, Any]) -> None:
        found[arm] = dict(measured)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found) + "\n", "utf-8")

    if "base" not in found:
        keep("base", {task: measure(recipe_of("grpo", words), begin, task) for task in TASKS})
    for arm in arms:
        if arm not in found:
            print(f"seed {seed}: {arm}", flush=True)
            folder, recipe = out / arm.replace(", ", "-").replace(" ", "-"), recipe_of(arm, words)
            keep(arm, {task: trained(folder, recipe, task) for task in TASKS})


def main() -> None:
    """Train and measure what the command line asks for; by default all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("runs/which-estimator"))
    options = parser.parse_args()
    for seed in options.seeds:
        seed_of(options.out / f"seed-{seed}", seed, options.arms)


if __name__ == "__main__":
    main()
