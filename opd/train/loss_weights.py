"""Weights of tokens in a stream of the loss: normalisers, importance corrections, the mismatch.

**Normalisers.** Every function takes the token counts of the *whole* step (all micro-batches, all ranks) and
returns the weight of a token of each sample. `sum(weight * per_token_loss)` is then the step's loss for any
packing. A mean of micro-batch means would weigh a token by its neighbours in the pack.

**Importance corrections** between the policy that drew the tokens and the one that learns from them. A
rejected token leaves the loss *and* its normaliser. With weight 0 but still counted it would shrink the
gradient of all others. A kept token counts with its weight. Tokens that are too many policy versions old
leave the loss before that.

**The mismatch** between the log-probabilities of the engine and of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from opd.config import Recipe
from opd.config.rl import CorrectionConfig, IcePop, MaskedIS, SequenceMaskedTIS, TeacherWeight, TruncatedIS
from opd.errors import ConfigError
from opd.types import Sample

Aggregation = Literal["token", "sequence", "constant", "turn"]


def weight_at(weight: TeacherWeight, step: int) -> float:
    """Return a weight at `step`, from 0 on. Points are linear in between, and constant outside."""
    if not isinstance(weight, list):
        return weight
    steps, weights = zip(*weight, strict=True)
    return float(np.interp(step, steps, weights))


def turns_of(mask: np.ndarray, counted: np.ndarray | None = None) -> int:
    """Return the number of turns of a response. A turn is a run of True in the loss mask `[R]`; environment
    tokens separate them. With `counted` `[R]` count only turns that have a counted token.
    """
    starts = _run_starts(mask)
    if counted is None:
        return int(np.count_nonzero(starts))
    return len(np.unique(np.cumsum(starts)[mask & counted]))


def turn_shares(mask: np.ndarray, counted_tokens: np.ndarray | None = None) -> np.ndarray:
    """Return `[R]` float64 weights that make all turns of the response weigh the same. A token's weight
    relative to the mean is `tokens / (turns * tokens of the turn)`, and 0 elsewhere. The weights sum to the
    response's tokens, so the sample's scale keeps its sum. Turns are those of the loss mask `[R]`. With
    `counted_tokens` `[R]` only these count.
    """
    counted = mask if counted_tokens is None else mask & counted_tokens
    turn = np.cumsum(_run_starts(mask))
    sizes = np.bincount(turn[counted], minlength=1)
    share = np.count_nonzero(counted) / (max(np.count_nonzero(sizes), 1) * np.maximum(sizes, 1))
    weights = np.zeros(len(mask))
    weights[counted] = share[turn[counted]]
    return weights


def _run_starts(mask: np.ndarray) -> np.ndarray:
    """Return `[R]` bool, True where a run of True begins."""
    starts = mask.astype(bool)
    starts[1:] &= ~starts[:-1]
    return starts


def policy_scales(
    counts: Sequence[int],
    aggregation: Aggregation,
    max_new_tokens: int = 1,
    turns: Sequence[int] | None = None,
) -> list[float]:
    """Return the weight of a token of each sample, from the counted tokens of each.

    `token`: `1 / total tokens`. `sequence`: every response that has a token weighs the same, spread evenly
    over its tokens. `constant`: `1 / (max_new_tokens * responses)` for any lengths (Dr. GRPO, 2503.20783);
    these weights sum to the mean length over `max_new_tokens`, not to 1. `turn`: every turn of the step
    weighs the same. `turns` has their number in each response; `turn_shares` evens them out within a
    response.
    """
    if aggregation == "turn":
        turns = [int(count > 0) for count in counts] if turns is None else turns
        return [n / (max(sum(turns), 1) * max(count, 1)) for n, count in zip(turns, counts, strict=True)]
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
    """`policy_scales` by sample uid, with all branches of an episode as one response."""
    if aggregation == "turn":  # of which each belongs to one sample
        scales = policy_scales(counts, aggregation, max_new_tokens, turns)
        return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}
    episodes = by_episode(samples, counts)
    scales = policy_scales(list(episodes.values()), aggregation, max_new_tokens)
    of_episode = dict(zip(episodes, scales, strict=True))
    return {sample.uid: of_episode[sample.episode] for sample in samples}


def by_episode(samples: Sequence[Sample], numbers: Sequence[int]) -> dict[str, int]:
    """Sum `numbers`, one for each of `samples`, over all branches of an episode. Return the sums by episode,
    in the order of their first samples. A response without branches is an episode of its own.
    """
    sums: dict[str, int] = {}
    for sample, number in zip(samples, numbers, strict=True):
        sums[sample.episode] = sums.get(sample.episode, 0) + number
    return sums


def per_teacher_scales(
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float] | None = None,
    units: Sequence[int] | None = None,
) -> list[float]:
    """Return the weight of a token of each sample. The tokens of each teacher sum to its share of the loss,
    for any length of its answers. `counts` are the counted tokens of each sample.

    `teacher_shares` defaults to equal shares. Shares are normalised over the teachers that have a token in
    the step, so the weights sum to 1. Samples without a teacher weigh 0. Raises `ConfigError` for a teacher
    that has tokens but no positive share.

    `units` is the number of equally weighted units of each sample, spread evenly over its tokens: 1 for
    episodes, the number of turns for turns. None: every token is a unit.
    """
    if units is not None:
        units = [unit if count else 0 for unit, count in zip(units, counts, strict=True)]
        scales = per_teacher_scales(units, teachers, teacher_shares)
        spread = zip(scales, units, counts, strict=True)
        return [scale * unit / max(count, 1) for scale, unit, count in spread]
    tokens: dict[str, int] = {}
    for count, name in zip(counts, teachers, strict=True):
        if name is not None and count:
            tokens[name] = tokens.get(name, 0) + count
    shares: dict[str, float] = {}
    for name in tokens:
        share = 1.0 if teacher_shares is None else teacher_shares.get(name, 0.0)
        if not share > 0:
            raise ConfigError(f"teacher {name!r} has tokens in the step but no positive share; give it one")
        shares[name] = float(share)
    total = sum(shares.values())
    scale = {name: shares[name] / (total * tokens[name]) for name in tokens}
    return [scale.get(name, 0.0) if name is not None else 0.0 for name in teachers]


def normalised_scales(
    samples: Sequence[Sample],
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float],
    turns: Sequence[int] | None,
    normalise: str,
) -> dict[str, float]:
    """`per_teacher_scales` by sample uid. Within a teacher's share its episodes, its turns or, with any other
    `normalise`, its tokens weigh the same. All branches of an episode have one teacher and together weigh as
    much as a response without branches.
    """
    if normalise == "episode":
        episodes = by_episode(samples, counts)
        of_episode = {sample.episode: name for sample, name in zip(samples, teachers, strict=True)}
        names = [of_episode[episode] for episode in episodes]
        scales = per_teacher_scales(list(episodes.values()), names, teacher_shares, [1] * len(episodes))
        by_name = dict(zip(episodes, scales, strict=True))
        return {sample.uid: by_name[sample.episode] for sample in samples}
    units = turns if normalise == "turn" else None
    scales = per_teacher_scales(counts, teachers, teacher_shares, units)
    return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}


def route_scales(
    recipe: Recipe,
    samples: Sequence[Sample],
    counts: Sequence[int],
    turns: Sequence[int] | None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the weight of a token of each sample by uid, from the counted tokens and turns of each. Only
    `normalise: turn` needs the turns. `weights` of domains replace the recipe's.

    With `normalise: token` every token weighs the same. Otherwise a route's share of the loss is its domains'
    weights, split by the samples that each domain sent it. Within a route tokens, episodes or turns weigh the
    same. `turn_shares` evens turns out within a sample.
    """
    normalise = recipe.distill.normalise
    if normalise == "token":
        scales = policy_scales(counts, "token")
        return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}
    # The first branch stands for its episode.
    first = {sample.episode: sample.uid for sample in reversed(samples)}
    episodes: dict[str, int] = {}
    for sample in samples:
        episodes[sample.domain] = episodes.get(sample.domain, 0) + (first[sample.episode] == sample.uid)
    # A domain without a teacher is a route of its own.
    routes = [sample.teacher or f"rewards of {sample.domain}" for sample in samples]
    shares: dict[str, float] = {}
    for route, sample in zip(routes, samples, strict=True):
        if first[sample.episode] == sample.uid:
            weight = recipe.domains[sample.domain].weight if weights is None else weights[sample.domain]
            share = weight / episodes[sample.domain]
            shares[route] = shares.get(route, 0.0) + share
    return normalised_scales(samples, counts, routes, shares, turns, normalise)


