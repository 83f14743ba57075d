"""Requests of an agent to the gateway in OpenAI's API, read strictly, and its error objects.

Nothing here trusts the body. A setting that would change how tokens are drawn is refused or ignored, because
training samples are drawn as the recipe says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from opd.data.messages import THOUGHTS, MessageError, read_messages
from opd.environments.protocol import Message
from opd.untrusted import read_document, safe_excerpt

MOST_BODY = 16 << 20
"""Bytes of a request."""
MOST_OBJECTS = 1 << 20
"""Characters, as JSON, of a request's tools, and of all tool calls in it. Each request renders them all."""
MOST_MESSAGES, MOST_TOOLS, MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 10_000, 1_000, 16, 16, 1_000
_ROLES = ("system", "developer", "user", "assistant", "tool")
_READ = ("role", "content", "name", "tool_call_id", "tool_calls", *THOUGHTS)
"""Fields of a message that are read. A client's other fields are ignored."""
_AS_RECIPE = "is not applied: what is learnt from is sampled as the recipe says"


class RefusedRequestError(Exception):
    """A refusal of a request, as an error object of OpenAI's API."""

    def __init__(
        self, message: str, code: str = "invalid_value", param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def error_object(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    choices: int
    most: int | None
    """Most tokens of the answer."""
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    """True if a stream ends with its usage."""
    ids: bool
    """True if the answer has its token ids."""
    model: str
    prompt: str | tuple[int, ...] | None = None
    """Of `/v1/completions`: text, or token ids. `None` for messages."""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    calls: bool = False
    """True if tool calls are parsed in the answer."""
    logprobs: bool = False

    @property
    def is_chat(self) -> bool:
        """True for messages, False for a prompt."""
        return self.prompt is None


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(default="", max_length=500)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    # Ignored.
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = None
    seed: int | None = None
    user: str | None = None
    # Refused unless they change nothing.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def _changes_nothing(cls, value: object) -> Any:
        if value:
            raise ValueError(_AS_RECIPE)
        return value

    @field_validator("stop")
    @classmethod
    def _is_bounded(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS or not all(0 < len(one) <= LONGEST_STOP for one in stops):
            raise ValueError(f"has at most {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters")
        return stops

    def _build_request(self, **values: Any) -> AgentRequest:
        return AgentRequest(
            choices=self.n or 1,
            stops=tuple(self.stop or ()),
            stream=bool(self.stream),
            usage=(self.stream_options or {}).get("include_usage") is True,
            ids=bool(self.return_token_ids),
            model=self.model,
            **{"most": self.max_tokens, **values},
        )


class _Chat(_Common):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    # `required` is `auto`, because training uses the model's own draw, with a call in it or without.
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # Ignored.
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @field_validator("tool_choice")
    @classmethod
    def _is_free(cls, value: object) -> Any:
        if value not in (None, "auto", "none", "required"):
            raise ValueError("is auto, none or required: nothing makes the model call a certain tool")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _is_of_the_written(cls, value: int | None) -> int | None:
        if value:
            raise ValueError("is 0: log-probabilities are given of the tokens that were written")
        return value

    @field_validator("response_format")
    @classmethod
    def _is_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError(_AS_RECIPE)
        return value

    @field_validator("modalities")
    @classmethod
    def _is_only_text(cls, value: list[str] | None) -> list[str] | None:
        if value not in (None, ["text"]):
            raise ValueError('is ["text"]: the model writes nothing else')
        return value

    def to_request(self) -> AgentRequest:
        tools = tuple(self.tools or ())
        for index, tool in enumerate(tools):
            where, function = f"tools[{index}]", tool.get("function")
            has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
            if tool.get("type") != "function" or not has_name:
                raise RefusedRequestError(
                    f'{where} is {{"type": "function", "function": {{"name": ...}}}}.', param=where
                )
        _refuse_large(tools, "tools")
        limits = [most for most in (self.max_tokens, self.max_completion_tokens) if most is not None]
        return self._build_request(
            messages=messages_of(self.messages),
            tools=tools,
            calls=bool(tools) and self.tool_choice != "none",
            most=min(limits, default=None),
            logprobs=bool(self.logprobs),
        )


class _Completion(_Common):
    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(default=None, ge=0, le=1)
    # Refused unless they change nothing.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @field_validator("echo", "suffix")
    @classmethod
    def _is_not_asked_for(cls, value: object) -> Any:
        if value:
            raise ValueError("is not supported")
        return value

    def to_request(self) -> AgentRequest:
        if self.best_of not in (None, self.n or 1):
            raise RefusedRequestError(
                "best_of is n, or left out: all that is written is answered.", param="best_of"
            )
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise RefusedRequestError("prompt is one text, or the token ids of one.", param="prompt")
            prompt = prompt[0]
        if not prompt:
            raise RefusedRequestError("prompt is empty.", param="prompt")
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        # OpenAI's own default of 16 tokens is an old one. The rest of the budget is used, as for a chat.
        return self._build_request(prompt=prompt, logprobs=self.logprobs is not None)


def read_request(body: bytes, chat: bool) -> AgentRequest:
    """Parse the request in `body`. Raises `RefusedRequestError`."""
    try:
        document = read_document(body, MOST_BODY)
        json.dumps(document, ensure_ascii=False).encode()  # unpaired surrogates are no text
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(
            f"the body is no JSON that is read: {safe_excerpt(error, 200)}.", "invalid_json"
        ) from None
    if not isinstance(document, dict):
        raise RefusedRequestError("the body is no object.", "invalid_json")
    try:
        form = (_Chat if chat else _Completion).model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = safe_excerpt(".".join(str(part) for part in first["loc"]))
        if param.startswith("prompt."):  # one error for each form of it
            refusal = RefusedRequestError("prompt is one text, or the token ids of one.", param="prompt")
        elif first["type"] == "extra_forbidden":
            refusal = RefusedRequestError(f"{param} is not supported.", "unsupported_parameter", param)
        else:
            message = safe_excerpt(first["msg"].removeprefix("Value error, "), 300)
            refusal = RefusedRequestError(f"{param}: {message}.", param=param)
        raise refusal from None
    return form.to_request()


def _refuse_large(objects: Sequence[Any], field: str) -> None:
    """Raise `RefusedRequestError` for more than `MOST_OBJECTS` characters."""
    count = len(json.dumps(objects, ensure_ascii=False)) if objects else 0
    if count > MOST_OBJECTS:
        raise RefusedRequestError(
            f"{field} have {count:,} characters, and {MOST_OBJECTS:,} are the most.", "too_large", field, 413
        )


def messages_of(messages: Sequence[Mapping[str, object]]) -> tuple[Message, ...]:
    """Convert messages for chat templates: text, and calls with their arguments as objects. A client's other
    fields are dropped. Raises `RefusedRequestError`.
    """
    _refuse_large([one.get("tool_calls") for one in messages if one.get("tool_calls")], "tool_calls")
    for index, one in enumerate(messages):
        if not isinstance(one.get("role"), str) or one["role"] not in _ROLES:
            where = f"messages[{index}].role"
            raise RefusedRequestError(f"{where} is one of {', '.join(_ROLES)}.", param=where)
    read = [{key: one[key] for key in _READ if one.get(key) is not None} for one in messages]
    try:
        converted = tuple(read_messages([{"content": None, **one} for one in read]))
    except MessageError as error:
        where = f"messages{'' if error.where[:1] in ('', '[') else '.'}{error.where}"
        raise RefusedRequestError(f"{where}: {error}.", param=where) from None
    if converted[-1]["role"] == "assistant":
        raise RefusedRequestError("the last message is the assistant's: nothing goes on with an answer.")
    return converted
