"""Rules over the metrics of a run's steps, and the default set.

`docs/reference/watch.md` has the source of the default bounds, and the test that provokes each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from opd.config.base import Config

RuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
NO_NAMES = ("mean", "floor")
"""Last parts of metrics that are no domain's or teacher's name."""


def covers_metric(pattern: str, name: str) -> bool:
    """Return True if `pattern` covers the metric `name`. A `*` stands for anything, except the `mean` and the
    `floor` of several.
    """
    if pattern == name:
        return True
    return name.rpartition("/")[2] not in NO_NAMES and fnmatchcase(name, pattern)


class Condition(Config):
    """A metric beyond its bounds."""

    metric: str = Field(min_length=1)
    """Its name in `metrics.jsonl`; `*` stands for any domain, teacher or part, each of which is looked at by
    itself."""
    above: float | None = None
    """Upper bound: the metric is too high above it."""
    below: float | None = None
    """Lower bound: the metric is too low below it. With both bounds it has to stay between them."""
    form: Literal["value", "ratio", "change"] = "value"
    """Number that is compared with the bounds. `value`: the metric. `ratio`: the metric divided by the mean
    of its first `first` values, if that is above 0. `change`: the metric minus that mean."""
    first: int = Field(default=5, gt=0, le=1_000_000)
    """Number of first values whose mean `ratio` and `change` use. The rule waits until there are as many."""
    last: int = Field(default=1, gt=0, le=1_000_000)
    """Number of latest values whose mean is compared with the bounds, for a metric that goes up and down. The
    rule waits until there are as many."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> Condition:
        if self.above is None and self.below is None:
            raise ValueError("a condition needs a bound; give above or below")
        if self.above is not None and self.below is not None and self.below > self.above:
            raise ValueError(f"every value is above {self.above:g} or below {self.below:g}; swap the bounds")
        return self


class RuleConfig(Condition):
    """What is to happen when a metric stays beyond its bounds."""

    also: Condition | None = None
    """Another condition that has to hold at the same time, of the same metric, or of another one, whose
    latest value counts."""
    steps: int = Field(default=10, gt=0, le=1_000_000)
    """Values in a row that are beyond the bounds before the rule fires: steps, or measurements of a metric
    that not every step has."""
    stages: str = Field(default="*", min_length=1)
    """Stages it is for; `*` stands for anything: `specialist-*`, `merge`."""
    action: Literal["warn", "lower_rate", "stop"] = "warn"
    """`warn`: a line in the terminal, in `flags.jsonl` and in the report. `lower_rate`: the learning rate is
    multiplied by `factor` from the next step on, again after every further `steps`. `stop`: the stage writes
    a checkpoint and the run ends with one sentence."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """Factor by which `lower_rate` multiplies the learning rate."""
    lever: str = Field(default="look at the samples of this step", min_length=1, max_length=500)
    """Advice at the end of the rule's sentence."""


def _make_rule(metric: str, lever: str, **settings: Any) -> RuleConfig:
    return RuleConfig(metric=metric, lever=lever, **settings)


_LEARNERS = "*-*"
"""Specialists and baselines: the names of base and merge have no dash."""
_UNSOLVED = Condition(metric="reward/mean", below=0.8)

