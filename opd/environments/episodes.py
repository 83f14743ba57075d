"""Episodes: the model acts, its environment answers, turn after turn, many at once.

A turn is one request of the engine, so it is logged, interrupted and resumed as any other. While some
episodes wait for their environments, the turns of others are decoded in one batch. An episode becomes one
`Sample`. Its response is every token from the first turn to the last. The loss mask is True on exactly the
engine's tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.environments import EnvironmentConfig
from opd.environments.conversation import Conversation, bound_messages, parse_calls
from opd.environments.processes import shared_processes, world_command
from opd.environments.protocol import EPISODE, Action, Observation, Task, environment_class, tools_of
from opd.environments.world import World
from opd.rollout.collect import EncodedPrompt
from opd.rollout.requests import EpisodeKind, RequestWriter, gather_all
from opd.storage.transcript import Tokens, choices_of, masks_of
from opd.types import RolloutRequest, Sample, SampleGroup, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opd.environments.trajectory import TrajectoryLog

Ended = Literal["done", "turns", "tokens"]
"""Reason why an episode is over: its environment's, or `max_turns` or `rollout.max_new_tokens`."""


@dataclass(slots=True)
class Episode:
    """One sample while its episode runs."""

    sample: Sample
    world: World
    parts: list[tuple[Tokens, bool]] = field(default_factory=list)
    """Consecutive tokens, and True for the model's."""
    opening: np.ndarray | None = None
    """[C] int32: prompt and first observation, once the environment was reset."""
    turn: int = 0
    length: int = 0
    """Response tokens so far."""
    routed: int = 0
    """First positions whose expert choices the engine has given."""
    rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    """Tool calls that could be parsed."""
    faults: int = 0
    """Tool calls that could not be parsed."""
    success: float | str = 0.5
    """`EnvironmentConfig.success`."""

    def add_tokens(self, tokens: Tokens, written: bool) -> None:
        """Append tokens, which the model has `written` or has not."""
        self.parts.append((tokens, written))
        self.length += len(tokens)

    def context_tokens(self) -> np.ndarray:
        """[C + R] int32: all tokens so far."""
        assert self.opening is not None
        return np.concatenate([self.opening, *(part.token_ids for part, _ in self.parts)])


def assemble_sample(sample: Sample, opening: np.ndarray | None, parts: Sequence[tuple[Tokens, bool]]) -> None:
    """Set the response of `sample` from `parts`: tokens, and True for the model's. `opening`: its prompt, if
    it has changed.
    """
    joined = Tokens.join([part for part, _ in parts])
    starts = np.cumsum([len(sample.prompt_ids if opening is None else opening), *(len(p) for p, _ in parts)])
    masks = [np.full(len(part), written, dtype=bool) for part, written in parts]
    if opening is not None:
        sample.prompt_ids = opening
    sample.response_ids, sample.rollout_logprobs = joined.token_ids, joined.logprobs
    sample.policy_versions = joined.policy_versions
    sample.loss_mask = np.concatenate(masks) if masks else np.zeros(0, dtype=bool)
    sample.sampling_masks = masks_of(joined)
    sample.expert_choices = choices_of(zip(starts.tolist(), (part for part, _ in parts), strict=False))


def task_of(sample: Sample, seed: int) -> Task:
    """Return the task of the episode of `sample`, in a run of `seed`."""
    metadata = {key: value for key, value in sample.metadata.items() if key not in ("messages", "prompt")}
    prompt, messages = sample.metadata.get("prompt"), sample.metadata.get("messages")
    digest = hashlib.sha256(str(seed).encode() + b"/" + sample.prompt_ids.tobytes()).digest()
    task_seed = int.from_bytes(digest[:4], "big") >> 1
    return Task(sample.uid, str(prompt or ""), list(messages or []), sample.label, metadata, task_seed)


