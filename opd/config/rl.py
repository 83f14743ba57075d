"""Settings of reinforcement learning (advantages, policy loss, importance corrections, reference KL) and of
divergences from teachers, for the merge and for a specialist.

A correction is for tokens that the trainer's policy would draw with another probability. The ratio is
`pi_train / pi_rollout`: the trainer's log-probability at the start of the step against the engine's, logged
when it drew the token. It is 1 for a synchronous run on one kind of kernel, and not for stale rollouts,
quantised engines or other kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from opd.config.base import DIVERGENCE, GROUP, POLICY_LOSS, Changes, Config, Own
from opd.config.teachers import TeacherPromptConfig, as_user_text


class TruncatedIS(Config):
    """TIS: every token counts with its ratio, held between the bounds (Yao et al. 2025)."""

    type: Literal["tis"] = "tis"
    lower: float = Field(default=0.0, ge=0, le=1)
    """A smaller ratio counts as this."""
    upper: float = Field(default=2.0, ge=1)
    """A larger ratio counts as this."""


class _Bounds(Config):
    lower: float = Field(default=0.5, ge=0, le=1)
    """Tokens (or responses) with a smaller ratio are rejected."""
    upper: float = Field(default=2.0, ge=1)
    """Tokens (or responses) with a larger ratio are rejected."""

    @model_validator(mode="after")
    def _refuse_empty(self) -> _Bounds:
        if self.lower == self.upper:
            raise ValueError("lower and upper are both 1: nearly every token would be rejected; widen them")
        return self


class MaskedIS(_Bounds):
    """MIS: the ratio inside the bounds; outside them the token, or the whole response, is rejected
    (Liu et al. 2025, "When speed kills stability")."""

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the bound and the weight are the ratio of the whole response, the product over its tokens.
    It is exact for the response, and its variance grows with the length."""


class IcePop(_Bounds):
    """IcePop (Ring-1T, 2510.18855): the token ratio inside wide bounds; tokens outside them are rejected."""

    type: Literal["icepop"] = "icepop"
    upper: float = Field(default=5.0, ge=1)
    """Tokens (or responses) with a larger ratio are rejected."""


class SequenceMaskedTIS(_Bounds):
    """Responses whose geometric mean ratio is outside the bounds are rejected; in the others tokens count
    with their ratio, truncated at `truncate`."""

    type: Literal["seq_mask_tis"] = "seq_mask_tis"
    truncate: float = Field(default=2.0, ge=1)
    """A larger ratio of a token counts as this."""


CorrectionConfig = Annotated[TruncatedIS | MaskedIS | IcePop | SequenceMaskedTIS, Field(discriminator="type")]


class _Advantage(Config):
    whiten: bool = False
    """Subtract the mean over the step's tokens from the advantages, and divide by their standard
    deviation."""

    compares: ClassVar[bool] = True
    """True if a response is worth something only relative to the others of its group."""


class GRPOAdvantage(_Advantage):
    """Reward minus the group's mean, divided by the group's standard deviation (DeepSeekMath, 4.1)."""

    type: Literal["grpo"] = "grpo"
    eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation before the division."""


class DrGRPOAdvantage(_Advantage):
    """Reward minus the group's mean, not divided by anything (Liu et al. 2025, "Dr. GRPO")."""

    type: Literal["dr_grpo"] = "dr_grpo"


class RLOOAdvantage(_Advantage):
    """Reward minus the mean of the *other* responses (Ahmadian et al. 2024)."""

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(_Advantage):
    """REINFORCE++ (Hu et al. 2025, 2501.03262): the reward, whitened over the step. It has no use for groups:
    one response a prompt is enough."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    whiten: bool = True
    """Subtract the mean over the step's tokens from the rewards, and divide by their standard deviation.
    `false` is REINFORCE, which subtracts nothing."""

    compares: ClassVar[bool] = False


class ReinforcePlusPlusBaselineAdvantage(_Advantage):
    """REINFORCE++ with a baseline: reward minus the group's mean, whitened over the step."""

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = True
    """Subtract the mean over the step's tokens from the advantages, and divide by their standard
    deviation."""


