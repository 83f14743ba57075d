"""Scores samples: each domain's reward function, under a time limit, with its results checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from opd.data.prompts import Checker
from opd.errors import RewardError
from opd.rewards.execution import Job
from opd.rewards.functions import RewardFunction, RewardSample, Turn, checker_reward
from opd.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardRunner:
    """Holds one reward function per domain."""

    def __init__(
        self,
        functions: Mapping[str, RewardFunction | Checker],
        tokenizer: PreTrainedTokenizerBase,
        timeout: float = 60.0,
        stops: Collection[int] = (),
    ) -> None:
        """`functions` by domain: loaded reward functions, or domains' own checkers. `timeout` is in seconds,
        for one domain's samples of one call of `score`. `stops`: token ids that end a response, beside the
        tokenizer's special ones.
        """
        self._functions = {
            domain: f if isinstance(f, RewardFunction) else checker_reward(f, f"checker of domain {domain}")
            for domain, f in functions.items()
        }
        self._tokenizer = tokenizer
        self._ends = frozenset((*tokenizer.all_special_ids, *stops))
        self._timeout = timeout

    def together(self, domain: str) -> bool:
        """Whether the domain's function is given all samples of a call of `score` at once."""
        return domain in self._functions and self._functions[domain].style == "batch"

    def score(self, samples: Sequence[Sample]) -> None:
        """Set `reward` and `reward_parts` of every sample that did not fail or get aborted.

        Asynchronous functions of all domains run concurrently, synchronous ones one after another. Raises
        `RewardError` naming function, domain and sample if a function raises, takes too long, or returns
        anything but finite numbers, one for each sample; no sample is changed then.
        """
        by_domain: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.status not in (Status.FAILED, Status.ABORTED):
                by_domain.setdefault(sample.domain, []).append(sample)
        jobs = [(scored, self._job(domain, scored)) for domain, scored in by_domain.items()]
        for _, job in jobs:
            if job.function.is_async:
                job.start()
        outcomes = []
        for scored, job in jobs:
            if not job.function.is_async:
                job.start()
            outcomes += zip(scored, job.result(), strict=True)
        for sample, (reward, parts) in outcomes:
            sample.reward = reward
            sample.reward_parts = parts

    def _job(self, domain: str, samples: Sequence[Sample]) -> Job:
        if domain not in self._functions:
            raise RewardError(f"domain {domain} has no reward function; set domains.{domain}.reward.")
        prompts = {sample.prompt_ids.tobytes(): sample.prompt_ids for sample in samples}
        texts = {key: self._decode(ids.tolist()) for key, ids in prompts.items()}  # a group shares one prompt
        views = [self._view(sample, texts[sample.prompt_ids.tobytes()]) for sample in samples]
        return Job(self._functions[domain], views, self._timeout)

    def text(self, sample: Sample) -> str:
        """The response as its reward function sees it."""
        return self._view(sample, "").text

    def _view(self, sample: Sample, prompt: str) -> RewardSample:
        """`sample` as its reward function sees it. The token that ended a turn is left out of its text; any
        other special token stays, so that a stray one cannot turn a wrong answer into a right one.
        """
        ids = sample.response_ids.tolist()
        mask = sample.loss_mask.tolist()
        turns = [] if ids else [Turn("assistant", "")]
        for start, stop in _runs(mask):
            own, last = ids[start:stop], stop == len(ids)
            ended = mask[start] and (not last or sample.status is Status.COMPLETED)
            if ended and own[-1] in self._ends:
                own.pop()
            turns.append(Turn("assistant" if mask[start] else "environment", self._decode(own)))
        return RewardSample(
            sample.uid,
            "".join(turn.text for turn in turns if turn.role == "assistant"),
            prompt,
            sample.label,
            sample.domain,
            sample.metadata,
            turns,
            sample.status,
            ids,
            mask,
        )

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Bounds of the stretches of equal values."""
    cuts = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]]
    return list(pairwise([0, *cuts, len(mask)])) if mask else []
