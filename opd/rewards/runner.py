"""Scores samples: each domain's reward function, under a time limit, with its results checked.

From what a reward function returned for one sample to plain numbers, or one sentence.

Calls one reward function on one domain's samples and reads its answers, in a thread, with a time limit.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

from opd.data.prompts import Checker
from opd.errors import RewardError
from opd.imports import calling, raised, told
from opd.rewards.functions import RewardFunction, RewardSample, Turn, checker_reward
from opd.streams import streams_kept
from opd.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST = 1e9
"""Of a reward or an advantage: squared and summed in float32 it is still far from infinity."""


def reward_value(
    function: RewardFunction, sample: RewardSample, value: Any, noun: str = "sample"
) -> tuple[float, dict[str, float]]:
    """(reward, parts). Raises `RewardError` naming function, domain and sample, or what `noun` calls it, for
    anything but finite numbers of at most `LARGEST`.
    """
    where = f"reward function {function.name} (domain {sample.domain}, {noun} {sample.uid})"
    with calling(f"{where} returned a {type(value).__name__}, and reading it", RewardError):
        if not isinstance(value, dict):
            return _number(value, where, "returned"), {}
        # Of the dict itself: a class of the user's own may have methods of its own.
        parts = {
            str.__str__(str(key)): _number(part, where, f"returned {key} =")
            for key, part in dict.items(value)
        }
        if not parts:
            raise RewardError(f"{where} returned an empty dict; give at least one entry.")
        if "reward" in parts:
            return parts["reward"], parts
        return _number(math.fsum(parts.values()), where, "returned parts whose sum is"), parts


def _number(value: Any, where: str, verb: str) -> float:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
    if not isinstance(plain, Real):
        raise RewardError(
            f"{where} {verb} {told(plain, repr)}, a {type(plain).__name__}; return a number or a dict of"
            " numbers."
        )
    number = float(plain)
    if not math.isfinite(number):
        raise RewardError(f"{where} {verb} {number}; return finite numbers only.")
    if abs(number) > LARGEST:
        raise RewardError(f"{where} {verb} {number:g}; scale rewards to {LARGEST:g} at most.")
    return number


Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""

_CANCEL_SECONDS = 0.5
"""How long a cancelled asynchronous function may take to clean up."""


class Job:
    """One call of a function on samples of one domain.

    A thread cannot be stopped: a synchronous function that never returns keeps its (daemon) thread, which
    ends with the process. An asynchronous one is cancelled.
    """

    def __init__(
        self,
        function: RewardFunction,
        samples: Sequence[RewardSample],
        timeout: float,
        noun: str = "sample",
    ) -> None:
        """`timeout` is in seconds; `noun` says in errors what the uids of `samples` name."""
        self.function = function
        self.samples = samples
        self._noun = noun
        self._timeout = timeout
        self._thread = threading.Thread(target=self._run, name=f"reward {function.name}", daemon=True)
        self._deadline = 0.0
        self._scored: list[Scored] | None = None
        self._failure: BaseException | None = None
        self._expired = False
        self._running = [sample.uid for sample in samples]
        """Samples being scored right now, for the sentence of an error."""

    def start(self) -> None:
        """Begin; the time limit counts from here."""
        grace = _CANCEL_SECONDS if self.function.is_async else 0.0
        self._deadline = time.monotonic() + self._timeout + grace
        self._thread.start()

    def result(self) -> list[Scored]:
        """Each sample's reward. Raises `RewardError`."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() or self._expired:
            raise RewardError(
                f"{self._what()} took longer than {self._timeout:g} s, the rollout.reward_timeout that a new"
                " run may raise; make it faster."
            )
        if self._failure is not None:
            raise self._failure
        if self._scored is None:
            raise RewardError(f"{self._what()} raised what cannot be shown; mend it.")
        return self._scored

    def _what(self) -> str:
        uids = list(self._running)
        more = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
        domain = self.samples[0].domain
        return f"reward function {self.function.name} (domain {domain}, {self._noun} {uids[0]}{more})"

    def _raised(self, error: BaseException) -> RewardError:
        return RewardError(f"{self._what()} {raised(error)}; mend it.")

    def _run(self) -> None:
        try:
            with streams_kept():
                if self.function.is_async:
                    self._scored = asyncio.run(asyncio.wait_for(self._call_async(), self._timeout))
                else:
                    self._scored = self._call()
        except RewardError as error:
            self._failure = error
        except TimeoutError:  # of wait_for: the function's own errors arrive as RewardError
            self._expired = True
        except BaseException as error:  # handed to the thread that asked
            self._failure = self._raised(error)

    def _call(self) -> list[Scored]:
        if self.function.style == "batch":
            with calling(self._what(), RewardError):
                returned = self.function.call(**self.function.batch_arguments(self.samples))
            return self._whole(returned)
        scored = []
        for sample in self.samples:
            self._running = [sample.uid]
            with calling(self._what(), RewardError):
                value = self.function.call(sample)
            scored.append(reward_value(self.function, sample, value, self._noun))
        return scored

    async def _call_async(self) -> list[Scored]:
        if self.function.style == "batch":
            return self._whole(await self._batch())
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._one(sample)) for sample in self.samples]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        return [task.result() for task in pending]

    async def _batch(self) -> Any:
        arguments = self.function.batch_arguments(self.samples)
        try:
            return await self.function.call(**arguments)
        except Exception as error:
            raise self._raised(error) from error

    async def _one(self, sample: RewardSample) -> Scored:
        try:
            value = await self.function.call(sample)
        except Exception as error:
            self._running = [sample.uid]
            raise self._raised(error) from error
        if sample.uid in self._running:
            self._running.remove(sample.uid)
        return reward_value(self.function, sample, value, self._noun)

    def _whole(self, returned: Any) -> list[Scored]:
        """A batch function's result, if it is a sequence of the right length."""
        what, wanted = self._what(), len(self.samples)
        with calling(f"{what} returned a {type(returned).__name__}, and reading it", RewardError):
            if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
                raise RewardError(
                    f"{what} returned a {type(returned).__name__}; return a list of one number each."
                )
            found = list(
                islice(returned, wanted + 1)
            )  # it may say another length than it has, or have no end
            if len(found) != wanted:
                count = len(found) if len(found) < wanted else max(len(returned), len(found))
                raise RewardError(
                    f"{what} returned {count} rewards for {wanted} completions; return one for each."
                )
        return [
            reward_value(self.function, sample, value, self._noun)
            for sample, value in zip(self.samples, found, strict=True)
        ]


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