class GAEAdvantage(_Advantage):
    """Generalised advantage estimation (Schulman et al. 2016, 1506.02438) with the values of a critic, which
    is trained beside the policy (PPO): see `specialist.critic`."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount: the worth now of a reward of 1 that comes one token later."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda. 1: a token's advantage is the rewards after it, less its value. 0: the next token's value
    stands for the rewards after it, which has less noise and the critic's bias."""
    whiten: bool = True
    """Subtract the mean over the step's tokens from the advantages, and divide by their standard
    deviation."""

    compares: ClassVar[bool] = False


class CustomAdvantage(_Advantage):
    """An estimator of your own, by dotted path."""

    type: Literal["custom"] = "custom"
    path: Annotated[str, Own(GROUP)]
    """Dotted path of a function of a group, or of a class without constructor arguments."""

    compares: ClassVar[bool] = False  # it may compare with what it remembers


AdvantageConfig = Annotated[
    GRPOAdvantage
    | DrGRPOAdvantage
    | RLOOAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | GAEAdvantage
    | CustomAdvantage,
    Field(discriminator="type"),
]


class _PolicyLoss(Config):
    aggregation: Literal["token", "sequence", "constant", "turn"] = "token"
    """`token`: every token of the step weighs the same. `sequence`: every response. `constant`: sums divided
    by `max_new_tokens` times the number of responses (Dr. GRPO). `turn`: every turn of the model, of all
    episodes, so that neither long turns nor short episodes weigh more. With `gae` the critic's, too."""
    correction: Annotated[CorrectionConfig | None, Changes()] = None
    """Correction for tokens that were drawn with another probability than the trainer gives them: `{type:
    tis}`, `mis`, `icepop` or `seq_mask_tis`. The ratio is the trainer's probability divided by the one at the
    draw. Off by default: in a synchronous run on one machine the ratio is 1."""


class PolicyLossConfig(_PolicyLoss):
    """Clipped importance-weighted policy gradient (PPO), with asymmetric bounds (DAPO) and dual clip."""

    type: Literal["clip"] = "clip"
    clip_low: Annotated[float, Changes()] = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at `1 - clip_low`."""
    clip_high: Annotated[float, Changes()] = Field(default=0.28, ge=0)
    """The ratio is clipped at `1 + clip_high`."""
    dual_clip: Annotated[float | None, Changes()] = Field(default=None, gt=1)
    """Bound on the loss of tokens with a negative advantage: the ratio counts at most this much."""
    path: Annotated[str | None, Own(POLICY_LOSS)] = None
    """Dotted path of a per-token loss in place of the clipped one:
    `loss(logprobs, old_logprobs, advantages, config) -> [N]`, tensors in, a tensor out. One with a parameter
    `bounds` is told where responses begin and end."""


class GSPOLoss(_PolicyLoss):
    """GSPO (Zheng et al. 2025, 2507.18071): what is clipped is the ratio of the whole response, the geometric
    mean of its tokens'. It stays near 1, and so do the bounds."""

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Changes()] = Field(default=3e-4, ge=0, lt=1)
    """The response's ratio is clipped at `1 - clip_low`."""
    clip_high: Annotated[float, Changes()] = Field(default=4e-4, ge=0)
    """The response's ratio is clipped at `1 + clip_high`."""
    aggregation: Literal["token", "sequence", "constant", "turn"] = "sequence"
    """`sequence`, as in the paper: every response weighs the same. `token`: every token of the step. `turn`:
    every turn of the model. `constant`: sums divided by `max_new_tokens` times the number of responses."""


class CISPOLoss(_PolicyLoss):
    """CISPO (2506.13585): every token keeps its gradient `ratio * A * grad log p`, in which the
    ratio is a number, held between the bounds."""

    type: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Changes()] = Field(default=1.0, ge=0, le=1)
    """A ratio below `1 - clip_low` counts as that; 1 is no lower bound."""
    clip_high: Annotated[float, Changes()] = Field(default=4.0, ge=0)
    """A ratio above `1 + clip_high` counts as that."""


def _loss_type(value: object) -> str:
    """Return the `type` of a policy loss. Without one it is the clipped loss."""
    tag = value.get("type", "clip") if isinstance(value, Mapping) else getattr(value, "type", "clip")
    return tag if isinstance(tag, str) else repr(tag)


