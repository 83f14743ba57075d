"""Settings of a specialist: its training and its prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from opd.config.base import BATCH, GROUP, Changes, Config, Own
from opd.config.rl import (
    AdvantageConfig,
    CustomAdvantage,
    GAEAdvantage,
    GRPOAdvantage,
    OPDConfig,
    PolicyLoss,
    PolicyLossConfig,
    ReferenceKLConfig,
    SampledTokenK1,
    ShapingConfig,
)
from opd.config.train import BatchConfig, OptimConfig
from opd.config.writing import RolloutConfig


class RefillConfig(Config):
    """Take more prompts until `prompts_per_step` groups carry signal (DAPO's dynamic sampling, 2503.14476,
    section 3.2). What was written beyond that is not learned from."""

    limit: int = Field(default=3, ge=2, le=1000)
    """Most prompts that a step takes, in multiples of `prompts_per_step`. What carries signal by then is
    learned from, however little it is."""


class CriticConfig(Config):
    """The model whose values `advantage: {type: gae}` takes: the one that the stage starts from, with a value
    head in place of its own, all of whose weights are trained (also beside `model.lora`)."""

    optim: OptimConfig = OptimConfig(schedule="linear", final_lr_fraction=0.1)
    """Its own AdamW. Batching, mini-batches and epochs are the specialist's."""
    clip: Annotated[float | None, Changes()] = Field(default=None, gt=0)
    """Bound on the change of a value since the start of the step, in units of the reward. Beyond it the loss
    has no gradient (PPO's value clipping). `null` is no bound."""
    warmup_steps: Annotated[int, Changes()] = Field(default=0, ge=0, le=10_000_000)
    """First rollout steps in which the critic alone learns and the policy stays as it is."""


class DifficultyConfig(Config):
    """Measure training prompts before the first step, with the model it starts from, and leave out those it
    (nearly) always answers right, or never. An answer is right where its reward is above 0.5."""

    samples: int = Field(default=8, ge=2, le=10_000)
    """Answers to each prompt, of which the share that is right is its rate."""
    prompts: int = Field(default=2048, gt=0, le=100_000)
    """Most training prompts of a domain that are measured. Where it has more, so many are drawn, and the
    others are not trained on."""
    min_rate: float = Field(default=0.05, ge=0, le=1)
    """A prompt with a smaller rate is left out."""
    max_rate: float = Field(default=0.9, ge=0, le=1)
    """A prompt with a larger rate is left out."""

    @model_validator(mode="after")
    def _refuse_empty(self) -> DifficultyConfig:
        if self.min_rate > self.max_rate:
            raise ValueError(
                f"no rate is between min_rate {self.min_rate:g} and max_rate {self.max_rate:g}; give the"
                " smaller one first"
            )
        return self


class CurriculumConfig(Config):
    """Easy prompts first, by the rates of `difficulty`: a step asks the easiest of them, of which there are
    evenly more from step to step (linear competence, Platanios et al. 2019, 1903.09848)."""

    start: float = Field(default=0.25, gt=0, lt=1)
    """Share of the prompts, the easiest, that the first step asks from."""
    until: float = Field(default=0.5, gt=0, le=1)
    """Share of the steps after which all prompts are asked."""


class ReplayConfig(Config):
    """Ask prompts again whose groups carried signal, the oldest first. A prompt whose group has none any more
    is solved, or was luck: it comes again when the sequence of all prompts reaches it."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Most of `prompts_per_step` that come again."""
    most: int = Field(default=1024, gt=0, le=100_000)
    """Prompts that wait at once; the oldest are forgotten beyond that."""

    def replay_count(self, per_step: int) -> int:
        """Return how many of a step's prompts are asked again, if enough wait."""
        return int(self.share * per_step)


