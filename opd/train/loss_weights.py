"""What each token weighs in a stream of the loss: normalisers, importance corrections, the mismatch.

**Normalisers.** Every function takes the token counts of the *whole* step (all micro-batches, all ranks) and
returns what a token of each sample weighs, so that `sum(weight * per_token_loss)` is the step's loss however
the samples are packed: a mean of micro-batch means would weigh tokens by the company they keep.

**Importance corrections** between the policy that drew the tokens and the one that learns from them. A
rejected token leaves the loss *and* its normaliser: with weight 0 but still counted it would shrink the
gradient of all the others. What is kept counts with its weight. Tokens that are too many policy versions old
leave the loss before that.

**The mismatch**: how far the engine that wrote the tokens is from the trainer that learns from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from opd.config.rl import CorrectionConfig, IcePop, MaskedIS, SequenceMaskedTIS, TruncatedIS
from opd.errors import ConfigError
from opd.types import Sample

if TYPE_CHECKING:
    from opd.config import Recipe

Aggregation = Literal["token", "sequence", "constant", "turn"]


def turns_of(mask: np.ndarray, kept: np.ndarray | None = None) -> int:
    """How many turns a response has: runs of True in its loss mask `[R]`, what an environment says lies
    between them. With `kept` `[R]` those of which it has a token.
    """
    starts = _starts(mask)
    if kept is None:
        return int(np.count_nonzero(starts))
    return len(np.unique(np.cumsum(starts)[mask & kept]))


def turn_shares(mask: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """[R] float64: by how much more or less than the mean a token of each turn weighs, so that every turn of
    the response weighs the same: `tokens / (turns * tokens of the turn)`, 0 elsewhere. They sum to the
    response's tokens, so a scale of the sample keeps its sum. Turns are those of the loss mask `[R]`; with
    `kept` `[R]` their tokens are those that it has left.
    """
    left = mask if kept is None else mask & kept
    turn = np.cumsum(_starts(mask))
    sizes = np.bincount(turn[left], minlength=1)
    share = np.count_nonzero(left) / (max(np.count_nonzero(sizes), 1) * np.maximum(sizes, 1))
    found = np.zeros(len(mask))
    found[left] = share[turn[left]]
    return found


def _starts(mask: np.ndarray) -> np.ndarray:
    """[R] bool: where a run of True begins."""
    starts = mask.astype(bool)
    starts[1:] &= ~starts[:-1]
    return starts


def policy_scales(
    counts: Sequence[int],
    aggregation: Aggregation,
    max_new_tokens: int = 1,
    turns: Sequence[int] | None = None,
) -> list[float]:
    """What a token of each sample weighs, from how many tokens of each the loss counts.

    `token`: `1 / total tokens`. `sequence`: every response that has a token weighs the same, spread evenly
    over its tokens. `constant`: `1 / (max_new_tokens * responses)`, whatever the lengths are (Dr. GRPO,
    2503.20783); these weights sum to the mean length over `max_new_tokens`, not to 1. `turn`: every turn of
    the step weighs the same, of which `turns` says how many each response has; within a response they are
    evened out by `turn_shares`.
    """
    if aggregation == "turn":
        own = [int(count > 0) for count in counts] if turns is None else turns
        return [n / (max(sum(own), 1) * max(count, 1)) for n, count in zip(own, counts, strict=True)]
    if aggregation == "constant":
        return [1.0 / (max_new_tokens * max(len(counts), 1))] * len(counts)
    if aggregation == "token":
        return [1.0 / max(sum(counts), 1)] * len(counts)
    sequences = sum(count > 0 for count in counts)
    return [1.0 / (max(sequences, 1) * max(count, 1)) for count in counts]


def response_scales(
    samples: Sequence[Sample],
    counts: Sequence[int],
    aggregation: Aggregation,
    max_new_tokens: int,
    turns: Sequence[int],
) -> dict[str, float]:
    """As `policy_scales`, by uid of the sample, where all branches of an episode are one response."""
    if aggregation == "turn":  # of which each belongs to one sample
        scales = policy_scales(counts, aggregation, max_new_tokens, turns)
        return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}
    episodes = by_episode(samples, counts)
    scales = policy_scales(list(episodes.values()), aggregation, max_new_tokens)
    whole = dict(zip(episodes, scales, strict=True))
    return {sample.uid: whole[sample.episode] for sample in samples}


def by_episode(samples: Sequence[Sample], numbers: Sequence[int]) -> dict[str, int]:
    """The sum of `numbers`, one for each of `samples`, over all branches of an episode, by the episode; a
    response without branches is one of its own. In the order of their first samples.
    """
    found: dict[str, int] = {}
    for sample, number in zip(samples, numbers, strict=True):
        found[sample.episode] = found.get(sample.episode, 0) + number
    return found


def per_teacher_scales(
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float] | None = None,
    units: Sequence[int] | None = None,
) -> list[float]:
    """What a token of each sample weighs, so that the tokens of each teacher sum to its share of the loss,
    however short its answers are; `counts`: how many tokens of each sample the loss counts.

    `teacher_shares` defaults to equal shares. Shares are normalised over the teachers that have a token in
    the step, so the weights sum to 1. Samples without a teacher weigh 0. Raises `ConfigError` for a teacher
    that has tokens but no positive share.

    `units`: of each sample how many of what weighs alike within a teacher's share, spread evenly over the
    sample's tokens: 1 for episodes, else its turns. Tokens without.
    """
    if units is not None:
        whole = [unit if count else 0 for unit, count in zip(units, counts, strict=True)]
        scales = per_teacher_scales(whole, teachers, teacher_shares)
        spread = zip(scales, whole, counts, strict=True)
        return [scale * unit / max(count, 1) for scale, unit, count in spread]
    tokens: dict[str, int] = {}
    for count, name in zip(counts, teachers, strict=True):
        if name is not None and count:
            tokens[name] = tokens.get(name, 0) + count
    shares = {name: _share(name, teacher_shares) for name in tokens}
    total = sum(shares.values())
    scale = {name: shares[name] / (total * tokens[name]) for name in tokens}
    return [scale.get(name, 0.0) if name is not None else 0.0 for name in teachers]


def episode_scales(
    samples: Sequence[Sample],
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """As `per_teacher_scales` with a unit of 1 for each episode, by uid of the sample: all branches of an
    episode, which have one teacher, weigh together what a response without branches weighs.
    """
    episodes = by_episode(samples, counts)
    known = {sample.episode: name for sample, name in zip(samples, teachers, strict=True)}
    own = [known[episode] for episode in episodes]
    scales = per_teacher_scales(list(episodes.values()), own, teacher_shares, [1] * len(episodes))
    whole = dict(zip(episodes, scales, strict=True))
    return {sample.uid: whole[sample.episode] for sample in samples}


def normalised_scales(
    samples: Sequence[Sample],
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float],
    turns: Sequence[int],
    normalise: str,
) -> dict[str, float]:
    """As `per_teacher_scales`, by uid of the sample: within a teacher's share what weighs the same are its
    episodes, its turns or, with any other `normalise`, its tokens.
    """
    if normalise == "episode":
        return episode_scales(samples, counts, teachers, teacher_shares)
    units = turns if normalise == "turn" else None
    scales = per_teacher_scales(counts, teachers, teacher_shares, units)
    return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}


def route_scales(
    recipe: Recipe,
    samples: Sequence[Sample],
    counts: Sequence[int],
    turns: Sequence[int],
) -> dict[str, float]:
    """What a token of each sample weighs, by uid, where the loss counts so many of each, in so many turns.

    With `normalise: token` every token weighs the same. Else each route's share of the loss is its domains'
    weights, shared out by the samples they sent it; within it tokens, episodes or turns weigh the same. Turns
    are evened out within a sample by `turn_shares`.
    """
    normalise = recipe.distill.normalise
    if normalise == "token":
        scales = policy_scales(counts, "token")
        return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}
    # Of an episode's branches the first stands for it.
    first = {sample.episode: sample.uid for sample in reversed(samples)}
    sent: dict[str, int] = {}
    for sample in samples:
        sent[sample.domain] = sent.get(sample.domain, 0) + (first[sample.episode] == sample.uid)
    # A domain without a teacher is a route of its own.
    routes = [sample.teacher or f"rewards of {sample.domain}" for sample in samples]
    shares: dict[str, float] = {}
    for route, sample in zip(routes, samples, strict=True):
        if first[sample.episode] == sample.uid:
            share = recipe.domains[sample.domain].weight / sent[sample.domain]
            shares[route] = shares.get(route, 0.0) + share
    return normalised_scales(samples, counts, routes, shares, turns, normalise)


def _share(name: str, teacher_shares: Mapping[str, float] | None) -> float:
    share = 1.0 if teacher_shares is None else teacher_shares.get(name, 0.0)
    if not share > 0:
        raise ConfigError(f"teacher {name!r} has tokens in the step but no positive share; give it one")
    return float(share)


def weigh(mask: np.ndarray, scale: float, shares: np.ndarray | None = None) -> np.ndarray:
    """[R] float32: `scale` where `mask` `[R]` is True, times the token's own of `shares` `[R]`."""
    return np.where(mask, scale if shares is None else scale * shares, 0.0).astype(np.float32)


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: beyond every useful bound, and finite."""


def corrected(
    config: CorrectionConfig | None, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """What `config` makes of a sample drawn with log-probabilities `rollout` `[R]`: the loss mask `[R]`
    without rejected tokens, over which to normalise; the weights `[R]` float32, 0 where that is False; and
    how many tokens have a weight that was truncated.

    `recomputed` are the trainer's log-probabilities of the same tokens at the start of the step, `mask` is
    the loss mask. Without `config` every token counts as it is.
    """
    if config is None:
        return mask, mask.astype(np.float32), 0
    log_ratio = np.where(mask, recomputed.astype(np.float64) - rollout, 0.0)
    keep, weight, bounded = _one(config, log_ratio, mask)
    return keep, np.where(keep, weight, 0.0).astype(np.float32), int(np.count_nonzero(bounded & keep))


@dataclass(slots=True)
class CorrectionSums:
    """What the metrics need of samples that need not be kept."""

    tokens: float = 0.0
    kept: float = 0.0
    truncated: float = 0.0
    weights: float = 0.0
    """Sum of the weights of the kept tokens."""
    squares: float = 0.0
    """Sum of their squares."""

    def add(self, mask: np.ndarray, kept: np.ndarray, weights: np.ndarray, truncated: int) -> None:
        """Add a sample with loss mask `mask` and what `corrected` has made of it."""
        self.tokens += int(np.count_nonzero(mask))
        self.kept += int(np.count_nonzero(kept))
        self.truncated += truncated
        self.weights += float(weights.sum(dtype=np.float64))
        self.squares += float(np.square(weights, dtype=np.float64).sum())

    def include(self, other: CorrectionSums) -> None:
        """Add the samples of `other`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, float]:
        """`correction/rejected`, `/truncated` (shares of the tokens), `/weight_mean` of the kept ones and
        `/ess`, the effective sample size `(sum w)^2 / (N sum w^2)` of all; empty without tokens.
        """
        if not self.tokens:
            return {}
        return {
            "correction/rejected": 1.0 - self.kept / self.tokens,
            "correction/truncated": self.truncated / self.tokens,
            "correction/weight_mean": self.weights / max(self.kept, 1),
            "correction/ess": self.weights**2 / (self.tokens * self.squares) if self.squares else 0.0,
        }