PolicyLoss = Annotated[
    Annotated[PolicyLossConfig, Tag("clip")]
    | Annotated[GSPOLoss, Tag("gspo")]
    | Annotated[CISPOLoss, Tag("cispo")],
    Discriminator(_loss_type),
]


class ReferenceKLConfig(Config):
    """Penalty for leaving the frozen starting policy. Off when `coef` is 0."""

    coef: Annotated[float, Changes()] = Field(default=0.0, ge=0)
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """k1 and placement `advantage` or `reward`, or k2 and placement `loss`: the reverse KL's gradient. k3 and
    placement `loss`: the forward KL's gradient. Every other pair has a wrong or zero gradient and is
    refused."""
    placement: Literal["advantage", "loss", "reward"] = "loss"
    """Place of the penalty: in the advantages, or in the loss as a term of its own. With `advantage: {type:
    gae}` it may also be in each token's reward, where the critic learns to expect it (PPO)."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """With placement `advantage`: 0 charges a token its own log-ratio. Above 0 it also charges the discounted
    sum of the following ones (1: the gradient of the KL between whole responses)."""
    target: Annotated[float | None, Changes()] = Field(default=None, gt=0)
    """Nats a token that the KL is held at: after each step `coef` grows if more was measured, and shrinks if
    less. `null` leaves `coef` as it is."""
    gain: Annotated[float, Changes()] = Field(default=0.1, gt=0, le=1)
    """Speed of that change, with `target`. A step changes `coef` by a fifth of this at most."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> ReferenceKLConfig:
        if self.discount and self.placement != "advantage":
            other = " (there the advantage's gamma is the discount)" if self.placement == "reward" else ""
            raise ValueError(
                f"discount has no effect with placement {self.placement}{other}; set placement to advantage"
            )
        if self.target is not None and not self.coef:
            raise ValueError("target has no effect with coef 0, which nothing makes larger; set coef above 0")
        if self.target is None and self.gain != ReferenceKLConfig.model_fields["gain"].default:
            raise ValueError("gain has no effect without target; give the nats a token to hold the KL at")
        return self

    @model_validator(mode="after")
    def _refuse_wrong_gradients(self) -> ReferenceKLConfig:
        if (self.estimator == "k1") == (self.placement == "loss"):
            raise ValueError(
                f"estimator {self.estimator} with placement {self.placement} has a zero or wrong gradient; "
                "use k1 with placement advantage, or k2 or k3 with placement loss"
            )
        return self


class ShapingConfig(Config):
    """Changes to the rewards before advantages are computed from them. Evaluations see the rewards without
    these changes. The order: parts are weighted, the sum is clipped, then the penalties, then the
    division."""

    weights: Annotated[dict[str, float], Changes()] = {}
    """Weight of each part of a reward in parts, as TRL's `reward_weights`. A part that is not named does not
    count. Empty: the reward is the number that its function returns."""
    clip: Annotated[tuple[float, float] | None, Changes()] = None
    """Bounds of the reward."""
    truncated_reward: Annotated[float | None, Changes()] = None
    """Upper bound on the reward of a response that `rollout.max_new_tokens` ended."""
    overlong_buffer: Annotated[int, Changes()] = Field(default=0, ge=0)
    """Last tokens before `rollout.max_new_tokens` in which a response begins to be penalised, ever more to
    the last (DAPO, 2503.14476, equation 13); 0 penalises none. Of all lengths what the model wrote counts."""
    overlong_penalty: Annotated[float, Changes()] = Field(default=1.0, ge=0)
    """Amount taken from the reward of a response that is `rollout.max_new_tokens` long."""
    length_coef: Annotated[float, Changes()] = Field(default=0.0, ge=0)
    """Weight of a reward for being shorter than the others of a group, from 0.5 to -0.5. Wrong answers (a
    reward of at most 0.5) only get its negative part (Kimi k1.5, 2501.12599, section 2.3.3)."""
    running_std: bool = False
    """Divide by the standard deviation of the domain's rewards since the stage began, this step's included.
    It has no effect where the advantage divides by a group's own."""
    mask_truncated: Annotated[bool, Changes()] = False
    """Responses that `rollout.max_new_tokens` ended count in their group's mean and are not learned from."""

    @model_validator(mode="after")
    def _refuse_nonsense(self) -> ShapingConfig:
        if self.overlong_penalty != 1.0 and not self.overlong_buffer:
            raise ValueError("overlong_penalty has no effect without overlong_buffer; give it, or neither")
        if self.weights and not any(self.weights.values()):
            raise ValueError("all weights are 0, so nothing would be learned; give one part a weight")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} is empty; give the lower bound first")
        return self