DEFAULT_RULES: dict[str, RuleConfig] = {
    "flat_reward": _make_rule(
        "reward/std",
        "every response gets the same reward: call the reward function on a right and a wrong answer, and"
        " read some responses, which a prompt in another template than the model's makes nonsense",
        below=1e-6,
        also=_UNSOLVED,
        steps=5,
    ),
    "dead_groups": _make_rule(
        "frac_reward_zero_std",
        "nearly all groups have equal rewards and teach nothing: raise specialist.group_size, set"
        " specialist.refill or difficulty, or take prompts that the base answers right now and then",
        above=0.9,
        also=_UNSOLVED,
        steps=5,
        stages=_LEARNERS,
    ),
    "held_out_flat": _make_rule(
        "accuracy/*",
        "the reward is learnt and held-out prompts are not: read responses for what games it, raise"
        " specialist.reference_kl.coef, or give the domain more prompts",
        below=0.02,
        form="change",
        first=1,
        also=Condition(metric="reward/mean", above=0.1, form="change"),
        steps=3,
        stages=_LEARNERS,
    ),
    "truncation": _make_rule(
        "truncated",
        "responses do not end by themselves: raise rollout.max_new_tokens; if rewards grow with length, set"
        " specialist.shaping.overlong_buffer or truncated_reward; if none ends from the beginning, check the"
        " prompt's template and rollout.stop_ids",
        above=0.7,
        steps=5,
    ),
    "length_drift": _make_rule(
        "length/mean",
        "responses grow and rewards do not: set specialist.shaping.length_coef or overlong_buffer",
        above=2.0,
        form="ratio",
        also=Condition(metric="reward/mean", below=0.05, form="change"),
        stages=_LEARNERS,
    ),
    "entropy_collapse": _make_rule(
        "entropy",
        "the student is certain and often wrong: raise specialist.policy_loss.clip_high or entropy_coef, hold"
        " it with specialist.reference_kl, or lower the learning rate",
        below=0.1,
        form="ratio",
        also=Condition(metric="reward/mean", below=0.5),
        steps=3,
        stages=_LEARNERS,  # a merge gets as certain as its teachers
    ),
    "entropy_explosion": _make_rule(
        "entropy",
        "the student writes ever more at random: lower the learning rate or specialist.entropy_coef, or hold"
        " it with specialist.reference_kl",
        above=3.0,
        form="ratio",
        also=Condition(metric="entropy", above=1.0),
    ),
    "far_from_base": _make_rule(
        "*_kl",
        "the student has left what the base writes: raise specialist.reference_kl.coef, hold it with its"
        " target, or lower the learning rate",
        above=2.0,
    ),
    "no_learning": _make_rule(
        "*_kl",
        "the policy is where it began and the reward does not rise: raise the learning rate, or lower"
        " specialist.reference_kl.coef; if the base is right already, take harder prompts",
        below=0.005,
        also=Condition(metric="reward/mean", below=0.02, form="change", first=20, last=20),
        steps=100,
        stages=_LEARNERS,
    ),
    "clip_share": _make_rule(
        "policy/clip_ratio",
        "the policy moves too far in a step: lower the learning rate, specialist.minibatches or epochs",
        above=0.3,
        steps=5,
    ),
    "large_ratio": _make_rule(
        "policy/ratio_max",
        "some tokens' probabilities change many times over in a step: lower the learning rate,"
        " specialist.minibatches or epochs, or set specialist.policy_loss.dual_clip",
        above=20.0,
        steps=5,
    ),
    "engine_mismatch": _make_rule(
        "mismatch/mean_abs",
        "the engine does not write with the weights that are trained, or computes them otherwise: check the"
        " weight sync and model.dtype, lower rollout.max_ahead, or set a correction"
        " (specialist.policy_loss.correction, distill.policy_loss.correction)",
        above=0.1,
        steps=5,
    ),
    "few_effective_samples": _make_rule(
        "mismatch/ess",
        "a few tokens carry the whole gradient: lower rollout.max_ahead, or set a correction"
        " (specialist.policy_loss.correction, distill.policy_loss.correction)",
        below=0.5,
        steps=5,
    ),
    "routing_apart": _make_rule(
        "routing/apart",
        "the trainer would send many tokens to other experts than the engine did: check the weight sync and"
        " model.dtype, or lower rollout.max_ahead",
        above=0.3,
        steps=5,
    ),
    "unaligned": _make_rule(
        "align/none",
        "a teacher with a tokenizer of its own says nothing of most tokens, because answers are no UTF-8 or"
        " it cannot write them: read some responses, or give a teacher with the student's tokenizer",
        above=0.5,
        steps=5,
    ),
    "clamped_weights": _make_rule(
        "correction/truncated",
        "the importance correction's bound holds many tokens: lower rollout.max_ahead, or widen its upper",
        above=0.2,
    ),
    "rejected_tokens": _make_rule(
        "correction/rejected",
        "the importance correction rejects most of the step: lower rollout.max_ahead, or widen its bounds",
        above=0.5,
    ),
    "clipped_rewards": _make_rule(
        "shaping/clipped",
        "most rewards are at a bound of specialist.shaping.clip: widen it",
        above=0.5,
    ),
    "grad_norm": _make_rule(
        "grad_norm",
        "the gradient stays far larger than it was: lower the learning rate, or look for outlying rewards",
        above=20.0,
        form="ratio",
        first=10,
        also=Condition(metric="grad_norm", above=1.0),
        steps=5,
    ),
    "lost_critic": _make_rule(
        "critic/explained_variance",
        "the critic says less of returns than their mean does: raise specialist.critic.warmup_steps or its"
        " learning rate, or do without one (specialist.advantage: {type: grpo})",
        below=-0.2,
    ),
    "far_teacher": _make_rule(
        "kl/*",
        "the teacher gives what the student writes hardly any probability: compare the chat templates and"
        " tokenizers of the two (opd doctor --parity), begin with the teacher's answers (distill.warm_up), or"
        " let the student learn from demonstrations first",
        above=3.0,
        steps=5,
    ),
    "stalled_teacher": _make_rule(
        "kl/*",
        "the student does not come nearer to this teacher: raise distill.optim.lr, the domain's weight or"
        " prompts_per_domain; of a specialist its learning rate or specialist.opd.coef",
        above=0.9,
        form="ratio",
        first=60,  # an earlier task moves the student away from other teachers for some tens of steps
        last=20,
        also=Condition(metric="kl/*", above=0.1, last=20),
        steps=180,
    ),
    "idle_teacher": _make_rule(
        "grad_share/*",
        "this teacher does not pull the student: check that it differs from the base; if it has taught all"
        " it knows, leave it out",
        below=0.001,
    ),
}
"""By name; all of them warn."""


