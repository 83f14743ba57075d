"""The simulation itself: batches are written, scored and learnt from, each by whoever is free."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from opd.pipelines.simulate.cluster import Cluster
from opd.pipelines.simulate.costs import (
    LayerCost,
    decode_of,
    layer_cost,
    prefill_seconds,
    running_limit,
    sync_seconds,
    train_seconds,
)
from opd.pipelines.simulate.engines import Engine, Request
from opd.pipelines.simulate.events import Clock, Usage
from opd.pipelines.simulate.teacher_pass import TeacherPasses


@dataclass(slots=True)
class Batch:
    """One step's requests, and when what happened to them (seconds)."""

    requests: list[Request]
    left: int
    opened: float
    written: float = 0.0
    scored: float = 0.0
    score_seconds: float = 0.0
    stall_seconds: float = 0.0
    train_seconds: float = 0.0
    learnt: float = 0.0
    staleness: int = 0
    """Versions between the oldest first token and the weights that learn from it."""

    def sizes(self, share: slice = slice(None)) -> tuple[float, float]:
        """(tokens, squares of lengths) of some of its sequences, prompts included."""
        lengths = np.array([r.prompt + r.length for r in self.requests[share]])
        return float(lengths.sum()), float((lengths**2).sum())


@dataclass(slots=True)
class Simulated:
    """What came out."""

    seconds: float
    """Until the last update."""
    batches: list[Batch]
    usage: dict[str, Usage]
    workers: dict[str, int]
    """How many of each kind `usage` adds up."""
    limit: int
    """Requests an engine wrote at once."""

    @property
    def step_seconds(self) -> float:
        """Mean time from one update to the next, without the first step, where nothing overlaps yet."""
        learnt = [0.0, *(batch.learnt for batch in self.batches)]
        first = 1 if len(self.batches) > 1 else 0
        return (learnt[-1] - learnt[first]) / (len(self.batches) - first)

    @property
    def tokens(self) -> float:
        """Response tokens learnt from."""
        return float(sum(r.length for batch in self.batches for r in batch.requests))


@dataclass(slots=True)
class _Learner:
    scoring: bool = False
    training: bool = False
    scored: int = 0
    """Batches with teacher scores."""
    usage: dict[str, Usage] = field(default_factory=dict)


