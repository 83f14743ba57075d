"""Rewards behind HTTP: questions become requests, each is sent once, and replies are cached on disk.

The servers are `opd.served`'s: balanced and retried, with bounded answers and no redirect. Their replies are
in one SQLite file below the reward's `cache`, which processes share. The first process to store an answer
decides it, and all others use the stored one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import socket
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opd.config.rewards import PLACES, JudgeReward, ScorerReward, ServedReward
from opd.errors import RewardError
from opd.redact import redact
from opd.rewards.verifier import Answered, is_missing
from opd.served.http_client import (
    SERVERS,
    HTTPClient,
    Patience,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
    parse_json,
)
from opd.served.http_pool import HTTPPool
from opd.untrusted import read_document

_log = logging.getLogger(__name__)

_FILE = "replies.sqlite3"
_LOCKED = 60.0
"""Seconds that another process may hold the file."""
_SELECTED = 500
_REFUSALS = (400, 413, 422)
"""Statuses about a single request, such as a prompt beyond the model's length."""
_LONGEST = 2**26
"""Bytes of a value that is read back."""
LARGEST = 1e9
"""Largest absolute value of a reward."""


class EndpointError(RewardError):
    """Servers that do not answer, or not as they should. The user's own code is not at fault."""

    of_own_code = False


@dataclass(frozen=True, slots=True)
class EndpointForm:
    """The requests and replies of an endpoint.

    Args:
        path: Behind each URL.
        size: Questions of one request.
        body: Returns the request of so many questions.
        read: Returns the answers in a reply, one of JSON for each of so many questions. Raises
            `UnavailableError`. A reply `None` means that the request was refused. An answer `None` means the
            same, and is not stored.
        most: Bytes of a reply to one question.
        kind: Type of an answer.
        lenient: Accept that single requests are refused.
    """

    path: str
    size: int
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    read: Callable[[Any, int], list[Any]]
    most: int
    kind: type
    lenient: bool = False


def fill_template(template: str, answer: Answered) -> str:
    """Fill the placeholders of `template`. Inserted text is not searched for placeholders."""
    label = answer.label if isinstance(answer.label, str) else json.dumps(answer.label, ensure_ascii=False)
    values = {"prompt": answer.prompt, "context": answer.context, "answer": answer.text, "label": label}
    return re.sub(rf"\{{({'|'.join(PLACES)})\}}", lambda match: values[match[1]], template)


def label_fault(settings: JudgeReward | ScorerReward, label: object) -> str | None:
    """Return an error if the template names the label and the row has none."""
    names_label = "{label}" in settings.template or getattr(settings, "api", None) == "openrlhf"
    return (
        "is missing; give what the template's {label} stands for"
        if names_label and is_missing(label)
        else None
    )


def require(settings: ServedReward) -> None:
    """Raise `MissingExtraError`, or `ConfigError` if the key is not set."""
    HTTPClient(_reward_name(settings), _pool_options(settings))


def answer_seconds(settings: ServedReward) -> float:
    """Return the longest time of one answer."""
    return settings.patience + settings.timeout * (settings.attempts + 1)


def check_reachable(settings: ServedReward) -> None:
    """Raise `EndpointError` for the first server whose address refuses connections."""
    for url in settings.urls:
        address = urlsplit(url)
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), timeout=5.0).close()
        except OSError as error:
            raise EndpointError(
                f"{_reward_name(settings)}: nobody answers at {redact(url)} ({error}); start the server, or"
                " correct its URL."
            ) from None


def query_endpoint(
    settings: ServedReward, form: EndpointForm, questions: Sequence[dict[str, Any]]
) -> list[Any]:
    """Return the endpoint's answer to each of `questions`, in order. Equal questions get equal answers.

    Raises `RewardError` once patience or attempts are over. Answers so far are stored.
    """
    return asyncio.run(_query_endpoint(settings, form, questions))


async def _query_endpoint(
    settings: ServedReward, form: EndpointForm, questions: Sequence[dict[str, Any]]
) -> list[Any]:
    endpoint = (settings.type, [redact(url) for url in settings.urls], form.path)
    keys = [_json_digest([*endpoint, question]) for question in questions]
    different = dict(zip(keys, questions, strict=True))
    with closing(Replies(settings.cache, form.kind)) as replies:
        answers = replies.find_replies(different)
        missing = [key for key in different if key not in answers]
        parts = iter([missing[start : start + form.size] for start in range(0, len(missing), form.size)])
        pool = _Pool(_reward_name(settings), _pool_options(settings), form.lenient) if missing else None

        async def query_batches() -> None:
            assert pool is not None
            for part in parts:
                body, count = form.body([different[key] for key in part]), len(part)
                most = CONTROL + form.most * count
                values = await pool.post_json(
                    form.path, body, 1, lambda reply, count=count: form.read(reply, count), most
                )
                fresh = dict(zip(part, values, strict=True))
                answers.update(fresh)
                stored = {key: value for key, value in fresh.items() if value is not None}
                answers.update(replies.store_replies(stored))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(missing), settings.concurrency * len(settings.urls))):
                    tasks.create_task(query_batches())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if pool is not None:
                await pool.close()
    return [answers[key] for key in keys]


