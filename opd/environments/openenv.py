"""OpenEnv's environments by URL: a server of theirs gets each action over a WebSocket (extra `agents`).

One connection is one episode. The server's messages are not trusted: they are bounded in size and depth.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opd.environments.protocol import Action, Step, Task
from opd.errors import ConfigError, needs_extra
from opd.untrusted import MAX_DEPTH, depth_exceeds, escape_controls, read_document, safe_excerpt

MOST_MESSAGE = 8 << 20
"""Bytes of a message."""
CONNECTING = 20.0
"""Seconds that a connection may take."""
TEXT = "{text}"
"""Placeholder for the model's text in an action's values."""


class OpenEnvError(Exception):
    """A failure of the server, as a part of a sentence."""


class OpenEnv:
    """One episode. The server's reset gets the recipe's arguments, the row's `reset` (an object of
    arguments), and the seed: the label if it is a number, else `task.seed`.
    """

    def __init__(
        self,
        url: str,
        action: str | Mapping[str, Any] = "message",
        reset: Mapping[str, Any] | None = None,
        show: Sequence[str] | None = None,
    ) -> None:
        """`url`: of the server, `http(s)://` or `ws(s)://`. `action`: the field of its action for the model's
        text, or the full action with `{text}` in place of it. `show`: the fields of an observation that the
        model sees; `None` is all of them. Raises `ConfigError`.
        """
        parts = urlsplit(str(url))
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if parts.scheme not in schemes or not parts.hostname:
            raise ConfigError(
                f"environment openenv: params.url {safe_excerpt(url)} is no http(s):// or ws(s):// address"
            )
        path = parts.path.rstrip("/")
        self._url = (
            f"{schemes[parts.scheme]}://{parts.netloc}{path if path.endswith('/ws') else f'{path}/ws'}"
        )
        self._action = {action: TEXT} if isinstance(action, str) else dict(action)
        self._reset, self._show = dict(reset or {}), show
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, task: Task) -> str:
        """Return the server's first observation."""
        with needs_extra("environment openenv", "agents"):
            import aiohttp
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECTING))
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=MOST_MESSAGE)
        except aiohttp.ClientError as error:
            await self.close()
            raise OpenEnvError(f"{self._url} cannot be reached ({safe_excerpt(error, 200)})") from error
        row_arguments = task.metadata.get("reset")
        seed = task.label if type(task.label) is int and task.label >= 0 else task.seed
        arguments = {
            **self._reset,
            **(row_arguments if isinstance(row_arguments, Mapping) else {}),
            "seed": seed,
        }
        observation, _, _ = _read_step(await self._send_message("reset", arguments))
        return self._describe_observation(observation)

    async def step(self, action: Action) -> Step:
        """Return the server's answer. An invalid action is answered with an error text."""
        try:
            data = await self._send_message("step", _fill_template(self._action, action.text))
        except _ServerRefusedError as error:
            return Step(f"error: {error}")
        observation, reward, done = _read_step(data)
        return Step(self._describe_observation(observation), reward, done)

    async def close(self) -> None:
        """End the episode on the server, too."""
        socket, self._socket = self._socket, None
        session, self._session = self._session, None
        if socket is not None:
            with contextlib.suppress(Exception):  # it is gone, or about to be
                await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
        if session is not None:
            await session.close()

    async def _send_message(self, method: str, data: Mapping[str, object]) -> Any:
        """Return an answer's data. Raises `OpenEnvError`, `_ServerRefusedError` for an invalid action."""
        import aiohttp

        try:
            await self._socket.send_str(json.dumps({"type": method, "data": data}))
            message = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OpenEnvError(f"{self._url} is gone ({safe_excerpt(error, 200)})") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            large = f", or a message of more than {MOST_MESSAGE:,} bytes" * (
                self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            )
            raise OpenEnvError(f"{self._url} ended the episode{large} (code {self._socket.close_code})")
        try:
            answer = read_document(message.data, MOST_MESSAGE)
            if depth_exceeds(answer, MAX_DEPTH):
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
            kind, content = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OpenEnvError(f"{self._url} said what is no message ({safe_excerpt(error, 200)})") from error
        if kind == "error":
            raise _failure_error(content, method)
        return content

    def _describe_observation(self, observation: object) -> str:
        """Return an observation as text: a text as it is, a single field's value, else JSON."""
        if isinstance(observation, Mapping):
            fields = {key: observation[key] for key in (self._show or observation) if key in observation}
            observation = next(iter(fields.values())) if len(fields) == 1 else fields
        is_text = isinstance(observation, str)
        return escape_controls(observation if is_text else json.dumps(observation, ensure_ascii=False))


class _ServerRefusedError(Exception):
    """The server refused an action as invalid."""


def _failure_error(content: object, method: str) -> Exception:
    details = content if isinstance(content, Mapping) else {}
    code, message = str(details.get("code", "")), safe_excerpt(details.get("message", "no reason"), 300)
    if code == "VALIDATION_ERROR" and method == "step":
        errors = details.get("errors")
        fields = errors if isinstance(errors, list) else []
        why = "; ".join(
            safe_excerpt(one.get("msg", ""), 100) for one in fields[:3] if isinstance(one, Mapping)
        )
        return _ServerRefusedError(f"{message}{f' ({why})' if why else ''}")
    hint = "; set environment.concurrent to what it has room for" if code == "CAPACITY_REACHED" else ""
    return OpenEnvError(f"the server failed: {message} ({safe_excerpt(code) or 'no code'}){hint}")


def _read_step(data: Any) -> tuple[Any, float, bool]:
    """Return observation, reward and True if the episode is over. Raises `OpenEnvError`."""
    reward = data.get("reward") if isinstance(data, Mapping) else "missing"
    if reward is not None and not isinstance(reward, int | float):
        raise OpenEnvError("the server's answer has no observation and reward")
    return data.get("observation", ""), float(reward or 0.0), data.get("done") is True


def _fill_template(form: Any, text: str) -> Any:
    if isinstance(form, str):
        return form.replace(TEXT, text)
    if isinstance(form, Mapping):
        return {key: _fill_template(value, text) for key, value in form.items()}
    return [_fill_template(one, text) for one in form] if isinstance(form, list | tuple) else form
