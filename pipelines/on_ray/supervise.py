"""Keeps the stages of a run going on a cluster: makes the actors, listens, starts a dead trainer anew."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from opd import errors
from opd.config import RayLaunch, Recipe
from opd.errors import LaunchError, OpdError
from opd.monitor.progress import Progress
from opd.pipelines.on_ray.actors import PING_SECONDS, ActorLostError, ActorSpec, Remote, start_actors
from opd.pipelines.on_ray.cluster import Cluster, open_cluster, reserve
from opd.pipelines.on_ray.layout import Layout
from opd.pipelines.run_folder import RunFolder
from opd.pipelines.stages import Stage
from opd.rollout.preemption import Preemption

LOOK = 0.25
"""Seconds between two looks at the trainer."""


def run_on_ray(recipe: Recipe, folder: RunFolder, stages: Sequence[Stage], progress: Progress) -> None:
    """Run `stages` one after the other, with `recipe.launch` as the place.

    Raises what a stage raises; `LaunchError` if the cluster or an actor is lost for good. Everything
    acknowledged is in the run folder then.
    """
    listening = Preemption(recipe.runtime.grace_seconds).listen(leave=False)
    with listening as asked, open_crew(recipe, folder) as crew:
        for stage in stages:
            result = crew.run(stage.name, progress, asked)
            progress.finish(stage.name, _summary(result))


@contextmanager
def open_crew(recipe: Recipe, folder: RunFolder) -> Iterator[Crew]:
    """The actors of a run while the block runs."""
    launch = recipe.launch
    assert isinstance(launch, RayLaunch)
    layout = Layout.of(launch)
    specs = {
        name: ActorSpec(name, recipe.model_dump_json(), str(folder.path.resolve()), os.getcwd())
        for name in layout.places
    }
    with open_cluster(launch, layout) as cluster:
        placement = reserve(cluster, launch, layout)
        crew = Crew(cluster, launch, start_actors(launch, layout, placement, specs))
        cluster.look()
        try:
            yield crew
        finally:
            crew.dismiss(placement)


@dataclass(slots=True)
class Crew:
    """The actors of a run."""

    cluster: Cluster
    launch: RayLaunch
    actors: dict[str, Remote]
    suspended: bool = field(default=False, init=False)
    _stopped: float | None = field(default=None, init=False)

    def run(self, stage: str, progress: Progress, asked: Preemption) -> dict[str, Any]:
        """Run one stage; a trainer that dies or hangs is started anew and goes on from the checkpoint."""
        trainer, restarts = self.actors["trainer"], 0
        helpers = [self._role("engine"), self._role("teacher")]
        while True:
            try:
                reference = trainer.send("run", stage, *helpers)
                return _outcome(stage, self._listen(stage, reference, progress, asked))
            except ActorLostError as error:
                restarts += 1
                self._require_cluster()
                asked.check()
                if restarts > self.launch.max_restarts:
                    raise self._given_up(stage, error) from None
                progress.note(f"{stage}: {error}; it is started anew from the newest checkpoint")
            try:
                trainer.await_return(lambda: self.cluster.lost() or asked.stopping)
            except ActorLostError as error:
                self._require_cluster()
                asked.check()
                raise self._given_up(stage, error) from None

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

    def _role(self, role: str) -> list[Remote]:
        return [actor for name, actor in self.actors.items() if name.startswith(f"{role}-")]

    def _listen(self, stage: str, reference: Any, progress: Progress, asked: Preemption) -> tuple:
        """What `reference` gives in the end; until then news are passed on. Raises `ActorLostError`."""
        trainer, ray = self.actors["trainer"], self.cluster.ray
        heard = time.monotonic()
        self.suspended, self._stopped = False, None
        while True:
            done, _ = ray.wait([reference], timeout=LOOK)
            self._pass_on(asked)
            if done:
                self._report(stage, trainer, progress)
                return trainer.get(reference, PING_SECONDS)
            if self.cluster.lost():
                raise self.cluster.gone()
            if self._report(stage, trainer, progress) or self.suspended:
                heard = time.monotonic()
            limit = self.launch.trainer_timeout
            if limit is not None and time.monotonic() - heard > limit:
                trainer.kill()
                raise ActorLostError(f"the trainer finished no step in {limit:g} s and was ended")

    def _report(self, stage: str, trainer: Remote, progress: Progress) -> bool:
        """Pass the trainer's news on; whether there were any. A trainer that does not answer is ended."""
        news = trainer.get(trainer.send("news", control=True), PING_SECONDS)
        for kind, *words in news:
            if kind == "progress":
                progress.update(stage, *words)
            else:
                progress.note(f"{stage}: {words[0]}")
        return bool(news)

    def _pass_on(self, asked: Preemption) -> None:
        """Tell the trainer what this process was asked to do."""
        trainer = self.actors["trainer"]
        if asked.stopping and self._stopped is None:
            self._stopped = time.monotonic()
            trainer.send("ask", "stop", control=True)
        if self._stopped is not None and time.monotonic() - self._stopped > asked.grace:
            asked.check()  # the grace period is over: the log holds all that was acknowledged
        if asked.suspended != self.suspended:
            self.suspended = asked.suspended
            trainer.send("ask", "suspend" if self.suspended else "wake", control=True)

    def _require_cluster(self) -> None:
        """Raise if it was the cluster that went."""
        if self.cluster.lost():
            raise self.cluster.gone()
        ray = self.cluster.ray
        try:
            alive = any(node["Alive"] for node in ray.nodes())
        except Exception:
            alive = False
        if not alive:
            raise self.cluster.gone()

    def _given_up(self, stage: str, error: Exception) -> LaunchError:
        return LaunchError(
            f"the trainer of {stage} is lost ({error}); see logs/trainer.log in the run folder and continue"
            " with --resume."
        )


def _outcome(stage: str, said: tuple) -> dict[str, Any]:
    """A stage's result, or the error it raised."""
    kind, *words = said
    if kind == "done":
        return words[0]
    if kind == "crash":
        raise RuntimeError(f"stage {stage} crashed with {words[0]}; its traceback is in logs/trainer.log")
    name, arguments = words
    found = getattr(errors, name, OpdError)
    raise found(*arguments)


def _summary(result: dict[str, Any]) -> str:
    from opd.pipelines.run import summary

    return summary(result)
