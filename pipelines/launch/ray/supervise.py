"""Keeps the stages of a run going on a cluster: makes the actors, listens, starts a dead trainer anew.

The trainer in a process of its own: it runs a stage, with the engines and teachers it is given.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd import errors
from opd.config import RayLaunch, Recipe
from opd.errors import ConfigError, LaunchError, OpdError, RunFolderError
from opd.pipelines.launch.local import check_ranks
from opd.pipelines.launch.ray.actors import (
    PING_SECONDS,
    ActorLostError,
    ActorSpec,
    Remote,
    no_memory,
    start_actors,
)
from opd.pipelines.launch.ray.cluster import Cluster, Layout, import_ray, open_cluster, reserve, role_of
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.helpers import Writers
from opd.pipelines.stages.order import Stage, summary
from opd.progress import Progress
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


LOOK = 0.25
"""Seconds between two looks at the trainer."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at the processes of a cluster of our own."""
LAST_WORDS_SECONDS = 20.0
"""Time the other ranks have to say what they know once one has failed."""


def run_on_ray(recipe: Recipe, folder: RunFolder, stages: Sequence[Stage], progress: Progress) -> None:
    """Run `stages` one after the other, with `recipe.launch` as the place.

    Raises what a stage raises; `LaunchError` if the cluster or an actor is lost for good. Everything
    acknowledged is in the run folder then.
    """
    listening = Preemption(recipe.runtime.grace_seconds).listen(leave=False)
    with listening as asked, open_worker_group(recipe, folder, asked) as group:
        for stage in stages:
            progress.begin(stage.name)
            result = group.run(stage, progress, asked)
            progress.finish(stage.name, summary(result))


@contextmanager
def open_worker_group(recipe: Recipe, folder: RunFolder, asked: Preemption) -> Iterator[WorkerGroup]:
    """The actors of a run while the block runs. Raises `PreemptedError` if it is to stop while they start."""
    launch = recipe.launch
    assert isinstance(launch, RayLaunch)
    ranks = recipe.train.ranks or 1
    check_ranks(recipe, ranks)
    if launch.engines < ranks:
        raise ConfigError(
            f"launch.engines is {launch.engines}, but each of the {ranks} ranks of train.ranks needs an"
            " engine; raise it."
        )
    layout = Layout.of(launch, ranks)
    specs = {
        name: ActorSpec(name, recipe.model_dump_json(), str(folder.path.resolve()), os.getcwd())
        for name in layout.places
    }
    with open_cluster(launch, layout, asked) as cluster:
        placement = reserve(cluster, launch, layout, asked)
        group = WorkerGroup(cluster, launch, start_actors(launch, layout, placement, specs, asked))
        cluster.look()
        try:
            yield group
        finally:
            group.dismiss(placement)