class SpecialistConfig(Config):
    """One GRPO run; the same settings serve every domain and the mixed-domain baseline."""

    steps: Annotated[int, Changes()] = Field(default=120, ge=0, le=10_000_000)
    """Rollout steps. 0 trains a domain that has `sft` on its demonstrations alone."""
    prompts_per_step: int = Field(default=64, gt=0, le=1_000_000)
    """Prompts of a rollout step; each is answered `group_size` times."""
    group_size: Annotated[int, Changes()] = Field(default=8, gt=0, le=10_000)
    """Responses per prompt (G); 1 with `advantage: {type: reinforce_plus_plus}`, `gae` or `custom` alone."""
    minibatches: Annotated[int, Changes()] = Field(default=4, gt=0, le=1_000_000)
    """Mini-batches per rollout step, each an optimiser step; with 1, and one epoch, the ratio is always 1 and
    the clip never acts."""
    epochs: Annotated[int, Changes()] = Field(default=1, gt=0, le=1_000)
    """Passes over the mini-batches of a rollout step. Advantages, and the log-probabilities that ratios are
    taken to, are those of its start."""
    shaping: ShapingConfig = ShapingConfig()
    advantage: AdvantageConfig = GRPOAdvantage()
    """Formula that turns rewards into advantages: `{type: grpo}`, or another of these types."""
    critic: Annotated[CriticConfig | None, Changes(below=False)] = None
    """Training of the critic of `advantage: {type: gae}`. `null` is the default critic there, and none with
    any other advantage."""
    policy_loss: PolicyLoss = PolicyLossConfig()
    """Policy gradient of the advantages: `{type: clip}`, or another of these types."""
    opd: OPDConfig | None = None
    """Teachers to follow beside the rewards: `{teacher: NAME, coef: 1.0}`; `null` follows none."""
    reference_kl: ReferenceKLConfig = ReferenceKLConfig()
    entropy_coef: Annotated[float, Changes()] = 0.0
    """Weight of a bonus for the policy's entropy; 0 adds none."""
    group_filter: Annotated[str | None, Own(GROUP)] = None
    """Dotted path of `keep(group) -> bool`: a group it refuses is not learned from."""
    to_batch: Annotated[str | None, Own(BATCH)] = None
    """Dotted path of `convert(batch) -> batch`, the last word on every batch before the trainer."""
    filter_zero_variance: bool = True
    """Drop groups whose rewards are all equal: they carry no policy gradient."""
    refill: RefillConfig | None = None
    """`{limit: 3}`: prompts are taken until `prompts_per_step` of their groups are left after the two filters
    above, at most three times as many. `null` learns from what is left of `prompts_per_step`."""
    difficulty: DifficultyConfig | None = None
    """`{samples: 8}`: train on prompts of middling difficulty, measured before the first step. The
    mixed-domain baseline takes what the specialists have measured."""
    curriculum: CurriculumConfig | None = None
    """`{start: 0.25, until: 0.5}`: easy prompts first, by `difficulty`."""
    replay: ReplayConfig | None = None
    """`{share: 0.25}`: that share of a step's prompts are ones whose groups carried signal before."""
    optim: OptimConfig = OptimConfig(lr=3e-4, schedule="linear", final_lr_fraction=0.1)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: Annotated[int, Changes("aside")] = Field(default=20, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""
    evaluate_every: Annotated[int, Changes("aside")] = Field(default=0, ge=0)
    """Steps between measurements of held-out accuracy while it trains, on `evaluation.curve_prompts` prompts
    a domain, scored by the domain's reward; 0 takes none."""
    max_steps_without_signal: Annotated[int, Changes("aside")] = Field(default=10, gt=0)
    """Stop with an error after this many steps in a row in which every group was filtered."""

    @model_validator(mode="after")
    def _refuse_groups_without_an_advantage(self) -> SpecialistConfig:
        name = self.advantage.type
        if self.advantage.compares and self.group_size == 1:
            raise ValueError(
                f"group_size is 1, but advantage {name} compares the responses to one prompt; set group_size"
                " to 2 or more, or advantage to {type: reinforce_plus_plus}"
            )
        if self.shaping.length_coef and self.group_size == 1:
            raise ValueError(
                "shaping.length_coef compares the lengths of a prompt's responses, of which a group_size of 1"
                " has one; leave it out, or set group_size to 2 or more"
            )
        if isinstance(self.advantage, CustomAdvantage):
            if self.group_size == 1 and self.filter_zero_variance:
                raise ValueError(
                    "filter_zero_variance would drop every group, all of whose rewards are equal with a"
                    " group_size of 1; set it to false, or group_size to 2 or more"
                )
        elif not self.advantage.compares and self.filter_zero_variance:
            raise ValueError(
                f"advantage {name} learns from groups of equal rewards, too, which filter_zero_variance would"
                " drop; set filter_zero_variance to false"
            )
        return self

    @model_validator(mode="after")
    def _refuse_a_choice_without_signal(self) -> SpecialistConfig:
        if not self.filter_zero_variance and self.group_filter is None:
            compares = self.advantage.compares or (self.advantage.type == "custom" and self.group_size > 1)
            advice = "set filter_zero_variance to true, " if compares else ""
            for name in ("refill", "replay"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} chooses prompts by what a filter drops, and there is none; {advice}give a"
                        f" group_filter, or set {name} to null"
                    )
        if self.replay is not None and not self.replay.replay_count(self.prompts_per_step):
            raise ValueError(
                f"a replay.share of {self.replay.share:g} of {self.prompts_per_step} prompts_per_step comes"
                " to no prompt; give more of either, or set replay to null"
            )
        if self.curriculum is not None and self.difficulty is None:
            raise ValueError(
                "curriculum orders prompts by what difficulty measures; give difficulty, too, or set"
                " curriculum to null"
            )
        return self

    @property
    def most_prompts(self) -> int:
        """Maximum prompts of a step, with those of `refill`."""
        return self.prompts_per_step * (1 if self.refill is None else self.refill.limit)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if log-probabilities are needed before the update, which computes them anyway. A step of one
        update trains with the weights it began with, so its ratios are to its own log-probabilities.
        """
        reference, loss = self.reference_kl, self.policy_loss
        several = self.minibatches * self.epochs > 1 or self.to_batch is not None
        k1 = self.opd is not None and isinstance(self.opd.loss, SampledTokenK1)
        measured = reference.coef > 0 and (reference.placement != "loss" or reference.target is not None)
        critic = isinstance(self.advantage, GAEAdvantage)
        return several or k1 or measured or critic or loss.correction is not None

    @property
    def critic_warmup(self) -> int:
        """Steps in which only the critic is trained."""
        return 0 if self.critic is None else self.critic.warmup_steps

    @model_validator(mode="after")
    def _refuse_a_critic_without_use(self) -> SpecialistConfig:
        if isinstance(self.advantage, GAEAdvantage):
            if self.to_batch is not None:
                raise ValueError(
                    "to_batch cannot say what the critic of advantage gae learns from; leave one of the two"
                    " out"
                )
            if self.steps and self.critic_warmup >= self.steps:
                raise ValueError(
                    f"critic.warmup_steps {self.critic_warmup} leaves none of the {self.steps} steps"
                    " to the policy; give less"
                )
            return self
        for name, value, other in (
            ("critic", self.critic is not None, "null"),
            ("reference_kl.placement reward", self.reference_kl.placement == "reward", "advantage"),
        ):
            if value:
                raise ValueError(
                    f"{name} has no effect with advantage {self.advantage.type}; set it to {other}, or"
                    " advantage to {type: gae}"
                )
        return self

    def check_rollout(self, domain: str, rollout: RolloutConfig) -> None:
        """Raise `ValueError` if `domain` cannot be trained with the response settings of `rollout`."""
        for key in ("refill", "replay"):
            if getattr(self, key) is not None and rollout.schedule != "in_turn":
                raise ValueError(
                    f"specialist.{key} (of domain {domain}) needs rollout.schedule in_turn: which prompts"
                    " come next depends on the rewards of those before; leave one of the two out"
                )
        most, buffer = rollout.max_new_tokens, self.shaping.overlong_buffer
        if buffer >= most:
            raise ValueError(
                f"a shaping.overlong_buffer of {buffer} penalises every response of domain {domain}, whose"
                f" rollout.max_new_tokens is {most}; give less"
            )
