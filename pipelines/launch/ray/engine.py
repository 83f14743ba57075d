"""A rollout engine in a process of its own. It computes a chunk of tokens when it is asked for one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opd.errors import RolloutError
from opd.pipelines.launch.ray.actors import ActorSpec
from opd.pipelines.launch.ray.cluster import import_ray
from opd.types import Chunk, RolloutRequest


class EngineActor:
    """What `opd.pipelines.launch.ray.ray_engine` talks to. One method runs at a time."""

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.begin("opd.pipelines.stages.student")
        self._engine: Any = None
        self._model: str | None = None
        self._call = 0
        self._steps: Iterator[Chunk] | None = None

    def ping(self) -> int:
        """The process."""
        return os.getpid()

    def load(self, model: str) -> None:
        """Hold the Hugging Face folder `model` as version 0."""
        from opd.pipelines.stages.student import embedded

        self._end()
        self._engine = self._model = None
        self._engine = embedded(self._recipe, Path(model)).engines[0]
        self._model = model

    def holds(self) -> tuple[str | None, int]:
        """The model it was loaded with, and the version of its weights."""
        return self._model, -1 if self._engine is None else self._engine.policy_version

    def update(self, pieces: Sequence[Any], version: int) -> str:
        """Take the weights in `pieces`, references of what `tensors.buckets` made; returns their digest.
        Requests in flight go on with them.
        """
        engine, ray = self._loaded(), import_ray()
        engine.pause()
        engine.flush()
        try:
            weights = ((n, p.tensor()) for piece in pieces for n, p in ray.get(piece))
            return engine.update_weights(weights, version)
        finally:
            engine.resume()

    def flush(self) -> None:
        """Drop every cached key and value."""
        self._loaded().flush()

    def begin(self, call: int, requests: Sequence[RolloutRequest]) -> None:
        """Start call number `call`; what an earlier one still had to do is dropped."""
        engine = self._loaded()
        self._end()
        self._steps, self._call = engine.generate(requests), call

    def advance(self, call: int) -> Chunk | None:
        """The next chunk of `call`; `None` if it is over."""
        if self._steps is None or call != self._call:
            return None
        chunk = next(self._steps, None)
        if chunk is None:
            self._steps = None
        return chunk

    def abort(self, call: int, uids: list[str]) -> None:
        """Stop these requests of `call`."""
        if self._steps is not None and call == self._call:
            self._loaded().abort(uids)

    def end(self, call: int) -> None:
        """Drop `call`."""
        if call == self._call:
            self._end()

    def digest(self) -> str:
        """Digest of the weights it holds."""
        return self._loaded().model.digest()

    def _end(self) -> None:
        steps, self._steps = self._steps, None
        close = getattr(steps, "close", None)
        if close is not None:
            close()

    def _loaded(self) -> Any:
        if self._engine is None:
            raise RolloutError("the engine holds no model yet; call load() first.")
        return self._engine
