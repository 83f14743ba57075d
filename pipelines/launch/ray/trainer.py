"""The trainer in a process of its own: it runs a stage, with the engines and teachers it is given."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.errors import OpdError, RunFolderError
from opd.pipelines.launch.ray.actors import ActorSpec, Remote, no_memory
from opd.pipelines.launch.ray.cluster import import_ray
from opd.pipelines.stages.helpers import Writers
from opd.protocols import Teacher
from opd.rollout.preemption import Preemption

PATIENCE = 60.0
"""Seconds an earlier trainer of the run may take to be gone."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A trainer's rank among several, and where rank 0 waits for them."""

    rank: int
    size: int
    address: str
    """Where rank 0 is."""
    port: int

    def publish(self) -> None:
        """Set what torchrun would set. Ray shows each actor its own devices alone."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True, slots=True)
class RayHelpers:
    """Implements `opd.pipelines.stages.helpers.Helpers`."""

    recipe: Recipe
    stage: str
    engines: Sequence[Remote]
    teachers_: Sequence[Remote]
    note: Callable[[str], None]

    def writers(self, model: Path) -> Writers:
        """See the protocol."""
        from opd.pipelines.launch.ray.engine import Fleet

        return Fleet(self.engines, model, self.note).writers()

    def teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """See the protocol."""
        from opd.models.causal_lm import torch_device
        from opd.pipelines.launch.ray.teacher import ray_teachers

        if not self.teachers_:
            return None
        device = torch_device(self.recipe.model.device)
        return ray_teachers(self.teachers_, names, self.stage, vocabulary, device, self.note)


class TrainerActor:
    """What `supervise` talks to. `run` holds it until a stage has ended; the methods of the control group
    answer meanwhile.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.begin("opd.pipelines.run")
        self._spec = spec
        self._news: deque[tuple] = deque(maxlen=1000)  # nobody asks a rank but the first
        self._preemption = Preemption(self._recipe.runtime.grace_seconds)

    def ping(self) -> int:
        """The process."""
        return os.getpid()

    def free_port(self) -> tuple[str, int]:
        """Address of its node, and a port that is free there."""
        address = import_ray().util.get_node_ip_address()
        with socket.socket() as tried:
            tried.bind((address, 0))
            return address, tried.getsockname()[1]

    def run(
        self, stage: str, engines: Sequence[Remote], teachers: Sequence[Remote], rendezvous: Rendezvous | None
    ) -> tuple:
        """Run `stage` from its newest checkpoint, alone or, with a `rendezvous`, as one of several ranks;
        returns ("done", result), ("error", class, arguments) for an `OpdError`, or ("crash", words).
        """
        from opd.pipelines.launch.machine import out_of_memory

        helpers = RayHelpers(self._recipe, stage, engines, teachers, self._note)
        try:
            with self._alone() if rendezvous is None or rendezvous.rank == 0 else nullcontext():
                return "done", self._execute(stage, helpers, rendezvous)
        except OpdError as error:
            traceback.print_exc()
            return "error", type(error).__name__, error.args
        except Exception as error:
            traceback.print_exc()
            reason = out_of_memory(error)
            if reason is None:
                return "crash", f"{type(error).__name__}: {error}"
            return "error", "TrainingError", (no_memory(self._spec.name, reason),)

    def _execute(self, stage: str, helpers: RayHelpers, rendezvous: Rendezvous | None) -> dict[str, Any]:
        from opd.pipelines.records.run_folder import RunFolder
        from opd.pipelines.run import execute
        from opd.pipelines.stages.order import plan
        from opd.ranks import Ranks, joined

        recipe, train = self._recipe, self._recipe.train
        with ExitStack() as stack:
            ranks = Ranks()
            if rendezvous is not None:
                rendezvous.publish()
                ranks = stack.enter_context(joined(recipe.model.device, train.timeout_seconds))
                stack.enter_context(ranks.naming_the_lost(f"the work on stage {stage}"))
            return execute(
                recipe,
                RunFolder.attach(self._spec.folder),
                plan(recipe)[stage],
                lambda *words: self._news.append(("progress", *words)),
                self._note,
                self._preemption,
                helpers,
                ranks,
            )

    def news(self) -> list[tuple]:
        """Control: progress and notes since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def ask(self, what: str) -> None:
        """Control: `stop`, `suspend` or `wake`."""
        getattr(self._preemption, what)()

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self._news.append(("note", text))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock no other trainer of this run holds: one that was given up, but lives on where nobody
        reaches it, must not write into the folder beside this one.
        """
        from opd.storage.files import FileLock

        lock, until = FileLock(Path(self._spec.folder) / ".trainer.lock"), time.monotonic() + PATIENCE
        while True:
            try:
                lock.acquire()
                break
            except RunFolderError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        try:
            yield
        finally:
            lock.release()
