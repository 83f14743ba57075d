"""Scores samples: each domain's reward function, of any form, under a time limit, with its results checked.

1. `def reward(sample) -> float | dict` or `async def`, with `sample` a `RewardSample`.
2. TRL's form, `def reward(prompts, completions, **columns) -> list[float]` or `async def`, recognised by a
   parameter named `completions`. The columns are `completion_ids`, `label`, `domain`, the samples' metadata,
   and what else a `RewardSample` has, as lists.
3. A domain's own checker, `checker(completion, label) -> float`.
4. A built-in reward (`opd.rewards`), `score(samples) -> list of float or dict`, within limits of its own.

A dict is a reward in parts: its `reward` entry is the reward if there is one, else the sum of all entries.
What comes back is plain finite numbers, or one sentence that names function, domain and sample.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from opd.errors import RewardError
from opd.imports import import_attribute
from opd.output import written_by
from opd.own_code import calling, confined, raised, told
from opd.rollout.prompts import Checker
from opd.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opd.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of a response by one side, as text without the token that ended it."""

    role: Literal["assistant", "environment"]
    """`assistant`: the model wrote it; `environment`: what an agent's tools or environment answered."""
    text: str


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward function sees of a sample."""

    uid: str
    text: str
    """What the model wrote, without the tokens that ended its turns; several turns one after the other."""
    prompt: str
    label: Any
    domain: str
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: Sequence[Turn] = ()
    """The whole response in order: one turn of the model, or an agent's and its environment's."""
    status: Status = Status.COMPLETED
    """`COMPLETED`, or `TRUNCATED` where `max_new_tokens` ended it."""
    token_ids: Sequence[int] = ()
    """[R] the whole response, the environment's tokens and those that ended turns included."""
    loss_mask: Sequence[bool] = ()
    """[R] True where the model wrote the token."""

    @property
    def completion(self) -> str:
        """The same as `text`."""
        return self.text

    @property
    def length(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.loss_mask)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """`length` if the response was cut off at `max_new_tokens`."""
        return "length" if self.status is Status.TRUNCATED else "stop"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: the prompt's messages (a prompt of text is the user's) and all turns."""
        asked = self.metadata.get("messages") or [{"role": "user", "content": self.prompt}]
        return [*asked, *self.answers]

    @property
    def answers(self) -> list[dict[str, Any]]:
        """All turns as messages."""
        return [{"role": turn.role, "content": turn.text} for turn in self.turns]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function of any form, with what is needed to call it."""

    name: str
    call: Callable[..., Any]
    style: Literal["sample", "batch", "samples"]
    """One sample at a time, all of a domain's samples at once in TRL's form, or any list of samples."""
    is_async: bool
    seconds: float = 0.0
    """That a sample may take by limits of the function's own; 0 where it has none."""
    answer: Callable[..., Any] | None = None
    """Reads the answer out of a response, for a vote among several; its attribute `answer`."""

    def batch_arguments(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """Keyword arguments for a `batch` function: those of its parameters, or all columns for `**columns`.

        Samples whose metadata holds `messages` are given the way TRL gives conversations. Raises
        `RewardError` naming a parameter that no column fills.
        """
        columns = _columns(samples)
        parameters = inspect.signature(self.call).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            accepted = set(columns)
        else:
            accepted = {parameter.name for parameter in parameters}
        for parameter in parameters:
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if needed and parameter.name not in columns:
                raise RewardError(
                    f"reward function {self.name} needs the column {parameter.name!r}, which domain "
                    f"{samples[0].domain} does not have (it has {', '.join(sorted(columns))}); give that"
                    " parameter a default."
                )
        return {name: values for name, values in columns.items() if name in accepted}


_SHOWN = ("turns", "status", "finish_reason", "length", "loss_mask")
"""Attributes of a `RewardSample` that are columns, unless the data has columns of these names."""


def _columns(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for sample in samples for name in sample.metadata)
    columns: dict[str, list[Any]] = {name: [getattr(s, name) for s in samples] for name in _SHOWN}
    columns |= {name: [s.metadata.get(name) for s in samples] for name in names}
    chat = bool(samples) and all("messages" in sample.metadata for sample in samples)
    columns["prompts"] = [s.metadata["messages"] if chat else s.prompt for s in samples]
    columns["completions"] = [s.answers if chat else s.text for s in samples]
    columns["completion_ids"] = [list(s.token_ids) for s in samples]
    columns["label"] = [sample.label for sample in samples]
    columns["domain"] = [sample.domain for sample in samples]
    return columns


def load_reward(dotted: str) -> RewardFunction:
    """The reward function at `package.module:function`.

    Raises `RewardError` if it cannot be imported, is not callable, or has none of the accepted forms.
    """
    return wrap_reward(import_attribute(dotted, "reward", RewardError), dotted)


def wrap_reward(call: Any, name: str) -> RewardFunction:
    """A function (or callable object) of form 1 or 2. Raises `RewardError` if it has neither form."""
    if inspect.isclass(call) or not callable(call):
        raise RewardError(f"reward {name} is a {type(call).__name__}, not a function; name a function.")
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except Exception as error:  # an object of the user's own may say anything of itself
        raise RewardError(f"reward {name} has no readable signature; wrap it in a plain function.") from error
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - asked whether it is async, not whether it exists
    )
    said: Any = getattr(call, "answer", None)
    answer = said if callable(said) else None
    if any(parameter.name == "completions" for parameter in parameters):
        return RewardFunction(name, call, "batch", is_async, answer=answer)
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not positional or len(required) > 1:
        shown = ", ".join(parameter.name for parameter in parameters)
        raise RewardError(
            f"reward {name}({shown}) has none of the accepted forms: reward(sample), or "
            "reward(prompts, completions, **columns)."
        )
    return RewardFunction(name, call, "sample", is_async, answer=answer)


