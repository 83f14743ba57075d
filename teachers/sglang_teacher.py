"""A teacher behind HTTP: SGLang servers score the student's tokens, the published head stays here.

Every server is asked before it works, and again after it was away, whether it is the right one: its model and
weights, and how hidden states come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import OpdError, TeacherError
from opd.foreign import decoding
from opd.kernels.head import Head
from opd.models.hf_folder import read_object
from opd.served.hidden_segments import HiddenSegment, Plugin, most_answered, plugin_of, width_of
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.http_pool import HTTPPool
from opd.served.sglang_answers import (
    EXACT,
    HALF,
    PROBE,
    Question,
    check_finished,
    hidden_body,
    hidden_of,
    is_uniform,
    logprob_body,
    logprobs_of,
    most_bytes,
    most_tokens,
    ranks_of,
    says_nothing,
    top_logprobs_of,
    versions_of,
)
from opd.storage.published import PublishedModel
from opd.teachers.kinds import TeacherKind
from opd.teachers.served_teacher import (
    Rebuild,
    ServedTeacher,
    Visit,
    head_of,
    lost_weights,
    opener,
    rebuild_with,
    visits,
)
from opd.teachers.skeleton import is_published, small_files
from opd.teachers.unpublished import UnpublishedWeights
from opd.teachers.weight_probe import Read, UnprovedError, WeightProof, by_published, by_source, compare

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of the head's weight, padding included."""

    rows: int
    width: int


@dataclass(slots=True)
class ExpectedSGLang:
    """What a server must be; what the recipe leaves open is what the first server was."""

    config: Mapping[str, Any]
    """The model's Hugging Face configuration."""
    head: HeadShape
    hidden: bool
    """Whether hidden states are needed."""
    rebuild: Rebuild | None = None
    """Log-probabilities of ids [N] from hidden rows [N, D], by the right head; `None` compares servers with
    each other only."""
    weight_version: str | None = None
    checksum: str | None = None
    proof: WeightProof = field(default_factory=WeightProof)
    tolerance: float = EXACT
    longest: int | None = None
    """Most tokens of a sample that every server scores."""
    chunk: int | None = None
    """Most tokens a server without the plug-in prefills at once; it loses hidden states of earlier chunks."""
    plugins: dict[str, Plugin] = field(default_factory=dict)
    """Of the servers, by URL, that leave hidden states as bytes."""
    warned: bool = False
    """Whether it was said that hidden states come as JSON."""


async def admit(pool: HTTPPool, server: Server, expected: ExpectedSGLang) -> float | None:
    """The most by which the probe's log-probabilities differ, in nats; `None` where there are none to compare
    with.

    Raises `TeacherError` if another model or other weights answer, or the server lacks what is needed;
    `UnavailableError` if it does not answer.
    """
    info = await pool.ask(server, "GET", "/model_info")
    _check_kind(pool.owner, server, info, expected)
    _check_version(pool.owner, server, str(info.get("weight_version")), expected)
    settings = await _settings(pool, server)
    if expected.hidden:
        await _look_for_plugin(pool, server, expected)
    _check_settings(pool.owner, server, settings, expected)
    if expected.checksum is not None:
        await _check_checksum(pool, server, expected)
    served = await _outputs(pool, server, settings, expected)
    try:
        return await expected.proof.compare(pool.owner, server.url, served, expected.tolerance)
    except UnprovedError as trouble:
        held = await checksum(pool, server)
        raise TeacherError(
            f"{pool.owner}: nothing proves that hidden states of {server.url} are of the published model,"
            f" since {trouble}; set signal to topk, or, where you know that it serves the right weights,"
            f" checksum to {held}."
        ) from None


async def _look_for_plugin(pool: HTTPPool, server: Server, expected: ExpectedSGLang) -> None:
    expected.plugins.pop(server.url, None)
    plugin = await plugin_of(pool, server)
    if plugin is not None:
        expected.plugins[server.url] = plugin
    elif not expected.warned:
        expected.warned = True
        _log.warning(
            "%s: %s gives hidden states as JSON numbers, the prompt's too, which takes many times the bytes"
            " and the time; start it with the folder opd/served/plugin on its PYTHONPATH",
            pool.owner,
            server.url,
        )


async def hidden_states(
    pool: HTTPPool,
    server: Server,
    question: Question,
    expected: ExpectedSGLang,
    check: Callable[[dict[str, Any]], None],
    *,
    logprobs: bool = False,
) -> np.ndarray:
    """[count, D] float32: last hidden states at the positions of `question`, by one attempt at one server.

    Args:
        check: Raises for an answer whose hidden states need not be looked at.
        logprobs: Ask for the tokens' log-probabilities, too.

    Raises `UnavailableError`, `RefusedError` and what `check` raises.
    """
    head, plugin = expected.head, expected.plugins.get(server.url)
    if plugin is None:
        body = hidden_body(question)
        answer = await pool.ask(server, "POST", "/generate", body, most_bytes(body, head.width))
        check(answer)
        rows = hidden_of(answer, question, head.width, head.rows)
    else:
        with HiddenSegment(plugin, question, head.width) as segment:
            body = segment.body(logprobs=logprobs)
            answer = await pool.ask(server, "POST", "/generate", body, most_answered(body))
            check(answer)
            rows = await segment.rows(pool, server, answer)
    if says_nothing(rows, question.tokens[:-1]):
        raise lost_weights(pool.owner, server.url, "all hidden states of an answer are the same")
    return rows


async def checksum(pool: HTTPPool, server: Server) -> str:
    """The server's checksum over all weights on all of its ranks."""
    answer = await pool.ask(server, "POST", "/weights_checker", {"action": "checksum"})
    told = [rank.get("per_gpu_checksum") for rank in ranks_of(answer)]
    if not told or None in told:
        raise UnavailableError(f"{server.url}/weights_checker tells no checksum", answered=True)
    return "+".join(map(str, told))


