"""A base made from scratch: random weights, then a supervised warm-up on demonstrations of mixed quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.algorithms.normalise import token_weights
from opd.config import Recipe, WarmupConfig
from opd.errors import ConfigError, TrainingError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.adapted import all_weights
from opd.pipelines.context import StageContext
from opd.pipelines.domains import DomainSet, load_domains, student_tokenizer
from opd.pipelines.evaluate import domain_accuracy
from opd.pipelines.loop import Extent, Step, StepResult, run_loop
from opd.pipelines.precision import model_dtype
from opd.pipelines.student import Student
from opd.train.schedule import learning_rate
from opd.train.terms import CrossEntropyTerm
from opd.types import RolloutBatch, Sample, Status


def new_base(recipe: Recipe, folder: Path) -> None:
    """Write a freshly initialised model of the recipe's configuration, with its tokenizer."""
    tokenizer = student_tokenizer(recipe, load_domains(recipe).values())
    model = CausalLM.from_config(
        recipe.model.config or {},
        tokenizer=tokenizer,
        dtype=model_dtype(recipe),
        device=recipe.model.device,
        seed=recipe.seed,
    )
    save_checkpoint(model, tokenizer, folder, {"method": "random initialisation", "seed": recipe.seed})


def warm_up(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Train the model in `start` on demonstrations of mixed quality and write it to `out`.

    Raises `TrainingError` if it then samples fewer right answers than `min_accuracy` in some domain.
    """
    recipe = context.recipe
    config = recipe.base or WarmupConfig()
    student = Student.open(all_weights(context), start, config.optim, config.batch, [CrossEntropyTerm()])
    data = DomainSet.open(recipe, student.tokenizer, context.note)

    def step(step: Step) -> StepResult:
        with step.timer("data"):
            samples = _demonstrations(data, config, student.tokenizer, recipe.seed, step.index)
            batch = RolloutBatch.supervised(samples, token_weights([s.loss_mask for s in samples]))
            student.backend.mine(samples)
        with step.timer("train"):
            metrics = student.backend.forward_backward(batch)
            metrics |= student.backend.step(learning_rate(config.optim, step.index, step.progress))
        return StepResult(metrics, 0, f"cross-entropy {metrics['loss/ce']:.3f}")

    extent = Extent(steps=config.steps)
    result = run_loop(context, student.backend, extent, config.checkpoint_every, step)
    student.sync(1)
    for domain in recipe.domains:
        found = domain_accuracy(student.evaluator, data, domain, 500, student.sampling, seed=recipe.seed)
        result[f"accuracy/{domain}"] = found.accuracy
        if found.accuracy < config.min_accuracy:
            raise TrainingError(
                f"the warmed-up base samples {found.accuracy:.1%} right answers in domain {domain}, fewer"
                f" than base.min_accuracy = {config.min_accuracy:.1%}; raise base.steps or base.right."
            )
    card = {"method": "supervised warm-up", "settings": config.model_dump(mode="json")}
    return result | {"digest": student.export(out, card)}


def _demonstrations(
    data: DomainSet, config: WarmupConfig, tokenizer: PreTrainedTokenizerBase, seed: int, step: int
) -> list[Sample]:
    """The step's demonstrations: a pure function of (seed, step)."""
    rng = np.random.default_rng([seed, step])
    names = list(data.domains)
    prompts = data.mixed(names, step * config.batch_size, config.batch_size, "warm-up")
    samples = []
    for prompt in prompts:
        demonstrate = data.domains[prompt.domain].demonstrations
        if demonstrate is None:
            raise ConfigError(
                f"domain {prompt.domain} has no demonstrations to warm up on; give model.path, not base."
            )
        text = demonstrate(prompt.metadata["prompt"], rng, config.right, config.wrong_rule)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        samples.append(_supervised_sample(prompt.uid, prompt.domain, prompt.token_ids, ids))
    return samples


def _supervised_sample(uid: str, domain: str, prompt_ids: np.ndarray, response_ids: Sequence[int]) -> Sample:
    return Sample(
        uid=uid,
        group_uid=uid,
        domain=domain,
        prompt_ids=prompt_ids,
        response_ids=np.array(response_ids, dtype=np.int32),
        loss_mask=np.ones(len(response_ids), dtype=bool),
        status=Status.COMPLETED,
    )
