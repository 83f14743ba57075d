"""A teacher behind HTTP: SGLang servers score the student's tokens, the published head stays here.

Every server is asked whether it has the right model before it works, and again after it was away.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.config import Recipe, TopKKL
from opd.config.teachers import ServerConfig, SGLangTeacherConfig
from opd.errors import ConfigError, OpdError, TeacherError
from opd.foreign import decoding
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import torch_device, torch_dtype
from opd.models.hf_folder import read_object
from opd.progress import doing
from opd.served.http_pool import (
    SERVERS,
    HTTPPool,
    LoopThread,
    Patience,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
)
from opd.served.sglang_answers import (
    Question,
    check_finished,
    hidden_body,
    hidden_of,
    logprob_body,
    logprobs_of,
    most_bytes,
    ranks_of,
    top_logprobs_of,
    versions_of,
)
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Opening, Placement, TeacherKind
from opd.teachers.skeleton import is_published, read_head, small_files
from opd.types import HiddenStates, Sample, TeacherTargets, TokenLogprobs, TopKLogprobs

if TYPE_CHECKING:
    from opd.storage.shard_cache import ShardCache

EXACT, HALF = 1e-3, 0.25
"""Nats by which log-probabilities of the same model may differ: served in float32, and in anything less."""
PROBE = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7, 2, 3], dtype=np.int32)
"""Ids below 8: every vocabulary has them, also a wrong one."""


Rebuild = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of the head's weight, padding included."""

    rows: int
    width: int


@dataclass(slots=True)
class Expected:
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
    logprobs: np.ndarray | None = None
    """[len(PROBE) - 2] of the probe's tokens."""
    tolerance: float = EXACT
    context: int | None = None
    """Most tokens a request may have on any server."""
    chunk: int | None = None
    """Most tokens a server prefills at once; hidden states of earlier chunks are lost."""


async def admit(pool: HTTPPool, server: Server, expected: Expected) -> None:
    """Raises `TeacherError` if another model or other weights answer, or the server lacks what is needed;
    `UnavailableError` if it does not answer.
    """
    info = await pool.ask(server, "GET", "/model_info")
    _check_kind(pool.owner, server, info, expected)
    _check_version(pool.owner, server, str(info.get("weight_version")), expected)
    settings = await _settings(pool, server)
    _check_settings(pool.owner, server, settings, expected)
    if expected.checksum is not None:
        await _check_checksum(pool, server, expected)
    await _check_outputs(pool, server, settings, expected)


async def checksum(pool: HTTPPool, server: Server) -> str:
    """The server's checksum over all weights on all of its ranks."""
    answer = await pool.ask(server, "POST", "/weights_checker", {"action": "checksum"})
    return "+".join(str(rank.get("per_gpu_checksum")) for rank in ranks_of(answer))


def _check_kind(owner: str, server: Server, info: dict[str, Any], expected: Expected) -> None:
    for key in ("architectures", "model_type"):
        there, here = info.get(key), expected.config.get(key)
        if there and here and there != here:
            raise TeacherError(
                f"{owner}: {server.url} serves {info.get('model_path')} with {key} {there}, the recipe's"
                f" teacher has {here}; check which model is behind the URL."
            )


def _check_version(owner: str, server: Server, version: str, expected: Expected) -> None:
    if expected.weight_version is None:
        expected.weight_version = version
    if version != expected.weight_version:
        raise TeacherError(
            f"{owner}: {server.url} holds weight version {version}, but {expected.weight_version} is due;"
            " serve the version the run began with."
        )


def check_versions(owner: str, answer: dict[str, Any], expected: Expected) -> None:
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


def _check_settings(owner: str, server: Server, settings: dict[str, Any], expected: Expected) -> None:
    if expected.hidden and settings.get("enable_return_hidden_states") is False:
        raise TeacherError(
            f"{owner}: {server.url} returns no hidden states; start it with --enable-return-hidden-states, or"
            " set the server's signal to topk or sampled."
        )
    limits = [settings.get("context_length"), settings.get("max_total_num_tokens")]
    with decoding(lambda cause: UnavailableError(f"{server.url}/server_info: {cause}", answered=True)):
        known = [int(limit) for limit in (*limits, expected.context) if limit]
        chunk = int(settings.get("chunked_prefill_size") or 0)
    expected.context = min(known, default=None)
    if chunk > 0:
        expected.chunk = min(chunk, expected.chunk or chunk)
    if settings and settings.get("dtype") != "float32":
        expected.tolerance = HALF