def _check_kind(owner: str, server: Server, info: dict[str, Any], expected: ExpectedSGLang) -> None:
    for key in ("architectures", "model_type"):
        there, here = info.get(key), expected.config.get(key)
        if there and here and there != here:
            raise TeacherError(
                f"{owner}: {server.url} serves {info.get('model_path')} with {key} {there}, the recipe's"
                f" teacher has {here}; check which model is behind the URL."
            )


def _check_version(owner: str, server: Server, version: str, expected: ExpectedSGLang) -> None:
    if expected.weight_version is None:
        expected.weight_version = version
    if version != expected.weight_version:
        raise TeacherError(
            f"{owner}: {server.url} holds weight version {version}, but {expected.weight_version} is due;"
            " serve the version the run began with."
        )


def check_versions(owner: str, answer: dict[str, Any], expected: ExpectedSGLang) -> None:
    """`TeacherError` unless the answer was computed with the expected weights alone."""
    found = versions_of(answer)
    if found != {expected.weight_version}:
        raise TeacherError(
            f"{owner}: an answer was computed with weight version {', '.join(sorted(found))}, but"
            f" {expected.weight_version} is due; serve the version the run began with and --resume."
        )


async def _settings(pool: HTTPPool, server: Server) -> dict[str, Any]:
    try:
        return await pool.ask(server, "GET", "/server_info") or {}
    except RefusedError:
        return {}  # a router passes scoring on but not this


def _check_settings(owner: str, server: Server, settings: dict[str, Any], expected: ExpectedSGLang) -> None:
    if expected.hidden and settings.get("enable_return_hidden_states") is False:
        raise TeacherError(
            f"{owner}: {server.url} returns no hidden states; start it with --enable-return-hidden-states, or"
            " set the server's signal to topk or sampled."
        )
    with decoding(lambda cause: UnavailableError(f"{server.url}/server_info: {cause}", answered=True)):
        most = most_tokens(settings)
        chunk = int(settings.get("chunked_prefill_size") or 0)
    if most is not None:
        longest = most - SGLangTeacherConfig.kept
        expected.longest = min(longest, expected.longest or longest)
    if chunk > 0 and server.url not in expected.plugins:
        expected.chunk = min(chunk, expected.chunk or chunk)
    if settings and settings.get("dtype") != "float32":
        expected.tolerance = HALF


async def _check_checksum(pool: HTTPPool, server: Server, expected: ExpectedSGLang) -> None:
    held = await checksum(pool, server)
    if held != expected.checksum:
        raise TeacherError(
            f"{pool.owner}: the weights of {server.url} have checksum {held}, the recipe says"
            f" {expected.checksum}; serve the right weights or correct the recipe."
        )


async def _outputs(
    pool: HTTPPool, server: Server, settings: dict[str, Any], expected: ExpectedSGLang
) -> np.ndarray:
    """The probe's log-probabilities: what is made of hidden states where these are asked for, else what the
    server says, compared with each other where it can be done.
    """
    if not expected.hidden and (expected.proof.proves or not settings.get("enable_return_hidden_states")):
        body = logprob_body(Question("probe", PROBE, 0))
        answer = await pool.ask(server, "POST", "/generate", body, most_bytes(body))
        return logprobs_of(answer, PROBE, 0, expected.head.rows)
    told: list[np.ndarray] = []

    def check(answer: dict[str, Any]) -> None:
        told.append(logprobs_of(answer, PROBE[:-1], 0, expected.head.rows))
        check_width(pool.owner, server, answer, expected.head.width)

    question = Question("probe", PROBE, 0)
    rows = await hidden_states(pool, server, question, expected, check, logprobs=True)
    if expected.rebuild is None:
        return told[0]
    rebuilt = await asyncio.to_thread(expected.rebuild, rows, PROBE[1:])
    who, due = f"{pool.owner}: {server.url}", rebuilt[: len(told[0])]
    compare(who, told[0], due, expected.tolerance, "the published head gives")
    return rebuilt


def check_width(owner: str, server: Server, answer: dict[str, Any], width: int) -> None:
    """`TeacherError` if the hidden states have another width than the head."""
    with decoding(lambda cause: UnavailableError(f"{server.url}: hidden states, {cause}", answered=True)):
        found = width_of(answer)
        if found is None:
            states = answer["meta_info"].get("hidden_states") or [[[]]]
            found = len(states[0][0]) if isinstance(states[0][0], list) else len(states[0])
    if found != width:
        raise TeacherError(
            f"{owner}: {server.url} returns hidden states of width {found}, the published head takes {width};"
            " check which model is behind the URL."
        )


def expected_of(
    model: PublishedModel | Mapping[str, Any],
    settings: SGLangTeacherConfig,
    read: Read | None,
    load: Callable[[], Head] | None = None,
) -> ExpectedSGLang:
    """What the servers of a teacher must be: the published `model`, or the one of a configuration, whose head
    `load` gives. `read`: the proof, which a checksum takes the place of.
    """
    if isinstance(model, PublishedModel):
        head = model.manifest.head
        described, shape = model.manifest.config, HeadShape(head.vocabulary, head.hidden)
        load = head_of(model)
    else:
        text = model.get("text_config", model)
        described, shape = model, HeadShape(text["vocab_size"], text["hidden_size"])
    hidden, known = settings.signal == "hidden", settings.checksum is not None
    proof = WeightProof(None if known else read, needed=hidden)
    rebuild = None if load is None else rebuild_with(load)
    return ExpectedSGLang(
        described, shape, hidden, rebuild, settings.weight_version, settings.checksum, proof
    )


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