def _over_defaults(rules: object) -> Any:
    """Merge `rules` over the default ones of their names, and add the other defaults."""
    if not isinstance(rules, Mapping):
        return rules
    merged: dict[Any, Any] = {name: rule for name, rule in DEFAULT_RULES.items() if name not in rules}
    for name, rule in rules.items():
        default = DEFAULT_RULES.get(name)
        if isinstance(rule, RuleConfig) or not isinstance(rule, Mapping):
            merged[name] = rule
        elif default is not None:
            values = default.model_dump()
            merged[name] = {**values, **rule}
            if isinstance(rule.get("also"), Mapping) and values["also"] is not None:
                merged[name]["also"] = {**values["also"], **rule["also"]}
        elif "metric" not in rule:
            close = difflib.get_close_matches(str(name), DEFAULT_RULES, n=1, cutoff=0.5)
            hint = f", or did you mean watch.{close[0]}?" if close else ""
            raise ValueError(f"watch.{name} is no rule of the default set; give it a metric{hint}")
        else:
            merged[name] = rule
    # One order for all, because rules fire in it.
    return {name: merged[name] for name in [*DEFAULT_RULES, *(n for n in rules if n not in DEFAULT_RULES)]}


Rules = Annotated[dict[RuleName, RuleConfig | None] | None, BeforeValidator(_over_defaults)]