class _Simulation:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, Clock()
        self._rng = np.random.default_rng(cluster.seed)
        self._version = 0
        self._batches: list[Batch] = []
        self._queue: deque[Request] = deque()
        self._syncing = False
        decode, self.limit = decode_of(cluster), running_limit(cluster)
        prefill = partial(prefill_seconds, cluster)
        count = cluster.ranks.rollout // cluster.ranks.per_engine
        self.engines = [Engine(self.clock, decode, prefill, self.limit, self._factor()) for _ in range(count)]
        self._learner = _Learner(usage={"trainer": Usage()})
        self._own_ranks = cluster.ranks.teachers > 0 and not cluster.ranks.colocated
        if self._own_ranks:
            self._learner.usage["teachers"] = Usage()
        self._passes = TeacherPasses(cluster.prefetch_gb * 1e9)

    def run(self) -> Simulated:
        for engine in self.engines:
            engine.resume(rebuild=False)
        self._open()
        self.clock.run()
        rollout = Usage(busy=sum(engine.usage.busy for engine in self.engines))
        usage = {"rollout": rollout, **self._learner.usage}
        workers = dict.fromkeys(usage, 1) | {"rollout": len(self.engines)}
        return Simulated(self._batches[-1].learnt, self._batches, usage, workers, self.limit)

    def _factor(self) -> float:
        """One random factor with mean 1."""
        sigma = self.cluster.jitter
        return float(self._rng.lognormal(-sigma * sigma / 2, sigma)) if sigma else 1.0

    def _open(self) -> None:
        """Begin every batch that may be begun: at most `ahead` updates before its turn."""
        work, lengths = self.cluster.work, self.cluster.lengths
        while len(self._batches) < min(work.steps, self._version + self.cluster.ahead + 1):
            rng = np.random.default_rng((self.cluster.seed, len(self._batches)))
            drawn = rng.lognormal(-(lengths.sigma**2) / 2, lengths.sigma, work.requests) * lengths.mean
            number = len(self._batches)
            requests = [
                Request(number, lengths.prompt / work.samples_per_prompt, float(tokens))
                for tokens in np.clip(np.round(drawn), 1, lengths.longest)
            ]
            self._batches.append(Batch(requests, len(requests), self.clock.now))
            self._queue.extend(requests)
        if not self._syncing:
            for engine in self.engines:
                self._work(engine)

    def _work(self, engine: Engine) -> None:
        engine.work(self._queue, self._version, self._written, lambda: self._work(engine))

    def _written(self, request: Request) -> None:
        batch = self._batches[request.batch]
        batch.left -= 1
        if batch.left == 0:
            batch.written = self.clock.now
            self._score()

    def _score(self) -> None:
        """Begin the teachers' pass over the next batch, if it is written and somebody is free to."""
        learner = self._learner
        number = learner.scored
        if learner.scoring or number >= len(self._batches) or self._batches[number].left:
            return
        if not self._own_ranks and (learner.training or number > self._version or self._syncing):
            return
        learner.scoring = True
        batch = self._batches[number]
        done = self._passes.run(self.clock.now, self._layers(batch))
        used = learner.usage["teachers" if self._own_ranks else "trainer"]
        used.busy += done.busy
        used.stalled += done.stalled
        batch.stall_seconds = done.stalled
        batch.score_seconds = done.end - self.clock.now
        self.clock.at(done.end, lambda: self._scored(batch))

    def _layers(self, batch: Batch) -> list[LayerCost]:
        """All layers of all teachers, each for its share of the samples."""
        cluster, layers = self.cluster, []
        for teacher in range(cluster.teachers):
            cost = layer_cost(cluster, *batch.sizes(slice(teacher, None, cluster.teachers)))
            for _ in range(cluster.teacher.layers):
                load, compute = cost.load * self._factor(), cost.compute * self._factor()
                layers.append(LayerCost(cost.nbytes, load, compute))
        return layers

    def _scored(self, batch: Batch) -> None:
        batch.scored = self.clock.now
        self._learner.scoring = False
        self._learner.scored += 1
        self._train()
        self._score()

    def _train(self) -> None:
        """Begin the next update, if its batch is scored and the trainer is free."""
        learner = self._learner
        if learner.training or self._syncing or learner.scored <= self._version:
            return
        learner.training = True
        batch = self._batches[self._version]
        batch.staleness = self._version - min(request.began_under for request in batch.requests)
        batch.train_seconds = train_seconds(self.cluster, *batch.sizes()) * self._factor()
        learner.usage["trainer"].busy += batch.train_seconds
        self.clock.at(self.clock.now + batch.train_seconds, lambda: self._sync(batch))

    def _sync(self, batch: Batch) -> None:
        """New weights: engines stop between two tokens and go on under them."""
        self._learner.training, self._syncing = False, True
        for engine in self.engines:
            engine.pause()
        seconds = sync_seconds(self.cluster) * self._factor()
        self.clock.at(self.clock.now + seconds, lambda: self._synced(batch))

    def _synced(self, batch: Batch) -> None:
        batch.learnt = self.clock.now
        self._version += 1
        self._syncing = False
        for engine in self.engines:
            engine.resume(rebuild=True)
        self._open()
        self._train()
        self._score()


def simulate(cluster: Cluster) -> Simulated:
    """Run `cluster.work.steps` steps; the same cluster and seed give the same result. Raises `ConfigError` if
    the student does not fit into an engine.
    """
    return _Simulation(cluster).run()
