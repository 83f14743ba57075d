"""Which prompts a specialist asks where its recipe chooses: more of them until a batch carries signal.

What is chosen is a function of rewards and of what a checkpoint holds (`Step.counters`), so a
resumed stage asks the same prompts again, under the same uids.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from opd.config import SpecialistConfig
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.samples import StepSamples
from opd.rollout.collect import EncodedPrompt
from opd.types import Sample, SampleGroup

_TAKEN = "prompts_taken"
"""Counter: how many of the endless sequence of prompts the steps so far have taken."""


@dataclass(frozen=True, slots=True)
class Judge:
    """What an algorithm thinks of groups."""

    reward: Callable[[StepSamples], None]
    """Reward every sample, as the reward function says."""
    shape: Callable[[StepSamples, MutableMapping[str, float]], object]
    """What becomes of rewards before signal is looked for; counters are its to change."""
    keep: Callable[[StepSamples], Sequence[SampleGroup]]
    """The groups that there is something to learn from."""


class PromptChoice:
    """Hands out the prompts of each step, and says what of it is learned from.

    Args:
        data: The domains.
        domains: Those that are asked.
        stage: Begins the uid of every prompt.
        config: Of the stage.
        judge: Of the stage's algorithm.
    """

    def __init__(
        self, data: DomainSet, domains: Sequence[str], stage: str, config: SpecialistConfig, judge: Judge
    ) -> None:
        self._data, self._domains, self._stage, self._config = data, list(domains), stage, config
        self._judge = judge
        self._next = 0
        self._counters: dict[str, float] = {}
        self._places: dict[str, int] = {}
        """Of this step: the place of each prompt among those that were asked, by uid."""
        self._raw: dict[str, tuple[float | None, dict[str, float]]] = {}
        """What reward functions said, by uid of the sample."""
        self._kept: dict[str, bool] = {}
        """Whether a group is one to learn from, by uid."""

    @property
    def refills(self) -> bool:
        """Whether steps take more prompts until enough groups carry signal; `more` then rewards them."""
        return self._config.refill is not None

    def begin(self, counters: MutableMapping[str, float]) -> None:
        """A step begins; `counters` are those of the stage up to it."""
        self._counters = dict(counters)
        self._next = int(counters.get(_TAKEN, 0))
        self._places, self._raw, self._kept = {}, {}, {}

    def first(self) -> list[EncodedPrompt]:
        """The prompts that the step asks in any case."""
        return self._take(self._config.prompts_per_step)

    def more(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Prompts to ask beside those of `samples`, which are rewarded and put in the order they were asked
        in; none once enough groups carry signal, or `refill.limit` is reached.

        As many as would fill the batch at the share that had signal so far.
        """
        refill, wanted = self._config.refill, self._config.prompts_per_step
        if refill is None:
            return []
        self._look_at(samples)
        taken, kept = len(samples.groups), sum(self._kept.values())
        missing, left = wanted - kept, refill.limit * wanted - taken
        if missing <= 0 or left <= 0:
            return []
        expected = -(-missing * taken // kept) if kept else wanted
        return self._take(min(expected, left))

    def settle(self, samples: StepSamples, counters: MutableMapping[str, float]) -> dict[str, float]:
        """Leave in `samples` the groups to learn from, and note in `counters` where the next step goes on;
        returns metrics.

        Of those with signal the first `prompts_per_step` in the order in which they were asked: who ended
        first, or how many were asked together, does not count.
        """
        counters[_TAKEN] = float(self._next)
        kept = [group for group in samples.groups if self._kept[group.uid]]
        taken, samples.groups = len(samples.groups), kept[: self._config.prompts_per_step]
        return {
            "refill/taken": float(taken),
            "refill/kept": float(len(samples.groups)),
            "refill/surplus": float(len(kept) - len(samples.groups)),
        }

    def _take(self, count: int) -> list[EncodedPrompt]:
        """The next `count` of the endless sequence, in its order, in which no domain comes first."""
        numbers = range(self._next, self._next + count)
        self._next += count
        prompts = [self._data.mixed(self._domains, number, 1, self._stage)[0] for number in numbers]
        for prompt in prompts:
            self._places[prompt.uid] = len(self._places)
        return prompts

    def _look_at(self, samples: StepSamples) -> None:
        """Reward the groups that were not looked at yet, and note which of them are to be learned from.

        All rewards are left as their functions gave them: they are shaped once the step is whole.
        """
        everyone = sorted(samples.groups, key=lambda group: self._places[group.uid])
        new = [group for group in everyone if group.uid not in self._kept]
        samples.groups = new
        self._judge.reward(samples)
        self._raw |= {sample.uid: (sample.reward, sample.reward_parts) for sample in samples.samples}
        samples.groups = everyone
        self._restore(samples.samples)
        self._judge.shape(samples, dict(self._counters))
        samples.groups = new
        kept = {group.uid for group in self._judge.keep(samples)}
        self._kept |= {group.uid: group.uid in kept for group in new}
        samples.groups = everyone
        self._restore(samples.samples)

    def _restore(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.reward, sample.reward_parts = self._raw[sample.uid]