async def _check_checksum(pool: HTTPPool, server: Server, expected: Expected) -> None:
    held = await checksum(pool, server)
    if held != expected.checksum:
        raise TeacherError(
            f"{pool.owner}: the weights of {server.url} have checksum {held}, the recipe says"
            f" {expected.checksum}; serve the right weights or correct the recipe."
        )


async def _check_outputs(
    pool: HTTPPool, server: Server, settings: dict[str, Any], expected: Expected
) -> None:
    """The probe's log-probabilities: rebuilt by the published head, and those of the first server.

    A server without hidden states can only be compared with the first one.
    """
    head = expected.head
    question = Question("probe", PROBE, 0)
    if expected.hidden or settings.get("enable_return_hidden_states"):
        body = hidden_body(question)
        answer = await pool.ask(server, "POST", "/generate", body, most_bytes(body, head.width))
        served = logprobs_of(answer, PROBE[:-1], 0, head.rows)
        check_width(pool.owner, server, answer, head.width)
        if expected.logprobs is None and expected.rebuild is not None:
            rows = hidden_of(answer, question, head.width, head.rows)[:-1]
            rebuilt = await asyncio.to_thread(expected.rebuild, rows, PROBE[1:-1])
            _compare(pool.owner, server, served, rebuilt, expected.tolerance, "the published head gives")
    else:
        body = logprob_body(Question("probe", PROBE[:-1], 0))
        answer = await pool.ask(server, "POST", "/generate", body, most_bytes(body))
        served = logprobs_of(answer, PROBE[:-1], 0, head.rows)
    if expected.logprobs is None:
        expected.logprobs = served
    _compare(pool.owner, server, served, expected.logprobs, expected.tolerance, "the first server gave")


def check_width(owner: str, server: Server, answer: dict[str, Any], width: int) -> None:
    """`TeacherError` if the hidden states have another width than the head."""
    with decoding(lambda cause: UnavailableError(f"{server.url}: hidden states, {cause}", answered=True)):
        states = answer["meta_info"].get("hidden_states") or [[[]]]
        found = len(states[0][0]) if isinstance(states[0][0], list) else len(states[0])
    if found != width:
        raise TeacherError(
            f"{owner}: {server.url} returns hidden states of width {found}, the published head takes {width};"
            " check which model is behind the URL."
        )


def _compare(
    owner: str, server: Server, served: np.ndarray, due: np.ndarray, tolerance: float, source: str
) -> None:
    apart = float(np.abs(served - due).max())
    if not apart <= tolerance:
        raise TeacherError(
            f"{owner}: {server.url} serves another model, vocabulary or other weights than the recipe's: its"
            f" log-probabilities differ by up to {apart:.3g} nats from what {source}."
        )


def expected_of(model: PublishedModel | Mapping[str, Any], settings: SGLangTeacherConfig) -> Expected:
    """What the servers of a teacher must be: the published `model`, or the one of a configuration."""
    if isinstance(model, PublishedModel):
        head = model.manifest.head
        described, shape = model.manifest.config, HeadShape(head.vocabulary, head.hidden)
        rebuild = rebuild_with(model)
    else:
        text = model.get("text_config", model)
        described, shape = model, HeadShape(text["vocab_size"], text["hidden_size"])
        rebuild = None
    hidden = settings.signal == "hidden"
    return Expected(described, shape, hidden, rebuild, settings.weight_version, settings.checksum)


