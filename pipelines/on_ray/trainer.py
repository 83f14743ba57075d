"""The trainer in a process of its own: it runs a stage, with the engines and teachers it is given."""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.errors import OpdError, RunFolderError
from opd.pipelines.helpers import Writers
from opd.pipelines.on_ray.actors import ActorSpec, Remote
from opd.protocols import Teacher
from opd.rollout.preemption import Preemption

PATIENCE = 60.0
"""Seconds an earlier trainer of the run may take to be gone."""


@dataclass(frozen=True, slots=True)
class RayHelpers:
    """Implements `opd.pipelines.helpers.Helpers`."""

    recipe: Recipe
    stage: str
    engines: Sequence[Remote]
    teachers_: Sequence[Remote]
    note: Callable[[str], None]

    def writers(self, model: Path) -> Writers:
        """See the protocol."""
        from opd.pipelines.on_ray.ray_engine import Fleet

        return Fleet(self.engines, model, self.note).writers()

    def teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """See the protocol."""
        from opd.models.causal_lm import torch_device
        from opd.pipelines.on_ray.ray_teacher import ray_teachers

        if not self.teachers_:
            return None
        device = torch_device(self.recipe.model.device)
        return ray_teachers(self.teachers_, names, self.stage, vocabulary, device, self.note)


class TrainerActor:
    """What `opd.pipelines.on_ray.supervise` talks to. `run` holds it until a stage has ended; the methods of
    the control group answer meanwhile.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.begin()
        self._spec = spec
        self._news: deque[tuple] = deque()
        self._preemption = Preemption(self._recipe.runtime.grace_seconds)

    def ping(self) -> int:
        """The process."""
        return os.getpid()

    def run(self, stage: str, engines: Sequence[Remote], teachers: Sequence[Remote]) -> tuple:
        """Run `stage` from its newest checkpoint; returns ("done", result), ("error", class, arguments) for
        an `OpdError`, or ("crash", words).
        """
        from opd.pipelines.run import execute
        from opd.pipelines.run_folder import RunFolder
        from opd.pipelines.stages import plan

        folder = RunFolder.attach(self._spec.folder)
        lock = self._alone(folder.path)
        try:
            helpers = RayHelpers(self._recipe, stage, engines, teachers, self._note)
            result = execute(
                self._recipe,
                folder,
                plan(self._recipe)[stage],
                lambda *words: self._news.append(("progress", *words)),
                self._note,
                self._preemption,
                helpers,
            )
        except OpdError as error:
            traceback.print_exc()
            return "error", type(error).__name__, error.args
        except Exception as error:
            traceback.print_exc()
            return "crash", f"{type(error).__name__}: {error}"
        finally:
            lock.release()
        return "done", result

    def news(self) -> list[tuple]:
        """Control: progress and notes since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def ask(self, what: str) -> None:
        """Control: `stop`, `suspend` or `wake`."""
        getattr(self._preemption, what)()

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self._news.append(("note", text))

    def _alone(self, folder: Path) -> Any:
        """A lock no other trainer of this run holds: one that was given up, but lives on where nobody reaches
        it, must not write into the folder beside this one.
        """
        from opd.storage.files import FileLock

        lock, until = FileLock(folder / ".trainer.lock"), time.monotonic() + PATIENCE
        while True:
            try:
                lock.acquire()
                return lock
            except RunFolderError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