Signal = Literal["hidden", "topk", "sampled"]


class DistillLoss(Config):
    """What every loss against a teacher says of itself."""

    @property
    def signal(self) -> Signal:
        """The minimum signal that a teacher's servers have to give."""
        return "hidden"

    @property
    def weighs_samples(self) -> bool:
        """True if the loss is itself an expectation over sampled tokens."""
        return False


DivergenceKind = Literal["reverse", "forward", "jsd", "skew_reverse", "skew_forward"]


class SelectedTokens(Config):
    """The positions of each response that a divergence is learnt at. The others weigh 0, these as much more,
    so that a response keeps its weight. It costs a second pass over the two heads, without a gradient."""

    by: Literal["divergence", "entropy"] = "divergence"
    """What is largest there: the divergence itself (where student and teacher disagree), or the student's
    entropy."""
    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of a response's counted tokens that is learnt at, rounded up."""


class FullVocabularyKL(DistillLoss):
    """The exact divergence over the whole vocabulary at every position: no action-sampling variance."""

    type: Literal["full"] = "full"
    kind: DivergenceKind = "reverse"
    """`reverse`: KL(student || teacher); `forward`: KL(teacher || student); `jsd`: generalised
    Jensen-Shannon with `beta`. `skew_reverse`: KL(student || m); `skew_forward`: KL(teacher || m), where m
    mixes the two by `beta` (DistiLLM)."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture `m = beta * t + (1 - beta) * p`; used by `jsd` and the skewed
    kinds only."""
    later: list[tuple[Annotated[int, Field(gt=0)], DivergenceKind]] = Field(default=[], max_length=100)
    """Other kinds from some steps of the merge on, counted from 0: `[[60, reverse]]` with `kind: forward` is
    forward, then reverse."""
    select: SelectedTokens | None = None
    """Learn at a part of each response's positions, chosen by disagreement or entropy: `{by: divergence,
    share: 0.5}`. `null` learns at all of them."""

    @field_validator("later")
    @classmethod
    def _steps_grow(cls, later: list[tuple[int, DivergenceKind]]) -> list[tuple[int, DivergenceKind]]:
        if any(after[0] <= before[0] for before, after in pairwise(later)):
            raise ValueError("the steps of later do not grow; put them in order")
        return later

    def kind_at(self, step: int) -> str:
        """Return the kind at `step` of the merge, from 0 on."""
        return next((kind for start, kind in reversed(self.later) if step >= start), self.kind)

    @property
    def kinds(self) -> set[str]:
        """All kinds, of all steps."""
        return {self.kind, *(kind for _, kind in self.later)}


class SampledTokenK1(DistillLoss):
    """`adv - lambda * (log p_student - log p_teacher)` on the sampled tokens: unbiased, noisy."""

    type: Literal["k1"] = "k1"
    coef: Annotated[float, Changes()] = Field(default=1.0, gt=0)
    """Lambda of that formula."""
    baseline: Literal["none", "batch_mean"] = "batch_mean"
    """Subtract the teacher's mean log-ratio of the batch: same expectation (up to O(1/N)), less variance."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """0 credits each token with its own log-ratio; above 0 with the discounted sum of those that follow."""
    loss: PolicyLossConfig = PolicyLossConfig()

    @property
    def signal(self) -> Signal:
        """The sampled tokens' log-probabilities."""
        return "sampled"


class SampledTokenK2(DistillLoss):
    """`(log p_student - log p_teacher)^2 / 2` as a loss on the sampled tokens: the reverse KL's gradient."""

    type: Literal["k2"] = "k2"

    @property
    def signal(self) -> Signal:
        """The sampled tokens' log-probabilities."""
        return "sampled"

    @property
    def weighs_samples(self) -> bool:
        """True: the whole loss."""
        return True


