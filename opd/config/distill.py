"""The merge: which divergence from which teachers, estimated how, normalised how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opd.config.base import Config
from opd.config.rl import AdvantageConfig, GRPOAdvantage, PolicyLossConfig
from opd.config.teachers import StreamedTeacherConfig, TeachersConfig
from opd.config.train import BatchConfig, OptimConfig


class DistillLoss(Config):
    """What every loss against a teacher says of itself."""

    signal: ClassVar[Literal["hidden", "topk", "sampled"]] = "hidden"
    """The least that servers of a teacher have to be asked for."""

    @property
    def weighs_samples(self) -> bool:
        """Whether it is itself an expectation over the tokens that were sampled."""
        return False


class FullVocabularyKL(DistillLoss):
    """The exact divergence over the whole vocabulary at every position: no action-sampling variance."""

    type: Literal["full"] = "full"
    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    """`reverse`: KL(student || teacher); `forward`: KL(teacher || student); `jsd`: generalised
    Jensen-Shannon with `beta`."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture `beta * t + (1 - beta) * p`; used by `jsd` only."""


class SampledTokenK1(DistillLoss):
    """`adv - lambda * (log p_student - log p_teacher)` on the sampled tokens: unbiased, noisy."""

    type: Literal["k1"] = "k1"
    coef: float = Field(default=1.0, gt=0)
    """lambda."""
    baseline: Literal["none", "batch_mean"] = "batch_mean"
    """Subtract the teacher's mean log-ratio of the batch: same expectation (up to O(1/N)), less variance."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """0 credits each token with its own log-ratio; above 0 with the discounted sum of those that follow."""
    loss: PolicyLossConfig = PolicyLossConfig()

    signal: ClassVar = "sampled"


class SampledTokenK2(DistillLoss):
    """`(log p_student - log p_teacher)^2 / 2` as a loss on the sampled tokens: the reverse KL's gradient."""

    type: Literal["k2"] = "k2"

    signal: ClassVar = "sampled"

    @property
    def weighs_samples(self) -> bool:
        """All of it."""
        return True


class TopKKL(DistillLoss):
    """Reverse KL on a top-k support of the teacher."""

    type: Literal["topk"] = "topk"
    k: int = Field(default=64, gt=0, le=100_000)
    """Tokens of the teacher's support at every position."""
    form: Literal["tail", "hybrid", "truncated"] = "tail"
    """`tail`: everything outside the support is one bucket (a lower bound on the KL); `hybrid`: exact on the
    support plus a score-function term for sampled tokens outside it (unbiased on-policy); `truncated`:
    support only (biased: it leaks mass out of the support; for comparison)."""

    signal: ClassVar = "topk"

    @property
    def weighs_samples(self) -> bool:
        """The term of tokens outside the support."""
        return self.form == "hybrid"


class CustomDivergence(DistillLoss):
    """A loss of your own against one teacher, by dotted path: `loss(micro, student, view) -> [N]`."""

    type: Literal["custom"] = "custom"
    path: str
    """Dotted path of the function."""

    @property
    def weighs_samples(self) -> bool:
        """It may be."""
        return True


DistillLossConfig = Annotated[
    FullVocabularyKL | SampledTokenK1 | SampledTokenK2 | TopKKL | CustomDivergence,
    Field(discriminator="type"),
]


class DistillConfig(Config):
    """Multi-teacher on-policy distillation of the student."""

    steps: int = Field(default=120, gt=0, le=10_000_000)
    """Optimiser steps of the merge."""
    prompts_per_domain: int = Field(default=64, gt=0, le=1_000_000)
    """Prompts of each domain in every step."""
    samples_per_prompt: int = Field(default=1, gt=0, le=10_000)
    """Responses a prompt; above 1 where `rl_coef` needs groups."""
    prefixes: Literal["student", "teacher"] = "student"
    """Whose answers the divergence is taken on. `teacher`: each prompt is answered by its own teacher (of a
    mixture by the one of the largest weight), all of them before the first step. With `loss.kind: forward`
    that is distillation from soft labels, the comparison that tells what writing its own answers does for the
    student."""
    loss: DistillLossConfig = FullVocabularyKL()
    mixture: Literal["one_hot", "geometric", "arithmetic"] = "one_hot"
    """For domains with several teachers. `one_hot`: each prompt is routed to one teacher, drawn with the
    teachers' weights; `geometric`: `sum_i w_i KL(p || t_i)`, whose floor `-log Z` is logged; `arithmetic`:
    `KL(p || sum_i w_i t_i)`."""
    normalise: Literal["teacher", "token"] = "teacher"
    """`teacher`: every teacher's tokens are averaged first, so that short answers keep their share of the
    gradient; `token`: every token weighs the same."""
    teachers: TeachersConfig = StreamedTeacherConfig()
    """The kind of the teachers that have no `type` of their own, and of the specialists that the run trains:
    `streamed`, `local`, or a mapping with a `type` and its settings (`{type: megatron, tensor_parallel:
    2}`)."""
    to_batch: str | None = None
    """Dotted path of `convert(batch) -> batch`, the last word on every batch before the trainer."""
    rl_coef: float = Field(default=0.0, ge=0)
    """Weight of the reward's policy gradient beside the distillation; 0 is pure distillation."""
    advantage: AdvantageConfig = GRPOAdvantage()
    """How rewards become advantages where `rl_coef` is above 0."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The reward's policy gradient, where `rl_coef` is above 0 (k1 shares its stream: `loss.loss`). Its
    `correction` also weighs the sampled tokens of the losses k2, top-k `hybrid` and a custom one; the others
    are exact at every state, whoever wrote it, and have none."""
    optim: OptimConfig = OptimConfig(lr=1e-3, schedule="cosine", final_lr_fraction=0.0, warmup_steps=5)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: int = Field(default=20, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> DistillConfig:
        reverse = isinstance(self.loss, FullVocabularyKL) and self.loss.kind == "reverse"
        if self.mixture == "arithmetic" and not (reverse or isinstance(self.loss, SampledTokenK1)):
            raise ValueError(
                "mixture arithmetic is defined for the full-vocabulary reverse KL and for k1; choose one of"
                " them as loss, or mixture one_hot or geometric"
            )
        if self.policy_loss != PolicyLossConfig():
            self._check_policy_loss()
        sampled = self.loss.type == "k1" or (self.weighs_samples and self.loss.type != "custom")
        if self.prefixes == "teacher" and (sampled or self.rl_coef > 0):
            what = "rl_coef" if self.rl_coef > 0 else f"loss {self.loss.type}"
            raise ValueError(
                f"{what} is an expectation over tokens that the student draws, and with prefixes teacher it"
                " draws none; take a loss of type full, or prefixes student"
            )
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

    @property
    def weighs_samples(self) -> bool:
        """Whether the distillation stream itself is an expectation over the tokens that were sampled."""
        return self.loss.weighs_samples

    def _check_policy_loss(self) -> None:
        if isinstance(self.loss, SampledTokenK1):
            raise ValueError(
                "policy_loss has no effect with loss k1, whose stream is the same; set loss.loss instead"
            )
        only_corrects = self.policy_loss == PolicyLossConfig(correction=self.policy_loss.correction)
        if self.rl_coef == 0 and not (self.weighs_samples and only_corrects):
            raise ValueError(
                f"policy_loss has no effect on loss {self.loss.type} without rl_coef; set rl_coef above 0, or"
                " leave it out"
            )
