"""Ask servers for a teacher's scores, and check that each of them serves the teacher's model.

`Scorer` is what all server programs have in common: a server says who it is, its weights are compared by a
checksum or by a probe, then it is asked. A program's own requests are a subclass, in the file of its
teacher.

The probe is what a model's own weights, read through once with one layer in memory, say of a few tokens. A
head that is right proves no layers: specialists of one base may share it.
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
from opd.foreign import decoding, whole
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.models.hf_folder import read_object
from opd.served.http_client import Server
from opd.served.http_pool import HTTPPool
from opd.served.scoring import EXACT, PROBE, Question
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.skeleton import is_published, read_head, small_files
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.teachers.unpublished import UnpublishedWeights
from opd.types import Sample

_log = logging.getLogger(__name__)

Read = Callable[[], np.ndarray]
"""[len(PROBE) - 1]: the log-probabilities of the probe's tokens by weights that are read for it."""


class UnprovedError(Exception):
    """The weights cannot be read layer by layer, so that nothing proves what must be proved; it says why."""


@dataclass(slots=True)
class WeightProof:
    """The probe's log-probabilities that every server of a teacher must give."""

    read: Read | None = None
    """By the model's own weights; `None` compares servers with each other."""
    needed: bool = False
    """Whether servers that are compared with each other alone are not good enough."""
    logprobs: np.ndarray | None = None
    """Once known: of weights that were read, or else of the first server."""
    source: str = "the first server gave"
    """Where they come from."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are read."""

    @property
    def proves(self) -> bool:
        """Whether weights say, or will, what is compared, as far as is known."""
        return self.read is not None

    async def compare(self, owner: str, url: str, served: np.ndarray, most: float) -> float | None:
        """By how many nats what the server at `url` gave is off, at most; `None` if it is the first and there
        is nothing else to compare it with.

        Args:
            owner: The teacher, for errors.
            served: [N] of the probe's first tokens that are scored.
            most: Nats that are rounding.

        Raises `TeacherError` for other weights, `UnprovedError` where `needed` and they cannot be read.
        """
        async with self._lock:
            if self.logprobs is None and self.read is not None:
                await self._read(owner)
            first = self.logprobs is None
            if self.logprobs is None:
                self.logprobs = served
        due = self.logprobs[: len(served)]
        apart = compare(f"{owner}: {url}", served[: len(due)], due, most, self.source)
        return None if first else apart

    def said(self, apart: float | None) -> str:
        """What `compare` found, as the end of a sentence."""
        if apart is not None:
            return f"outputs within {apart:.2g} nats of what {self.source}"
        return "outputs compared with nothing, since it is the first of its servers"

    async def _read(self, owner: str) -> None:
        assert self.read is not None
        try:
            self.logprobs = await asyncio.to_thread(self.read)
            self.source = "the model's own weights give"
        except (ModelError, TeacherError) as trouble:  # an architecture that is not read layer by layer
            if self.needed:
                raise UnprovedError(str(trouble).rstrip(".")) from None
            self.read = None
            _log.warning("%s: its servers are compared with each other alone, since %s", owner, trouble)


def compare(who: str, served: np.ndarray, due: np.ndarray, most: float, source: str) -> float:
    """By how much the probe's log-probabilities differ, in nats. Raises `TeacherError` above `most`.

    Args:
        who: The teacher and the server.
        source: Where the ones that are `due` come from: what follows "from what".
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
    """By what is published at `url`."""

    def read() -> np.ndarray:
        sample = Sample("probe", "probe", "", PROBE[:1], response_ids=PROBE[1:])
        teacher = StreamedTeacher("probe", url, placement=Placement(), stream=LayerStream(cache=cache))
        try:
            return _logprobs(teacher.score([sample]).rows, teacher.load_head())
        finally:
            teacher.close()

    return read


def by_folder(folder: str | Path) -> Read:
    """By a Hugging Face folder, which the run will publish."""

    def read() -> np.ndarray:
        weights = UnpublishedWeights(Path(folder))
        hidden = weights.hidden(torch.from_numpy(PROBE[:-1].astype(np.int64)))
        return _logprobs(hidden, weights.head())

    return read


def _logprobs(hidden: Tensor, head: Head) -> np.ndarray:
    """[N - 1] of the probe's tokens but the first, by the states `hidden` [N - 1, D] before them."""
    ids = torch.from_numpy(PROBE[1:].astype(np.int64))
    with torch.no_grad():
        return linear_logprobs(hidden, head, ids).float().numpy()