def token_weights(mask: np.ndarray, scale: float, shares: np.ndarray | None = None) -> np.ndarray:
    """Return `[R]` float32, `scale` where `mask` `[R]` is True, times the token's entry of `shares` `[R]`."""
    return np.where(mask, scale if shares is None else scale * shares, 0.0).astype(np.float32)


MAX_LOG_RATIO = 20.0
"""Clamp of log-ratios before `exp`: beyond every useful bound, and finite."""


def apply_correction(
    config: CorrectionConfig | None, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Apply `config` to a sample drawn with log-probabilities `rollout` `[R]`. Return the loss mask `[R]`
    without rejected tokens (normalise over it), the weights `[R]` float32 (0 where it is False), and the
    number of tokens with a truncated weight.

    `recomputed` are the trainer's log-probabilities of the same tokens at the start of the step. `mask` is
    the loss mask. Without `config` every counted token has weight 1.
    """
    if config is None:
        return mask, mask.astype(np.float32), 0
    log_ratio = np.where(mask, recomputed.astype(np.float64) - rollout, 0.0)
    ratio = _clamped_ratio(log_ratio)
    keep, weight, truncated = mask, ratio, np.zeros_like(mask)
    match config:
        case TruncatedIS():
            weight = np.clip(ratio, config.lower, config.upper)
            truncated = weight != ratio
        case MaskedIS(level="sequence"):
            weight = np.broadcast_to(_clamped_ratio(log_ratio.sum()), ratio.shape)
            keep = mask & _inside_bounds(config, weight)
        case MaskedIS() | IcePop():
            keep = mask & _inside_bounds(config, ratio)
        case SequenceMaskedTIS():
            typical = _clamped_ratio(log_ratio.sum() / max(np.count_nonzero(mask), 1))
            weight = np.minimum(ratio, config.truncate)
            keep, truncated = mask & _inside_bounds(config, typical), weight != ratio
    return keep, np.where(keep, weight, 0.0).astype(np.float32), int(np.count_nonzero(truncated & keep))


@dataclass(slots=True)
class CorrectionSums:
    """Sums over samples for the correction metrics; samples need not stay in memory."""

    tokens: float = 0.0
    kept: float = 0.0
    truncated: float = 0.0
    weights: float = 0.0
    """Sum of the weights of the kept tokens."""
    squares: float = 0.0
    """Sum of their squares."""

    def add(self, mask: np.ndarray, kept: np.ndarray, weights: np.ndarray, truncated: int) -> None:
        """Add a sample with loss mask `mask` and the results of `apply_correction`."""
        self.tokens += int(np.count_nonzero(mask))
        self.kept += int(np.count_nonzero(kept))
        self.truncated += truncated
        self.weights += float(weights.sum(dtype=np.float64))
        self.squares += float(np.square(weights, dtype=np.float64).sum())

    def merge_from(self, other: CorrectionSums) -> None:
        """Add the samples of `other`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, float]:
        """Return `correction/rejected`, `/truncated` (shares of the tokens), `/weight_mean` of the kept ones
        and `/ess`, the effective sample size `(sum w)^2 / (N sum w^2)` of all. Empty without tokens.
        """
        if not self.tokens:
            return {}
        return {
            "correction/rejected": 1.0 - self.kept / self.tokens,
            "correction/truncated": self.truncated / self.tokens,
            "correction/weight_mean": self.weights / max(self.kept, 1),
            "correction/ess": self.weights**2 / (self.tokens * self.squares) if self.squares else 0.0,
        }