def checker_reward(checker: Checker, name: str) -> RewardFunction:
    """A domain's own checker as a reward function."""

    def reward(sample: RewardSample) -> float:
        return checker(sample.text, sample.label)

    return RewardFunction(name, reward, "sample", is_async=False)


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

_STARTING = 60.0
"""Seconds in which processes that compare answers start."""
_CANCEL_SECONDS = 0.5
"""How long a cancelled asynchronous function may take to clean up."""
_CHATTY = 50_000
"""Characters: who has printed more within the time limit may have spent it on that: a pipe holds 65,536, then
the next line waits for its reader.
"""


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
        # What ends each answer by itself is not ended for their number.
        self._timeout = max(timeout, _STARTING + function.seconds * len(samples) if function.seconds else 0.0)
        self._thread = threading.Thread(target=self._run, name=f"reward {function.name}", daemon=True)
        self._deadline = 0.0
        self._printed = 0
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
            printed = written_by(self._thread.ident) - self._printed
            advice = "make it faster."
            if printed > _CHATTY:  # each line is searched for secrets, and waits for whoever reads it
                advice = f"it has printed {printed:,} characters in that time: print less, or make it faster."
            raise RewardError(
                f"{self._what()} took longer than {self._timeout:g} s (rollout.reward_timeout, which --resume"
                f" --accept-changed-settings lets you raise); {advice}"
            )
        if self._failure is not None:
            raise self._failure
        if self._scored is None:
            raise RewardError(f"{self._what()} raised what cannot be shown; mend it.")
        return self._scored

    def _what(self, running: Sequence[str] | None = None) -> str:
        uids = list(self._running) if running is None else running
        more = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
        domain = self.samples[0].domain
        return f"reward function {self.function.name} (domain {domain}, {self._noun} {uids[0]}{more})"

    def _raised(self, error: BaseException) -> RewardError:
        return RewardError(f"{self._what()} {raised(error)}; mend it.")

    def _run(self) -> None:
        self._printed = written_by(threading.get_ident())
        try:
            with confined(f"reward function {self.function.name}"):
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
        if self.function.style != "sample":
            with calling(self._what(), RewardError):
                if self.function.style == "samples":
                    returned = self.function.call(self.samples)
                else:
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
            with confined(self._what()):
                return await self.function.call(**arguments)
        except Exception as error:
            raise self._raised(error) from error

    async def _one(self, sample: RewardSample) -> Scored:
        try:
            with confined(self._what([sample.uid])):
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


