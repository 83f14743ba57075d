"""Score samples by servers of a published model, whose head stays here.

Each sample is requested once and waited for. The `Scorer` of the program knows its requests and the proof of
its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from opd.config import Recipe, TopKKL
from opd.config.rl import GATED
from opd.config.teachers import ServedTeacherConfig, ServerConfig, check_temperature
from opd.errors import ConfigError, OpdError, TeacherError
from opd.kernels.head import Head
from opd.loop_thread import LoopThread
from opd.models.causal_lm import torch_device, torch_dtype
from opd.progress import set_activity
from opd.served.http_client import (
    SERVERS,
    Patience,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
    refusal_advice,
)
from opd.served.http_pool import HTTPPool, UrlsFile, check_distinct
from opd.served.scoring import Question
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement, TeacherKind, TeacherOpening
from opd.teachers.scorer import Scorer, by_published, by_source, named_model, published_model
from opd.teachers.skeleton import read_head
from opd.types import HiddenStates, Sample, TeacherTargets, TokenLogprobs, TopKLogprobs

if TYPE_CHECKING:
    from opd.storage.shard_cache import ShardCache

T = TypeVar("T")
_LOOK = 0.5
"""Seconds between two calls of `check` while waiting for servers."""


@dataclass(frozen=True, slots=True)
class SignalNeeds:
    """Requirements of a loss on a served teacher besides the kind of its signal."""

    temperature: float = 1.0
    """Sampling temperature, at which the loss compares."""
    top_k: int = 64
    """Support of the signal `topk`."""
    main: bool = True
    """Whether this rank, of those with the same servers, compares them with the published weights if that
    needs reading all of these.
    """


def pool_options(config: ServerConfig, rank: int = 0, ranks: int = 1) -> PoolOptions:
    """Return the settings of a recipe's client, which is `rank` of the `ranks` that share the servers."""
    patience = Patience(
        timeout=config.timeout,
        connect_timeout=config.connect_timeout,
        unreachable=config.patience,
        retry=replace(SERVERS, attempts=config.attempts),
        hedge_after=config.hedge_after,
    )
    most = config.max_in_flight_tokens
    options = PoolOptions(config.urls, config.api_key_env, most, patience, rank=rank, ranks=ranks)
    if config.started_group is not None:
        look_at = f"servers.{config.started_group}, and what the server says in logs/servers"
        revive = (
            f"the run starts servers.{config.started_group} again by itself: see in logs/servers why it was"
            " away, raise `patience` if it takes longer to start, and continue with --resume"
        )
        options = replace(options, look_at=look_at, revive=revive, api_key=config.server_key)
    if config.urls_file is None:
        return options
    return replace(options, more=UrlsFile(config.urls_file, config.urls).new_urls)


