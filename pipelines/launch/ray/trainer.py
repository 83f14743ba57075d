"""Run the trainers of a run on Ray, and supervise them from the process that was started. A trainer runs a
stage with its engines and teachers. The process makes all actors, monitors the trainers and restarts lost
ones.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import RayLaunch, Recipe
from opd.errors import ConfigError, LaunchError, OpdError, RunFolderError, TrainingError, from_system
from opd.output import LogForwarder, record_fields
from opd.pipelines.launch.local import check_ranks, rank_environment
from opd.pipelines.launch.ray.actors import (
    PING_SECONDS,
    ActorLostError,
    ActorSpec,
    RemoteActor,
    no_memory,
    start_actors,
)
from opd.pipelines.launch.ray.cluster import (
    BundleLayout,
    Cluster,
    import_ray,
    needed_launch,
    open_cluster,
    require_gpus_asked,
    reserve_bundles,
    role_of,
)
from opd.pipelines.launch.ray.server import end_servers, servers_of
from opd.pipelines.launch.started_server import free_port
from opd.pipelines.launch.supervisor import Cause, MemberFailedError, Message, Supervisor, final_message
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.pipeline_plan import Stage, stage_summary
from opd.progress import Progress, current_activity, set_activity, set_remote_activity
from opd.protocols import Teacher
from opd.rollout.engine_pool import EnginePool
from opd.rollout.preemption import Preemption

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds until an earlier trainer of the run must be gone."""


@dataclass(frozen=True, slots=True)
class HelperActors:
    engines: Sequence[RemoteActor]
    teachers: Sequence[RemoteActor]
    servers: Sequence[RemoteActor]


@dataclass(frozen=True, slots=True)
class RayHelpers:
    """Implements `opd.pipelines.stages.context.StageHelpers`."""

    recipe: Recipe
    stage: str
    engines: Sequence[RemoteActor]
    teachers_: Sequence[RemoteActor]

    def open_engines(self, model: Path, adapters: bool = False) -> EnginePool:
        from opd.pipelines.launch.ray.engine import EngineFleet

        return EngineFleet(self.engines, model, adapters).engine_pool()

    def open_teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        from opd.models.causal_lm import torch_device
        from opd.pipelines.launch.ray.teacher import ray_teachers

        if not self.teachers_:
            return None
        device = torch_device(self.recipe.model.device)
        return ray_teachers(self.teachers_, names, self.stage, vocabulary, device)


class TrainerActor:
    """The actor behind `Trainer`. `run` blocks until a stage has ended. Control methods answer meanwhile."""

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.start_process("opd.pipelines.run")
        self._spec = spec
        self._news: deque[Message] = deque(maxlen=1000)  # only the first rank's are read
        self._busy = ""
        """The last reported activity."""
        self._preemption = Preemption(self._recipe.runtime.grace_seconds)

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def free_port(self) -> tuple[str, int]:
        """Return the address of its node, and a free port there."""
        address = import_ray().util.get_node_ip_address()
        return address, free_port(address)

    def run(self, stage: str, actors: HelperActors, variables: Mapping[str, str]) -> Message:
        """Run `stage` from its newest checkpoint, and return its last message. `done` holds the result. The
        process is alone, or the rank that the environment `variables` make it.
        """
        from opd.pipelines.run import execute_stage
        from opd.pipelines.stages.pipeline_plan import plan_stages
        from opd.ranks import Ranks, join_ranks

        recipe = self._recipe

        def run_stage() -> dict[str, Any]:
            with ExitStack() as stack:
                if variables.get("RANK", "0") == "0":
                    stack.enter_context(self._trainer_lock())
                stack.enter_context(
                    LogForwarder(lambda record: self._append_news("log", *record_fields(record)))
                )
                ranks = Ranks()
                if variables:
                    os.environ |= variables
                    ranks = stack.enter_context(join_ranks(recipe.model.device, recipe.train.timeout_seconds))
                    stack.enter_context(ranks.name_missing_ranks(f"the work on stage {stage}"))
                folder = RunFolder.attach(self._spec.folder)
                return execute_stage(
                    recipe,
                    folder,
                    plan_stages(recipe)[stage],
                    lambda *words: self._append_news("progress", *words),
                    self._preemption,
                    RayHelpers(recipe, stage, actors.engines, actors.teachers),
                    ranks,
                    stack.enter_context(servers_of(recipe, actors.servers, ranks, folder.server_logs)),
                )

        return final_message(run_stage, self._known_error)

    def _known_error(self, error: Exception) -> OpdError | None:
        from opd.pipelines.launch.machine import out_of_memory

        reason = None if isinstance(error, OpdError) else out_of_memory(error)
        return from_system(error) if reason is None else TrainingError(no_memory(self._spec.name, reason))

    def _append_news(self, kind: Any, *words: Any) -> None:
        self._news.append(Message(kind, words))

    def news(self) -> list[Message]:
        """Return progress and log records since the last call, and a new activity. A control method."""
        news = [self._news.popleft() for _ in range(len(self._news))]
        if (busy := current_activity()) != self._busy:
            self._busy = busy
            news.append(Message("busy", (busy,)))
        return news

    def ask(self, action: str) -> None:
        """Call `stop`, `suspend` or `wake` of the preemption. A control method."""
        getattr(self._preemption, action)()

    @contextmanager
    def _trainer_lock(self) -> Iterator[None]:
        """Hold the run's trainer lock. An earlier trainer may live on unreachable, and must not write too."""
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