def rebuild_with(published: PublishedModel) -> Rebuild:
    """By the head of `published`, over all of its rows, as a server has them; read at each call."""

    def rebuild(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        head = read_head(published, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            hidden, tokens = torch.from_numpy(rows), torch.from_numpy(ids.astype(np.int64))
            return linear_logprobs(hidden, head, tokens).float().numpy()

    return rebuild


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loss needs of a served teacher beside the kind of its signal."""

    temperature: float = 1.0
    """Sampling temperature, at which the loss compares."""
    top_k: int = 64
    """Support of the signal `topk`."""


def pool_options(config: ServerConfig) -> PoolOptions:
    """The client's settings of a recipe."""
    patience = Patience(
        timeout=config.timeout,
        connect_timeout=config.connect_timeout,
        unreachable=config.patience,
        retry=replace(SERVERS, attempts=config.attempts),
        hedge_after=config.hedge_after,
    )
    return PoolOptions(config.urls, config.api_key_env, config.max_in_flight_tokens, patience)


def check_temperature(name: str, signal: str, temperature: float) -> None:
    """`ConfigError` if servers cannot give `signal` at `temperature`: they score at 1 and say nothing."""
    if signal != "hidden" and temperature != 1.0:
        raise ConfigError(
            f"teacher {name}: servers give log-probabilities at temperature 1 only, but rollout.temperature"
            f" is {temperature:g}; set teachers.{name}.signal to hidden, or the temperature to 1."
        )


class SGLangTeacher:
    """Implements `opd.protocols.Teacher` on servers of a published model.

    Every sample is one request, identified here: whatever happens on the way it is scored once, or the call
    raises. Answers are checked for length, order, finite numbers and the version of the weights.

    Args:
        name: How recipes and metrics call it.
        url: What `opd publish` wrote of the model the servers run: its head, and what it must be.
        config: Servers and signal.
        asked: Temperature and size of a top-k support.
        placement: Dtype and device of hidden states and head, and the tokenizer's vocabulary.
        cache: This node's copies of what is read from object stores: the head.

    Raises `ConfigError` for a signal that cannot be had at the temperature, or for a padded vocabulary.
    """

    def __init__(
        self,
        name: str,
        url: str,
        config: SGLangTeacherConfig,
        *,
        asked: Asked,
        placement: Placement,
        cache: ShardCache | None = None,
    ) -> None:
        self.name, self.url = name, url
        self.signal, self._asked, self._placement = config.signal, asked, placement
        check_temperature(name, config.signal, asked.temperature)
        self.published = PublishedModel.open(url, cache=cache)
        self._head = self.published.manifest.head
        rows = self._head.vocabulary
        self._vocabulary = placement.vocabulary or rows
        if self.signal != "hidden" and rows != self._vocabulary:
            raise ConfigError(
                f"teacher {name}: its head has {rows} rows for {self._vocabulary} tokens, and a server's"
                f" log-probabilities count the padding; set teachers.{name}.signal to hidden."
            )
        self._expected = expected_of(self.published, config)
        self.pool = HTTPPool(f"teacher {name}", pool_options(config), TeacherError, self._admit)
        self._begun: dict[str, tuple[Question, Future[Any]]] = {}

    @cached_property
    def _loop(self) -> LoopThread:
        return LoopThread(f"teacher-{self.name}")

    @property
    def digest(self) -> str:
        """Identity of the published weights and of the version the servers report. Asks them."""
        self.connect()
        named = f"{self.published.manifest.digest} served as {self._expected.weight_version}"
        return hashlib.sha256(named.encode()).hexdigest()

    @property
    def bytes_read(self) -> int:
        """Bytes this process has read from the store for it."""
        return self.published.bytes_read

    @property
    def cached_bytes(self) -> int:
        """Bytes of heads that came from the node's copies."""
        return self.published.cached_bytes

    def connect(self) -> None:
        """Check one server now. Raises `TeacherError` if none answers or the wrong model does."""
        if self._expected.logprobs is None:
            self._loop.run(self._ask_limits())

    def begin(self, samples: Sequence[Sample]) -> None:
        """Ask for the scores of `samples` now; `score` waits for them. A second call changes nothing."""
        for sample in samples:
            if len(sample.response_ids):
                self._future(sample)

    def score(self, samples: Sequence[Sample]) -> TeacherTargets:
        """Targets of the response tokens of `samples`, in order: `HiddenStates` [N, D], `TokenLogprobs` [N]
        or `TopKLogprobs` [N, K], as the signal says.

        Raises `TeacherError` if a sample cannot be scored.
        """
        futures = [self._future(sample) for sample in samples if len(sample.response_ids)]
        try:
            with doing(self._waiting):
                wait(futures, return_when=FIRST_EXCEPTION)  # whichever it is: the others may wait for long
            failed = next((f for f in futures if f.done() and f.exception() is not None), None)
            found = [future.result() for future in ([failed] if failed else futures)]
        except BaseException:
            for _, future in self._begun.values():
                future.cancel()
            raise
        finally:
            for sample in samples:
                self._begun.pop(sample.uid, None)
        return self._targets(found)

    def load_head(self) -> Head:
        """The published head, read now. The caller's to keep and to drop."""
        place = self._placement
        return read_head(
            self.published, torch_dtype(place.dtype), torch_device(place.device), place.vocabulary
        )

    def close(self) -> None:
        """Give up what still runs, close the connections and let the store go."""
        if "_loop" in self.__dict__:
            self._loop.run(self.pool.close())
            self._loop.close()
        self.published.close()

    def _waiting(self) -> str:
        trouble = self.pool.trouble
        return f"waiting for teacher {self.name}{f' ({trouble})' if trouble else ''}"

    def _future(self, sample: Sample) -> Future[Any]:
        question = Question(sample.uid, sample.token_ids.astype(np.int32), len(sample.prompt_ids) - 1)
        begun = self._begun.get(sample.uid)
        if begun is not None and np.array_equal(begun[0].tokens, question.tokens):
            return begun[1]
        if begun is not None:
            begun[1].cancel()
        self._check_question(question)
        future = self._loop.start(self._score(question))
        self._begun[sample.uid] = question, future
        return future

    async def _admit(self, server: Server) -> None:
        await admit(self.pool, server, self._expected)

    async def _score(self, question: Question) -> Any:
        if self._expected.logprobs is None:
            # One server must have told its limits before anything long is sent.
            await self._ask_limits()
        self._check_length(question)
        if self.signal == "hidden":
            width, rows = self._head.hidden, self._head.vocabulary
            return await self._ask(
                question, hidden_body(question), lambda answer: hidden_of(answer, question, width, rows)
            )
        top_k = min(self._asked.top_k, self._vocabulary) if self.signal == "topk" else 0
        return await self._ask(
            question, logprob_body(question, top_k), lambda answer: self._logprobs(answer, question, top_k)
        )

    async def _ask(self, question: Question, body: dict[str, Any], read: Any) -> Any:
        def check(answer: dict[str, Any]) -> Any:
            check_finished(answer)
            check_versions(self.pool.owner, answer, self._expected)
            return read(answer)

        return await self.pool.post(
            "/generate", body, len(question.tokens), check, most_bytes(body, self._head.hidden)
        )

    async def _ask_limits(self) -> None:
        question = Question("limits", np.array([1, 2], dtype=np.int32), 0)
        await self._ask(question, logprob_body(question), lambda answer: None)

    def _logprobs(self, answer: dict[str, Any], question: Question, top_k: int) -> Any:
        sampled = logprobs_of(answer, question.tokens, question.start, self._head.vocabulary)
        if not top_k:
            return sampled
        return *top_logprobs_of(answer, question.count, top_k, self._vocabulary), sampled

    def _check_question(self, question: Question) -> None:
        """An id outside the vocabulary may end a server: it is never sent."""
        tokens = question.tokens
        if question.start < 0:
            raise TeacherError(f"sample {question.uid} has no prompt; every prompt needs at least one token.")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            outside = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise TeacherError(
                f"sample {question.uid} holds token id {outside}, outside the vocabulary of"
                f" {self._vocabulary} tokens of teacher {self.name}; use a teacher with the student's"
                " tokenizer."
            )

    def _check_length(self, question: Question) -> None:
        length, limit = len(question.tokens), self._expected.context
        if limit is not None and length > limit:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {self.name} take {limit};"
                " start them with a larger --context-length."
            )
        chunk = self._expected.chunk
        if self.signal == "hidden" and chunk is not None and length - 1 > chunk:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {self.name} prefill"
                f" {chunk} at once and lose the hidden states before; start them with --chunked-prefill-size"
                " -1."
            )

    def _targets(self, found: list[Any]) -> TeacherTargets:
        place = self._placement
        device = torch_device(place.device)
        if self.signal == "hidden":
            empty = np.zeros((0, self._head.hidden), dtype=np.float32)
            rows = torch.from_numpy(np.concatenate([empty, *found]))
            return HiddenStates(rows.to(device, torch_dtype(place.dtype)))
        none = np.zeros(0, dtype=np.float32)
        if self.signal == "sampled":
            return TokenLogprobs(torch.from_numpy(np.concatenate([none, *found])).to(device))
        width = min(self._asked.top_k, self._vocabulary)
        ids = np.concatenate([np.zeros((0, width), dtype=np.int64), *(ids for ids, _, _ in found)])
        logprobs = np.concatenate([none.reshape(0, 1).repeat(width, 1), *(values for _, values, _ in found)])
        sampled = np.concatenate([none, *(own for _, _, own in found)])
        return TopKLogprobs(*(torch.from_numpy(part).to(device) for part in (ids, logprobs, sampled)))


