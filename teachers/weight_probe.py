"""The probe by which servers prove their layers: what a model's own weights, read through once with one layer
in memory, say of a few tokens, and whether a server says the same.

A head that is right proves no layers: specialists of one base may share it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.errors import ModelError, TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.served.sglang_answers import PROBE
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.skeleton import is_published
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
