"""A teacher behind HTTP: vLLM servers give hidden states of the student's tokens or score them, the published
head stays here.

A server says nothing of its weights that could be relied on, so it proves them by its outputs (see
`weight_probe.py`). Every server is asked before it works, and again after it was away.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe, TopKKL
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import VLLMTeacherConfig
from opd.errors import ConfigError, OpdError, TeacherError
from opd.foreign import decoding, whole
from opd.models.hf_folder import read_object
from opd.served.http_client import RefusedError, Server
from opd.served.http_pool import HTTPPool
from opd.served.plugin.opd_hidden_states import DTYPES
from opd.served.sglang_answers import PROBE, Question, says_nothing
from opd.served.vllm_answers import (
    POOL,
    SCORE,
    hidden_body,
    hidden_bytes,
    hidden_of,
    model_of,
    most_bytes,
    scores_of,
    scoring_body,
)
from opd.served.vllm_server import OF_NOTHING, checksums, model_settings, probe, tolerance
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
from opd.teachers.weight_probe import Read, UnprovedError, WeightProof, by_published, by_source

_POOLING = shlex.join(ServerGroupConfig(type="vllm", arguments=VLLMTeacherConfig.POOLING).words)
_WIDER = 64
"""Of the probe so many times the bytes that are due are read, to say that hidden states are wider."""


@dataclass(slots=True)
class Rows:
    """The hidden states that are due."""

    width: int
    rebuild: Rebuild | None = None
    """`None` before the model is published: then nothing is compared."""
    told: dict[str, str] = field(default_factory=dict)
    """What the servers compute in, by URL; of one that does not tell, float32 holds what any gives."""

    def dtype_of(self, server: Server) -> str:
        """In which `server` is asked for them."""
        return self.told.get(server.url, "float32")


@dataclass(slots=True)
class ExpectedVLLM:
    """What a server must be; what nothing else says is what the first server was."""

    vocabulary: int
    rows: Rows | None = None
    """`None`: log-probabilities are."""
    top_k: int = 0
    """How many of the most likely tokens are asked for; 0 asks for the given ones alone."""
    proof: WeightProof = field(default_factory=WeightProof)
    checksum: str | None = None
    context: int | None = None
    """Most tokens a request may have on any server, the one that is written with them."""
    model: str = ""
    """What the first server calls its model."""


async def admit(pool: HTTPPool, server: Server, expected: ExpectedVLLM) -> float | None:
    """The most by which the probe's log-probabilities differ, in nats; `None` where there are none to compare
    with.

    Raises `TeacherError` if another model or other weights answer, or the server lacks what is needed;
    `UnavailableError` if it does not answer.
    """
    model, limit = model_of(await pool.ask(server, "GET", "/v1/models"))
    expected.model = expected.model or model
    expected.context = min((known for known in (limit, expected.context) if known), default=None)
    if expected.checksum is not None:
        held = await checksum(pool, server)
        if held != expected.checksum:
            raise TeacherError(
                f"{pool.owner}: the weights of {server.url} have checksum {held or 'none that it tells'}, the"
                f" recipe says {expected.checksum}; serve the right weights, with VLLM_SERVER_DEV_MODE=1, or"
                " take what `opd doctor` prints (a server that pools leaves out the head)."
            )
    settings = await model_settings(pool, server)
    served = await _probe(pool, server, expected, settings)
    if served is None:
        return None
    try:
        return await expected.proof.compare(pool.owner, server.url, served, tolerance(settings))
    except UnprovedError as trouble:
        raise TeacherError(
            f"{pool.owner}: nothing proves that hidden states of its servers are of the published model,"
            f" since {trouble}; set signal to topk, or give checksum."
        ) from None


async def checksum(pool: HTTPPool, server: Server) -> str | None:
    """The server's checksum over all weights on all of its ranks; `None` if it tells none: it does in the
    developers' mode alone, and not of weights that it has packed, as it does on a CPU.
    """
    found = await checksums(pool, server)
    if not found or OF_NOTHING in found.values():
        return None
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


async def _probe(
    pool: HTTPPool, server: Server, expected: ExpectedVLLM, settings: dict[str, Any] | None
) -> np.ndarray | None:
    top_k, rows = expected.top_k, expected.rows
    try:
        if rows is None:
            return await probe(pool, server, top_k, expected.vocabulary)
        told = str((settings or {}).get("dtype")).removeprefix("torch.")
        rows.told[server.url] = told if told in DTYPES else "float32"
        found = await hidden_states(pool, server, Question("probe", PROBE, 0), rows, _WIDER)
        return None if rows.rebuild is None else await asyncio.to_thread(rows.rebuild, found, PROBE[1:])
    except RefusedError as refusal:
        if rows is not None:
            raise TeacherError(
                f"{pool.owner}: {server.url} gives no hidden states ({refusal}); start it with {_POOLING}, or"
                " set signal to topk, and check its URL and key."
            ) from None
        raise TeacherError(
            f"{pool.owner}: {server.url} does not score a prompt with its {top_k} most likely tokens"
            f" ({refusal}); start it with --max-logprobs {max(top_k, 1)} or more, and without --runner"
            " pooling, and check its URL and key."
        ) from None


async def hidden_states(
    pool: HTTPPool, server: Server, question: Question, rows: Rows, wider: int = 1
) -> np.ndarray:
    """[count, D] float32: last hidden states at the positions of `question`, by one attempt at one server, of
    whose answer `wider` times what is due is read.

    Raises `UnavailableError`, `RefusedError`, and `TeacherError` for another width or weights that are lost.
    """
    dtype = rows.dtype_of(server)
    body, due = hidden_body(question, dtype), hidden_bytes(question, rows.width, dtype)
    _, content = await pool.fetch(server, "POST", POOL, body, wider * due)
    found, odd = divmod(len(content), due // rows.width)
    if wider > 1 and 0 < found != rows.width and not odd:
        raise TeacherError(
            f"{pool.owner}: {server.url} returns hidden states of width {found}, the published head takes"
            f" {rows.width}; check which model is behind the URL."
        )

    def checked() -> tuple[np.ndarray, bool]:
        states = hidden_of(content, question, rows.width, dtype)
        return states, says_nothing(states, question.tokens[:-1])

    states, nothing = await asyncio.to_thread(checked)  # some megabytes: other answers go on
    if nothing:
        raise lost_weights(pool.owner, server.url, "all hidden states of an answer are the same")
    return states


def rows_of(published: PublishedModel) -> Rows:
    """Of the servers of a published model."""
    return Rows(published.manifest.head.hidden, rebuild_with(head_of(published)))


def _rows_described(path: str) -> Rows:
    """Of the servers of a model that is not published yet. Raises `ConfigError`."""
    with small_files(path) as folder:
        config = read_object(folder / "config.json")
    with decoding(lambda cause: ConfigError(f"{path}/config.json does not say hidden_size ({cause}).")):
        width = whole(config.get("text_config", config)["hidden_size"], 1, 2**31, "hidden_size")
    here = Path(path).is_dir()
    return Rows(width, rebuild_with(lambda: UnpublishedWeights(Path(path)).head()) if here else None)


class VLLMTeacher(ServedTeacher):
    """See `ServedTeacher`. Answers are checked for length, order and finite numbers."""

    def __init__(self, name: str, url: str, config: VLLMTeacherConfig, **others: Any) -> None:
        """See `ServedTeacher`."""
        super().__init__(name, url, config, **others)
        top_k = min(self._asked.top_k, self._vocabulary) if self.signal == "topk" else 0
        rows = rows_of(self.published) if self.signal == "hidden" else None
        read = by_published(url, others.get("cache")) if self._asked.main else None
        self._expected = ExpectedVLLM(self._vocabulary, rows, top_k, _proof(read, config), config.checksum)

    @property
    def served_as(self) -> str:
        """No version: the outputs prove the published weights."""
        return "vllm"

    def connect(self) -> None:
        """Check one server now. Raises `TeacherError` if none answers or the wrong model does."""
        if self._expected.proof.logprobs is None:
            self._run(self._limits())

    async def _admit(self, server: Server) -> None:
        await admit(self.pool, server, self._expected)

    async def _limits(self) -> None:
        """One server must have told its limits before anything long is sent."""
        await self._ask(Question("limits", np.array([1, 2], dtype=np.int32), 0))

    async def _score(self, question: Question) -> Any:
        if self._expected.proof.logprobs is None:
            await self._limits()
        length, limit = len(question.tokens), self._expected.context
        # Of hidden states the last token is not asked for; with scores a server writes one more.
        longest = None if limit is None else limit + (1 if self.signal == "hidden" else -1)
        if longest is not None and length > longest:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {self.name} take"
                f" {longest}; start them with a larger --max-model-len."
            )
        found = await self._ask(question)
        return found[2] if self.signal == "sampled" else found

    async def _ask(self, question: Question) -> Any:
        rows, top_k = self._expected.rows, self._expected.top_k
        if rows is not None:
            return await self.pool.call(
                len(question.tokens), lambda server: hidden_states(self.pool, server, question, rows)
            )
        body, most = scoring_body(question, top_k), most_bytes(question, top_k)

        async def attempt(server: Server) -> Any:
            answer = await self.pool.ask(server, "POST", SCORE, body, most)
            # A long sample's answer has some hundred thousand entries: other answers go on.
            return await asyncio.to_thread(scores_of, answer, question, top_k, self._vocabulary)

        return await self.pool.call(len(question.tokens), attempt)


def _proof(read: Read | None, config: VLLMTeacherConfig) -> WeightProof:
    return WeightProof(read, needed=config.signal == "hidden" and config.checksum is None)


def _check(name: str, settings: VLLMTeacherConfig, recipe: Recipe) -> Iterator[str | OpdError]:
    """Every server: identity, settings, a few scored tokens."""

    def prepare(stack: ExitStack) -> Visit:
        assert settings.path is not None
        loss, vocabulary, rows = recipe.distill.loss, 2**31, None
        hidden = settings.signal == "hidden"
        if is_published(settings.path):
            published = stack.enter_context(PublishedModel.open(settings.path))
            vocabulary = published.manifest.head.vocabulary
            rows = rows_of(published) if hidden else None
        elif hidden:
            rows = _rows_described(settings.path)
        top_k = min(loss.k, vocabulary) if isinstance(loss, TopKKL) and settings.signal == "topk" else 0
        proof = _proof(by_source(settings.path), settings)
        expected = ExpectedVLLM(vocabulary, rows, top_k, proof, settings.checksum)
        return lambda pool, server: _visit(pool, server, expected)

    return visits(name, settings, recipe, prepare)


async def _visit(pool: HTTPPool, server: Server, expected: ExpectedVLLM) -> str:
    apart = await admit(pool, server, expected)
    held = await checksum(pool, server)
    told = "tells no checksum" if held is None else f"checksum {held}"
    return f"{server.url}: {expected.model}, {told}, {expected.proof.said(apart)}"


KIND = TeacherKind(opener(VLLMTeacher), _check)
