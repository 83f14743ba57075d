"""A teacher behind HTTP: vLLM servers give hidden states of the student's tokens or score them, the published
head stays here.

A server says nothing of its weights that could be relied on, so it proves them: the log-probabilities of a
probe must be those that the published weights give, read through once, layer by layer, when the first server
is admitted. Every server is asked before it works, and again after it was away.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from opd.config import Recipe, TopKKL
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import VLLMTeacherConfig
from opd.errors import ConfigError, OpdError, TeacherError
from opd.foreign import decoding, whole
from opd.kernels.ops import linear_logprobs
from opd.models.hf_folder import read_object
from opd.served.http_pool import HTTPPool, RefusedError, Server
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
from opd.teachers.kinds import Placement, TeacherKind
from opd.teachers.layer_stream import LayerStream
from opd.teachers.served_teacher import (
    Rebuild,
    ServedTeacher,
    Visit,
    compare,
    lost_weights,
    opener,
    rebuild_with,
    visits,
)
from opd.teachers.skeleton import is_published, small_files
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.types import Sample

_log = logging.getLogger(__name__)


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
class Expected:
    """What a server must be; what nothing else says is what the first server was."""

    vocabulary: int
    rows: Rows | None = None
    """`None`: log-probabilities are."""
    top_k: int = 0
    """How many of the most likely tokens are asked for; 0 asks for the given ones alone."""
    published: Callable[[], np.ndarray] | None = None
    """[len(PROBE) - 1] of the probe's tokens by the published weights; `None` compares servers with each
    other."""
    checksum: str | None = None
    logprobs: np.ndarray | None = None
    """[len(PROBE) - 1], once known: by the published weights, or else by the first server."""
    source: str = "the first server gave"
    context: int | None = None
    """Most tokens a request may have on any server, the one that is written with them."""
    model: str = ""
    """What the first server calls its model."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the published weights are read."""


async def admit(pool: HTTPPool, server: Server, expected: Expected) -> float | None:
    """The most by which the probe's log-probabilities differ, in nats; `None` before there are any to compare
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
    async with expected.lock:
        if expected.logprobs is None and expected.published is not None:
            await _read_published(pool, expected)
        if expected.logprobs is None:
            expected.logprobs = served
    who, most = f"{pool.owner}: {server.url}", tolerance(settings)
    return compare(who, served, expected.logprobs, most, expected.source)


async def checksum(pool: HTTPPool, server: Server) -> str | None:
    """The server's checksum over all weights on all of its ranks; `None` if it tells none: it does in the
    developers' mode alone, and not of weights that it has packed, as it does on a CPU.
    """
    found = await checksums(pool, server)
    if not found or OF_NOTHING in found.values():
        return None
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


async def _probe(
    pool: HTTPPool, server: Server, expected: Expected, settings: dict[str, Any] | None
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


async def _read_published(pool: HTTPPool, expected: Expected) -> None:
    assert expected.published is not None
    try:
        expected.logprobs = await asyncio.to_thread(expected.published)
        expected.source = "the published weights give"
    except TeacherError as trouble:  # an architecture that is not read layer by layer
        if expected.rows is not None and expected.checksum is None:
            raise TeacherError(
                f"{pool.owner}: nothing proves that hidden states of its servers are of the published model,"
                f" since {str(trouble).rstrip('.')}; set signal to topk, give checksum, or serve it with"
                " SGLang."
            ) from None
        expected.published = None
        _log.warning("%s: its servers are compared with each other alone, since %s", pool.owner, trouble)


def rows_of(published: PublishedModel) -> Rows:
    """Of the servers of a published model."""
    return Rows(published.manifest.head.hidden, rebuild_with(published))


def _rows_described(path: str) -> Rows:
    """Of the servers of a model that is not published yet. Raises `ConfigError`."""
    with small_files(path) as folder:
        config = read_object(folder / "config.json")
    with decoding(lambda cause: ConfigError(f"{path}/config.json does not say hidden_size ({cause}).")):
        return Rows(whole(config.get("text_config", config)["hidden_size"], 1, 2**31, "hidden_size"))


class VLLMTeacher(ServedTeacher):
    """See `ServedTeacher`. Answers are checked for length, order and finite numbers."""

    def __init__(self, name: str, url: str, config: VLLMTeacherConfig, **others: Any) -> None:
        """See `ServedTeacher`."""
        super().__init__(name, url, config, **others)
        top_k = min(self._asked.top_k, self._vocabulary) if self.signal == "topk" else 0
        by_weights = _published(url, others.get("cache")) if self._asked.main else None
        rows = rows_of(self.published) if self.signal == "hidden" else None
        self._expected = Expected(self._vocabulary, rows, top_k, by_weights, config.checksum)

    @property
    def served_as(self) -> str:
        """No version: the outputs prove the published weights."""
        return "vllm"

    def connect(self) -> None:
        """Check one server now. Raises `TeacherError` if none answers or the wrong model does."""
        if self._expected.logprobs is None:
            self._run(self._limits())

    async def _admit(self, server: Server) -> None:
        await admit(self.pool, server, self._expected)

    async def _limits(self) -> None:
        """One server must have told its limits before anything long is sent."""
        await self._ask(Question("limits", np.array([1, 2], dtype=np.int32), 0))

    async def _score(self, question: Question) -> Any:
        if self._expected.logprobs is None:
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


def _published(url: str, cache: Any) -> Callable[[], np.ndarray]:
    """The probe's log-probabilities by the weights that are published at `url`, one layer in memory."""

    def compute() -> np.ndarray:
        sample = Sample("probe", "probe", "", PROBE[:1], response_ids=PROBE[1:])
        teacher = StreamedTeacher("probe", url, placement=Placement(), stream=LayerStream(cache=cache))
        try:
            hidden = teacher.score([sample]).rows
            ids = torch.from_numpy(PROBE[1:].astype(np.int64))
            with torch.no_grad():
                return linear_logprobs(hidden, teacher.load_head(), ids).float().numpy()
        finally:
            teacher.close()

    return compute


def _check(name: str, settings: VLLMTeacherConfig, recipe: Recipe) -> Iterator[str | OpdError]:
    """Every server: identity, settings, a few scored tokens."""

    def prepare(stack: ExitStack) -> Visit:
        assert settings.path is not None
        loss, by_weights, vocabulary, rows = recipe.distill.loss, None, 2**31, None
        hidden = settings.signal == "hidden"
        if is_published(settings.path):
            published = stack.enter_context(PublishedModel.open(settings.path))
            vocabulary, by_weights = published.manifest.head.vocabulary, _published(settings.path, None)
            rows = rows_of(published) if hidden else None
        elif hidden:
            rows = _rows_described(settings.path)
        top_k = min(loss.k, vocabulary) if isinstance(loss, TopKKL) and settings.signal == "topk" else 0
        expected = Expected(vocabulary, rows, top_k, by_weights, settings.checksum)
        return lambda pool, server: _visit(pool, server, expected)

    return visits(name, settings, recipe, prepare)


async def _visit(pool: HTTPPool, server: Server, expected: Expected) -> str:
    apart = await admit(pool, server, expected)
    held = await checksum(pool, server)
    told = "tells no checksum" if held is None else f"checksum {held}"
    compared = f"outputs within {apart or 0.0:.2g} nats of what {expected.source}"
    if apart is None:
        compared = "hidden states as wide as the model's"
    return f"{server.url}: {expected.model}, {told}, {compared}"


KIND = TeacherKind(opener(VLLMTeacher), _check)