def check_signal(name: str, settings: SGLangTeacherConfig, recipe: Recipe) -> None:
    """`ConfigError` if the loss needs more than the servers of teacher `name` are asked for."""
    distill, signals = recipe.distill, ("sampled", "topk", "hidden")
    needed = "hidden" if distill.mixture == "geometric" else distill.loss.signal
    if signals.index(settings.signal) < signals.index(needed):
        what = f"distill.loss {distill.loss.type} with mixture {distill.mixture}"
        raise ConfigError(
            f"teachers.{name}.signal is {settings.signal}, which is too little for {what}; set it to hidden,"
            " or choose another loss."
        )


@contextmanager
def _open(
    teachers: Mapping[str, SGLangTeacherConfig], opening: Opening
) -> Iterator[dict[str, SGLangTeacher]]:
    recipe, found = opening.recipe, {}
    loss = recipe.distill.loss
    asked = Asked(recipe.rollout.temperature, loss.k if isinstance(loss, TopKKL) else 1)
    with ExitStack() as stack:
        for name, settings in teachers.items():
            check_signal(name, settings, recipe)
            url = opening.sources[name]
            found[name] = teacher = SGLangTeacher(
                name, url, settings, asked=asked, placement=opening.placement, cache=opening.cache
            )
            stack.callback(teacher.close)
        yield found


