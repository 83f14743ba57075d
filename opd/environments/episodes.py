"""Episodes: the model acts, its environment answers, turn after turn, many at once.

A turn is one request of the engine, so it is logged, interrupted and resumed as any other, and while some
episodes wait for their environments the others' turns are decoded together. An episode becomes one `Sample`:
its response is every token from the first turn to the last, and the loss mask is True on exactly those that
the engine wrote.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.environments import EnvironmentConfig
from opd.environments.conversation import Conversation, bounded, parse
from opd.environments.kinds import environment_class, tools_of
from opd.environments.processes import shared, world_command
from opd.environments.protocol import Action, Observation, Step, Task
from opd.environments.world import Loop, World
from opd.errors import RolloutError
from opd.rollout.beside import write_alone
from opd.rollout.collect import EncodedPrompt, Generates
from opd.rollout.ledger import OtherRequestError
from opd.storage.transcript import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opd.environments.trajectory import TrajectoryLog

EPISODE = "episode"
"""Key of a sample's metadata: what is known of its episode."""
Ended = Literal["done", "turns", "tokens"]
"""Why an episode is over: its environment says so, or `max_turns` or `rollout.max_new_tokens` are reached."""


@dataclass(slots=True)
class Episode:
    """One sample on its way."""

    sample: Sample
    world: World
    parts: list[tuple[Tokens, bool]] = field(default_factory=list)
    """Tokens that follow one another, and whether the model wrote them."""
    opening: np.ndarray | None = None
    """[C] int32: prompt and first observation, once the environment was reset."""
    turn: int = 0
    length: int = 0
    """Response tokens so far."""
    rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    """Tool calls that could be read."""
    faults: int = 0
    """Those that could not."""
    success: float | str = 0.5
    """`EnvironmentConfig.success`."""

    @property
    def uid(self) -> str:
        """Of the request of the present turn."""
        return f"{self.sample.uid}/{self.turn}"

    def add(self, tokens: Tokens, written: bool) -> None:
        """Tokens that follow, which the model has `written` or has not."""
        self.parts.append((tokens, written))
        self.length += len(tokens)

    def context(self) -> np.ndarray:
        """[C + R] int32: all tokens so far."""
        assert self.opening is not None
        return np.concatenate([self.opening, *(part.token_ids for part, _ in self.parts)])

    def finish(self, why: Ended) -> Sample:
        """The sample, whole."""
        sample = self.sample
        assemble(sample, self.opening, self.parts)
        sample.status = Status.COMPLETED if why == "done" else Status.TRUNCATED
        sample.metadata[EPISODE] = {
            "turns": len(self.rewards),
            "ended": why,
            "reward": float(sum(self.rewards)),
            "rewards": self.rewards,
            "calls": self.calls,
            "broken_calls": self.faults,
            "info": self.info,
            "success": self.success,
        }
        return sample


def succeeded(sample: Sample, above: float) -> bool:
    """Whether a scored response counts as right: an episode by its environment's rule, any other if its
    reward is above `above`.
    """
    episode = sample.metadata.get(EPISODE) or {}
    rule = episode.get("success", above)
    if isinstance(rule, str):
        return bool(episode["info"].get(rule.removeprefix("info.")))
    return (sample.reward or 0.0) > rule


def assemble(sample: Sample, opening: np.ndarray | None, parts: Sequence[tuple[Tokens, bool]]) -> None:
    """Make the response of `sample` of `parts`: tokens, and whether the model wrote them. `opening`: its
    prompt, if that is another by now.
    """
    joined = Tokens.join([part for part, _ in parts])
    masks = [np.full(len(part), written, dtype=bool) for part, written in parts]
    if opening is not None:
        sample.prompt_ids = opening
    sample.response_ids, sample.rollout_logprobs = joined.token_ids, joined.logprobs
    sample.policy_versions = joined.policy_versions
    sample.loss_mask = np.concatenate(masks) if masks else np.zeros(0, dtype=bool)


def task_of(sample: Sample, seed: int) -> Task:
    """What the episode of `sample` is about, in a run of `seed`."""
    metadata = {key: value for key, value in sample.metadata.items() if key not in ("messages", "prompt")}
    prompt, messages = sample.metadata.get("prompt"), sample.metadata.get("messages")
    named = hashlib.sha256(str(seed).encode() + b"/" + sample.prompt_ids.tobytes()).digest()
    own = int.from_bytes(named[:4], "big") >> 1
    return Task(sample.uid, str(prompt or ""), list(messages or []), sample.label, metadata, own)