def _read_answers(
    function: RewardFunction,
    answer: Callable[[RewardSample], Any],
    samples: Sequence[RewardSample],
    timeout: float,
) -> list[str | None]:
    """What `answer` reads of each sample, in a thread that may never return."""
    what = f"the `answer` of reward function {function.name} (domain {samples[0].domain})"
    read: list[str | None] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with calling(what, RewardError):
                for sample in samples:
                    found = answer(sample)
                    if found is not None and not isinstance(found, str):
                        raise RewardError(
                            f"{what} returned a {type(found).__name__}; return a text, or None where there is"
                            " no answer."
                        )
                    read.append(None if found is None else str.__str__(found))
        except BaseException as error:  # handed to the thread that asked
            failed.append(error)

    thread = threading.Thread(target=run, name=f"answers {function.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise RewardError(f"{what} took longer than {timeout:g} s (rollout.reward_timeout); make it faster.")
    if failed:
        raise failed[0]
    return read


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

    def score_shared(self, ranks: Ranks, samples: Sequence[Sample]) -> None:
        """`score` of `samples` that all `ranks` have, each on one of them."""
        mine = ranks.shard(samples)
        self.score(mine)
        if ranks.alone:
            return
        found = [[sample.reward, sample.reward_parts] for sample in mine]
        everyone = ranks.unshard(ranks.gather_json(found, "the rewards of a batch"))
        for sample, (reward, parts) in zip(samples, everyone, strict=True):
            sample.reward, sample.reward_parts = reward, parts

    def _job(self, domain: str, samples: Sequence[Sample]) -> Job:
        if domain not in self._functions:
            raise RewardError(f"domain {domain} has no reward function; set domains.{domain}.reward.")
        prompts = {sample.prompt_ids.tobytes(): sample.prompt_ids for sample in samples}
        texts = {key: self._decode(ids.tolist()) for key, ids in prompts.items()}  # a group shares one prompt
        views = [self._view(sample, texts[sample.prompt_ids.tobytes()]) for sample in samples]
        return Job(self._functions[domain], views, self._timeout)

    def answers(self, samples: Sequence[Sample]) -> list[str]:
        """The answer in each of one domain's responses: what the reward function's `answer` reads of it, or,
        where it has none or reads nothing, the response without blanks around it.

        Raises `RewardError` if that function raises, takes too long, or returns anything but text or `None`.
        """
        views = [self._view(sample, "") for sample in samples]
        function = self._functions[samples[0].domain] if samples else None
        read: list[str | None] = [None] * len(views)
        if function is not None and function.answer is not None:
            read = _read_answers(function, function.answer, views, self._timeout)
        return [view.text.strip() if own is None else own for own, view in zip(read, views, strict=True)]

    def text(self, sample: Sample) -> str:
        """The response for people: as its reward function sees it, or, of an agent, turn by turn: what the
        model wrote behind `> `, and what it was answered below.
        """
        if sample.loss_mask.all():
            return self._view(sample, "").text
        ids = sample.response_ids.tolist()
        lines = []
        for start, stop in _runs(sample.loss_mask.tolist()):
            said = self._tokenizer.decode(ids[start:stop], skip_special_tokens=True)
            lines.append(f"> {said}" if sample.loss_mask[start] else str(said).strip())
        return "\n".join(lines)

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