def by_source(path: str) -> Read | None:
    """By the model at `path` as a recipe names it; `None` if it is not here to be read."""
    if is_published(path):
        return by_published(path)
    return by_folder(path) if Path(path).is_dir() else None


Rebuild = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Log-probabilities [N] float32 of ids [N] from hidden rows [N, D], by the teacher's own head."""


@dataclass(frozen=True, slots=True)
class DueModel:
    """What the servers of a teacher must serve."""

    config: Mapping[str, Any]
    """Its Hugging Face configuration."""
    rows: int
    """Of its head, padding included."""
    width: int
    """Of its hidden states."""
    rebuild: Rebuild | None = None
    """`None` before the model is here: hidden states are then compared between servers only."""


def rebuild_with(load: Callable[[], Head]) -> Rebuild:
    """By the head that `load` gives, over all of its rows, as a server has them; read at each call, by one
    thread at a time.
    """
    reading = threading.Lock()  # servers are admitted side by side, whose heads would be here at once

    def rebuild(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        with reading, torch.no_grad():
            hidden, tokens = torch.from_numpy(rows), torch.from_numpy(ids.astype(np.int64))
            return linear_logprobs(hidden, load(), tokens).float().numpy()

    return rebuild


def published_model(published: PublishedModel) -> DueModel:
    """Describe a published model; its head is read on this CPU when outputs are compared."""
    manifest = published.manifest
    load = partial(read_head, published, torch.float32, torch.device("cpu"))
    return DueModel(manifest.config, manifest.head.vocabulary, manifest.head.hidden, rebuild_with(load))


def named_model(path: str, stack: ExitStack) -> DueModel:
    """Describe the model that a recipe names: published at `path`, a folder, or a name on the Hub. `stack`
    keeps what is open. Raises `ConfigError` if its configuration lacks a size.
    """
    if is_published(path):
        return published_model(stack.enter_context(PublishedModel.open(path)))
    with small_files(path) as folder:
        config = read_object(folder / "config.json")
    with decoding(lambda cause: ConfigError(f"{path}/config.json does not say its sizes ({cause}).")):
        text = config.get("text_config", config)
        rows, width = (whole(text[key], 1, 2**31, key) for key in ("vocab_size", "hidden_size"))
    here = Path(path).is_dir()
    rebuild = rebuild_with(lambda: UnpublishedWeights(Path(path)).head()) if here else None
    return DueModel(config, rows, width, rebuild)


class Scorer(ABC):
    """Scores of one teacher by servers of one program.

    Args:
        model: What they must serve.
        settings: The teacher's entry in the recipe.
        read: The model's own outputs, which servers are compared with; `None` compares them with each other.
            A checksum in the recipe takes their place.
        top_k: How many of the most likely tokens are asked for; 0 asks for the given ones alone.
        vocabulary: Ids that an answer may name are below it.
    """

    checksum_hint: ClassVar[str] = ""
    """What may be wrong beside the weights if a checksum is another: ends a sentence."""

    def __init__(
        self,
        model: DueModel,
        settings: ServedTeacherConfig,
        read: Read | None,
        *,
        top_k: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        self.model, self.checksum, self.top_k = model, settings.checksum, top_k
        self.vocabulary = model.rows if vocabulary is None else vocabulary
        self.hidden = settings.signal == "hidden"
        known = self.checksum is not None
        self.proof = WeightProof(None if known else read, needed=self.hidden and not known)
        self.tolerance = EXACT
        """Nats by which outputs may differ: of the coarsest server, since they are compared with each other
        too."""

    @property
    @abstractmethod
    def version(self) -> str:
        """What servers say of the weights they hold, once one was asked: part of the teacher's digest."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What servers call what they hold, for people."""

    @abstractmethod
    async def meet(self, pool: HTTPPool, server: Server) -> float:
        """Ask who it is and how it was started; return the nats by which its outputs may differ.

        Raises `TeacherError` for another model or if it lacks what is needed, `UnavailableError` if it is
        away.
        """

    @abstractmethod
    async def held_checksum(self, pool: HTTPPool, server: Server) -> str | None:
        """The server's checksum over all weights on all of its ranks; `None` if it tells none."""

    @abstractmethod
    async def outputs(self, pool: HTTPPool, server: Server) -> np.ndarray | None:
        """[N] float32: the probe's log-probabilities; `None` where hidden states cannot be rebuilt."""

    @abstractmethod
    async def ask(self, pool: HTTPPool, server: Server, question: Question) -> Any:
        """One attempt at one server: [count, D], [count], or ids and log-probabilities [count, K] with
        [count], as the signal says. Raises `UnavailableError`, `RefusedError` and `TeacherError`.
        """

    @abstractmethod
    def longest(self) -> tuple[int | None, str]:
        """Most tokens of a sample that every server scores, `None` if they did not say; how to raise it."""

    def check_length(self, teacher: str, question: Question) -> None:
        """Raise `TeacherError` for a sample that the servers met so far cannot score."""
        length, (most, mend) = len(question.tokens), self.longest()
        if most is not None and length > most:
            raise TeacherError(
                f"sample {question.uid} has {length} tokens, the servers of teacher {teacher} take {most};"
                f" {mend}."
            )

    async def admit(self, pool: HTTPPool, server: Server) -> float | None:
        """Check that `server` may be asked; return the most by which the probe's log-probabilities differ, in
        nats, `None` where there are none to compare with.

        Raises `TeacherError` if another model or other weights answer, or the server lacks what is needed;
        `UnavailableError` if it does not answer.
        """
        self.tolerance = max(self.tolerance, await self.meet(pool, server))
        if self.checksum is not None:
            await self._compare_checksum(pool, server)
        served = await self.outputs(pool, server)
        if served is None:
            return None
        try:
            return await self.proof.compare(pool.owner, server.url, served, self.tolerance)
        except UnprovedError as trouble:
            held = await self.held_checksum(pool, server)
            known = (
                ""
                if held is None
                else f", or, where you know that it serves the right weights, checksum to {held}"
            )
            raise TeacherError(
                f"{pool.owner}: nothing proves that hidden states of {server.url} are of the published model,"
                f" since {trouble}; set signal to topk{known}."
            ) from None

    async def _compare_checksum(self, pool: HTTPPool, server: Server) -> None:
        held = await self.held_checksum(pool, server)
        if held != self.checksum:
            raise TeacherError(
                f"{pool.owner}: the weights of {server.url} have checksum {held or 'none that it tells'}, the"
                f" recipe says {self.checksum}; serve the right weights or correct the"
                f" recipe{self.checksum_hint}."
            )

    async def describe(self, pool: HTTPPool, server: Server) -> str:
        """Admit `server` and say in one sentence what was found."""
        apart = await self.admit(pool, server)
        held = await self.held_checksum(pool, server)
        told = "tells no checksum" if held is None else f"checksum {held}"
        compared = "weights proved by it" if self.checksum else self.proof.said(apart)
        return f"{server.url}: {self.title}, {told}, {compared}{self.way_of(server)}"

    def way_of(self, server: Server) -> str:
        """How hidden states come, if there are several ways: the end of a sentence."""
        return ""


def lost_weights(owner: str, url: str, sign: str) -> TeacherError:
    """Of a server that answers as if all were well, such as one that was put to sleep and woken."""
    return TeacherError(
        f"{owner}: {url} has lost its weights ({sign}, whatever was asked); start it again, and continue with"
        " --resume."
    )
