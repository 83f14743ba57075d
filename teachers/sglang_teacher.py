"""A teacher behind HTTP: SGLang servers score the student's tokens, the published head stays here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from opd.config.teachers import SGLangTeacherConfig
from opd.errors import TeacherError
from opd.served.hidden_segments import HiddenSegment, Plugin, most_answered, plugin_of, width_of
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.http_pool import HTTPPool
from opd.served.scoring import EXACT, PROBE, Question, is_uniform, logprob_tolerance, says_nothing
from opd.served.sglang_protocol import (
    check_finished,
    hidden_body,
    hidden_of,
    logprob_body,
    logprobs_of,
    most_bytes,
    most_tokens,
    ranks_of,
    top_logprobs_of,
    versions_of,
)
from opd.teachers.scorer import ExpectedModel, Read, Scorer, compare_logprobs, lost_weights
from opd.teachers.served_teacher import ServedTeacher, kind_served_by
from opd.untrusted import convert_decode_errors

_log = logging.getLogger(__name__)
_GENERATE = "/generate"


class SGLangScorer(Scorer):
    """See `Scorer`. Answers are checked for length, order, finite numbers and the version of the weights."""

    def __init__(
        self, model: ExpectedModel, settings: SGLangTeacherConfig, read: Read | None, **options: Any
    ) -> None:
        super().__init__(model, settings, read, **options)
        self.weight_version = settings.weight_version
        """The recipe's version, or that of the first server."""
        self.most: int | None = None
        """Most tokens of a sample that every server scores."""
        self.chunk: int | None = None
        """Tokens a server without the plug-in prefills at once. It loses hidden states of earlier chunks."""
        self.plugins: dict[str, Plugin] = {}
        """Plug-ins of servers, by URL, that leave hidden states as bytes."""
        self._tells_hidden: set[str] = set()
        """URLs of servers that give hidden states."""
        self._warned = False
        """Whether it was logged that hidden states come as JSON."""

    @property
    def served_version(self) -> str:
        return str(self.weight_version)

    @property
    def model_title(self) -> str:
        return f"weight version {self.weight_version}"

    async def inspect_server(self, pool: HTTPPool, server: Server) -> float:
        info = await pool.request_json(server, "GET", "/model_info")
        self._check_kind(pool.owner, server, info)
        version = str(info.get("weight_version"))
        if self.weight_version is None:
            self.weight_version = version
        if version != self.weight_version:
            raise TeacherError(
                f"{pool.owner}: {server.url} holds weight version {version}, but {self.weight_version} is"
                " due; serve the version the run began with."
            )
        try:
            settings = await pool.request_json(server, "GET", "/server_info") or {}
        except RefusedError:
            settings = {}  # a router passes scoring on but not this
        if self.hidden:
            self.plugins.pop(server.url, None)
            plugin = await plugin_of(pool, server)
            if plugin is not None:
                self.plugins[server.url] = plugin
            elif not self._warned:
                self._warned = True
                _log.warning(
                    "%s: %s gives hidden states as JSON numbers, the prompt's too, which takes many times the"
                    " bytes and the time; start it with the folder opd/served/plugin on its PYTHONPATH",
                    pool.owner,
                    server.url,
                )
        self.check_settings(pool.owner, server, settings)
        if settings.get("enable_return_hidden_states"):
            self._tells_hidden.add(server.url)
        return logprob_tolerance(settings) if settings else EXACT

    def _check_kind(self, owner: str, server: Server, info: dict[str, Any]) -> None:
        for key in ("architectures", "model_type"):
            served, expected = info.get(key), self.model.config.get(key)
            if served and expected and served != expected:
                raise TeacherError(
                    f"{owner}: {server.url} serves {info.get('model_path')} with {key} {served}, the recipe's"
                    f" teacher has {expected}; check which model is behind the URL."
                )

    def check_settings(self, owner: str, server: Server, settings: dict[str, Any]) -> None:
        """Raise `TeacherError` if a server of these `settings` gives no hidden states that are needed. Note
        its limits.
        """
        if self.hidden and settings.get("enable_return_hidden_states") is False:
            raise TeacherError(
                f"{owner}: {server.url} returns no hidden states; start it with"
                " --enable-return-hidden-states, or set the server's signal to topk or sampled."
            )
        with convert_decode_errors(
            lambda cause: UnavailableError(f"{server.url}/server_info: {cause}", answered=True)
        ):
            most = most_tokens(settings)
            chunk = int(settings.get("chunked_prefill_size") or 0)
        if most is not None:
            longest = most - SGLangTeacherConfig.kept
            self.most = min(longest, self.most or longest)
        if chunk > 0 and server.url not in self.plugins:
            self.chunk = min(chunk, self.chunk or chunk)

    async def served_checksum(self, pool: HTTPPool, server: Server) -> str:
        """See `Scorer`. Raises `UnavailableError` if it gives none."""
        answer = await pool.request_json(server, "POST", "/weights_checker", {"action": "checksum"})
        checksums = [rank.get("per_gpu_checksum") for rank in ranks_of(answer)]
        if not checksums or None in checksums:
            raise UnavailableError(f"{server.url}/weights_checker tells no checksum", answered=True)
        return "+".join(map(str, checksums))

    async def served_logprobs(self, pool: HTTPPool, server: Server) -> np.ndarray:
        """See `Scorer`: rebuilt from hidden states if these are requested, else the server's own. Both are
        compared with each other if possible.
        """
        question, rows = Question("probe", PROBE, 0), self.model.rows
        if not self.hidden and (self.proof.has_reference or server.url not in self._tells_hidden):
            body = logprob_body(question)
            answer = await pool.request_json(server, "POST", _GENERATE, body, most_bytes(body))
            return logprobs_of(answer, PROBE, 0, rows)
        served: list[np.ndarray] = []

        def check_answer(answer: dict[str, Any]) -> None:
            served.append(logprobs_of(answer, PROBE[:-1], 0, rows))
            _check_width(pool.owner, server, answer, self.model.width)

        hidden = await self._hidden_states(pool, server, question, check_answer, logprobs=True)
        if self.model.rebuild is None:
            return served[0]
        rebuilt = await asyncio.to_thread(self.model.rebuild, hidden, PROBE[1:])
        who, due = f"{pool.owner}: {server.url}", rebuilt[: len(served[0])]
        compare_logprobs(who, served[0], due, self.tolerance, "the published head gives")
        return rebuilt

    async def score_question(self, pool: HTTPPool, server: Server, question: Question) -> Any:

        def check_answer(answer: dict[str, Any]) -> None:
            check_finished(answer)
            versions = versions_of(answer)
            if versions != {self.weight_version}:
                raise TeacherError(
                    f"{pool.owner}: an answer was computed with weight version {', '.join(sorted(versions))},"
                    f" but {self.weight_version} is due; serve the version the run began with and --resume."
                )

        if self.hidden:
            return await self._hidden_states(pool, server, question, check_answer)
        body, rows = logprob_body(question, self.top_k), self.model.rows
        answer = await pool.request_json(server, "POST", _GENERATE, body, most_bytes(body))
        check_answer(answer)
        sampled = logprobs_of(answer, question.tokens, question.start, rows)
        if is_uniform(sampled, rows):
            raise lost_weights(pool.owner, server.url, f"all tokens have probability 1/{rows}")
        if not self.top_k:
            return sampled
        return *top_logprobs_of(answer, question.token_count, self.top_k, self.vocabulary), sampled

    async def _hidden_states(
        self,
        pool: HTTPPool,
        server: Server,
        question: Question,
        check: Callable[[dict[str, Any]], None],
        *,
        logprobs: bool = False,
    ) -> np.ndarray:
        """Return [count, D] float32: last hidden states at the positions of `question`, by one attempt.

        Args:
            check: Raises for an answer whose hidden states are not needed.
            logprobs: Request the tokens' log-probabilities, too.

        Raises `UnavailableError`, `RefusedError` and the errors of `check`.
        """
        model, plugin = self.model, self.plugins.get(server.url)
        if plugin is None:
            body = hidden_body(question)
            answer = await pool.request_json(server, "POST", _GENERATE, body, most_bytes(body, model.width))
            check(answer)
            rows = hidden_of(answer, question, model.width, model.rows)
        else:
            with HiddenSegment(plugin, question, model.width) as segment:
                body = segment.request_body(logprobs=logprobs)
                answer = await pool.request_json(server, "POST", _GENERATE, body, most_answered(body))
                check(answer)
                rows = await segment.read_rows(pool, server, answer)
        if says_nothing(rows, question.tokens[:-1]):
            raise lost_weights(pool.owner, server.url, "all hidden states of an answer are the same")
        return rows

    def longest_sample(self) -> tuple[int | None, str]:
        return self.most, "start them with a larger --context-length"

    def check_length(self, teacher: str, question: Question) -> None:
        super().check_length(teacher, question)
        length = len(question.tokens)
        if self.hidden and self.chunk is not None and length - 1 > self.chunk:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {teacher} prefill"
                f" {self.chunk} at once and lose the hidden states before; start them with the plug-in for"
                " hidden states (opd/served/plugin on their PYTHONPATH), or with --chunked-prefill-size -1."
            )

    def transport_text(self, server: Server) -> str:
        if not self.hidden:
            return ""
        plugin = self.plugins.get(server.url)
        transport = (
            "as JSON" if plugin is None else "over HTTP" if plugin.folder is None else "through shared memory"
        )
        return f", hidden states {transport}"


def _check_width(owner: str, server: Server, answer: dict[str, Any], width: int) -> None:
    """Raise `TeacherError` if the hidden states have another width than the head."""
    with convert_decode_errors(
        lambda cause: UnavailableError(f"{server.url}: hidden states, {cause}", answered=True)
    ):
        served_width = width_of(answer)
        if served_width is None:
            states = answer["meta_info"].get("hidden_states") or [[[]]]
            served_width = len(states[0][0]) if isinstance(states[0][0], list) else len(states[0])
    if served_width != width:
        raise TeacherError(
            f"{owner}: {server.url} returns hidden states of width {served_width}, the published head"
            f" takes {width}; check which model is behind the URL."
        )


class SGLangTeacher(ServedTeacher):
    """See `ServedTeacher`."""

    scorer_class = SGLangScorer


KIND = kind_served_by(SGLangTeacher)
