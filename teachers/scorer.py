"""Ask servers for a teacher's scores, and check that each of them serves the teacher's model.

`Scorer` is the common part of all server programs: a server identifies itself, its weights are compared by a
checksum or by a probe, then it scores. A program's own requests are a subclass, in the file of its teacher.

The probe compares a server with the model's own weights, read through once with one layer in memory, on a few
tokens. A right head proves no layers: specialists of one base may share it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from opd.config.teachers import ServedTeacherConfig
from opd.errors import ConfigError, ModelError, TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.models.hf_folder import read_object
from opd.served.http_client import Server
from opd.served.http_pool import HTTPPool
from opd.served.scoring import EXACT, PROBE, Question
from opd.storage.published import PublishedModel
from opd.teachers.hf_reader import HFFolderReader
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.skeleton import is_published, read_head, small_files
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.types import Sample
from opd.untrusted import bounded_integer, convert_decode_errors

_log = logging.getLogger(__name__)

Read = Callable[[], np.ndarray]
"""Returns [len(PROBE) - 1]: log-probabilities of the probe's tokens by weights that are read for it."""


class UnprovedError(Exception):
    """The weights cannot be read layer by layer, so a required proof is missing. The text is the reason."""


@dataclass(slots=True)
class WeightProof:
    """The probe's log-probabilities that every server of a teacher must give."""

    read: Read | None = None
    """Reads them from the model's own weights. `None` compares servers with each other."""
    needed: bool = False
    """Whether comparing servers with each other alone is not enough."""
    logprobs: np.ndarray | None = None
    """The log-probabilities, once known: of weights that were read, or else of the first server."""
    source: str = "the first server gave"
    """Source of the log-probabilities, for messages."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are read."""

    @property
    def has_reference(self) -> bool:
        """Return whether the model's weights are the reference, as far as is known."""
        return self.read is not None

    async def compare(self, owner: str, url: str, served: np.ndarray, most: float) -> float | None:
        """Return the largest difference in nats of the server at `url`, or `None` if it is the first and
        there is nothing else to compare it with.

        Args:
            owner: The teacher, for errors.
            served: [N] log-probabilities of the probe's first scored tokens.
            most: Nats that count as rounding.

        Raises `TeacherError` for other weights, `UnprovedError` if `needed` and they cannot be read.
        """
        async with self._lock:
            if self.logprobs is None and self.read is not None:
                try:
                    self.logprobs = await asyncio.to_thread(self.read)
                    self.source = "the model's own weights give"
                except (ModelError, TeacherError) as trouble:  # an architecture that is not read by layers
                    if self.needed:
                        raise UnprovedError(str(trouble).rstrip(".")) from None
                    self.read = None
                    _log.warning(
                        "%s: its servers are compared with each other alone, since %s", owner, trouble
                    )
            first = self.logprobs is None
            if self.logprobs is None:
                self.logprobs = served
        due = self.logprobs[: len(served)]
        apart = compare_logprobs(f"{owner}: {url}", served[: len(due)], due, most, self.source)
        return None if first else apart


def compare_logprobs(who: str, served: np.ndarray, due: np.ndarray, most: float, source: str) -> float:
    """Return the largest difference of the probe's log-probabilities, in nats. Raises `TeacherError` above
    `most`.

    Args:
        who: The teacher and the server.
        source: Source of the `due` ones, for the message, after "from what".
    """
    apart = float(np.abs(served - due).max())
    if not apart <= most:
        raise TeacherError(
            f"{who} serves another model, vocabulary or other weights than the recipe's: its"
            f" log-probabilities differ by up to {apart:.3g} nats from what {source}; check which model is"
            " behind the URL."
        )
    return apart


def by_published(url: str, cache: Any = None) -> Read:
    """Return a reader of the model published at `url`."""

    def read_logprobs() -> np.ndarray:
        sample = Sample("probe", "probe", "", PROBE[:1], response_ids=PROBE[1:])
        teacher = StreamedTeacher("probe", url, placement=Placement(), stream=LayerStream(cache=cache))
        try:
            return _reference_logprobs(teacher.score([sample]).rows, teacher.load_head())
        finally:
            teacher.close()

    return read_logprobs


