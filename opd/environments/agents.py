"""Agents of the user's own: any program that speaks OpenAI's API generates a domain's responses.

`run(task, base_url, api_key)` is called once a sample. Its API calls to the gateway become requests of that
sample. The same engine generates them behind the same log as all others. The branch in which it ends becomes
the `Sample`. Every other branch becomes one of its group's `branches`. Their loss masks are True on exactly
the engine's tokens, and on each of them in one sample.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.environments import EnvironmentConfig
from opd.environments.branches import Branches, BranchTurn
from opd.environments.episodes import assemble_sample, task_of
from opd.environments.gateway import Gateway, Session, require_server
from opd.environments.protocol import EPISODE, Task, agent_function
from opd.environments.world import (
    MOST_INFO,
    FailedError,
    given_up,
    in_thread,
    is_cancelled,
    number_of,
    without_exit,
)
from opd.errors import RolloutError
from opd.retry import Retry
from opd.rollout.collect import EncodedPrompt
from opd.rollout.request_state import OtherRequestError
from opd.rollout.requests import EpisodeKind, RequestWriter, gather_all
from opd.rollout.rewards import LARGEST
from opd.storage.transcript import Tokens
from opd.types import RolloutRequest, Sample, SampleGroup, SamplingParams, Status
from opd.untrusted import MAX_DEPTH, depth_exceeds, safe_excerpt
from opd.user_code import confine_user_code, describe_raise, safe_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    answer: tuple[str, int] | None = None
    """Name and choice number of the answer whose branch becomes the sample. The others become branches."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One sample while its episode runs."""

    sample: Sample
    group: SampleGroup
    task: Task
    session: Session
    branches: list[Sample] = field(default_factory=list)