class TopKKL(DistillLoss):
    """Reverse KL on a few tokens of every position, chosen by the teacher, the student or both."""

    type: Literal["topk"] = "topk"
    k: int = Field(default=64, gt=0, le=100_000)
    """Tokens that each of those who choose brings to the support of a position."""
    support: Literal["teacher", "student", "union"] = "teacher"
    """Who chooses: the reverse KL lives where the student puts its mass, which the teacher's own top k may
    not hold. `student` and `union` (the top k of each) need a teacher that gives log-probabilities of any
    token: one in the process, or a server with `signal: hidden`."""
    form: Literal["tail", "hybrid", "truncated"] = "tail"
    """`tail`: everything outside the support is one bucket (a lower bound on the KL). `hybrid`: exact on the
    support plus a score-function term for sampled tokens outside it (unbiased on-policy). `truncated`:
    support only (biased: it leaks mass out of the support; for comparison)."""

    @property
    def signal(self) -> Signal:
        """The teacher's own top k; if the student chooses tokens, only hidden states suffice."""
        return "topk" if self.support == "teacher" else "hidden"

    @property
    def weighs_samples(self) -> bool:
        """True with the term of tokens outside the support."""
        return self.form == "hybrid"


class CustomDivergence(DistillLoss):
    """A loss of your own against one teacher, by dotted path: `loss(micro, student, view) -> [N]`."""

    type: Literal["custom"] = "custom"
    path: Annotated[str, Own(DIVERGENCE)]
    """Dotted path of the function."""

    @property
    def weighs_samples(self) -> bool:
        """True, because it may be."""
        return True


DistillLossConfig = Annotated[
    FullVocabularyKL | SampledTokenK1 | SampledTokenK2 | TopKKL | CustomDivergence,
    Field(discriminator="type"),
]


Mixture = Literal["one_hot", "geometric", "arithmetic", "lowest_entropy", "entropy"]
GATED = ("lowest_entropy", "entropy")
"""Mixtures whose weights are each token's own."""


def check_mixture(loss: DistillLoss, mixture: Mixture) -> None:
    """Raise `ValueError` for a mixture of teachers that `loss` is not defined for."""
    full = isinstance(loss, FullVocabularyKL)
    reverse = full and loss.kinds == {"reverse"}
    if mixture in GATED and isinstance(loss, SampledTokenK1):
        raise ValueError(
            f"mixture {mixture} weighs teachers token by token, which loss k1 does not; take another loss,"
            " or mixture geometric"
        )
    if mixture != "one_hot" and full and loss.select is not None:
        raise ValueError(
            f"loss.select chooses tokens by one teacher, and mixture {mixture} has several; leave select out,"
            " or set mixture to one_hot"
        )
    if mixture == "arithmetic" and not (reverse or isinstance(loss, SampledTokenK1)):
        raise ValueError(
            "mixture arithmetic is defined for the full-vocabulary reverse KL and for k1; choose one of"
            " them as loss, or mixture one_hot or geometric"
        )


MOST_WEIGHT = 1e6
WeightPoints = Annotated[list[tuple[int, float]], Field(min_length=1, max_length=1000)]
"""`[[step, weight], ...]`: linear between two points, constant before the first and after the last. Steps
count from 0."""


def check_points(name: str, points: Sequence[tuple[int, float]]) -> None:
    """Raise `ValueError` for points of `name` that are no weights by step."""
    steps = [step for step, _ in points]
    if steps[0] < 0 or any(after <= before for before, after in pairwise(steps)):
        raise ValueError(f"the steps of {name} do not grow from 0 on; put its points in order")
    if not all(0 < weight <= MOST_WEIGHT for _, weight in points):
        raise ValueError(f"a weight of {name} is not above 0 and at most {MOST_WEIGHT:g}; correct it")


_LEAST = 1e-6
"""Minimum share of a teacher among several. One with less is never asked, and its logarithm is far off."""

TeacherWeight = float | WeightPoints
"""Of one teacher among several."""