class ServedTeacher:
    """Implements `opd.protocols.Teacher` on servers of a published model. A subclass names their program.

    Every sample is one request, identified here. It is scored once, whatever happens on the way, or the call
    raises.

    Args:
        name: Its name in recipes and metrics.
        url: Result of `opd publish` for the model the servers run: its head, and its description.
        config: Servers and signal.
        needs: Temperature and size of a top-k support.
        placement: Dtype and device of hidden states and head, and the tokenizer's vocabulary.
        cache: This node's cache of data from object stores: the head.

    Raises `ConfigError` for a signal that the temperature excludes, or for a padded vocabulary.
    """

    scorer_class: ClassVar[type[Scorer]]
    """Scorer for servers of the program."""

    def __init__(
        self,
        name: str,
        url: str,
        config: ServedTeacherConfig,
        *,
        needs: SignalNeeds,
        placement: Placement,
        cache: ShardCache | None = None,
    ) -> None:
        self.name, self.url = name, url
        self.signal, self._needs, self._placement = config.signal, needs, placement
        check_temperature(name, config, needs.temperature)
        self.published = PublishedModel.open(url, cache=cache)
        self._head = self.published.manifest.head
        rows = self._head.vocabulary
        self._vocabulary = placement.vocabulary or rows
        if self.signal != "hidden" and rows != self._vocabulary:
            raise ConfigError(
                f"teacher {name}: its head has {rows} rows for {self._vocabulary} tokens, and a server's"
                f" log-probabilities count the padding; set teachers.{name}.signal to hidden."
            )
        top_k = min(needs.top_k, self._vocabulary) if self.signal == "topk" else 0
        read = by_published(url, cache) if needs.main else None
        model = published_model(self.published)
        self.scorer = self.scorer_class(model, config, read, top_k=top_k, vocabulary=self._vocabulary)
        self.pool = HTTPPool(
            f"teacher {name}", pool_options(config), TeacherError, self._admit_server, watch=True
        )
        self._begun: dict[str, tuple[Question, Future[Any]]] = {}
        self.check: Callable[[], None] = lambda: None
        """See `TeacherOpening`."""
        self.own_turn: Callable[[], AbstractContextManager[None]] | None = None
        """One of the `turns` of `TeacherOpening`, if its servers sleep outside of it."""

    async def _admit_server(self, server: Server) -> None:
        await self.scorer.admit_server(self.pool, server)

    async def _score_question(self, question: Question) -> Any:
        """Return the result of `Scorer.score_question` of the first server that answers well."""
        await self._admit_one()
        self.scorer.check_length(self.name, question)
        return await self.pool.call_server(
            len(question.tokens), lambda server: self.scorer.score_question(self.pool, server, question)
        )

    def connect_server(self) -> None:
        """Check one server now. Raises `TeacherError` if none answers or the wrong model does."""
        future = self._loop.start(self._admit_one())
        try:
            self._wait_all([future])
            future.result()
        except BaseException:
            future.cancel()
            raise

    async def _admit_one(self) -> None:
        """Have one server admitted, which gives its limits, before anything long is sent."""

        async def do_nothing(server: Server) -> None:
            """Do nothing: the server was admitted for this."""

        if self.scorer.proof.logprobs is None:
            await self.pool.call_server(1, do_nothing)

    @cached_property
    def _loop(self) -> LoopThread:
        return LoopThread(f"teacher-{self.name}")

    @property
    def digest(self) -> str:
        """Identity of the published weights and of the version the servers report. Contacts them."""
        self.connect_server()
        identity = f"{self.published.manifest.digest} served as {self.scorer.served_version}"
        return hashlib.sha256(identity.encode()).hexdigest()

    @property
    def bytes_read(self) -> int:
        """Bytes this process has read from the store for it."""
        return self.published.bytes_read

    @property
    def cached_bytes(self) -> int:
        """Bytes of heads that came from the node's cache."""
        return self.published.cached_bytes

    def device_slot(self) -> AbstractContextManager[None] | None:
        """Return a context in which its servers are awake, or `None` if they never sleep. Each server proves
        its weights before it is used. All ranks enter and leave it together.
        """
        return None if self.own_turn is None else self._active_servers(self.own_turn)

    @contextmanager
    def _active_servers(self, turn: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        with turn():
            self._loop.run(self.pool.reset_admission())
            yield

    def begin_scoring(self, samples: Sequence[Sample]) -> None:
        """Request the scores of `samples` now. `score` waits for them. A second call changes nothing."""
        for sample in samples:
            if len(sample.response_ids):
                self._score_future(sample)

    def score(self, samples: Sequence[Sample]) -> TeacherTargets:
        """Return targets of the response tokens of `samples`, in order: `HiddenStates` [N, D],
        `TokenLogprobs` [N] or `TopKLogprobs` [N, K], as the signal says.

        Raises `TeacherError` if a sample cannot be scored, and the errors of `check`.
        """
        futures = [self._score_future(sample) for sample in samples if len(sample.response_ids)]
        try:
            with set_activity(self._waiting_text):
                self._wait_all(futures)
            failed = next((f for f in futures if f.done() and f.exception() is not None), None)
            results = [future.result() for future in ([failed] if failed else futures)]
        except BaseException:
            for _, future in self._begun.values():
                future.cancel()
            raise
        finally:
            for sample in samples:
                self._begun.pop(sample.uid, None)
        return self._build_targets(results)

    def load_head(self) -> Head:
        """Return the published head, read now. The caller keeps and drops it."""
        placement = self._placement
        return read_head(
            self.published, torch_dtype(placement.dtype), torch_device(placement.device), placement.vocabulary
        )

    def close(self) -> None:
        """Cancel running requests, and close the connections and the store."""
        if "_loop" in self.__dict__:
            self._loop.run(self.pool.close())
            self._loop.close()
        self.published.close()

    def _wait_all(self, futures: Sequence[Future[Any]]) -> None:
        """Wait until all are done or one has failed. After a failure the others may take long."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, _LOOK, FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                return
            if pending:
                self.check()

    def _waiting_text(self) -> str:
        trouble = self.pool.server_errors
        return f"waiting for teacher {self.name}{f' ({trouble})' if trouble else ''}"

    def _score_future(self, sample: Sample) -> Future[Any]:
        question = Question(sample.uid, sample.token_ids.astype(np.int32), len(sample.prompt_ids) - 1)
        begun = self._begun.get(sample.uid)
        if begun is not None and np.array_equal(begun[0].tokens, question.tokens):
            return begun[1]
        if begun is not None:
            begun[1].cancel()
        tokens = question.tokens
        if question.start < 0:
            raise TeacherError(f"sample {question.uid} has no prompt; every prompt needs at least one token.")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:  # it may end a server, so it is never sent
            outside = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise TeacherError(
                f"sample {question.uid} holds token id {outside}, outside the vocabulary of"
                f" {self._vocabulary} tokens of teacher {self.name}; use a teacher with the student's"
                " tokenizer."
            )
        future = self._loop.start(self._score_question(question))
        self._begun[sample.uid] = question, future
        return future

    def _build_targets(self, results: list[Any]) -> TeacherTargets:
        placement = self._placement
        device = torch_device(placement.device)
        if self.signal == "hidden":
            empty = np.zeros((0, self._head.hidden), dtype=np.float32)
            rows = torch.from_numpy(np.concatenate([empty, *results]))
            return HiddenStates(rows.to(device, torch_dtype(placement.dtype)))
        none = np.zeros(0, dtype=np.float32)
        if self.signal == "sampled":
            return TokenLogprobs(torch.from_numpy(np.concatenate([none, *results])).to(device))
        width = min(self._needs.top_k, self._vocabulary)
        ids = np.concatenate([np.zeros((0, width), dtype=np.int64), *(ids for ids, _, _ in results)])
        logprobs = np.concatenate(
            [none.reshape(0, 1).repeat(width, 1), *(values for _, values, _ in results)]
        )
        sampled = np.concatenate([none, *(one for _, _, one in results)])
        return TopKLogprobs(*(torch.from_numpy(part).to(device) for part in (ids, logprobs, sampled)))


def check_signal(name: str, settings: ServedTeacherConfig, recipe: Recipe) -> None:
    """Raise `ConfigError` if the loss needs more than the signal of teacher `name`."""
    distill, signals = recipe.distill, ("sampled", "topk", "hidden")
    needed = "hidden" if distill.mixture in ("geometric", *GATED) else distill.loss.signal
    if signals.index(settings.signal) < signals.index(needed):
        loss = f"distill.loss {distill.loss.type} with mixture {distill.mixture}"
        raise ConfigError(
            f"teachers.{name}.signal is {settings.signal}, which is too little for {loss}; set it to"
            f" {needed}, or choose another loss."
        )


def check_own_servers(
    teachers: Mapping[str, ServedTeacherConfig], others: Mapping[str, PoolOptions] | None = None
) -> None:
    """Raise `TeacherError` if URLs of these teachers, or of `others` by the field that names them, lead to
    one server. Teachers of one model may share theirs.
    """
    # Servers of a group that the run starts are distinct, and may be asleep.
    servers = {
        f"teachers.{name}.urls": settings
        for name, settings in teachers.items()
        if settings.started_group is None
    }
    wanted = {where: pool_options(settings) for where, settings in servers.items()}
    models = {where: settings.path for where, settings in servers.items() if settings.path is not None}
    check_distinct({**(others or {}), **wanted}, TeacherError, models)


def kind_served_by(teacher_class: type[ServedTeacher]) -> TeacherKind:
    """Return the kind of teachers on servers of the program of `made`."""

    @contextmanager
    def open_teachers(
        teachers: Mapping[str, ServedTeacherConfig], opening: TeacherOpening
    ) -> Iterator[dict[str, ServedTeacher]]:
        recipe, opened = opening.recipe, {}
        loss = recipe.distill.loss
        main = opening.group is None or dist.get_rank(opening.group) == 0
        needs = SignalNeeds(recipe.rollout.temperature, loss.k if isinstance(loss, TopKKL) else 1, main)
        check_own_servers(teachers)
        with ExitStack() as stack:
            for name, settings in teachers.items():
                check_signal(name, settings, recipe)
                url = opening.sources[name]
                opened[name] = teacher = teacher_class(
                    name, url, settings, needs=needs, placement=opening.placement, cache=opening.cache
                )
                stack.callback(teacher.close)
                given_up = partial(opening.given_up, settings.urls)
                teacher.pool.options = replace(teacher.pool.options, given_up=given_up)
                teacher.check = opening.check
                teacher.own_turn = opening.turns.get(settings.started_group or "")
                if (turn := teacher.device_slot()) is not None:  # sleeping servers are identified later
                    with turn:
                        teacher.connect_server()
            yield opened

    return TeacherKind(open_teachers, partial(_visit_servers, teacher_class))


def _visit_servers(
    teacher_class: type[ServedTeacher], name: str, settings: ServedTeacherConfig, recipe: Recipe
) -> Iterator[str | OpdError]:
    """Visit every server of teacher `name` and yield its identity, settings, and a few scored tokens."""
    check_signal(name, settings, recipe)
    if settings.servers is not None or settings.path is None:
        yield f"the run starts its servers itself ({settings.servers})"
        return
    pool = HTTPPool(f"teacher {name}", pool_options(settings), TeacherError)
    with ExitStack() as stack:
        model, loss = named_model(settings.path, stack), recipe.distill.loss
        top_k = min(loss.k, model.rows) if isinstance(loss, TopKKL) and settings.signal == "topk" else 0
        scorer = teacher_class.scorer_class(model, settings, by_source(settings.path), top_k=top_k)
        loop = LoopThread(f"doctor-{name}")
        stack.callback(loop.close)
        stack.callback(lambda: loop.run(pool.close()))
        for server in pool.servers:
            try:
                yield loop.run(_visit_server(pool, server, scorer))
            except OpdError as error:
                yield error


async def _visit_server(pool: HTTPPool, server: Server, scorer: Scorer) -> str:
    try:
        return await scorer.describe_server(pool, server)
    except UnavailableError as trouble:
        raise TeacherError(f"{pool.owner}: {trouble}; start the server or correct its URL.") from None
    except RefusedError as refusal:
        mend = refusal_advice(refusal, "check its URL and key")
        raise TeacherError(f"{pool.owner}: {refusal}; {mend}.") from None
