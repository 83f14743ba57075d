"""Choose a specialist's prompts if its recipe says so.

It takes prompts of medium difficulty, easy ones first, repeats some whose groups carried signal, and adds
more until a batch has enough signal. The choice is a function of rewards and of the checkpoint
(`StepContext.counters`, `StepContext.memory`). So a resumed stage samples the same prompts again, under the
same uids. If rewards change, as those of an unrecorded judge, it takes others under other uids. No uid stands
for two prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.specialist import CurriculumConfig, SpecialistConfig
from opd.errors import CheckpointError
from opd.pipelines.records.stage_names import of_round, specialist_stage, split_round
from opd.pipelines.stages.context import StageContext, damaged_memory
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import StepContext
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import Student
from opd.rollout.collect import EncodedPrompt
from opd.rollout.prompts import PromptCursor
from opd.types import Sample, SampleGroup
from opd.untrusted import safe_excerpt

if TYPE_CHECKING:
    from opd.pipelines.stages.difficulty import Rates

_TAKEN = "prompts_taken"
"""Counter: number of prompts taken from the endless sequence so far."""
_MOST = 1 << 53
"""Maximum plausible number of taken prompts."""
_WAITING = "replay"
"""Key of a checkpoint's memory: [domain, index] of the prompts that wait to be repeated, the oldest first."""


@dataclass(frozen=True, slots=True)
class Judge:
    """The algorithm's treatment of groups."""

    reward: Callable[[StepSamples], None]
    """Rewards every sample with the reward function."""
    shape: Callable[[StepSamples, MutableMapping[str, float]], object]
    """Shapes rewards before the check for signal. May change the counters."""
    keep: Callable[[StepSamples], Sequence[SampleGroup]]
    """The groups that pass its filters."""
    masks: Callable[[Sample], bool]
    """Returns true for a sample that is never trained on."""

    def is_trainable(self, group: SampleGroup) -> bool:
        """Return whether a filtered group is trained on."""
        return not all(map(self.masks, group.samples))


