"""One agent's requests, as branches of tokens. A request continues an earlier answer, or begins a branch.

A request continues an answer if its messages are an earlier request's, the answer to it, and more. Its tokens
are the earlier ones as generated, and the chat template's text for the new messages. Any other request (an
edited history, another conversation, a sub-agent) begins a branch of its own, whose prompt is all it brings.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.environments import EnvironmentConfig
from opd.environments.conversation import Conversation, parse_calls, without_calls
from opd.environments.gateway_requests import AgentRequest, RefusedRequestError
from opd.environments.protocol import Message
from opd.errors import RolloutError, is_of_library, reason_of
from opd.models.chat_templates import TemplateError, refuse_unread
from opd.models.token_ids import encode_text, id_count
from opd.rollout.request_state import StopStrings
from opd.storage.transcript import Tokens
from opd.types import Sample, SamplingParams, Status, no_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Limit = Literal["turns", "tokens"]
"""The limit an agent has met: `max_turns`, or `rollout.max_new_tokens`."""


@dataclass(slots=True, eq=False)
class BranchTurn:
    """One turn of the model: its context and its tokens."""

    uid: str
    parent: BranchTurn | None
    added: np.ndarray
    """[A] int32: the tokens between the parent's tokens and its own, or a branch's full prompt."""
    most: int
    """Most tokens of the turn."""
    stops: tuple[str, ...]
    """Texts that end it."""
    branch: str
    depth: int
    claimed: bool = True
    """True if a client waits for it or has been answered. Otherwise the next equal request gets it."""
    live: bool = False
    """True if a client streams it."""
    tokens: Tokens = field(default_factory=Tokens.empty)
    status: Status | None = None
    """Set once it has ended."""
    looked: int = 0
    """Leading tokens that hold no stop string."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set in the gateway's loop when tokens arrive."""

    def context_tokens(self) -> np.ndarray:
        """[C] int32: the tokens before the turn."""
        parts: list[np.ndarray] = []
        turn: BranchTurn | None = self
        while turn is not None:
            parts += [turn.added] if turn is self else [turn.tokens.token_ids, turn.added]
            turn = turn.parent
        return np.concatenate(parts[::-1])

    @property
    def routed_positions(self) -> int:
        """First positions of context and tokens whose expert choices the engine has given."""
        return self.tokens.routed_positions(len(self.context_tokens()))

    def branch_path(self) -> list[BranchTurn]:
        """The turns from the branch's first to this."""
        path, turn = [], self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def set_tokens(self, tokens: Tokens, status: Status | None) -> None:
        """Set the tokens so far. Called in the gateway's loop."""
        if self.status is None:
            self.tokens, self.status = tokens, status
            self.changed.set()

    def stop_at(self, stops: StopStrings) -> None:
        """End at the first of these strings. Tokens behind it are dropped."""
        ids = self.tokens.token_ids.tolist()
        for end in range(self.looked + 1, len(ids) + 1):
            if stops.has_stop(ids[max(0, end - stops.window) : end]):
                self.tokens, self.status = self.tokens.select_rows(slice(0, end)), Status.COMPLETED
                return
        self.looked = len(ids)


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    text: str
    calls: list[dict[str, Any]]
    """In the form of OpenAI's API."""
    finish: str

    @property
    def as_message(self) -> Message:
        """The answer as the assistant's message."""
        return {"role": "assistant", "content": self.text, "tool_calls": self.calls}