LOOK_SECONDS = 5.0
"""Seconds between two looks at the processes of the run's own cluster."""


def run_on_ray(recipe: Recipe, folder: RunFolder, stages: Sequence[Stage], progress: Progress) -> None:
    """Run `stages` in sequence on the cluster of `recipe.launch`.

    Raises a stage's own errors, and `LaunchError` if the cluster or an actor is finally lost. Everything
    acknowledged is in the run folder then.
    """
    listening = Preemption(recipe.runtime.grace_seconds).handle_signals(leave=False)
    with listening as preemption, open_worker_group(recipe, folder, preemption) as group:
        for stage in stages:
            progress.begin_stage(stage.name)
            result = group.run(stage, progress, preemption)
            progress.finish_stage(stage.name, stage_summary(result))


@contextmanager
def open_worker_group(recipe: Recipe, folder: RunFolder, preemption: Preemption) -> Iterator[WorkerGroup]:
    """Start the actors of a run while the block runs. Raises `PreemptedError` if it is to stop meanwhile."""
    launch = needed_launch(recipe)
    ranks = recipe.train.ranks or 1
    check_ranks(recipe, ranks)
    if 0 < launch.engines < ranks:
        raise ConfigError(
            f"launch.engines is {launch.engines}, but each of the {ranks} ranks of train.ranks needs an"
            " engine; raise it."
        )
    layout = BundleLayout.from_launch(launch, ranks, recipe.servers)
    specs = {
        name: ActorSpec(name, recipe.model_dump_json(), str(folder.path.resolve()), os.getcwd())
        for name in layout.places
    }
    with ExitStack() as stack:
        with set_activity("starting Ray, or joining it"):
            cluster = stack.enter_context(open_cluster(launch, layout, preemption))
        require_gpus_asked(recipe, cluster.ray.cluster_resources().get("GPU", 0.0))
        with set_activity("waiting for what the run needs of the cluster, and its actors"):
            placement = reserve_bundles(cluster, launch, layout, preemption)
            group = WorkerGroup(cluster, launch, start_actors(launch, layout, placement, specs, preemption))
        cluster.record_processes()
        try:
            yield group
        finally:
            group.end_actors(placement)


class Trainer:
    """A trainer at work on a stage, as a member of `Supervisor`. The first one's news are passed on.

    `last` refers to its last message.
    """

    def __init__(self, remote: RemoteActor, last: Any, cluster: Cluster, first: bool) -> None:
        self.name, self._remote, self._last, self._cluster = remote.name, remote, last, cluster
        self._first, self._heard, self._suspended, self._gone = first, time.monotonic(), False, False

    def poll(self) -> Iterator[Message]:
        """Poll as in the protocol. A trainer is gone if its answer is late, or it has long had no news."""
        remote, limit = self._remote, self._remote.limits.trainer_timeout
        try:
            done, _ = self._cluster.ray.wait([self._last], timeout=0)
            if self._first:
                news = remote.get(remote.send("news", control=True), PING_SECONDS, kill=False)
                yield from news
                if self._suspended or any(message.kind != "busy" for message in news):
                    self._heard = time.monotonic()
            if done:
                yield remote.get(self._last, PING_SECONDS, kill=False)
            elif self._first and limit is not None and time.monotonic() - self._heard > limit:
                raise ActorLostError(f"the trainer finished no step in {limit:g} s")
        except ActorLostError as error:
            self._gone = error.actor is not None
            yield Message("gone", (str(error),))

    def request_action(self, action: str) -> None:
        """Ask as in the protocol."""
        self._suspended = action == "suspend"
        self._remote.send("ask", action, control=True)

    def end(self) -> None:
        """End as in the protocol. Ray restarts it as often as the recipe allows."""
        if not self._gone and not self._cluster.is_lost(patience=0.0):
            self._remote.kill()
        self._gone = True


