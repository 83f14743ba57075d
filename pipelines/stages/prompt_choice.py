"""Which prompts a specialist asks where its recipe chooses: those of middling difficulty, easy ones first,
some again whose groups carried signal, and more of them until a batch does.

What is chosen is a function of rewards and of what a checkpoint holds (`StepContext.counters`,
`StepContext.memory`), so a resumed stage asks the same prompts again, under the same uids. Where rewards are
not the same again, as of a judge that nobody keeps a record of, it asks others under other uids: none stands
for two prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.specialist import CurriculumConfig, SpecialistConfig
from opd.errors import CheckpointError
from opd.foreign import shown
from opd.pipelines.records.stage_names import specialist_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import StepContext
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import Student
from opd.rollout.collect import EncodedPrompt
from opd.rollout.prompts import PromptCursor
from opd.types import Sample, SampleGroup

if TYPE_CHECKING:
    from opd.pipelines.stages.difficulty import Rates

_TAKEN = "prompts_taken"
"""Counter: how many of the endless sequence of prompts the steps so far have taken."""
_MOST = 1 << 53
"""More were never taken."""
_WAITING = "replay"
"""What a checkpoint remembers: [domain, index] of the prompts that wait to come again, the oldest first."""


@dataclass(frozen=True, slots=True)
class Judge:
    """What an algorithm thinks of groups."""

    reward: Callable[[StepSamples], None]
    """Reward every sample, as the reward function says."""
    shape: Callable[[StepSamples, MutableMapping[str, float]], object]
    """What becomes of rewards before signal is looked for; counters are its to change."""
    keep: Callable[[StepSamples], Sequence[SampleGroup]]
    """The groups that pass its filters."""
    masks: Callable[[Sample], bool]
    """Whether a sample is never learned from."""

    def learns(self, group: SampleGroup) -> bool:
        """Whether something is learned from a group that was kept."""
        return not all(map(self.masks, group.samples))


class PromptChoice:
    """Hands out the prompts of each step, and says what of it is learned from.

    Args:
        data: The domains.
        domains: Those that are asked.
        stage: Begins the uid of every prompt.
        config: Of the stage.
        judge: Of the stage's algorithm.
        seed: Of the recipe, from which `measure` takes it.
    """

    def __init__(
        self,
        data: DomainSet,
        domains: Sequence[str],
        stage: str,
        config: SpecialistConfig,
        judge: Judge,
        seed: int = 0,
    ) -> None:
        self._data, self._domains, self._stage, self._config = data, list(domains), stage, config
        self._judge, self._seed = judge, seed
        self._pools: dict[str, Sequence[int]] = {n: range(len(data.domains[n].train)) for n in domains}
        """Of each domain the training prompts that are asked, by index."""
        self._rates: dict[str, Rates] = {}
        self._cursors: dict[str, tuple[int, PromptCursor[int]]] = {}
        """The latest of each domain, and over how many prompts it goes."""
        self._asked: dict[int, dict[str, tuple[str, int]]] = {}
        """Of each step the prompts that it asked, in their order: domain and index by uid."""
        self._step, self._next = 0, 0
        self._counters: dict[str, float] = {}
        self._waiting: dict[tuple[str, int], None] = {}
        self._raw: dict[str, tuple[float | None, dict[str, float]]] = {}
        """What reward functions said, by uid of the sample."""
        self._kept: dict[str, bool] = {}
        """Whether a group passes the filters, by uid."""

    @property
    def refills(self) -> bool:
        """Whether steps take more prompts until enough groups carry signal; `more` then rewards them."""
        return self._config.refill is not None

    @property
    def _in_turn(self) -> bool:
        """Whether what a step asks depends on the steps before it."""
        return self.refills or self._config.replay is not None

    def measure(self, context: StageContext, student: Student, start: Path) -> dict[str, Any]:
        """Ask from now on only prompts of middling difficulty, where the recipe measures it: for the stage's
        own specialist with the model in `start`, which `student` still is; for other stages what specialists
        have measured. Returns what was measured here, for the result.
        """
        self._seed = context.recipe.seed
        found: dict[str, Any] = {}
        for domain in self._domains:
            config = context.recipe.for_domain(domain).specialist.difficulty
            if config is None:
                continue
            from opd.pipelines.stages.difficulty import measure, measured

            own = self._stage == specialist_stage(domain)
            find = partial(measure, student=student, start=start) if own else measured
            rates = find(context, data=self._data, domain=domain)
            if rates is not None:
                self._rates[domain], self._pools[domain] = rates, rates.kept(config)
            if rates is not None and own:
                found[domain] = rates.summary(config)
        return {"difficulty": found} if found else {}

    def begin(self, step: StepContext) -> None:
        """A step begins. Where its prompts depend on those before it, they are asked from now on."""
        if not self._in_turn:
            return
        self._step, self._counters = step.index, dict(step.counters)
        taken, waiting = step.counters.get(_TAKEN, 0.0), step.memory.get(_WAITING, [])
        counted = isinstance(taken, int | float) and 0 <= taken <= _MOST
        if not counted or not isinstance(waiting, list):
            raise CheckpointError(
                f"the checkpoint of {self._stage} holds what no step has left there of its prompts; delete"
                " it, to go on from the one before."
            )
        self._next = int(taken)
        self._waiting = dict.fromkeys(map(self._remembered, waiting))
        self._asked, self._raw, self._kept = {}, {}, {}

    def first(self, step: int) -> list[EncodedPrompt]:
        """The prompts that step number `step` asks in any case: those that come again, then fresh ones."""
        count = self._config.prompts_per_step
        self._asked[step] = {}
        if not self._in_turn:
            return self._fresh(step, step * count, count)
        replay = self._config.replay
        again = list(self._waiting)[: replay.prompts(count)] if replay is not None else []
        prompts = []
        for domain, index in again:
            uid = f"{self._stage}/{domain}/again-{step}-{index}"
            self._asked[step][uid] = (domain, index)
            prompts.append(self._data.training(domain, index, uid))
        return prompts + self._take(count - len(again))

    def more(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Prompts to ask beside those of `samples`, which are rewarded and put in the order they were asked
        in; none once enough groups carry signal, or `refill.limit` is reached.

        As many as would fill the batch at the share that had signal so far.
        """
        refill, wanted = self._config.refill, self._config.prompts_per_step
        if refill is None:
            return []
        self._look_at(samples)
        taken = len(samples.groups)
        carrying = sum(self._kept[group.uid] and self._judge.learns(group) for group in samples.groups)
        missing, left = wanted - carrying, self._config.most_prompts - taken
        if missing <= 0 or left <= 0:
            return []
        expected = -(-missing * taken // carrying) if carrying else wanted
        return self._take(min(expected, left))

    def settle(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        """Leave in `samples` the groups to learn from, and note in `step` where the next one goes on; returns
        metrics.

        Of those with signal the first `prompts_per_step` in the order in which they were asked: who ended
        first, or how many were asked together, does not count.
        """
        asked = self._asked.pop(step.index)
        taken = samples.groups
        if self.refills:
            samples.groups = [group for group in taken if self._kept[group.uid]]
        else:
            samples.groups = list(self._judge.keep(samples))
        carrying = [group for group in samples.groups if self._judge.learns(group)]
        metrics = self._measures(step, asked, taken)
        if self._config.replay is not None:
            metrics |= self._remember(asked, carrying, step)
        if self._in_turn:
            step.counters[_TAKEN] = float(self._next)
        if self.refills:
            samples.groups = (carrying or samples.groups)[: self._config.prompts_per_step]
            used = min(len(carrying), self._config.prompts_per_step)
            metrics |= {
                "refill/taken": float(len(taken)),
                "refill/kept": float(used),
                "refill/surplus": float(len(carrying) - used),
            }
        return metrics

    def _measures(
        self, step: StepContext, asked: Mapping[str, tuple[str, int]], taken: Sequence[SampleGroup]
    ) -> dict[str, float]:
        """How hard what the step asked was for the model that the stage began with."""
        metrics: dict[str, float] = {}
        prompts = [asked[group.uid] for group in taken]
        rates = [self._rates[domain].of(index) for domain, index in prompts if domain in self._rates]
        if rates:
            metrics["difficulty/rate"] = float(np.mean(rates))
        if self._config.curriculum is not None:
            metrics["curriculum/share"] = admitted(self._config.curriculum, step.index, self._config.steps)
        return metrics

    def _remember(
        self, asked: Mapping[str, tuple[str, int]], carrying: Sequence[SampleGroup], step: StepContext
    ) -> dict[str, float]:
        """Prompts with signal wait to come again behind those that wait already; others wait no more."""
        replay = self._config.replay
        assert replay is not None
        signal = {group.uid for group in carrying}
        for prompt in asked.values():
            self._waiting.pop(prompt, None)
        self._waiting |= {prompt: None for uid, prompt in asked.items() if uid in signal}
        waiting = list(self._waiting)[-replay.most :]
        step.memory[_WAITING] = [list(prompt) for prompt in waiting]
        again = sum(uid.rpartition("/")[2].startswith("again-") for uid in asked)
        return {"replay/share": again / len(asked), "replay/waiting": float(len(waiting))}

    def _remembered(self, entry: Any) -> tuple[str, int]:
        """Domain and index of a prompt that a checkpoint names."""
        match entry:
            case [str(domain), int(index)] if domain in self._pools:
                rates = self._rates.get(domain)
                known = range(len(self._data.domains[domain].train)) if rates is None else rates.right
                if index in known:
                    return domain, index
        raise CheckpointError(
            f"the checkpoint of {self._stage} names training prompt {shown(entry)}, which is not there;"
            " restore the data the run was started with."
        )

    def _take(self, count: int) -> list[EncodedPrompt]:
        """The next `count` of the endless sequence."""
        first, self._next = self._next, self._next + count
        return self._fresh(self._step, first, count)

    def _fresh(self, step: int, first: int, count: int) -> list[EncodedPrompt]:
        """Numbers `first ... first + count - 1` of the endless sequence, in their order, in which no domain
        comes first.
        """
        prompts = []
        for number in range(first, first + count):
            own, place = divmod(number, len(self._domains))
            domain = self._domains[place]
            (index,) = self._cursor(domain, step).take(own, 1)
            uid = f"{self._stage}/{domain}/{own}"
            if self._config.curriculum is not None:  # by which a number is another prompt in another step
                uid += f"-{index}"
            self._asked[step][uid] = (domain, index)
            prompts.append(self._data.training(domain, index, uid))
        return prompts

    def _cursor(self, domain: str, step: int) -> PromptCursor[int]:
        """Over the prompts of `domain` that step number `step` may ask."""
        pool, curriculum = self._pools[domain], self._config.curriculum
        size = len(pool)
        if curriculum is not None and domain in self._rates:
            share = admitted(curriculum, step, self._config.steps)
            least = -(-self._config.prompts_per_step // len(self._domains))
            size = min(size, max(least, math.ceil(share * size)))
        known, cursor = self._cursors.get(domain, (0, None))
        if cursor is None or known != size:
            cursor = PromptCursor(pool[:size], self._seed, domain)
            self._cursors[domain] = size, cursor
        return cursor

    def _look_at(self, samples: StepSamples) -> None:
        """Reward the groups that were not looked at yet, and note which of them pass the filters.

        All rewards are left as their functions gave them: they are shaped once the step is whole.
        """
        places = {uid: place for place, uid in enumerate(self._asked[self._step])}
        everyone = sorted(samples.groups, key=lambda group: places[group.uid])
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


def admitted(config: CurriculumConfig, step: int, steps: int) -> float:
    """Share of the prompts, the easiest of them, that step number `step` of `steps` may ask: `start` at the
    first, growing evenly to all at the share `until` of the steps.
    """
    return min(1.0, config.start + (1.0 - config.start) * step / (config.until * max(steps, 1)))
