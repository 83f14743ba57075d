"""Keeps the stages of a run going on a cluster: makes the actors, listens, starts a dead trainer anew."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from opd import errors
from opd.config import RayLaunch, Recipe
from opd.errors import ConfigError, LaunchError, OpdError
from opd.pipelines.launch.local import check_ranks
from opd.pipelines.launch.ray.actors import PING_SECONDS, ActorLostError, ActorSpec, Remote, start_actors
from opd.pipelines.launch.ray.cluster import Cluster, Layout, open_cluster, reserve, role_of
from opd.pipelines.launch.ray.trainer import Rendezvous
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.order import Stage, summary
from opd.progress import Progress
from opd.rollout.preemption import Preemption

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
                progress.note(f"{stage}: {words[0]}")
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