CONTROL = 2**20
"""Bytes of a reply besides its answers."""


class _Pool(HTTPPool):
    """A pool that accepts any JSON as an answer."""

    def __init__(self, owner: str, options: PoolOptions, lenient: bool) -> None:
        super().__init__(owner, options, EndpointError)
        self._lenient = lenient

    async def request_json(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None = None, most: int = CONTROL
    ) -> Any:
        """Make one attempt at one server. Returns None if it refuses the request and may."""
        try:
            where, content = await self.request_bytes(server, method, path, body, most)
        except RefusedError as refusal:
            if self._lenient and refusal.status in _REFUSALS:
                return None
            raise
        try:
            return parse_json(content)
        except ValueError:
            raise UnavailableError(f"{where} with something that is not JSON", answered=True) from None


def _reward_name(settings: ServedReward) -> str:
    return f"reward {settings.type}"


def _pool_options(settings: ServedReward) -> PoolOptions:
    patience = Patience(
        timeout=settings.timeout,
        unreachable=settings.patience,
        retry=replace(SERVERS, attempts=settings.attempts),
    )
    return PoolOptions(settings.urls, settings.api_key_env, settings.concurrency, patience)


def finite_number(value: object) -> float:
    """Return `value`, if it is a number that can be a reward. Raises `UnavailableError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnavailableError(f"a {type(value).__name__} came where a number is due", answered=True)
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise UnavailableError("a number is not finite or beyond 1e9", answered=True)
    return float(value)


def _json_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Replies:
    """The cached answers of endpoints: values of JSON by the digest of the question, in `folder`, or in
    memory without one. A damaged row, or one of another `kind`, is ignored. An unreadable file is moved to
    `replies.sqlite3.damaged`, and a new one is begun. Raises `RewardError` if the machine refuses access.
    """

    def __init__(self, folder: str | None, kind: type) -> None:
        self._path = None if folder is None else Path(folder).expanduser() / _FILE
        self._kind = kind
        self._file: sqlite3.Connection | None = None
        self._with_recovery(self._open_file)

    def find_replies(self, keys: Iterable[str]) -> dict[str, Any]:
        return self._with_recovery(lambda: self._select_replies(list(keys)))

    def store_replies(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Store values of new keys, durably. Returns the stored values of all these keys."""
        return self._with_recovery(lambda: self._insert_replies(values))

    def close(self) -> None:
        """Close the file, so that others can move it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> sqlite3.Connection:
        if self._file is not None:
            return self._file
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(self._path or ":memory:", timeout=_LOCKED, isolation_level=None)
        self._file.execute("PRAGMA trusted_schema = OFF")
        self._file.execute(
            "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, value TEXT, seal TEXT) WITHOUT ROWID"
        )
        return self._file

    def _select_replies(self, keys: list[str]) -> dict[str, Any]:
        file, replies = self._open_file(), {}
        for start in range(0, len(keys), _SELECTED):
            some = keys[start : start + _SELECTED]
            marks = ",".join("?" * len(some))
            for key, text, seal in file.execute(
                f"SELECT key, value, seal FROM replies WHERE key IN ({marks})", some
            ):
                with suppress(ValueError, TypeError):
                    value = read_document(text, _LONGEST)
                    if type(value) is self._kind and seal == _json_digest([key, text]):
                        replies[key] = value
        return replies

    def _insert_replies(self, values: Mapping[str, object]) -> dict[str, Any]:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        file = self._open_file()
        with file:
            file.execute("BEGIN IMMEDIATE")
            stored = self._select_replies(list(values))
            new = [(key, text, _json_digest([key, text])) for key, text in rows if key not in stored]
            file.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", new)
        return dict(values) | stored

    def _with_recovery(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            # Locked, full, read-only, a folder in its place: its contents are not at fault.
            other_form = "no such column" in str(error) or "columns but" in str(error)
            if isinstance(error, sqlite3.OperationalError | OSError) and not other_form:
                self.close()
                raise self._storage_error(error) from error
        self.close()
        assert self._path is not None
        _log.warning("%s cannot be read: it is kept as %s.damaged, and begun anew", self._path, _FILE)
        try:
            self._path.replace(self._path.with_name(f"{_FILE}.damaged"))
            self._path.with_name(f"{_FILE}-journal").unlink(missing_ok=True)
        except OSError as error:
            raise self._storage_error(error) from error
        return work()

    def _storage_error(self, error: Exception) -> EndpointError:
        return EndpointError(
            f"{self._path}: what rewards have answered cannot be kept there ({error}); free the disk or the"
            " file, or give the reward another `cache`."
        )
