"""A base made from scratch: random weights, then a supervised warm-up on demonstrations of mixed quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.config import Recipe, WarmupConfig
from opd.errors import ConfigError, TrainingError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.evaluation.accuracy import domain_accuracy
from opd.pipelines.stages.adapted import all_weights
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet, load_domains, student_tokenizer
from opd.pipelines.stages.loop import Extent, LoopState, Step, train
from opd.pipelines.stages.off_policy import Supervised
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.source import Given
from opd.pipelines.stages.student import Student
from opd.train.optimizer import learning_rate
from opd.train.terms import CrossEntropyTerm
from opd.types import Sample, Status


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
    save_checkpoint(model, tokenizer, folder, {"about": f"Random weights, seed {recipe.seed}: untrained."})


def warm_up(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Train the model in `start` on demonstrations of mixed quality and write it to `out`.

    Where it samples fewer right answers than `min_accuracy` in some domain, it is trained for another round
    of `steps`. Raises `TrainingError` if that is still so after the last round.
    """
    recipe = context.recipe
    config = recipe.base or WarmupConfig()
    student = Student.open(all_weights(context), start, config.optim, config.batch, [CrossEntropyTerm()])
    data = DomainSet.open(recipe, student.tokenizer, context.note)
    algorithm = WarmUp(context, config, student, data)
    source = Given(
        lambda index: _demonstrations(data, config, student.tokenizer, recipe.seed, index), student.backend
    )
    extent = _Rounds(steps=config.steps)
    result = train(context, algorithm, source, student.backend, extent, config.checkpoint_every)
    accuracy = algorithm.measure(result["steps"])
    if short := _short(accuracy, config):
        raise TrainingError(
            f"after {config.rounds} rounds of warm-up {short}; raise base.steps, base.rounds or base.right"
        )
    accuracies = {f"accuracy/{name}": share for name, share in accuracy.items()}
    return result | accuracies | {"digest": student.export(out, context.card(result))}


class WarmUp(Supervised):
    """Rounds of cross-entropy on demonstrations, as many as it takes."""

    def __init__(
        self, context: StageContext, config: WarmupConfig, student: Student, data: DomainSet
    ) -> None:
        super().__init__(config.optim)
        self._context, self._config, self._student, self._data = context, config, student, data
        self._measured: dict[int, dict[str, float]] = {}

    def tokens(self, samples: StepSamples) -> int:
        return 0  # nobody has generated a demonstration

    def rate(self, step: Step) -> float:
        within = step.index % self._config.steps
        return learning_rate(self.optim, within, within / self._config.steps)

    def ended(self, step: Step, metrics: dict[str, float]) -> dict[str, float]:
        done, config = step.index + 1, self._config
        if done % config.steps == 0 and done < config.steps * config.rounds:
            with step.timer("evaluate"):
                short = _short(self.measure(done), config)
            if self._context.ranks.any(bool(short), "the end of a round"):
                step.counters[_MORE_ROUNDS] = step.counters.get(_MORE_ROUNDS, 0.0) + 1.0
                self._context.note(f"another round of warm-up: {short}")
        return {}

    def measure(self, version: int) -> dict[str, float]:
        """Accuracy in every domain of the weights as they are now, which are of `version`."""
        if version not in self._measured:
            student, recipe = self._student, self._context.recipe
            student.sync(version)
            engine, sampling = student.evaluator, student.sampling
            self._measured[version] = {
                name: domain_accuracy(engine, self._data, name, 500, sampling, seed=recipe.seed).accuracy
                for name in recipe.domains
            }
        return self._measured[version]


_MORE_ROUNDS = "rounds_more"
"""Counter: rounds after the first one. It is in every checkpoint, so that a resumed stage ends where it would
have ended."""


class _Rounds(Extent):
    """`steps`, and as many again for every further round."""

    def progress(self, state: LoopState) -> float:
        return min(1.0, state.step / self.total(state))

    def total(self, state: LoopState) -> int:
        return (self.steps or 1) * (1 + int(state.counters.get(_MORE_ROUNDS, 0)))


def _short(accuracy: Mapping[str, float], config: WarmupConfig) -> str:
    """What to say of the domains below `min_accuracy`; empty if there are none."""
    found = [f"{share:.1%} in {name}" for name, share in accuracy.items() if share < config.min_accuracy]
    floor = f"base.min_accuracy = {config.min_accuracy:.1%}"
    return f"the base samples fewer right answers than {floor}: {', '.join(found)}" if found else ""


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