class Episodes(EpisodeKind):
    """Implements `opd.rollout.collect.Generate` for a domain with an environment.

    Args:
        tokenizer: The student's.
        template: Arguments of the chat template's own.
        log: Log of the commands, for an environment that runs any.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        domain: str,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, object],
        log: TrajectoryLog | None = None,
    ) -> None:
        self._log = log
        self._config, self._domain, self._tokenizer = config, domain, tokenizer
        self._class = environment_class(config, domain)
        tools = tools_of(config, domain)
        self._template = {**template, "tools": tools} if tools else dict(template)

    async def play(
        self,
        writer: RequestWriter,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        groups = [prompt.empty_group(group_size) for prompt in prompts]
        samples = [sample for group in groups for sample in group.samples]
        conversation = Conversation(self._tokenizer, self._template, sampling.stop_ids)
        success = self._config.success
        episodes = [Episode(one, self._make_world(one, seed), success=success) for one in samples]
        player = _Player(self._config, conversation, sampling, seed, writer)
        await gather_all(player.play_episode(episode) for episode in episodes)
        return groups

    def _make_world(self, sample: Sample, seed: int) -> World:
        make: Any = partial(self._class, **self._config.params)
        if self._config.processes:
            workers = shared_processes(world_command(self._config.type), self._config.processes)
            make = partial(workers.open, self._config.params)
        if self._log is not None and hasattr(self._class, "log"):
            make = partial(_with_log, make, self._log)
        return World(make, task_of(sample, seed), self._config, self._domain)


def _with_log(make: Callable[[], Any], log: TrajectoryLog) -> Any:
    world = make()
    world.log = log
    return world


class _Player:
    """Plays the episodes of a domain, each a loop of turns."""

    def __init__(
        self,
        config: EnvironmentConfig,
        conversation: Conversation,
        sampling: SamplingParams,
        seed: int,
        writer: RequestWriter,
    ) -> None:
        self._config, self._conversation = config, conversation
        self._sampling, self._seed, self._writer = sampling, seed, writer
        self._slots = asyncio.Semaphore(config.concurrent)

    async def play_episode(self, episode: Episode) -> None:
        """Play `episode` to its end, once a slot is free. Its sample is complete then."""
        try:
            async with self._slots:
                ended = await self._play_turns(episode)
            sample = episode.sample
            assemble_sample(sample, episode.opening, episode.parts)
            sample.status = Status.COMPLETED if ended == "done" else Status.TRUNCATED
            sample.metadata[EPISODE] = {
                "turns": len(episode.rewards),
                "ended": ended,
                "reward": float(sum(episode.rewards)),
                "rewards": episode.rewards,
                "calls": episode.calls,
                "broken_calls": episode.faults,
                "info": episode.info,
                "success": episode.success,
            }
        finally:
            await episode.world.close()

    async def _play_turns(self, episode: Episode) -> Ended:
        """Generate and act in turn. Returns why the episode is over."""
        observation = await episode.world.reset()
        sample = episode.sample
        episode.opening = sample.prompt_ids
        if observation:
            messages = episode.world.task.messages
            text = bound_messages(observation, self._config.observation_characters)
            if messages:
                episode.opening = self._conversation.encode_opening(messages, text)
            else:
                added = self._conversation.encode_verbatim(text)
                episode.opening = np.concatenate([sample.prompt_ids, added])
        while (remaining := self._tokens_left(episode)) > 0:
            request = RolloutRequest(
                f"{episode.sample.uid}/{episode.turn}",
                episode.context_tokens(),
                replace(self._sampling, max_new_tokens=min(remaining, self._config.turn_tokens or remaining)),
                self._seed,
                session=episode.sample.uid,
                continues=episode.turn + 1 < self._config.max_turns,
                routed=episode.routed,
            )
            tokens, status = await self._writer.complete_request(request)
            episode.routed = tokens.routed_positions(len(request.prompt_ids))
            episode.add_tokens(tokens, written=True)
            if status is Status.TRUNCATED and self._tokens_left(episode) <= 0:
                return "tokens"  # half an action must not be carried out
            text = self._conversation.decode_text(tokens.token_ids.tolist())
            calls, broken = parse_calls(text, self._config.tool_format)
            episode.calls += len(calls)
            episode.faults += len(broken)
            action = Action(text, calls, broken, episode.turn, status is Status.TRUNCATED)
            step = await episode.world.step(action)
            episode.rewards.append(step.reward)
            episode.info |= step.info
            episode.turn += 1
            if step.done:
                return "done"
            if episode.turn >= self._config.max_turns:
                return "turns"
            if not self._add_observation(episode, step.observation):
                return "tokens"
        return "tokens"

    def _tokens_left(self, episode: Episode) -> int:
        """Tokens by which the episode may still grow. The first observation counts too, because it uses space
        behind the prompt.
        """
        assert episode.opening is not None
        first = max(0, len(episode.opening) - len(episode.sample.prompt_ids))
        return self._sampling.max_new_tokens - first - episode.length

    def _add_observation(self, episode: Episode, observation: Observation) -> bool:
        """Put an observation behind the turn. Returns False if there is no space for it."""
        last, _ = episode.parts[-1]
        text = bound_messages(observation or "", self._config.observation_characters)
        if episode.world.task.messages:
            action = episode.world.done[-1][0]
            role = self._config.observation_role or ("tool" if action.calls else "user")
            ids = self._conversation.encode_answer(last.token_ids, text, role)
        else:
            ids = self._conversation.encode_verbatim(text)
        if len(ids) >= self._tokens_left(episode):
            return False
        versions = np.full(len(ids), last.policy_versions[-1] if len(last) else 0, np.int32)
        episode.add_tokens(Tokens(ids, np.zeros(len(ids), np.float32), versions), written=False)
        return True