def by_folder(folder: str | Path) -> Read:
    """Return a reader of a Hugging Face folder, which the run will publish."""

    def read_logprobs() -> np.ndarray:
        weights = HFFolderReader(Path(folder))
        hidden = weights.hidden_states(torch.from_numpy(PROBE[:-1].astype(np.int64)))
        return _reference_logprobs(hidden, weights.read_head())

    return read_logprobs


def _reference_logprobs(hidden: Tensor, head: Head) -> np.ndarray:
    """Return [N - 1] log-probabilities of the probe's tokens but the first, from `hidden` [N - 1, D]."""
    ids = torch.from_numpy(PROBE[1:].astype(np.int64))
    with torch.no_grad():
        return linear_logprobs(hidden, head, ids).float().numpy()


def by_source(path: str) -> Read | None:
    """Return a reader of the model at `path` as a recipe names it, or `None` if it is not here to be read."""
    if is_published(path):
        return by_published(path)
    return by_folder(path) if Path(path).is_dir() else None


Rebuild = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Log-probabilities [N] float32 of ids [N] from hidden rows [N, D], by the teacher's own head."""


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """The model that the servers of a teacher must serve."""

    config: Mapping[str, Any]
    """Its Hugging Face configuration."""
    rows: int
    """Rows of its head, padding included."""
    width: int
    """Width of its hidden states."""
    rebuild: Rebuild | None = None
    """`None` before the model is here. Hidden states are then compared between servers only."""