class Agents(EpisodeKind):
    """Implements `opd.rollout.collect.Generate` for a domain whose environment is an agent.

    Args:
        tokenizer: The student's.
        template: Arguments of the chat template's own.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        domain: str,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, object],
    ) -> None:
        self._config, self._domain, self._tokenizer = config, domain, tokenizer
        self._template = template
        self._run = agent_function(config, domain)
        require_server()

    async def play(
        self,
        writer: RequestWriter,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        groups = [prompt.empty_group(group_size) for prompt in prompts]
        episodes: list[_Episode] = []
        for group in groups:
            for sample in group.samples:
                branches = Branches(sample, self._config, self._tokenizer, self._template, sampling)
                episodes.append(_Episode(sample, group, task_of(sample, seed), Session(branches)))
        player = _AgentPlayer(self._config, self._domain, self._run, writer, seed)
        with Gateway(self._tokenizer, player.submit_turn) as gateway:
            await gather_all(player.play_episode(gateway, episode) for episode in episodes)
        for episode in episodes:
            episode.group.branches += episode.branches
        player.log_without_room(len(episodes))
        return groups


class _AgentPlayer:
    """Calls the agents of a domain, in a loop of their own. An agent that blocks the loop blocks the others,
    but not the gateway.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        domain: str,
        run: Callable[..., Any],
        writer: RequestWriter,
        seed: int,
    ) -> None:
        self._config, self._domain, self._run, self._seed = config, domain, run, seed
        self._label = f"agent {config.agent_path} (domain {domain}"
        self._writer = writer
        self._slots = asyncio.Semaphore(config.concurrent)
        self._without_room: list[str] = []
        """Errors of episodes that raised after they were refused turns or tokens."""

    def submit_turn(
        self, session: Session, turn: BranchTurn, deliver: Callable[[Tokens, Status | None], None]
    ) -> None:
        """See `Gateway`."""
        sample, sampling = session.branches.sample, session.branches.sampling
        request = RolloutRequest(
            turn.uid,
            turn.context_tokens(),
            replace(sampling, max_new_tokens=turn.most),
            self._seed,
            session=sample.uid,
            continues=True,
            routed=0 if turn.parent is None else turn.parent.routed_positions,
        )
        self._writer.queue_request(request, deliver, partial(getattr, turn, "live"), self._mismatch_error)

    def _mismatch_error(self, error: OtherRequestError) -> RolloutError:
        return RolloutError(
            f"{self._label}) asks behind an answer otherwise than before it was interrupted: take its"
            f" randomness from task.seed, and no time of day from anywhere ({error})"
        )

    async def play_episode(self, gateway: Gateway, episode: _Episode) -> None:
        """Play `episode` to its end, once a slot is free. Its sample is complete then."""
        async with self._slots:
            outcome = await self._run_attempts(gateway, episode)
            branches, sample = episode.session.branches, episode.sample
            why = branches.limit or "done"
            sample.status = Status.COMPLETED if why == "done" else Status.TRUNCATED
            # The sample is the branch in which the agent ended. The others are further samples.
            learnt: set[BranchTurn] = set()
            ends = branches.last_turns(outcome.answer)
            if not ends:
                assemble_sample(sample, None, [])
            for index, end in enumerate(ends):
                path = end.branch_path()
                one = sample
                if index:
                    names = {"uid": f"{sample.uid}/{end.branch}", "branch_of": sample.uid}
                    one = replace(sample, metadata=dict(sample.metadata), **names)
                    episode.branches.append(one)
                assemble_sample(one, path[0].added, _branch_response(path, learnt))
                learnt.update(path)
            sample.metadata[EPISODE] = {
                "turns": len(learnt),
                "ended": why,
                "reward": outcome.reward,
                "rewards": [] if outcome.reward is None else [outcome.reward],
                "calls": branches.calls,
                "broken_calls": branches.broken,
                "info": outcome.info,
                "success": self._config.success,
                "branches": len(ends),
            }

    def log_without_room(self, count: int) -> None:
        """Log how many of `count` episodes raised after they were refused turns or tokens."""
        if self._without_room:
            _log.info(
                "%s): %d of %d episodes raised with no room left, which is reward 0; the first: %s",
                self._label,
                len(self._without_room),
                count,
                safe_excerpt(self._without_room[0], 200),
            )

    async def _run_attempts(self, gateway: Gateway, episode: _Episode) -> AgentOutcome:
        """Call the agent until it returns. Raises `RolloutError` once all attempts have failed."""
        session, retry = episode.session, Retry(attempts=self._config.attempts)
        where = f"{self._label}, {episode.task.uid})"
        for failures in range(1, retry.attempts + 1):
            key = gateway.admit_session(session)
            try:
                return self._check_outcome(await self._call_agent(gateway, episode, key), session.branches)
            except FailedError as error:
                if session.branches.limit is not None:  # it was refused turns or tokens
                    self._without_room.append(f"{episode.task.uid} {error}")
                    return AgentOutcome(0.0)
                if failures == retry.attempts:
                    raise given_up(where, error, failures) from error
                _log.warning("%s: %s; it is called again, and given the same answers", where, error)
            finally:
                gateway.expel_session(key)
            session.branches.reset_answers()
            await asyncio.sleep(retry.pause_seconds(failures))
        raise AssertionError("a retry has at least one attempt")

    async def _call_agent(self, gateway: Gateway, episode: _Episode, key: str) -> Any:
        """Return the agent's result. Raises `FailedError` if it raises, or does nothing for too long."""
        params = {name: value for name, value in self._config.params.items() if name != "run"}
        call = partial(self._run, episode.task, gateway.url, key, **params)
        limit, session = self._config.seconds, episode.session
        session.quiet = time.monotonic()
        with confine_user_code(self._label + ")"):
            work = asyncio.ensure_future(self._await_call(call))
            try:
                while True:
                    since = time.monotonic() - (session.quiet if not session.in_flight else time.monotonic())
                    if since >= limit:
                        raise FailedError(
                            f"neither asked nor returned for {limit:g} s"
                            f" (domains.{self._domain}.environment.seconds)"
                        )
                    done, _ = await asyncio.wait([work], timeout=max(0.01, limit - since))
                    if done:
                        return work.result()
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                raise FailedError("cancelled itself") from error
            except (FailedError, RolloutError):
                raise
            except Exception as error:
                raise FailedError(describe_raise(error)) from error
            finally:
                work.add_done_callback(lambda done: done.cancelled() or done.exception())  # error unread
                work.cancel()

    async def _await_call(self, call: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(self._run):
            return await without_exit(call)
        result = await in_thread(call, (), str(self._config.agent_path))
        return await without_exit(lambda: result) if inspect.isawaitable(result) else result

    def _check_outcome(self, result: Any, branches: Branches) -> AgentOutcome:
        """Return `result` as an outcome, if an agent may return it."""
        label = f"{self._label}) returned"
        fields = dict(result) if isinstance(result, Mapping) else {"reward": result}
        reward, answer, choice = (
            fields.pop("reward", None),
            fields.pop("answer", None),
            fields.pop("choice", 0),
        )
        try:
            if depth_exceeds(fields, MAX_DEPTH):
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
            number = None if reward is None else number_of(reward)
            info = json.loads(json.dumps(fields, allow_nan=False))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FailedError(
                f"{label} a {type(result).__name__}; return a reward, or a dict of JSON with `reward`"
                f" ({error})"
            ) from error
        if number is not None and not abs(number) <= LARGEST:
            raise FailedError(f"{label} reward {number}, which is no finite number of at most {LARGEST:g}")
        if len(json.dumps(info)) > MOST_INFO:
            raise FailedError(f"{label} more than {MOST_INFO:,} characters beside its reward")
        if answer is None:
            return AgentOutcome(number, info)
        is_name = isinstance(answer, str) and isinstance(choice, int | np.integer)  # others may be unhashable
        if not is_name or (answer, choice) not in branches.answered:
            name = f"answer {safe_text(answer, repr)[:100]}, choice {safe_text(choice, repr)[:100]}"
            raise FailedError(f"{label} {name}, which is none it had")
        return AgentOutcome(number, info, (answer, int(choice)))


def _branch_response(path: Sequence[BranchTurn], learnt: Collection[BranchTurn]) -> list[tuple[Tokens, bool]]:
    """The response of a branch: the model's turns, and the tokens between. A turn that is in another sample's
    loss mask counts as context here, like all tokens the model has not generated.
    """
    parts: list[tuple[Tokens, bool]] = []
    for turn in path:
        if parts:
            versions_before = parts[-1][0].policy_versions
            versions = np.full(len(turn.added), versions_before[-1] if len(versions_before) else 0, np.int32)
            parts.append((Tokens(turn.added, np.zeros(len(turn.added), np.float32), versions), False))
        tokens = turn.tokens
        parts.append(
            (replace(tokens, logprobs=np.zeros(len(tokens), np.float32)), False)
            if turn in learnt
            else (tokens, True)
        )
    return parts