def _clamped_ratio(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _inside_bounds(config: MaskedIS | IcePop | SequenceMaskedTIS, ratio: np.ndarray) -> np.ndarray:
    return (config.lower <= ratio) & (ratio <= config.upper)


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over the counted tokens, for a learner at `version`; empty without."""
    ages = np.concatenate([version - s.policy_versions[s.loss_mask] for s in samples] or [np.zeros(0)])
    if not len(ages):
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def drop_stale(samples: Sequence[Sample], version: int, limit: int) -> dict[str, float]:
    """Remove tokens that are more than `limit` versions old from the loss masks, in place.

    Return `staleness/dropped`, their share of the tokens that counted.
    """
    total = fresh = 0
    for sample in samples:
        total += int(np.count_nonzero(sample.loss_mask))
        sample.loss_mask = sample.loss_mask & (version - sample.policy_versions <= limit)
        fresh += int(np.count_nonzero(sample.loss_mask))
    return {"staleness/dropped": 1.0 - fresh / total if total else 0.0}


@dataclass(slots=True)
class MismatchSums:
    """Sums for the difference between the engine's and the trainer's log-probabilities of the same tokens.
    Tokens are added in chunks and need not stay in memory.
    """

    tokens: int = 0
    magnitude: float = 0.0
    """Sum of |difference|."""
    largest: float = 0.0
    top: float = float("-inf")
    """The largest difference. Scaling all weights leaves the ESS unchanged, so the largest is scaled to 1 and
    nothing overflows."""
    weights: float = 0.0
    """Sum of `exp(difference - top)`."""
    squares: float = 0.0
    """Sum of its square."""

    def add(self, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray) -> None:
        """Add `[N]` tokens, counting those whose `mask` is True."""
        difference = (recomputed.astype(np.float64) - rollout)[mask.astype(bool)]
        if not len(difference):
            return
        magnitude, top = np.abs(difference), float(difference.max())
        weights = np.exp(difference - top)
        self.merge_from(
            MismatchSums(
                len(difference),
                float(magnitude.sum()),
                float(magnitude.max()),
                top,
                float(weights.sum()),
                float(np.square(weights).sum()),
            )
        )

    def merge_from(self, other: MismatchSums) -> None:
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
        """Return `mismatch/mean_abs` and `mismatch/max_abs`, in nats, and `mismatch/ess`.

        That is the effective sample size of the importance weights `w = exp(recomputed - rollout)` as a
        fraction, `(sum w)^2 / (N sum w^2)`. It is 1 if both agree, and goes towards `1/N` if a few tokens
        carry everything. Without tokens: 0, 0 and 1.
        """
        if not self.tokens:
            return {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/ess": 1.0}
        return {
            "mismatch/mean_abs": self.magnitude / self.tokens,
            "mismatch/max_abs": self.largest,
            "mismatch/ess": self.weights**2 / (self.tokens * self.squares),
        }