def check_weights(weights: str | Mapping[str, Any] | None) -> Any:
    """Return a teacher, or weights over several, of all steps or by step. Raises `ValueError` unless each of
    them counts.
    """
    if isinstance(weights, dict):
        for name, points in weights.items():
            if isinstance(points, list):
                check_points(name, points)
        of_steps = {
            name: [weight for _, weight in points] if isinstance(points, list) else [points]
            for name, points in weights.items()
        }
        if not weights or min(map(min, of_steps.values())) <= 0:
            raise ValueError("give the name of a teacher, or several with positive weights")
        name, least = min(of_steps.items(), key=lambda one: min(one[1]))
        if min(least) < _LEAST * sum(map(max, of_steps.values())):
            raise ValueError(
                f"{name!r} has less than a millionth of the weight, which is as good as none; give it more,"
                " or leave it out"
            )
    return weights


class OPDConfig(Config):
    """Teachers that a specialist follows beside its rewards: on-policy distillation within GRPO. Filters of
    groups and `shaping.mask_truncated` choose what the rewards teach; teachers teach on every response."""

    teacher: str | dict[str, float]
    """Name of a teacher under `teachers` that has a `path`, or weights over several, which are divided by
    their sum."""
    coef: Annotated[float, Changes()] = Field(default=1.0, ge=0)
    """Weight of the teachers' divergence (nats a token) beside the rewards' policy gradient, whose tokens are
    weighed alike (`policy_loss.aggregation`)."""
    loss: DistillLossConfig = SampledTokenK1()
    """Loss of the distillation. `{type: k1}` takes `coef (log p_student - log p_teacher)` off the advantage
    of each sampled token, after any whitening. `{type: full}` and the others of the merge are a stream of
    their own in the loss."""
    mixture: Mixture = "one_hot"
    """With several teachers, as in the merge: `one_hot` sends each prompt to one of them, `geometric` and
    `arithmetic` pool them, `lowest_entropy` and `entropy` weigh them token by token."""
    teacher_prompt: TeacherPromptConfig | None = None
    """Prompt that they read here, in place of the domain's own `teacher_prompt`; `null` is that."""

    _weighs = field_validator("teacher")(check_weights)
    _expands = field_validator("teacher_prompt", mode="before")(as_user_text)

    @model_validator(mode="after")
    def _refuse_nonsense(self) -> OPDConfig:
        if not self.coef:
            raise ValueError("coef 0 would read teachers for nothing; give it a weight, or set opd to null")
        if not self.teacher:
            raise ValueError("teacher: give the name of a teacher, or several with positive weights")
        if isinstance(self.loss, SampledTokenK1):
            fields = SampledTokenK1.model_fields
            for name, instead in (("coef", "opd.coef"), ("loss", "policy_loss of the specialist")):
                if getattr(self.loss, name) != fields[name].default:
                    raise ValueError(f"loss.{name} has no effect within a specialist; set {instead}")
        if isinstance(self.loss, FullVocabularyKL) and self.loss.later:
            raise ValueError("loss.later counts steps of the merge; leave it out of a specialist's loss")
        check_mixture(self.loss, self.mixture)
        return self

    @property
    def teacher_weights(self) -> dict[str, float]:
        """Teachers and their weights, which sum to 1."""
        return shared_out(self.teacher)


def is_scheduled(weights: object) -> bool:
    """Return whether a teacher's weight goes by steps."""
    return isinstance(weights, Mapping) and any(isinstance(weight, list) for weight in weights.values())


def shared_out(teacher: str | Mapping[str, TeacherWeight]) -> dict[str, float]:
    """Return a teacher, or weights over several (those of the first step), as weights that sum to 1."""
    given = {teacher: 1.0} if isinstance(teacher, str) else teacher
    weights = {name: weight[0][1] if isinstance(weight, list) else weight for name, weight in given.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def route_names(weights: Mapping[str, Mapping[str, TeacherWeight]]) -> dict[str, str]:
    """Return the name of each domain's teachers, of all domains' `weights`: `a+b`. If another domain weighs
    the same ones in another way, the domain is in the name.
    """
    names = {domain: "+".join(of_teachers) for domain, of_teachers in weights.items()}
    ways: dict[str, list[Mapping[str, TeacherWeight]]] = {}
    for domain, name in names.items():
        ways.setdefault(name, []).append(weights[domain])
    alike = {name: all(one == found[0] for one in found) for name, found in ways.items()}
    return {domain: name if alike[name] else f"{name}@{domain}" for domain, name in names.items()}