def _check(name: str, settings: SGLangTeacherConfig, recipe: Recipe) -> Iterator[str | OpdError]:
    """Every server: identity, settings, a few scored tokens."""
    check_signal(name, settings, recipe)
    check_temperature(name, settings.signal, recipe.rollout.temperature)
    if settings.servers is not None or settings.path is None:
        yield f"the run starts its servers itself ({settings.servers})"
        return
    pool = HTTPPool(f"teacher {name}", pool_options(settings), TeacherError)
    with ExitStack() as stack:
        if is_published(settings.path):
            published = stack.enter_context(PublishedModel.open(settings.path))
            expected = expected_of(published, settings)
        else:
            with small_files(settings.path) as folder:
                expected = expected_of(read_object(folder / "config.json"), settings)
        loop = LoopThread(f"doctor-{name}")
        stack.callback(loop.close)
        stack.callback(lambda: loop.run(pool.close()))
        for server in pool.servers:
            try:
                yield loop.run(_visit(pool, server, expected))
            except OpdError as error:
                yield error


async def _visit(pool: HTTPPool, server: Server, expected: Expected) -> str:
    try:
        await admit(pool, server, expected)
        held = await checksum(pool, server)
    except UnavailableError as trouble:
        raise TeacherError(f"{pool.owner}: {trouble}; start the server or correct its URL.") from None
    except RefusedError as refusal:
        raise TeacherError(f"{pool.owner}: {refusal}; check its URL and key.") from None
    compared = "outputs match the published head" if expected.rebuild else "outputs as the first server's"
    return f"{server.url}: weight version {expected.weight_version}, checksum {held}, {compared}"


KIND = TeacherKind(_open, _check)