METRICS = (
    *("step", "time", "tokens/student", "loss/ce", "held_out/ce", "reward/mean", "reward/std"),
    *("reward/DOMAIN", "reward/DOMAIN/PART", "shaping/mean", "shaping/std", "shaping/clipped"),
    *("shaping/overlong", "shaping/length", "kl/mean", "kl/TEACHER", "kl/floor", "kl_at/P"),
    *(
        "teacher_prompt/sibling",
        "teacher_prompt/attempt",
        "teacher_prompt/feedback",
        "teacher_prompt/fallback",
        "teacher_prompt/none",
        "teacher_prompt/long",
    ),
    *("align/exact", "align/chunk", "align/none", "align/outside", "align/teacher_outside"),
    *(
        "accuracy/DOMAIN",
        "entropy",
        "base_kl",
        "reference_kl",
        "reference_kl/measured",
        "reference_kl/coef",
        "lr",
    ),
    *("grad_norm", "frac_reward_zero_std", "length/mean", "length/max", "length/p10", "length/p50"),
    *("length/p90", "truncated", "episode/turns", "episode/done", "episode/branches"),
    *("policy/clip_ratio", "policy/clip_low", "policy/clip_high"),
    *("policy/dual_clip", "policy/ratio_mean", "policy/ratio_min", "policy/ratio_max", "policy/kl_old"),
    *("mismatch/mean_abs", "mismatch/max_abs", "mismatch/ess", "token_share/TEACHER", "grad_share/TEACHER"),
    *("gate/TEACHER", "budget_weight/DOMAIN", "budget_prompts/DOMAIN", "budget_need/DOMAIN"),
    *("routing/apart", "routing/load_max", "routing/load_entropy", "routing/dead"),
    *("sampling/kept", "sampling/masked", "sampling/mass"),
    *("routing/balance_loss", "routing/z_loss", "warm_up/DOMAIN", "teacher_weight/DOMAIN/TEACHER"),
    *("staleness/mean", "staleness/max", "staleness/dropped", "correction/rejected", "correction/truncated"),
    *("correction/weight_mean", "correction/ess", "time/PHASE", "memory/PHASE/KIND"),
    *("head_loads", "resident_heads_peak"),
    *("prefetched_heads_peak", "teacher_tokens", "cached_tokens", "bytes_read", "cached_bytes"),
    *("weight_bytes_peak", "stall_seconds", "teacher/TEACHER/wait_seconds", "teacher/TEACHER/wait_share"),
    *("rollout/requests", "rollout/completed", "rollout/truncated", "rollout/failed", "rollout/aborted"),
    *("rollout/tokens", "rollout/prefilled_tokens", "rollout/replayed_requests", "rollout/replayed_tokens"),
    *("rollout/resumed_requests", "rollout/interrupted_requests", "rollout/suspensions"),
    *("rollout/deadlines", "rollout/engine_failures", "rollout/engine_timeouts", "rollout/kv_saved_bytes"),
    *("rollout/kv_restored_sequences", "rollout/kv_restored_tokens", "rollout/kept_tokens"),
    *("rollout/log_seconds", "rollout/carried", "rollout/out_of_order", "rollout/age"),
    *("rollout/pushed_bytes", "rollout/received_bytes", "context_parallel", "compiled_graphs"),
    *("refill/taken", "refill/kept", "refill/surplus", "critic/loss", "critic/explained_variance"),
    *("difficulty/rate", "curriculum/share", "replay/share", "replay/waiting"),
    *("critic/value_mean", "critic/return_mean", "critic/clip_ratio", "critic/grad_norm", "critic/lr"),
)
"""All metrics of a stage, as in `docs/reference/metrics.md`. DOMAIN and TEACHER are names of the recipe, PART
is of a reward in parts, PHASE of a step, KIND of a use of memory, P a power of two.
"""
_PHASES = ("data", "rollout", "score", "train", "sync", "evaluate")
_KINDS = (
    *("engine_weights", "engine_kv", "trainer_weights", "trainer_gradients", "trainer_moments"),
    *("teacher_weights", "teacher_heads", "hidden_states"),
)
_POWERS = tuple(str(2**exponent) for exponent in range(31))


def metrics_of(domains: Sequence[str], teachers: Sequence[str]) -> Iterator[str]:
    """Yield the names of `METRICS` in a run with these domains and teachers; PART stays as it is."""
    names = {"DOMAIN": domains, "TEACHER": teachers, "PHASE": _PHASES, "KIND": _KINDS, "P": _POWERS}
    for template in METRICS:
        parts = [names.get(part, (part,)) for part in template.split("/")]
        yield from ("/".join(chosen) for chosen in product(*parts))


def check_metrics(
    rules: Mapping[str, RuleConfig | None] | None, domains: Sequence[str], teachers: Sequence[str]
) -> None:
    """Raise `ValueError` naming a rule for a metric that no stage of such a run can log."""
    metrics = list(dict.fromkeys(metrics_of(domains, teachers)))
    for name, rule in (rules or {}).items():
        if rule is None or rule == DEFAULT_RULES.get(name):  # those are for any teachers
            continue
        used = {f"watch.{name}.metric": rule.metric}
        if rule.also is not None:
            used[f"watch.{name}.also.metric"] = rule.also.metric
        for where, pattern in used.items():
            in_parts = any(pattern.startswith(f"reward/{domain}/") for domain in domains)
            if in_parts or any(covers_metric(pattern, metric) for metric in metrics):
                continue
            close = difflib.get_close_matches(pattern, metrics, n=1, cutoff=0.0)
            raise ValueError(f"{where}: no stage logs {pattern!r}; did you mean {close[0]!r}?")
