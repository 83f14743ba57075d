"""Train the critic of a GRPO stage with advantage `gae`: its model and optimiser beside the student's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opd.config.rl import GAEAdvantage
from opd.config.specialist import CriticConfig
from opd.metrics import combine_updates
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.loop import StepContext
from opd.pipelines.stages.policy_stream import PolicyStream
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import Student, load_model
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend
from opd.train.critic import GAE, ValueTerm, local_critic_values, with_value_head
from opd.train.loss_weights import policy_scales, token_weights, turn_shares, turns_of
from opd.train.optimizer import learning_rate
from opd.types import Sample, TokenTerms


class Critic:
    """A value model that trains beside a student, on the same ranks and the same samples.

    Args:
        context: The stage, whose advantage is `gae`.
        start: The model whose trunk it begins with. Raises `ModelError` if its head is fixed.
        student: The student that samples.
    """

    def __init__(self, context: StageContext, start: Path, student: Student) -> None:
        recipe, specialist = context.recipe, context.recipe.specialist
        assert isinstance(specialist.advantage, GAEAdvantage)
        self._config, self._advantage = specialist.critic or CriticConfig(), specialist.advantage
        # Every turn weighs the same, as in the policy's loss. Otherwise every token does.
        self._by_turn = specialist.policy_loss.aggregation == "turn"
        self._student = student
        terms = [ValueTerm(self._config.clip)]
        training = TrainingSettings(self._config.optim, specialist.batch, 1.0, terms, context.offload_buffer)
        opened = open_backend(
            lambda dtype, empty=False: with_value_head(load_model(recipe, start, dtype, empty=empty)),
            recipe.train,
            training,
            context.ranks,
            dtype=model_dtype(recipe),
        )
        self.backend = context.closing.enter_context(opened)
        context.memory.add_source(self.backend.resident)
        self.backend.offload_state()
        self.backend.shares = student.backend.shares  # a sample's rank is the same for both

    def token_values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return values as `local_critic_values` does."""
        self.backend.max_tokens = self._student.backend.max_tokens  # samples on disk make it smaller
        return local_critic_values(self.backend, samples)

    def estimate_advantages(self, stream: PolicyStream, learned: Sequence[Sample], coef: float) -> None:
        """Estimate the advantages of a step. See `PolicyStream.estimate_gae`."""
        gae = GAE(self._advantage.gamma, self._advantage.lam)
        stream.estimate_gae(gae, self.token_values, learned, coef=coef, whiten=self._advantage.whiten)

    def train_critic(
        self, samples: StepSamples, parts: Sequence[Sequence[Sample]], stream: PolicyStream, step: StepContext
    ) -> dict[str, float]:
        """Take an optimiser step for each of `parts`, and return metrics. Raises `TrainingError` if the loss
        or the gradient is not finite.
        """
        rate = learning_rate(self._config.optim, step.index, step.progress)
        steps: list[dict[str, float]] = []
        for part in parts:
            counts = [sample.trainable_tokens for sample in part]
            turns = [turns_of(sample.loss_mask) for sample in part]
            scales = policy_scales(counts, "turn" if self._by_turn else "token", turns=turns)
            scale = {sample.uid: value for sample, value in zip(part, scales, strict=True)}

            def value_terms(sample: Sample, scale: dict[str, float] = scale) -> TokenTerms:
                terms = TokenTerms.zeros(len(sample.response_ids))
                terms.values, terms.returns = stream.values_and_returns(sample)
                shares = turn_shares(sample.loss_mask) if self._by_turn else None
                terms.policy_weight = token_weights(sample.loss_mask, scale[sample.uid], shares)
                return terms

            losses = self.backend.accumulate_gradient(part, samples.batch_reader(part, value_terms))
            update = self.backend.step(rate)
            steps.append(losses | {"critic/lr": update["lr"], "critic/grad_norm": update["grad_norm"]})
        self.backend.offload_state()
        return combine_updates(steps)