class PromptChoice:
    """Hands out the prompts of each step, and selects the groups to train on.

    Args:
        domains: Names of the domains to sample.
        stage: Prefix of every prompt's uid.
        judge: From the stage's algorithm.
        seed: The recipe's seed, which `measure` sets.
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
        """Domain -> indices of the training prompts to sample."""
        self._rates: dict[str, Rates] = {}
        self._cursors: dict[str, tuple[int, PromptCursor[int]]] = {}
        """Domain -> its latest cursor, and that cursor's number of prompts."""
        self._requests: dict[int, dict[str, tuple[str, int]]] = {}
        """Step -> its prompts in their order, as domain and index by uid."""
        self._step, self._next = 0, 0
        self._counters: dict[str, float] = {}
        self._waiting: dict[tuple[str, int], None] = {}
        self._raw: dict[str, tuple[float | None, dict[str, float]]] = {}
        """Uid of a sample -> result of the reward function."""
        self._passes: dict[str, bool] = {}
        """Uid of a group -> it passes the filters."""

    @property
    def is_refilling(self) -> bool:
        """Steps take more prompts until enough groups carry signal. `more` then rewards them."""
        return self._config.refill is not None

    @property
    def _is_sequential(self) -> bool:
        """A step's prompts depend on the steps before it."""
        return self.is_refilling or self._config.replay is not None

    def measure_prompts(self, context: StageContext, student: Student, start: Path) -> dict[str, Any]:
        """Restrict the prompts to those of medium difficulty, if the recipe measures it. The stage's own
        specialist is measured with the model in `start`, which `student` still is. Other stages use the
        measurements of specialists. Returns the measurements made here, for the result.
        """
        self._seed = context.recipe.seed
        measured: dict[str, Any] = {}
        for domain in self._domains:
            config = context.recipe.for_domain(domain).specialist.difficulty
            if config is None:
                continue
            from opd.pipelines.stages.difficulty import measure_difficulty, read_difficulty

            if split_round(self._stage)[0] == specialist_stage(domain):
                rates = measure_difficulty(context, student, self._data, domain, start)
                measured[domain] = rates.summary_numbers(config)
            else:
                rates = read_difficulty(context, self._data, domain)
            if rates is not None:
                self._rates[domain], self._pools[domain] = rates, rates.selected_indices(config)
        return {"difficulty": measured} if measured else {}

    def begin_step(self, step: StepContext) -> None:
        """Begin a step. If its prompts depend on earlier steps, sampling starts now."""
        if not self._is_sequential:
            return
        self._step, self._counters = step.index, dict(step.counters)
        count, waiting = step.counters.get(_TAKEN, 0.0), step.memory.get(_WAITING, [])
        is_count = isinstance(count, int | float) and 0 <= count <= _MOST
        if not is_count or not isinstance(waiting, list):
            raise damaged_memory(self._stage, "prompts")
        self._next = int(count)
        self._waiting = dict.fromkeys(map(self._replayed_prompt, waiting))
        self._requests, self._raw, self._passes = {}, {}, {}

    def first_prompts(self, step: int) -> list[EncodedPrompt]:
        """Return the first prompts of step number `step`: repeated ones, then new ones."""
        count = self._config.prompts_per_step
        self._requests[step] = {}
        if not self._is_sequential:
            return self._numbered_prompts(step, step * count, count)
        replay = self._config.replay
        again = list(self._waiting)[: replay.replay_count(count)] if replay is not None else []
        prompts = []
        for domain, index in again:
            uid = f"{self._stage}/{domain}/again-{step}-{index}"
            self._requests[step][uid] = (domain, index)
            prompts.append(self._data.training_prompt(domain, index, uid))
        return prompts + self._next_prompts(count - len(again))

    def more_prompts(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Return more prompts for the batch of `samples`, which are rewarded and sorted by request order.

        Empty once enough groups carry signal, or `refill.limit` is reached. The number would fill the batch
        at the present share of groups with signal.
        """
        refill, wanted = self._config.refill, self._config.prompts_per_step
        if refill is None:
            return []
        self._reward_groups(samples)
        total = len(samples.groups)
        carrying = sum(
            self._passes[group.uid] and self._judge.is_trainable(group) for group in samples.groups
        )
        missing, limit = wanted - carrying, self._config.most_prompts - total
        if missing <= 0 or limit <= 0:
            return []
        expected = -(-missing * total // carrying) if carrying else wanted
        return self._next_prompts(min(expected, limit))

    def select_groups(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        """Select the groups of `samples` to train on, store the next position in `step`, and return metrics.

        With refills it selects the first `prompts_per_step` groups with signal, in request order. The order
        of completion and the size of requests do not count.
        """
        config, requests, every = self._config, self._requests.pop(step.index), samples.groups
        if self.is_refilling:
            samples.groups = [group for group in every if self._passes[group.uid]]
        else:
            samples.groups = list(self._judge.keep(samples))
        carrying = [group for group in samples.groups if self._judge.is_trainable(group)]
        metrics: dict[str, float] = {}
        prompts = [requests[group.uid] for group in every]
        rates = [self._rates[domain].rate_of(index) for domain, index in prompts if domain in self._rates]
        if rates:  # of the start model
            metrics["difficulty/rate"] = float(np.mean(rates))
        if config.curriculum is not None:
            metrics["curriculum/share"] = curriculum_share(config.curriculum, step.index, config.steps)
        if config.replay is not None:
            metrics |= self._queue_replays(requests, carrying, step)
        if self._is_sequential:
            step.counters[_TAKEN] = float(self._next)
        if self.is_refilling:
            samples.groups = (carrying or samples.groups)[: config.prompts_per_step]
            used = min(len(carrying), config.prompts_per_step)
            metrics |= {
                "refill/taken": float(len(every)),
                "refill/kept": float(used),
                "refill/surplus": float(len(carrying) - used),
            }
        return metrics

    def _queue_replays(
        self, requests: Mapping[str, tuple[str, int]], carrying: Sequence[SampleGroup], step: StepContext
    ) -> dict[str, float]:
        """Queue prompts with signal for repetition, behind the waiting ones. Others leave the queue."""
        replay = self._config.replay
        assert replay is not None
        signal = {group.uid for group in carrying}
        for prompt in requests.values():
            self._waiting.pop(prompt, None)
        self._waiting |= {prompt: None for uid, prompt in requests.items() if uid in signal}
        waiting = list(self._waiting)[-replay.most :]
        step.memory[_WAITING] = [list(prompt) for prompt in waiting]
        again = sum(uid.rpartition("/")[2].startswith("again-") for uid in requests)
        return {"replay/share": again / len(requests), "replay/waiting": float(len(waiting))}

    def _replayed_prompt(self, entry: Any) -> tuple[str, int]:
        """Return domain and index of a prompt in a checkpoint."""
        match entry:
            case [str(domain), int(index)] if domain in self._pools:
                rates = self._rates.get(domain)
                indices = range(len(self._data.domains[domain].train)) if rates is None else rates.right
                if index in indices:
                    return domain, index
        raise CheckpointError(
            f"the checkpoint of {self._stage} names training prompt {safe_excerpt(entry)}, which is not"
            " there; restore the data the run was started with."
        )

    def _next_prompts(self, count: int) -> list[EncodedPrompt]:
        """Return the next `count` prompts of the endless sequence."""
        first, self._next = self._next, self._next + count
        return self._numbered_prompts(self._step, first, count)

    def _numbered_prompts(self, step: int, first: int, count: int) -> list[EncodedPrompt]:
        """Return numbers `first ... first + count - 1` of the endless sequence, which no domain leads."""
        prompts = []
        for number in range(first, first + count):
            turn, position = divmod(number, len(self._domains))
            domain = self._domains[position]
            (index,) = self._prompt_cursor(domain, step).next_prompts(turn, 1)
            uid = f"{self._stage}/{domain}/{turn}"
            if self._config.curriculum is not None:  # with it a number is another prompt in another step
                uid += f"-{index}"
            self._requests[step][uid] = (domain, index)
            prompts.append(self._data.training_prompt(domain, index, uid))
        return prompts

    def _prompt_cursor(self, domain: str, step: int) -> PromptCursor[int]:
        """Return the cursor over the prompts of `domain` that are admitted at step number `step`."""
        pool, curriculum = self._pools[domain], self._config.curriculum
        size = len(pool)
        if curriculum is not None and domain in self._rates:
            share = curriculum_share(curriculum, step, self._config.steps)
            least = -(-self._config.prompts_per_step // len(self._domains))
            size = min(size, max(least, math.ceil(share * size)))
        cursor_size, cursor = self._cursors.get(domain, (0, None))
        if cursor is None or cursor_size != size:
            name = of_round(domain, split_round(self._stage)[1])
            cursor = PromptCursor(pool[:size], self._seed, name)
            self._cursors[domain] = size, cursor
        return cursor

    def _reward_groups(self, samples: StepSamples) -> None:
        """Reward the new groups, and store which of them pass the filters.

        All rewards stay as their functions gave them. They are shaped once the step is complete.
        """
        places = {uid: position for position, uid in enumerate(self._requests[self._step])}
        everyone = sorted(samples.groups, key=lambda group: places[group.uid])
        new = [group for group in everyone if group.uid not in self._passes]
        samples.groups = new
        self._judge.reward(samples)
        self._raw |= {sample.uid: (sample.reward, sample.reward_parts) for sample in samples.samples}
        samples.groups = everyone
        self._restore_rewards(samples.samples)
        self._judge.shape(samples, dict(self._counters))
        samples.groups = new
        passing = {group.uid for group in self._judge.keep(samples)}
        self._passes |= {group.uid: group.uid in passing for group in new}
        samples.groups = everyone
        self._restore_rewards(samples.samples)

    def _restore_rewards(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.reward, sample.reward_parts = self._raw[sample.uid]


def curriculum_share(config: CurriculumConfig, step: int, steps: int) -> float:
    """Return the share of prompts, the easiest ones, that step number `step` of `steps` may use. It is
    `start` at the first step, and grows linearly to all at the share `until` of the steps.
    """
    return min(1.0, config.start + (1.0 - config.start) * step / (config.until * max(steps, 1)))