def ended_groups(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """`groups`, whose episodes have all ended. Raises `RolloutError` if one has not."""
    for group in groups:
        for sample in group.samples:
            if sample.status is Status.PENDING:
                raise RolloutError(
                    f"the engine ended without finishing episode {sample.uid}; restart with --resume."
                )
    return list(groups)


class Episodes:
    """Implements `opd.rollout.collect.Generate` for a domain with an environment.

    Args:
        config: The domain's.
        domain: Its name.
        tokenizer: Of the model that writes.
        template: Arguments of the chat template's own.
        log: Where the commands are kept of an environment that runs any.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        domain: str,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        log: TrajectoryLog | None = None,
    ) -> None:
        self._log = log
        self._config, self._domain, self._tokenizer = config, domain, tokenizer
        self._class = environment_class(config, domain)
        tools = tools_of(config, domain)
        self._template = {**template, "tools": tools} if tools else dict(template)

    def __call__(
        self,
        engine: Generates,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> list[SampleGroup]:
        """`group_size` episodes of each prompt. Raises `RolloutError` for an environment that fails."""
        return write_alone(self, engine, prompts, group_size, sampling, seed)

    def begin(
        self,
        prompts: Sequence[EncodedPrompt],
        group_size: int,
        sampling: SamplingParams,
        seed: int,
        news: threading.Event,
    ) -> _EpisodeBatch:
        """See `opd.rollout.beside`."""
        groups = [prompt.group(group_size) for prompt in prompts]
        samples = [sample for group in groups for sample in group.samples]
        conversation = Conversation(self._tokenizer, self._template, sampling.stop_ids)
        success = self._config.success
        episodes = [Episode(one, self._world(one, seed), success=success) for one in samples]
        batch = _EpisodeBatch(self._config, conversation, sampling, seed, news)
        batch.add(groups, episodes)
        return batch

    def _world(self, sample: Sample, seed: int) -> World:
        make: Any = partial(self._class, **self._config.params)
        if self._config.processes:
            workers = shared(world_command(self._config.type), self._config.processes)
            make = partial(workers.open, self._config.params)
        if self._log is not None and hasattr(self._class, "log"):
            make = partial(_logged, make, self._log)
        return World(make, task_of(sample, seed), self._config, self._domain)


def _logged(make: Callable[[], Any], log: TrajectoryLog) -> Any:
    made = make()
    made.log = log
    return made


class _EpisodeBatch:
    """Episodes that are written together, from the first reset to the last close."""

    def __init__(
        self,
        config: EnvironmentConfig,
        conversation: Conversation,
        sampling: SamplingParams,
        seed: int,
        news: threading.Event,
    ) -> None:
        self._config, self._conversation = config, conversation
        self._sampling, self._seed = sampling, seed
        self._loop = Loop(news)
        self._groups: list[SampleGroup] = []
        self._waiting: deque[Episode] = deque()
        """Not begun: as many are open as may be."""
        self._writing: dict[str, Episode] = {}
        """By uid of the request in flight."""
        self._acting = 0
        """Episodes whose environments are at work."""
        self._ready: list[RolloutRequest] = []
        self._open: dict[str, World] = {}
        self._transcript = Transcript()

    def close(self) -> None:
        """See `Writing`."""

        async def close() -> None:
            for world in list(self._open.values()):
                await world.close()

        self._loop.close(close)

    def add(self, groups: Sequence[SampleGroup], episodes: Sequence[Episode]) -> None:
        """Write these, too."""
        self._groups += groups
        self._waiting.extend(episodes)

    def groups(self) -> list[SampleGroup]:
        """See `Writing`."""
        return ended_groups(self._groups)

    def explained(self, error: OtherRequestError) -> RolloutError:
        """See `Writing`."""
        return error

    def due(self) -> Sequence[RolloutRequest] | None:
        """Turns that are due. The engine's thread asks."""
        while self._waiting and len(self._open) < self._config.concurrent:
            episode = self._waiting.popleft()
            self._open[episode.sample.uid] = episode.world
            self._act(episode, episode.world.reset)
        self._listen()
        if not self._ready and not self._writing and not self._acting and not self._waiting:
            return None
        asked, self._ready = self._ready, []
        return asked

    def _act(self, episode: Episode, work: Callable[[], Any]) -> None:
        self._acting += 1
        self._loop.start(episode, work)

    def _listen(self) -> None:
        """Hear what environments have answered."""
        while True:
            try:
                episode, said, error = self._loop.results.get(block=False)
            except queue.Empty:
                return
            self._acting -= 1
            if error is not None:
                raise error
            if episode is None:
                continue
            if episode.opening is None:
                self._begin(episode, said)
            else:
                self._answer(episode, said)

    def _begin(self, episode: Episode, said: Observation) -> None:
        """The environment was reset."""
        sample = episode.sample
        episode.opening = sample.prompt_ids
        if said:
            messages, told = episode.world.task.messages, bounded(said, self._config.observation_characters)
            if messages:
                episode.opening = self._conversation.opening(messages, told)
            else:
                added = self._conversation.plain(told)
                episode.opening = np.concatenate([sample.prompt_ids, added])
        self._ask(episode)

    def _ask(self, episode: Episode) -> None:
        """The model's next turn, or the end where no token is left."""
        left = self._left(episode)
        if left <= 0:
            self._end(episode, "tokens")
            return
        most = min(left, self._config.turn_tokens or left)
        sampling = replace(self._sampling, max_new_tokens=most)
        request = RolloutRequest(
            episode.uid,
            episode.context(),
            sampling,
            self._seed,
            session=episode.sample.uid,
            continues=episode.turn + 1 < self._config.max_turns,
        )
        self._writing[request.uid] = episode
        self._transcript.begin({request.uid: Tokens.empty()})
        self._ready.append(request)

    def _left(self, episode: Episode) -> int:
        """Tokens that the episode may still grow by. What the environment said first counts: it takes from
        the room behind the prompt.
        """
        assert episode.opening is not None
        first = max(0, len(episode.opening) - len(episode.sample.prompt_ids))
        return self._sampling.max_new_tokens - first - episode.length

    def take(self, chunk: Chunk) -> None:
        """What the engine has written."""
        self._transcript.add(chunk)
        for uid, status in chunk.finished.items():
            episode = self._writing.pop(uid)
            if status not in (Status.COMPLETED, Status.TRUNCATED):
                raise RolloutError(f"request {uid} ended as {status}; restart with --resume.")
            tokens = self._transcript.tokens(uid)
            episode.add(tokens, written=True)
            if status is Status.TRUNCATED and self._left(episode) <= 0:
                self._end(episode, "tokens")  # half an action is not to be carried out
                continue
            self._act(episode, partial(episode.world.step, self._action(episode, tokens, status)))
        self._transcript.end(chunk.finished)

    def _action(self, episode: Episode, tokens: Tokens, status: Status) -> Action:
        text = self._conversation.text(tokens.token_ids.tolist())
        calls, broken = parse(text, self._config.tool_format)
        episode.calls += len(calls)
        episode.faults += len(broken)
        return Action(text, calls, broken, episode.turn, status is Status.TRUNCATED)

    def _answer(self, episode: Episode, step: Step) -> None:
        """The environment has answered a turn."""
        episode.rewards.append(step.reward)
        episode.info |= step.info
        episode.turn += 1
        if step.done:
            self._end(episode, "done")
        elif episode.turn >= self._config.max_turns:
            self._end(episode, "turns")
        else:
            self._say(episode, step.observation)

    def _say(self, episode: Episode, said: Observation) -> None:
        """Put what the environment said behind the turn; the next one begins."""
        last, _ = episode.parts[-1]
        told = bounded(said or "", self._config.observation_characters)
        if episode.world.task.messages:
            action = episode.world.done[-1][0]
            role = self._config.observation_role or ("tool" if action.calls else "user")
            ids = self._conversation.answer(last.token_ids, told, role)
        else:
            ids = self._conversation.plain(told)
        if len(ids) >= self._left(episode):
            self._end(episode, "tokens")
            return
        versions = np.full(len(ids), last.policy_versions[-1] if len(last) else 0, np.int32)
        episode.add(Tokens(ids, np.zeros(len(ids), np.float32), versions), written=False)
        self._ask(episode)

    def _end(self, episode: Episode, why: Ended) -> None:
        episode.finish(why)
        world = self._open.pop(episode.sample.uid)
        self._acting += 1
        self._loop.start(None, world.close)
