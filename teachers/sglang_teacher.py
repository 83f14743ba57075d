"""A teacher behind HTTP: SGLang servers score the student's tokens, the published head stays here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import OpdError, TeacherError
from opd.models.hf_folder import read_object
from opd.served.http_client import Server
from opd.served.http_pool import HTTPPool
from opd.served.sglang_answers import (
    Question,
    check_finished,
    is_uniform,
    logprob_body,
    logprobs_of,
    most_bytes,
    top_logprobs_of,
)
from opd.storage.published import PublishedModel
from opd.teachers.kinds import TeacherKind
from opd.teachers.served_teacher import ServedTeacher, Visit, lost_weights, opener, visits
from opd.teachers.sglang_admission import (
    ExpectedSGLang,
    admit,
    check_versions,
    checksum,
    expected_of,
    hidden_states,
)
from opd.teachers.skeleton import is_published, small_files
from opd.teachers.unpublished import UnpublishedWeights
from opd.teachers.weight_probe import by_published, by_source


class SGLangTeacher(ServedTeacher):
    """See `ServedTeacher`. Answers are checked for length, order, finite numbers and the version of the
    weights.
    """

    def __init__(self, name: str, url: str, config: SGLangTeacherConfig, **others: Any) -> None:
        """See `ServedTeacher`."""
        super().__init__(name, url, config, **others)
        read = by_published(url, others.get("cache")) if self._asked.main else None
        self._expected = expected_of(self.published, config, read)

    @property
    def served_as(self) -> str:
        """The version of the weights."""
        return str(self._expected.weight_version)

    def connect(self) -> None:
        """Check one server now. Raises `TeacherError` if none answers or the wrong model does."""
        if self._expected.proof.logprobs is None:
            self._run(self._ask_limits())

    async def _admit(self, server: Server) -> None:
        await admit(self.pool, server, self._expected)

    async def _score(self, question: Question) -> Any:
        if self._expected.proof.logprobs is None:
            # One server must have told its limits before anything long is sent.
            await self._ask_limits()
        self._check_length(question)
        if self.signal == "hidden":
            return await self.pool.call(
                len(question.tokens),
                lambda server: hidden_states(self.pool, server, question, self._expected, self._check),
            )
        top_k = min(self._asked.top_k, self._vocabulary) if self.signal == "topk" else 0
        return await self._ask(
            question, logprob_body(question, top_k), partial(self._logprobs, question=question, top_k=top_k)
        )

    async def _ask(self, question: Question, body: dict[str, Any], read: Any) -> Any:
        async def attempt(server: Server) -> Any:
            answer = await self.pool.ask(server, "POST", "/generate", body, most_bytes(body))
            self._check(answer)
            return read(answer, server.url)

        return await self.pool.call(len(question.tokens), attempt)

    def _check(self, answer: dict[str, Any]) -> None:
        check_finished(answer)
        check_versions(self.pool.owner, answer, self._expected)

    async def _ask_limits(self) -> None:
        question = Question("limits", np.array([1, 2], dtype=np.int32), 0)
        await self._ask(question, logprob_body(question), lambda answer, url: None)

    def _logprobs(self, answer: dict[str, Any], url: str, question: Question, top_k: int) -> Any:
        rows = self._head.vocabulary
        sampled = logprobs_of(answer, question.tokens, question.start, rows)
        if is_uniform(sampled, rows):
            raise lost_weights(self.pool.owner, url, f"all tokens have probability 1/{rows}")
        if not top_k:
            return sampled
        return *top_logprobs_of(answer, question.count, top_k, self._vocabulary), sampled

    def _check_length(self, question: Question) -> None:
        length, limit = len(question.tokens), self._expected.longest
        if limit is not None and length > limit:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {self.name} take {limit};"
                " start them with a larger --context-length."
            )
        chunk = self._expected.chunk
        if self.signal == "hidden" and chunk is not None and length - 1 > chunk:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {self.name} prefill"
                f" {chunk} at once and lose the hidden states before; start them with the plug-in for hidden"
                " states (opd/served/plugin on their PYTHONPATH), or with --chunked-prefill-size -1."
            )


def _check(name: str, settings: SGLangTeacherConfig, recipe: Recipe) -> Iterator[str | OpdError]:
    """Every server: identity, settings, a few scored tokens."""

    def prepare(stack: ExitStack) -> Visit:
        expected = _expected(settings, stack)
        return lambda pool, server: _visit(pool, server, expected)

    return visits(name, settings, recipe, prepare)


def _expected(settings: SGLangTeacherConfig, stack: ExitStack) -> ExpectedSGLang:
    assert settings.path is not None
    path, read = settings.path, by_source(settings.path)
    if is_published(path):
        return expected_of(stack.enter_context(PublishedModel.open(path)), settings, read)
    load = None if read is None else lambda: UnpublishedWeights(Path(path)).head()
    with small_files(path) as folder:
        return expected_of(read_object(folder / "config.json"), settings, read, load)


async def _visit(pool: HTTPPool, server: Server, expected: ExpectedSGLang) -> str:
    apart = await admit(pool, server, expected)
    held = await checksum(pool, server)
    plugin = expected.plugins.get(server.url)
    way = "as JSON" if plugin is None else "over HTTP" if plugin.folder is None else "through shared memory"
    hidden = f", hidden states {way}" if expected.hidden else ""
    compared = "weights proved by it" if expected.checksum else expected.proof.said(apart)
    return f"{server.url}: weight version {expected.weight_version}, checksum {held}, {compared}{hidden}"


KIND = TeacherKind(opener(SGLangTeacher), _check)