def rebuild_with(load: Callable[[], Head]) -> Rebuild:
    """Return a function that uses the head of `load`, over all of its rows, as a server has them. The head is
    read at each call, by one thread at a time.
    """
    reading = threading.Lock()  # servers are admitted concurrently: all their heads would be in memory

    def rebuild_logprobs(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        with reading, torch.no_grad():
            hidden, tokens = torch.from_numpy(rows), torch.from_numpy(ids.astype(np.int64))
            return linear_logprobs(hidden, load(), tokens).float().numpy()

    return rebuild_logprobs


def published_model(published: PublishedModel) -> ExpectedModel:
    """Describe a published model. Its head is read on this CPU when outputs are compared."""
    manifest = published.manifest
    load = partial(read_head, published, torch.float32, torch.device("cpu"))
    return ExpectedModel(manifest.config, manifest.head.vocabulary, manifest.head.hidden, rebuild_with(load))


def named_model(path: str, stack: ExitStack) -> ExpectedModel:
    """Describe the model that a recipe names: published at `path`, a folder, or a name on the Hub. `stack`
    closes open resources. Raises `ConfigError` if its configuration lacks a size.
    """
    if is_published(path):
        return published_model(stack.enter_context(PublishedModel.open(path)))
    with small_files(path) as folder:
        config = read_object(folder / "config.json")
    with convert_decode_errors(
        lambda cause: ConfigError(f"{path}/config.json does not say its sizes ({cause}).")
    ):
        text = config.get("text_config", config)
        rows, width = (bounded_integer(text[key], 1, 2**31, key) for key in ("vocab_size", "hidden_size"))
    is_local = Path(path).is_dir()
    rebuild = rebuild_with(lambda: HFFolderReader(Path(path)).read_head()) if is_local else None
    return ExpectedModel(config, rows, width, rebuild)


class Scorer(ABC):
    """Scores of one teacher by servers of one program.

    Args:
        model: The model they must serve.
        settings: The teacher's entry in the recipe.
        read: The model's own outputs, as the reference for servers. `None` compares servers with each other.
            A checksum in the recipe replaces it.
        top_k: Number of most likely tokens to request. 0 requests the given tokens alone.
        vocabulary: Ids in an answer must be below it.
    """

    checksum_hint: ClassVar[str] = ""
    """Possible causes, besides the weights, of another checksum: ends a sentence."""

    def __init__(
        self,
        model: ExpectedModel,
        settings: ServedTeacherConfig,
        read: Read | None,
        *,
        top_k: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        self.model, self.checksum, self.top_k = model, settings.checksum, top_k
        self.vocabulary = model.rows if vocabulary is None else vocabulary
        self.hidden = settings.signal == "hidden"
        has_checksum = self.checksum is not None
        self.proof = WeightProof(None if has_checksum else read, needed=self.hidden and not has_checksum)
        self.tolerance = EXACT
        """Nats by which outputs may differ: the coarsest server's, because servers are compared, too."""

    @property
    @abstractmethod
    def served_version(self) -> str:
        """The servers' weight version, once one was asked: part of the teacher's digest."""

    @property
    @abstractmethod
    def model_title(self) -> str:
        """The servers' name of their model, for people."""

    @abstractmethod
    async def inspect_server(self, pool: HTTPPool, server: Server) -> float:
        """Read a server's identity and settings. Return the nats by which its outputs may differ.

        Raises `TeacherError` for another model or a missing feature, `UnavailableError` if it is away.
        """

    @abstractmethod
    async def served_checksum(self, pool: HTTPPool, server: Server) -> str | None:
        """Return the server's checksum over all weights on all of its ranks, or `None` if it gives none."""

    @abstractmethod
    async def served_logprobs(self, pool: HTTPPool, server: Server) -> np.ndarray | None:
        """Return [N] float32: the probe's log-probabilities, or `None` if hidden states cannot be rebuilt."""

    @abstractmethod
    async def score_question(self, pool: HTTPPool, server: Server, question: Question) -> Any:
        """Make one attempt at one server. Return [count, D], [count], or ids and log-probabilities [count, K]
        with [count], as the signal says. Raises `UnavailableError`, `RefusedError` and `TeacherError`.
        """

    @abstractmethod
    def longest_sample(self) -> tuple[int | None, str]:
        """Return the most tokens of a sample on every server, `None` if unknown, and how to raise it."""

    def check_length(self, teacher: str, question: Question) -> None:
        """Raise `TeacherError` for a sample that is too long for the servers met so far."""
        length, (most, mend) = len(question.tokens), self.longest_sample()
        if most is not None and length > most:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {teacher} take {most};"
                f" {mend}."
            )

    async def admit_server(self, pool: HTTPPool, server: Server) -> float | None:
        """Check that `server` may be used. Return the largest difference of the probe's log-probabilities, in
        nats, or `None` if there are none to compare with.

        Raises `TeacherError` if another model or other weights answer, or the server lacks a needed feature,
        and `UnavailableError` if it does not answer.
        """
        self.tolerance = max(self.tolerance, await self.inspect_server(pool, server))
        if self.checksum is not None:
            checksum = await self.served_checksum(pool, server)
            if checksum != self.checksum:
                raise TeacherError(
                    f"{pool.owner}: the weights of {server.url} have checksum"
                    f" {checksum or 'none that it tells'}, the recipe says {self.checksum}; serve the right"
                    f" weights or correct the recipe{self.checksum_hint}."
                )
        served = await self.served_logprobs(pool, server)
        if served is None:
            return None
        try:
            return await self.proof.compare(pool.owner, server.url, served, self.tolerance)
        except UnprovedError as trouble:
            reported = await self.served_checksum(pool, server)
            advice = (
                ""
                if reported is None
                else f", or, where you know that it serves the right weights, checksum to {reported}"
            )
            raise TeacherError(
                f"{pool.owner}: nothing proves that hidden states of {server.url} are of the published model,"
                f" since {trouble}; set signal to topk{advice}."
            ) from None

    async def describe_server(self, pool: HTTPPool, server: Server) -> str:
        """Admit `server` and return the result in one sentence."""
        apart = await self.admit_server(pool, server)
        checksum = await self.served_checksum(pool, server)
        checksum_text = "tells no checksum" if checksum is None else f"checksum {checksum}"
        if self.checksum:
            compared = "weights proved by it"
        elif apart is not None:
            compared = f"outputs within {apart:.2g} nats of what {self.proof.source}"
        else:
            compared = "outputs compared with nothing, since it is the first of its servers"
        return f"{server.url}: {self.model_title}, {checksum_text}, {compared}{self.transport_text(server)}"

    def transport_text(self, server: Server) -> str:
        """Return the transport of hidden states, if there are several: the end of a sentence."""
        return ""


def lost_weights(owner: str, url: str, sign: str) -> TeacherError:
    """Return the error for a server that answers as if all were well, such as after sleep and wake."""
    return TeacherError(
        f"{owner}: {url} has lost its weights ({sign}, whatever was asked); start it again, and continue with"
        " --resume."
    )
