"""Settings of the merge: the divergence, its teachers, estimator and normalisation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opd.config.base import BATCH, Changes, Config, Name, Own
from opd.config.rl import (
    AdvantageConfig,
    DistillLossConfig,
    FullVocabularyKL,
    GRPOAdvantage,
    Mixture,
    PolicyLossConfig,
    SampledTokenK1,
    WeightPoints,
    check_mixture,
    check_points,
)
from opd.config.teachers import StreamedTeacherConfig, TeachersConfig
from opd.config.train import BatchConfig, OptimConfig

WeightMerge = Literal[
    "average",
    "task_arithmetic",
    "ties",
    "dare",
    "della",
    "sce",
    "slerp",
    "model_stock",
    "ram",
    "ram_plus",
]
"""Ways to merge by arithmetic on weights. They need models of one configuration."""


class StaticBudget(Config):
    """Every domain keeps its `weight` and its prompts."""

    type: Literal["static"] = "static"


class _MovingBudget(Config):
    moves: Literal["loss", "prompts", "both"] = "loss"
    """What a domain gets more or less of. `loss`: its share of the loss (`domains.NAME.weight`). `prompts`:
    its prompts a step, at the same sum over all domains, and at least one. With `normalise: token` they are
    its share of the loss, too, and the only thing that can move. `gradient` needs that to move prompts."""


class ScheduledBudget(_MovingBudget):
    """Weights of domains by step."""

    type: Literal["schedule"] = "schedule"
    weights: dict[Name, WeightPoints]
    """By domain `[[step, weight], ...]`: in place of its `weight`, linear between two points, constant before
    the first and after the last. Steps count from 0. A domain that is not named keeps its `weight`."""

    @field_validator("weights")
    @classmethod
    def _refuse_nonsense(cls, weights: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
        if not weights:
            raise ValueError("no domain has a schedule; give one points, or set the type to static")
        for name, points in weights.items():
            check_points(name, points)
        return weights


class SteeredBudget(_MovingBudget):
    """Weights of domains that follow what was measured.

    A domain's weight (or prompts) is its own times a factor. A decision moves the logarithm of that factor.
    """

    type: Literal["gap", "progress", "gradient"]
    """`gap`: to where held-out accuracy is farthest below `goals`, decided whenever the learning curve is
    measured (`evaluation.every`). `progress`: to where most of the first step's KL is left. `gradient`: until
    each domain's share of the gradient is its weight's share. The last two decide after every step."""
    gain: float = Field(default=0.1, gt=0, le=1)
    """Part of the way to the wanted factor that one decision goes."""
    limit: float = Field(default=4.0, gt=1, le=1000)
    """Bound of a domain's factor: at most this, at least one over this."""
    strength: float = Field(default=1.0, gt=0, le=10)
    """Power of a domain's need, relative to the mean of all, that is its wanted factor. The need is the gap,
    the part of the KL that is left, or the wanted share of the gradient over the share it has."""
    goals: dict[Name, Annotated[float, Field(gt=0, le=1)]] = {}
    """With `gap`: held-out accuracy that a domain is to reach, such as its teacher's. 1 for others."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> SteeredBudget:
        if self.goals and self.type != "gap":
            raise ValueError(f"goals have no effect with budget {self.type}; leave them out, or take gap")
        return self


BudgetConfig = Annotated[StaticBudget | ScheduledBudget | SteeredBudget, Field(discriminator="type")]


class SoftLabelConfig(Config):
    """Soft labels on the teachers' answers, before a domain's own."""

    steps: int = Field(default=20, gt=0, le=10_000_000)
    """Steps after the first in which such a domain learns from answers of its teacher, with the forward KL
    whatever its loss is."""
    min_kl: float = Field(default=1.0, ge=0)
    """Divergence in the first step, nats a token, from which on a domain begins so. That step is on the
    student's own answers in every domain, with the domain's loss. 0: every domain with a teacher begins
    so."""


class DistillConfig(Config):
    """Multi-teacher on-policy distillation of the student."""

    steps: Annotated[int, Changes()] = Field(default=120, gt=0, le=10_000_000)
    """Optimiser steps of the merge."""
    start: Literal["base"] | WeightMerge = "base"
    """Model that the student starts from: the base, or a merge of its teachers' weights by a method of
    `baselines.methods`. That merge is made first, with the settings of `baselines`, and measured as one."""
    prompts_per_domain: int = Field(default=64, gt=0, le=1_000_000)
    """Prompts of each domain in every step."""
    samples_per_prompt: int = Field(default=1, gt=0, le=10_000)
    """Responses a prompt; above 1 where `rl_coef` needs groups."""
    prefixes: Literal["student", "teacher"] = "student"
    """Writer of the answers on which the divergence is taken. `student`: on-policy. `teacher`: each prompt is
    answered by its own teacher (of a mixture by the one of the largest weight), all of them before the first
    step. With `loss.kind: forward` that is distillation from soft labels, the comparison that tells what
    writing its own answers does for the student."""
    warm_up: SoftLabelConfig | None = None
    """A beginning on the teachers' answers, in domains whose first step says that student and teacher are
    foreign to each other: `{steps: 20, min_kl: 1.0}`. The decision is logged, `warm_up/DOMAIN` is 1 in these
    steps. `null`: every domain is on-policy from the first step on."""
    loss: DistillLossConfig = FullVocabularyKL()
    """Loss against the teachers: `{type: full}`, or another of these types."""
    mixture: Mixture = "one_hot"
    """For domains with several teachers. `one_hot` routes each prompt to one teacher, drawn with the
    teachers' weights. `geometric` is `sum_i w_i KL(p || t_i)`, whose floor `-log Z` is logged. `arithmetic`
    is `KL(p || sum_i w_i t_i)`. `lowest_entropy` and `entropy` are `sum_i g_i KL(p || t_i)` with weights of
    each token, by the teachers' entropies `H_i` (nats): all on the lowest, or `g_i` in proportion to `w_i
    exp(-H_i)`, whose floor is logged. `gate/TEACHER` is the mean of `g_i`."""
    normalise: Literal["teacher", "token", "episode", "turn"] = "teacher"
    """`teacher`: every teacher's tokens are averaged first, so that short answers keep their share of the
    gradient. `token`: every token weighs the same. `episode` and `turn` keep each teacher's share, too.
    Within it every response weighs the same, or every turn of the model: a run of tokens that it wrote."""
    budget: BudgetConfig = StaticBudget()
    """How the step is shared out between domains as the merge goes on: `{type: static}`, by a `schedule` of
    weights, or by what was measured (`gap`, `progress`, `gradient`). Every decision is logged as
    `budget_weight/DOMAIN`, `budget_prompts/DOMAIN` and `budget_need/DOMAIN`."""
    teachers: TeachersConfig = StreamedTeacherConfig()
    """Kind of the teachers without a `type` of their own, and of the specialists that the run trains:
    `streamed`, `local`, or a mapping with a `type` and its settings
    (`{type: megatron, tensor_parallel: 2}`)."""
    to_batch: Annotated[str | None, Own(BATCH)] = None
    """Dotted path of `convert(batch) -> batch`, the last word on every batch before the trainer."""
    kl_coef: Annotated[float, Changes("stream")] = Field(default=1.0, ge=0)
    """Weight of the teachers' divergence. 0 is for domains alone, which then have no teacher and learn from
    their reward (`rl_coef`)."""
    rl_coef: Annotated[float, Changes("stream")] = Field(default=0.0, ge=0)
    """Weight of the reward's policy gradient beside the distillation; 0 is pure distillation."""
    advantage: AdvantageConfig = GRPOAdvantage()
    """Formula that turns rewards into advantages, if `rl_coef` is above 0."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Policy gradient of the reward, if `rl_coef` is above 0 (k1 shares its stream: `loss.loss`). Its
    `correction` also weighs the sampled tokens of the losses k2, top-k `hybrid` and a custom one. The others
    are exact at every state, whoever wrote it, and have none."""
    optim: OptimConfig = OptimConfig(lr=1e-3, schedule="cosine", final_lr_fraction=0.0, warmup_steps=5)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: Annotated[int, Changes("aside")] = Field(default=20, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> DistillConfig:
        check_mixture(self.loss, self.mixture)
        if self.policy_loss != PolicyLossConfig():
            if isinstance(self.loss, SampledTokenK1):
                raise ValueError(
                    "policy_loss has no effect with loss k1, whose stream is the same; set loss.loss instead"
                )
            only_corrects = self.policy_loss == PolicyLossConfig(correction=self.policy_loss.correction)
            if self.rl_coef == 0 and not (self.weighs_samples and only_corrects):
                raise ValueError(
                    f"policy_loss has no effect on loss {self.loss.type} without rl_coef; set rl_coef above"
                    " 0, or leave it out"
                )
        sampled = self.loss.type == "k1" or (self.weighs_samples and self.loss.type != "custom")
        if self.teachers_write is not None and (sampled or self.rl_coef > 0):
            setting = "rl_coef" if self.rl_coef > 0 else f"loss {self.loss.type}"
            key = self.teachers_write.removeprefix("distill.")
            raise ValueError(
                f"{setting} is an expectation over tokens that the student draws, and with {key} it draws"
                " none; take a loss of type full, or let the student write (prefixes student, without"
                " warm_up)"
            )
        if self.warm_up is not None:
            self._check_warm_up(self.warm_up)
        if self.advantage.type == "gae":
            raise ValueError(
                "advantage gae needs a critic, which only specialists train; take another for the merge"
            )
        if self.rl_coef > 0 and self.samples_per_prompt < 2 and self.advantage.compares:
            raise ValueError(
                "rl_coef has no effect with one sample per prompt, whose advantage in its group is 0;"
                " set samples_per_prompt to 2 or more"
            )
        return self

    def _check_warm_up(self, warm_up: SoftLabelConfig) -> None:
        """Raise `ValueError` for a merge that cannot begin with soft labels."""
        if self.prefixes == "teacher":
            raise ValueError(
                "warm_up has no effect with prefixes teacher, whose answers are the teachers' in every step;"
                " leave one of the two out"
            )
        if not isinstance(self.loss, FullVocabularyKL):
            raise ValueError(
                f"warm_up learns soft labels over the whole vocabulary, and loss {self.loss.type} has none;"
                " take a loss of type full, or leave warm_up out"
            )
        if warm_up.steps + 1 >= self.steps:
            raise ValueError(
                f"warm_up.steps {warm_up.steps} leaves none of {self.steps} steps after it; lower it, or take"
                " prefixes teacher"
            )
        check_mixture(self.loss.model_copy(update={"kind": "forward"}), self.mixture)

    @property
    def teachers_write(self) -> str | None:
        """Return the setting by which teachers write answers that the merge learns from, `None` without."""
        if self.prefixes == "teacher":
            return "distill.prefixes teacher"
        return None if self.warm_up is None else "distill.warm_up"

    @property
    def taught_steps(self) -> int:
        """Return the most steps that learn from such answers."""
        if self.prefixes == "teacher":
            return self.steps
        return 0 if self.warm_up is None else self.warm_up.steps

    @property
    def weighs_samples(self) -> bool:
        """True if the distillation stream itself is an expectation over the sampled tokens."""
        return self.loss.weighs_samples


class SharesConfig(Config):
    """What a domain may have of the merge's settings for itself; all else is one student's."""

    prompts_per_domain: int | None = Field(default=None, gt=0, le=1_000_000)
    """Its prompts in every step; `null` is `distill.prompts_per_domain`."""
    kl_coef: Annotated[float | None, Changes("stream")] = Field(default=None, ge=0)
    """Weight of its teachers' divergence; `null` is `distill.kl_coef`. 0: it has no teacher, no specialist is
    trained for it, and it learns from its reward alone."""
    rl_coef: Annotated[float | None, Changes("stream")] = Field(default=None, ge=0)
    """Weight of its reward's policy gradient; `null` is `distill.rl_coef`."""
    loss: FullVocabularyKL | None = None
    """Its full divergence (`{kind: forward}`), in place of a `distill.loss` of type `full`; `null` is that.
    Domains that share a teacher have one."""