def _one(
    config: CorrectionConfig, log_ratio: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kept, weight, truncated) of one response, `[R]` each."""
    ratio = _ratio(log_ratio)
    match config:
        case TruncatedIS():
            weight = np.clip(ratio, config.lower, config.upper)
            return mask, weight, weight != ratio
        case MaskedIS(level="sequence"):
            ratio = np.broadcast_to(_ratio(log_ratio.sum()), ratio.shape)
            return mask & _inside(config, ratio), ratio, np.zeros_like(mask)
        case MaskedIS() | IcePop():
            return mask & _inside(config, ratio), ratio, np.zeros_like(mask)
        case SequenceMaskedTIS():
            typical = _ratio(log_ratio.sum() / max(np.count_nonzero(mask), 1))
            weight = np.minimum(ratio, config.truncate)
            return mask & _inside(config, typical), weight, weight != ratio


def _ratio(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _inside(config: MaskedIS | IcePop | SequenceMaskedTIS, ratio: np.ndarray) -> np.ndarray:
    return (config.lower <= ratio) & (ratio <= config.upper)


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over the tokens that count, for a learner at `version`; empty without."""
    ages = np.concatenate([version - s.policy_versions[s.loss_mask] for s in samples] or [np.zeros(0)])
    if not len(ages):
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def drop_stale(samples: Sequence[Sample], version: int, limit: int) -> dict[str, float]:
    """Take tokens that are more than `limit` versions old out of the loss masks, in place.

    Returns `staleness/dropped`, their share of the tokens that counted.
    """
    before = after = 0
    for sample in samples:
        before += int(np.count_nonzero(sample.loss_mask))
        sample.loss_mask = sample.loss_mask & (version - sample.policy_versions <= limit)
        after += int(np.count_nonzero(sample.loss_mask))
    return {"staleness/dropped": 1.0 - after / before if before else 0.0}


