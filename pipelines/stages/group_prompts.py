"""Make the prompts of teachers that say what a step's answers were: self-distillation with feedback (SDPO).

`domains.NAME.teacher_prompt` may name `{sibling}`, `{attempt}` and `{feedback}`. Such a prompt is another one
for each answer, and is made once the step has its rewards. It depends on the group and the seed alone, so
that each rank makes the same, and so does a resumed run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.teachers import TeacherPromptConfig
from opd.errors import DataError
from opd.models.token_ids import HeldTexts
from opd.pipelines.stages.samples import StepSamples
from opd.rollout.prompts import Prompt, encode_prompt, hash_fraction, teacher_prompt
from opd.rollout.rewards import RewardRunner
from opd.types import Sample, SampleGroup, Status, no_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupPrompts:
    """Makes the prompts of one domain's teachers."""

    domain: str
    config: TeacherPromptConfig
    tokenizer: PreTrainedTokenizerBase
    template: Mapping[str, Any]
    """Arguments of the chat template."""
    limit: int
    """Tokens of prompt and response together."""
    rewards: RewardRunner
    seed: int
    special: Sequence[str]
    """Texts of special tokens and stops."""
    in_order: bool = True
    """Groups are used in the order in which their prompts were taken."""
    waiting: dict[str, Prompt] = field(default_factory=dict)
    """By the uid of its group: the prompts that were taken and not yet used, in that order."""
    _edges: tuple[set[str], set[str]] = field(init=False)
    """The beginnings and the ends of special tokens."""
    _heard: bool = False

    def __post_init__(self) -> None:
        cuts = [(one[:cut], one[cut:]) for one in self.special for cut in range(1, len(one))]
        self._edges = {head for head, _ in cuts}, {tail for _, tail in cuts}

    def fill_prompts(self, samples: StepSamples, counts: Counter[str]) -> None:
        """Give each sample of the domain the prompt that its teachers read, or an empty one, and count."""
        groups = [group for group in samples.groups if group.domain == self.domain]
        prompts = self._take_prompts({group.uid for group in groups})
        for group in groups:
            with samples.with_tokens(group) as loaded:
                made = [self._fill_prompt(prompts[group.uid], loaded, one, counts) for one in loaded.samples]
            for sample, ids in zip(group.samples, made, strict=True):
                sample.teacher_prompt_ids = ids
        asked = "feedback" in self.config.group_columns and not self._heard and bool(groups)
        if asked and not any(sample.feedback for group in groups for sample in group.samples):
            _log.warning(
                "domain %s: the reward said nothing of any answer of this step, and teacher_prompt names"
                " {feedback}; return a dict with the entries reward and feedback",
                self.domain,
            )
        self._heard |= asked

    def _take_prompts(self, uids: set[str]) -> dict[str, Prompt]:
        """Return the prompts of `uids`, and forget them and, in order, what was taken before them."""
        prompts = {uid: self.waiting[uid] for uid in uids}
        if not self.in_order:
            for uid in uids:
                del self.waiting[uid]
            return prompts
        for uid in list(self.waiting):
            if not uids:
                break
            uids.discard(uid)
            del self.waiting[uid]
        return prompts

    def _fill_prompt(
        self, prompt: Prompt, group: SampleGroup, sample: Sample, counts: Counter[str]
    ) -> np.ndarray:
        """[C']: the first of the recipe's prompts that can be filled and leaves room, or nothing."""
        texts = {name: text for name, text in self._group_texts(group, sample).items() if text}
        counts["samples"] += 1
        made, long = no_ids(), False
        for place, config in enumerate(self.config.alternatives()):
            if not config.group_columns <= texts.keys():
                continue
            ids = self._encode(prompt, config, texts)
            if ids is None:
                continue
            if len(ids) + len(sample.response_ids) > self.limit:
                long = True
                continue
            counts.update(config.group_columns)
            counts["fallback"] += place > 0
            made = ids
            break
        counts["none"] += not len(made)
        counts["long"] += long
        return made

    def _group_texts(self, group: SampleGroup, sample: Sample) -> dict[str, str]:
        """Return what can be said to the teacher of `sample`. What cannot is empty."""
        named, is_right = self.config.group_columns, self._is_right(sample)
        others = [one for one in group.samples if one is not sample and self._is_right(one)]
        read: Callable[[Sample], str] = self.rewards.readable_text
        texts = {"feedback": sample.feedback}
        if "attempt" in named and not is_right and sample.reward is not None:
            texts["attempt"] = read(sample)
        if "sibling" in named and others:
            # Of equally good ones the draw is the sample's own, so that a group learns from several.
            best = max(
                others, key=lambda one: (one.reward, hash_fraction(f"{self.seed}/{sample.uid}/{one.uid}"))
            )
            texts["sibling"] = read(best)
        return texts

    def _is_right(self, sample: Sample) -> bool:
        ended = sample.status in (Status.COMPLETED, Status.TRUNCATED)
        return ended and sample.reward is not None and sample.reward >= self.config.success_threshold

    def _encode(
        self, prompt: Prompt, config: TeacherPromptConfig, texts: Mapping[str, str]
    ) -> np.ndarray | None:
        """[C'] int32. Text of the model's or of others is never read as a special token. `None` if it holds
        what the tokenizer cannot spell.
        """
        held = {f"{_HELD}{name}_": text for name, text in texts.items() if self._may_act(text)}
        texts = {
            name: f"{_HELD}{name}_" if f"{_HELD}{name}_" in held else text for name, text in texts.items()
        }
        asked = teacher_prompt(prompt, config, texts)
        try:
            return encode_prompt(asked, self.tokenizer, self.template, HeldTexts(held, self.special))
        except DataError:
            if not config.group_columns:  # the prompt itself
                raise
            return None

    def _may_act(self, text: str) -> bool:
        """Return True if `text` holds a special token, or could be a part of one with its neighbours."""
        heads, tails = self._edges
        longest = max(map(len, self.special), default=0)
        at_edges = any(text[-n:] in heads or text[:n] in tails for n in range(1, longest))
        return at_edges or _HELD in text or any(one in text for one in self.special)


_HELD = "ToldToTheTeacher"
"""Stands for text that holds a special token, while a prompt is rendered."""


def fill_teacher_prompts(made: Sequence[GroupPrompts], samples: StepSamples) -> dict[str, float]:
    """Make the teachers' prompts of a step whose samples have their rewards. Return the shares of samples
    that were taught with what, as metrics. Empty if no domain's teachers read such prompts.
    """
    counts: Counter[str] = Counter()
    for one in made:
        one.fill_prompts(samples, counts)
    named = {"none", "long"}.union(*(one.config.group_columns for one in made))
    named |= {"fallback"} if any(one.config.fallback for one in made) else set()
    total = counts["samples"]
    return {f"teacher_prompt/{name}": counts[name] / total for name in sorted(named) if total}