class Branches:
    """All requests of one agent in its episode.

    Args:
        sample: The sample of the episode. Its prompt is the agent's task.
        sampling: The recipe's. `max_new_tokens` bounds each branch behind its prompt.
        template: Arguments of the chat template's own.
    """

    def __init__(
        self,
        sample: Sample,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, object],
        sampling: SamplingParams,
    ) -> None:
        self.sample, self.sampling = sample, sampling
        self._config, self._tokenizer, self._template = config, tokenizer, template
        self.max_tokens = len(sample.prompt_ids) + sampling.max_new_tokens
        """Most tokens of a branch, with its prompt."""
        self.turns: list[BranchTurn] = []
        self.limit: Limit | None = None
        """The limit for which a request was refused last."""
        self.calls = self.broken = 0
        """Tool calls that could be parsed, and that could not."""
        self.asks: list[list[BranchTurn]] = []
        """The turns of each request, one a choice, in the order of the requests."""
        self.answered: dict[tuple[str, int], BranchTurn] = {}
        """By name of the answer and number of the choice."""
        self._ends: dict[bytes, BranchTurn] = {}
        """By digest of a conversation whose last message is the turn's."""
        self._texts: dict[BranchTurn, tuple[str, ...]] = {}
        """Prompt and answer of turns without messages: in full, and up to the stop string's end if that is
        within a token."""

    def make_conversation(self, request: AgentRequest) -> Conversation:
        """Return the encoder of messages, with the tools of the request."""
        tools = {"tools": list(request.tools)} if request.tools else {}
        return Conversation(self._tokenizer, {**self._template, **tools}, self.sampling.stop_ids)

    def reset_answers(self) -> None:
        """Prepare for another call of the agent. Equal requests get the same answers."""
        for turn in self.turns:
            turn.claimed = False
        self.asks.clear()
        self.answered.clear()

    def last_turns(self, answer: tuple[str, int] | None = None) -> list[BranchTurn]:
        """Return the last turns of all branches: answered turns that no answered turn continues.

        First comes the end of the branch that becomes the sample: the turn of `answer`, else the last
        requested one of those answered. The others are sorted by uid, because concurrent sub-agents have no
        order. Raises `KeyError` if no answer has that name.
        """
        answered = set(self.answered.values())
        if answer is not None:
            chosen = self.answered[answer]
        else:
            chosen = next((turn for turns in reversed(self.asks) for turn in turns if turn in answered), None)
        continued = {turn.parent for turn in answered}
        ends = {turn for turn in answered if turn not in continued} - {chosen}
        first = [] if chosen is None else [chosen]
        return [*first, *sorted(ends, key=lambda turn: turn.uid)]

    def assign_turns(self, request: AgentRequest) -> tuple[list[BranchTurn], list[BranchTurn]]:
        """Return the turns that answer `request`, one a choice, and those of them that need a request to the
        engine. Raises `RefusedRequestError`.
        """
        self._refuse_text(request)
        try:
            parent, added = self._find_parent(request)
        except RefusedRequestError:
            raise
        except RolloutError as error:
            raise RefusedRequestError(str(error), "template_error", "messages") from error
        except BaseException as error:  # tokenizers raise plain Exceptions of many kinds
            if not is_of_library(error):
                raise
            raise RefusedRequestError(
                f"the tokenizer cannot encode the request ({reason_of(error)})."
            ) from error
        most = self._most_tokens(request, parent, added)
        equal = [
            one
            for one in self.turns
            if (one.claimed, one.most, one.stops) == (False, most, request.stops)
            and one.parent is parent
            and np.array_equal(one.added, added)
        ]
        reused = equal[: request.choices]
        lacking = request.choices - len(reused)
        # Requests sent to the engine count, even if their client has gone.
        had = {one for turns in self.asks for one in turns}
        if len(had.union(reused)) + lacking > self._config.max_turns:
            self.limit = "turns"
            raise RefusedRequestError(
                f"the episode has had its {self._config.max_turns} turns (environment.max_turns).",
                "max_turns",
            )
        new = []
        for _ in range(lacking):
            new.append(self._new_turn(parent, added, most, request.stops))
            self.turns.append(new[-1])
        for turn in reused:
            turn.claimed = True
        self.asks.append([*reused, *new])
        return self.asks[-1], new

    def answer_turn(
        self, request: AgentRequest, turn: BranchTurn, name: str, choice: int, begun: str = ""
    ) -> ClientAnswer:
        """Return the answer of an ended turn for its client, which has already received `begun`."""
        written = self.make_conversation(request).decode_text(turn.tokens.token_ids.tolist())
        ends = [(index, index + len(stop)) for stop in request.stops if (index := written.find(stop)) >= 0]
        text = written[: min(ends)[0]] if ends else written
        text = text if text.startswith(begun) else begun
        # A stop string is in the tokens. So a client that continues them has it in the text, though the
        # answer left it out. It may end within its last token, and the client never saw the rest of that
        # token.
        wholes = [written] if written.startswith(text) else [text]
        if ends and min(ends)[1] < len(written) and written.startswith(text):
            wholes.append(written[: min(ends)[1]])
        finish = "stop" if turn.status is Status.COMPLETED else "length"
        calls: list[dict[str, Any]] = []
        if request.calls:
            read, broken = parse_calls(text, self._config.tool_format)
            # A call that holds a token of the chat template's own would be refused when it is sent back.
            special_in = self.make_conversation(request).special_in
            for index, call in enumerate(read):
                function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
                if special_in(json.dumps([call.name, call.arguments], ensure_ascii=False)):
                    broken.append(f"call {index + 1} holds a token of the chat template's own")
                else:
                    calls.append(
                        {
                            "id": f"call_{name[-16:]}_{choice}_{index}",
                            "type": "function",
                            "function": function,
                        }
                    )
            self.calls += len(calls)
            self.broken += len(broken)

            if calls:
                text, finish = without_calls(text, self._config.tool_format), "tool_calls"
        answer = ClientAnswer(text, calls, finish)
        self.answered[name, choice] = turn
        if request.is_chat:
            same = [] if calls else [{**answer.as_message, "content": full_text} for full_text in wholes]
            for one in (answer.as_message, *same):
                self._ends[_conversation_digests([*request.messages, one], request.tools)[-1]] = turn
        elif isinstance(request.prompt, str):
            self._texts[turn] = tuple(request.prompt + full_text for full_text in wholes)
        return answer

    def _most_tokens(self, request: AgentRequest, parent: BranchTurn | None, added: np.ndarray) -> int:
        """Most tokens that may follow."""
        path = [] if parent is None else parent.branch_path()
        first = len(path[0].added) if path else len(added)
        length = sum(len(one.added) + len(one.tokens) for one in path) + len(added)
        remaining = min(self.max_tokens - length, self.sampling.max_new_tokens - (length - first))
        if remaining <= 0:
            self.limit = "tokens"
            raise RefusedRequestError(
                f"this conversation has {length:,} tokens and leaves no room for an answer: a branch has"
                f" {self.max_tokens:,}, {self.sampling.max_new_tokens:,} of them behind its first prompt"
                " (rollout.max_new_tokens).",
                "context_length_exceeded",
                "messages" if request.is_chat else "prompt",
            )
        return min(remaining, self._config.turn_tokens or remaining, request.most or remaining)

    def _refuse_text(self, request: AgentRequest) -> None:
        """Raise `RefusedRequestError` for text that fits in no branch however it is encoded. Otherwise all
        agents would wait while megabytes are encoded.
        """
        longest = longest_token(self._tokenizer)
        prompt = request.prompt if isinstance(request.prompt, str) else ""
        texts = [one.get(key) or "" for one in request.messages for key in ("content", "reasoning_content")]
        count = len(prompt) + sum(map(len, texts))
        calls = [one["tool_calls"] for one in request.messages if "tool_calls" in one]
        objects = [*request.tools, *calls]  # a template that shows them writes them as JSON at least once
        count += len(json.dumps(objects, ensure_ascii=False)) if objects else 0
        if longest is not None and count > self.max_tokens * longest:
            self.limit = "tokens"
            raise RefusedRequestError(
                f"a text of {count:,} characters leaves no room for an answer: a branch has"
                f" {self.max_tokens:,} tokens (rollout.max_new_tokens).",
                "context_length_exceeded",
                "messages" if request.is_chat else "prompt",
            )

    def _refuse_unread(self, request: AgentRequest, messages: Sequence[Message]) -> None:
        """Raise `RefusedRequestError` if the chat template would not show the model new messages or tools."""
        tools = {"tools": list(request.tools)} if request.tools else {}
        try:
            refuse_unread(self._tokenizer, messages, {**self._template, **tools}, tools)
        except TemplateError as error:
            raise RefusedRequestError(f"{error}.", "template_error", "messages") from None

    def _new_turn(
        self, parent: BranchTurn | None, added: np.ndarray, most: int, stops: tuple[str, ...]
    ) -> BranchTurn:
        """Make a turn with a name that a resumed run gives again, whatever other branches are concurrent."""
        siblings = [one for one in self.turns if one.parent is parent]
        if parent is None:
            siblings = [one for one in siblings if np.array_equal(one.added, added)]
            origin = added.astype("<i4").tobytes()
        else:
            origin = parent.uid.encode()
        if parent is not None and not siblings:
            branch, depth = parent.branch, parent.depth + 1
        else:
            branch = hashlib.sha256(origin + b"#%d" % len(siblings)).hexdigest()[:12]
            depth = 0 if parent is None else parent.depth + 1
        return BranchTurn(f"{self.sample.uid}/{branch}/{depth}", parent, added, most, stops, branch, depth)

    def _find_parent(self, request: AgentRequest) -> tuple[BranchTurn | None, np.ndarray]:
        """Return the turn that `request` continues, and the tokens that come behind it."""
        if isinstance(request.prompt, str):
            return self._behind_text(request.prompt)
        if request.prompt is not None:
            return self._behind_ids(request.prompt)
        conversation = self.make_conversation(request)
        unread = [{key: one[key] for key in one if key != "content"} for one in request.messages]
        if special := conversation.special_in(json.dumps([unread, request.tools], ensure_ascii=False)):
            raise RefusedRequestError(
                f"names, tool calls and tools hold {special}, a token of the chat template's own.",
                param="messages",
            )
        if request.tools and self._config.tool_format == "none":
            raise RefusedRequestError(
                "the recipe does not say how the model writes tool calls: set environment.tool_format.",
                param="tools",
            )
        digests = _conversation_digests(request.messages, request.tools)
        for index in range(len(digests) - 2, -1, -1):
            turn = self._ends.get(digests[index])
            if turn is not None:
                messages = request.messages[index + 1 :]
                self._refuse_unread(request, messages)
                return turn, conversation.encode_answer(turn.tokens.token_ids, messages, "user")
        self._refuse_unread(request, request.messages)
        opening = list(self.sample.metadata.get("messages") or [])
        count = len(opening) if list(request.messages[: len(opening)]) == opening else 0
        return None, conversation.encode_opening(request.messages[:count], request.messages[count:])

    def _behind_text(self, prompt: str) -> tuple[BranchTurn | None, np.ndarray]:
        best, length = None, 0
        for turn, texts in self._texts.items():
            for text in texts:
                if prompt.startswith(text) and len(text) >= length:
                    best, length = turn, len(text)
        if best is None:
            return None, np.array(encode_text(self._tokenizer, prompt), np.int32)
        suffix = prompt[length:]
        ids = self._tokenizer(suffix, add_special_tokens=False)["input_ids"] if suffix else no_ids()
        added = np.array(ids, np.int32)
        written = best.tokens.token_ids
        ended = len(written) and len(added) and added[0] == written[-1] in self.sampling.stop_ids
        return best, added[1:] if ended else added

    def _behind_ids(self, prompt: Sequence[int]) -> tuple[BranchTurn | None, np.ndarray]:
        size = id_count(self._tokenizer)
        if not all(0 <= one < size for one in prompt):
            raise RefusedRequestError(f"prompt holds ids outside of 0 to {size - 1}.", param="prompt")
        ids, best, longest = np.array(prompt, np.int32), None, 0
        for turn in self.turns:
            if turn.status is None or not turn.claimed:
                continue
            turn_ids = np.concatenate([turn.context_tokens(), turn.tokens.token_ids])
            if longest <= len(turn_ids) <= len(ids) and np.array_equal(ids[: len(turn_ids)], turn_ids):
                best, longest = turn, len(turn_ids)
        return best, ids[longest:]


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Bytes of the longest token, or characters if tokens are not written as bytes. No token stands for more
    characters. `None` if the tokenizer turns unknown text into nothing, or into one token for all of it.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    odd = "\U0010fffd " * 8 * longest
    try:
        ids = tokenizer(odd, add_special_tokens=False)["input_ids"]
    except BaseException as error:  # plain Exceptions, for text that it does not know
        if not is_of_library(error):
            raise
        return longest
    return longest if len(ids) * longest >= len(odd) and tokenizer.unk_token_id not in ids else None


def _conversation_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digest of the conversation up to each message. Blanks around the assistant's text and the ids of its
    calls are ignored, because clients change them.
    """
    digests, digest = [], hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    for one in messages:
        content, calls, name = one.get("content") or "", [], one.get("name")
        if one["role"] == "assistant":
            content, name = content.strip(), None
        for call in one.get("tool_calls") or ():
            called = call["function"]
            arguments = called["arguments"]
            calls.append([called["name"], json.loads(arguments) if isinstance(arguments, str) else arguments])
        fields = [one["role"], content, calls, one.get("tool_call_id"), name]
        text = json.dumps(fields, sort_keys=True)
        digest = hashlib.sha256(digest + text.encode()).digest()
        digests.append(digest)
    return digests