Arrays = np.ndarray | Sequence[np.ndarray]


def mismatch(rollout_logprobs: Arrays, recomputed_logprobs: Arrays, mask: Arrays) -> dict[str, float]:
    """Difference between the engine's and the trainer's log-probabilities of the same tokens.

    Arguments are [N] arrays, or lists of one `[R]` array a sample; only tokens where `mask` is True count.
    `mismatch/mean_abs` and `mismatch/max_abs` are in nats. `mismatch/ess` is the effective sample size of the
    importance weights `w = exp(recomputed - rollout)` as a fraction, `(sum w)^2 / (N sum w^2)`: 1 if both
    agree, towards `1/N` if a few tokens carry everything. Without tokens: 0, 0 and 1.
    """
    sums = MismatchSums()
    sums.add(_flat(rollout_logprobs), _flat(recomputed_logprobs), _flat(mask))
    return sums.metrics()


@dataclass(slots=True)
class MismatchSums:
    """What `mismatch` needs of tokens that come piece by piece and need not be kept."""

    tokens: int = 0
    magnitude: float = 0.0
    """Sum of |difference|."""
    largest: float = 0.0
    top: float = float("-inf")
    """The largest difference. ESS does not change when all weights are scaled: with the largest at 1 nothing
    overflows."""
    weights: float = 0.0
    """Sum of `exp(difference - top)`."""
    squares: float = 0.0
    """Sum of its square."""

    def add(self, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray) -> None:
        """Add [N] tokens, of which those count whose `mask` is True."""
        difference = (recomputed.astype(np.float64) - rollout)[mask.astype(bool)]
        if not len(difference):
            return
        magnitude, top = np.abs(difference), float(difference.max())
        weights = np.exp(difference - top)
        self.include(
            MismatchSums(
                len(difference),
                float(magnitude.sum()),
                float(magnitude.max()),
                top,
                float(weights.sum()),
                float(np.square(weights).sum()),
            )
        )

    def include(self, other: MismatchSums) -> None:
        """Add the tokens of `other`."""
        if not other.tokens:
            return
        top = max(self.top, other.top)
        mine = float(np.exp(self.top - top)) if self.tokens else 0.0
        theirs = float(np.exp(other.top - top))
        self.weights = self.weights * mine + other.weights * theirs
        self.squares = self.squares * mine**2 + other.squares * theirs**2
        self.tokens += other.tokens
        self.magnitude += other.magnitude
        self.largest, self.top = max(self.largest, other.largest), top

    def metrics(self) -> dict[str, float]:
        """What `mismatch` returns."""
        if not self.tokens:
            return {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/ess": 1.0}
        return {
            "mismatch/mean_abs": self.magnitude / self.tokens,
            "mismatch/max_abs": self.largest,
            "mismatch/ess": self.weights**2 / (self.tokens * self.squares),
        }


def _flat(arrays: Arrays) -> np.ndarray:
    if isinstance(arrays, np.ndarray):
        return arrays
    return np.concatenate([np.asarray(array) for array in arrays]) if len(arrays) else np.zeros(0)