@dataclass(slots=True)
class WorkerGroup:
    """The actors of a run."""

    cluster: Cluster
    launch: RayLaunch
    actors: dict[str, RemoteActor]

    def run(self, stage: Stage, progress: Progress, preemption: Preemption) -> dict[str, Any]:
        """Run one stage. If a trainer dies or hangs, all ranks restart from the newest checkpoint."""
        trainers = self.role_actors("trainer")
        for attempt in range(self.launch.max_restarts + 1):
            try:
                return self._run_attempt(stage.name, trainers, progress, preemption)
            except ActorLostError as error:
                lost = error
                self.cluster.require_answer()
                preemption.check()
            if attempt < self.launch.max_restarts:
                _log.warning("%s: %s; it is started anew from the newest checkpoint", stage.name, lost)
                try:
                    for trainer in trainers:
                        trainer.await_return(lambda: self.cluster.is_lost() or preemption.is_stopping)
                except ActorLostError as error:
                    self.cluster.require_answer()
                    preemption.check()
                    raise _lost_trainer(stage.name, error) from None
        raise _lost_trainer(stage.name, lost)

    def role_actors(self, role: str) -> list[RemoteActor]:
        return [actor for name, actor in self.actors.items() if role_of(name) == role]

    def _run_attempt(
        self, stage: str, remotes: Sequence[RemoteActor], progress: Progress, preemption: Preemption
    ) -> dict[str, Any]:
        """Return the result of the stage. Raises `ActorLostError` if a rank is lost, after all have ended."""
        with ExitStack() as stack:
            stack.callback(set_remote_activity, "")
            watched = Supervisor(preemption, lambda _, message: message.forward_message(stage, progress))
            group = stack.enter_context(watched)
            engines, teachers, servers = (self.role_actors(role) for role in ("engine", "teacher", "server"))
            size, address, port = len(remotes), "", 0
            if size > 1:
                address, port = remotes[0].call("free_port", seconds=PING_SECONDS)
            trainers: list[Trainer] = []
            for rank, remote in enumerate(remotes):  # each with its share of the engines
                actors, variables = HelperActors(engines[rank::size], teachers, servers), {}
                if size > 1:  # Ray shows each actor only its own devices
                    variables = rank_environment(rank, size, address, port) | {"LOCAL_RANK": "0"}
                last = remote.send("run", stage, actors, variables)
                trainers.append(Trainer(remote, last, self.cluster, first=rank == 0))
            for trainer in trainers:
                group.add_member(trainer)
            try:
                while group.running:
                    if self.cluster.is_lost():
                        group.running.clear()  # Ray's own calls would wait for ever
                        raise self.cluster.lost_error()
                    self.cluster.record_processes(LOOK_SECONDS)
                    group.check_members()
            except MemberFailedError as failed:
                cause, words = failed.message.cause, failed.message.words
                if cause not in (Cause.DIED, Cause.LOST):
                    raise failed.to_error(f"stage {stage}", "logs/") from None
                for trainer in trainers:
                    trainer.end()
                lost = words[0] if cause == Cause.DIED else "the ranks lost each other"
                raise ActorLostError(lost) from None
        return group.results[remotes[0].name]

    def end_actors(self, placement: Any) -> None:
        """End the actors and free their resources."""
        if self.cluster.is_lost(patience=0.0):
            return
        ray = self.cluster.ray
        from ray.util.placement_group import remove_placement_group

        end_servers(self.role_actors("server"))
        for actor in self.actors.values():
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor.handle, no_restart=True)
        with suppress(ray.exceptions.RayError, ValueError):
            remove_placement_group(placement)


def _lost_trainer(stage: str, error: Exception) -> LaunchError:
    return LaunchError(
        f"the trainer of {stage} is lost ({error}); see logs/ in the run folder and continue with --resume."
    )
