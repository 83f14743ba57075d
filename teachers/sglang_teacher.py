"""A teacher behind HTTP: SGLang servers score the student's tokens, the published head stays here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.config import Recipe, TopKKL
from opd.config.teachers import ServerConfig, SGLangTeacherConfig
from opd.errors import ConfigError, OpdError, TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import torch_device, torch_dtype
from opd.models.hf_folder import read_object
from opd.progress import doing
from opd.served.distinct import check_distinct
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
    is_uniform,
    logprob_body,
    logprobs_of,
    most_bytes,
    top_logprobs_of,
)
from opd.served.urls_file import UrlsFile
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Opening, Placement, TeacherKind
from opd.teachers.sglang_admission import (
    Expected,
    admit,
    check_versions,
    checksum,
    expected_of,
    hidden_states,
    lost_weights,
)
from opd.teachers.skeleton import is_published, read_head, small_files
from opd.types import HiddenStates, Sample, TeacherTargets, TokenLogprobs, TopKLogprobs

if TYPE_CHECKING:
    from opd.storage.shard_cache import ShardCache


@dataclass(frozen=True, slots=True)
class Asked:
    """What a loss needs of a served teacher beside the kind of its signal."""

    temperature: float = 1.0
    """Sampling temperature, at which the loss compares."""
    top_k: int = 64
    """Support of the signal `topk`."""


def pool_options(config: ServerConfig, rank: int = 0, ranks: int = 1) -> PoolOptions:
    """The client's settings of a recipe. Of the servers that come later, `rank` of so many gets its share."""
    patience = Patience(
        timeout=config.timeout,
        connect_timeout=config.connect_timeout,
        unreachable=config.patience,
        retry=replace(SERVERS, attempts=config.attempts),
        hedge_after=config.hedge_after,
    )
    options = PoolOptions(config.urls, config.api_key_env, config.max_in_flight_tokens, patience)
    if config.urls_file is None:
        return options
    return replace(options, more=UrlsFile(config.urls_file, config.urls, rank, ranks).fresh)


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
                f" {chunk} at once and lose the hidden states before; start them with the plug-in for hidden"
                " states (opd/served/plugin on their PYTHONPATH), or with --chunked-prefill-size -1."
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
            check_distinct({f"teachers.{name}.urls": pool_options(settings)}, TeacherError)
            url = opening.sources[name]
            found[name] = teacher = SGLangTeacher(
                name, url, settings, asked=asked, placement=opening.placement, cache=opening.cache
            )
            stack.callback(teacher.close)
            given_up = partial(opening.given_up, settings.urls)
            teacher.pool.options = replace(teacher.pool.options, given_up=given_up)
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
    plugin = expected.plugins.get(server.url)
    way = "as JSON" if plugin is None else "over HTTP" if plugin.folder is None else "through shared memory"
    hidden = f", hidden states {way}" if expected.hidden else ""
    compared = "outputs match the published head" if expected.rebuild else "outputs as the first server's"
    return f"{server.url}: weight version {expected.weight_version}, checksum {held}, {compared}{hidden}"


KIND = TeacherKind(_open, _check)