@dataclass(slots=True)
class WorkerGroup:
    """The actors of a run."""

    cluster: Cluster
    launch: RayLaunch
    actors: dict[str, Remote]
    _suspended: bool = field(default=False, init=False)
    _stopped: float | None = field(default=None, init=False)

    def run(self, stage: Stage, progress: Progress, asked: Preemption) -> dict[str, Any]:
        """Run one stage. When a trainer dies or hangs, all ranks are started anew and go on from the newest
        checkpoint.
        """
        # What is not trained is done by one rank.
        trainers = self.role("trainer") if stage.trained else self.role("trainer")[:1]
        for attempt in range(self.launch.max_restarts + 1):
            try:
                references = self._begin(stage.name, trainers)
                return self._listen(stage.name, trainers, references, progress, asked)
            except ActorLostError as error:
                lost = error
                self._require_cluster()
                asked.check()
            if attempt < self.launch.max_restarts:
                progress.note(f"{stage.name}: {lost}; it is started anew from the newest checkpoint")
                try:
                    for trainer in trainers:
                        trainer.await_return(lambda: self.cluster.lost() or asked.stopping)
                except ActorLostError as error:
                    self._require_cluster()
                    asked.check()
                    raise _given_up(stage.name, error) from None
        raise _given_up(stage.name, lost)

    def role(self, role: str) -> list[Remote]:
        """The actors of a role, by number."""
        return [actor for name, actor in self.actors.items() if role_of(name) == role]

    def _begin(self, stage: str, trainers: Sequence[Remote]) -> list[Any]:
        """Ask every rank for `stage`, each with its share of the engines."""
        engines, teachers, size = self.role("engine"), self.role("teacher"), len(trainers)
        places: list[Rendezvous | None] = [None]
        if size > 1:
            address, port = trainers[0].call("free_port", seconds=PING_SECONDS)
            places = [Rendezvous(rank, size, address, port) for rank in range(size)]
        return [
            trainer.send("run", stage, engines[rank::size], teachers, place)
            for rank, (trainer, place) in enumerate(zip(trainers, places, strict=True))
        ]

    def dismiss(self, placement: Any) -> None:
        """End the actors and give their resources back."""
        if self.cluster.lost(patience=0.0):
            return
        ray = self.cluster.ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors.values():
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor.handle, no_restart=True)
        with suppress(ray.exceptions.RayError, ValueError):
            remove_placement_group(placement)

    def _listen(
        self,
        stage: str,
        trainers: Sequence[Remote],
        references: Sequence[Any],
        progress: Progress,
        asked: Preemption,
    ) -> dict[str, Any]:
        """The result of the stage; until it is there, news are passed on. Raises `ActorLostError` when a rank
        is lost, after the others have been ended.
        """
        ray, heard = self.cluster.ray, time.monotonic()
        self._suspended, self._stopped = False, None
        said: dict[int, tuple] = {}
        try:
            while len(said) < len(trainers):
                waiting = [reference for rank, reference in enumerate(references) if rank not in said]
                done, _ = ray.wait(waiting, timeout=LOOK)
                self._pass_on(trainers, asked)
                for reference in done:
                    rank = references.index(reference)
                    said[rank] = trainers[rank].get(reference, PING_SECONDS, kill=False)
                if any(words[0] != "done" for words in said.values()):
                    self._last_words(trainers, references, said)
                    return _outcome(stage, said)
                if self.cluster.lost():
                    raise self.cluster.gone()
                self.cluster.look(LOOK_SECONDS)
                if 0 in said or self._report(stage, trainers[0], progress) or self._suspended:
                    heard = time.monotonic()
                limit = self.launch.trainer_timeout
                if limit is not None and time.monotonic() - heard > limit:
                    raise ActorLostError(f"the trainer finished no step in {limit:g} s")
        except ActorLostError as error:
            self.cluster.require()
            for trainer in trainers:
                if trainer.name != error.actor:
                    trainer.kill()
            raise
        self._report(stage, trainers[0], progress)
        return _outcome(stage, said)

    def _last_words(
        self, trainers: Sequence[Remote], references: Sequence[Any], said: dict[int, tuple]
    ) -> None:
        """A rank has failed: hear what the others know, for the first to fail says why. Raises
        `ActorLostError` if one of them died, or if they had only lost each other.
        """
        for rank, reference in enumerate(references):
            if rank not in said:
                said[rank] = trainers[rank].get(reference, LAST_WORDS_SECONDS, kill=False)
        if all(words[0] == "done" or words[:2] == ("error", "RanksError") for words in said.values()):
            raise ActorLostError("the ranks lost each other")

    def _report(self, stage: str, trainer: Remote, progress: Progress) -> bool:
        """Pass the trainer's news on; whether there were any. `ActorLostError` if it does not answer."""
        news = trainer.get(trainer.send("news", control=True), PING_SECONDS, kill=False)
        for kind, *words in news:
            if kind == "progress":
                progress.update(stage, *words)
            else:
                progress.note(words[0], stage)
        return bool(news)

    def _pass_on(self, trainers: Sequence[Remote], asked: Preemption) -> None:
        """Tell the trainers what this process was asked to do."""
        if asked.stopping and self._stopped is None:
            self._stopped = time.monotonic()
            for trainer in trainers:
                trainer.send("ask", "stop", control=True)
        if self._stopped is not None and time.monotonic() - self._stopped > asked.grace:
            asked.check()  # the grace period is over: the log holds all that was acknowledged
        if asked.suspended != self._suspended:
            self._suspended = asked.suspended
            for trainer in trainers:
                trainer.send("ask", "suspend" if self._suspended else "wake", control=True)

    def _require_cluster(self) -> None:
        """Raise if it was the cluster that went."""
        self.cluster.require()
        ray = self.cluster.ray
        try:
            alive = any(node["Alive"] for node in ray.nodes())
        except Exception:
            alive = False
        if not alive:
            raise self.cluster.gone()


def _given_up(stage: str, error: Exception) -> LaunchError:
    return LaunchError(
        f"the trainer of {stage} is lost ({error}); see logs/ in the run folder and continue with --resume."
    )


def _outcome(stage: str, said: Mapping[int, tuple]) -> dict[str, Any]:
    """The first rank's result, or the error of a rank that did not just lose another."""
    failed = [words for _, words in sorted(said.items()) if words[0] != "done"]
    if not failed:
        return said[0][1]
    kind, *words = min(failed, key=lambda words: words[1] == "RanksError")
    if kind == "crash":
        raise RuntimeError(f"stage {stage} crashed with {words[0]}; its traceback is in logs/")
    name, arguments = words
    raise getattr(errors, name, OpdError)(*arguments)
