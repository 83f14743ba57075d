"""Simulate a cluster: free workers generate, score and train batches. See `pipelines/check/README.md`."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from opd.pipelines.check.cluster import (
    DecodeCost,
    LayerCost,
    SimulatedCluster,
    decode_of,
    layer_cost,
    load_cluster,
    memory_per_rank,
    prefill_seconds,
    running_limit,
    sync_seconds,
    train_seconds,
)


class Clock:
    """Call due events in order of time. Events of one moment run in the order of their creation."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def call_at(self, time: float, call: Callable[[], None]) -> None:
        """Call `call` at `time`, which must not be in the past."""
        if time < self.now:
            raise ValueError(f"an event at {time} was asked for at {self.now}")
        heapq.heappush(self._events, (time, next(self._serial), call))

    def run(self) -> None:
        """Run until no events are left."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass(slots=True)
class WorkerUsage:
    """Seconds of one kind of worker. The rest, neither busy nor stalled, was idle."""

    busy: float = 0.0
    stalled: float = 0.0
    """There was work, but it waited for bytes."""


@dataclass(slots=True)
class SimulatedRequest:
    """One response to generate."""

    batch: int
    prompt: float
    length: float
    """Tokens."""
    began_under: int = -1
    """Policy version of its first token."""


class SimulatedEngine:
    """Advance all running requests token by token, in closed form between two ends."""

    def __init__(
        self,
        clock: Clock,
        decode: DecodeCost,
        prefill: Callable[[float], float],
        slots: int,
        factor: float = 1.0,
    ) -> None:
        """`factor`: slowdown of this engine against the plan."""
        self._clock, self._decode, self._prefill = clock, decode, prefill
        self._slots, self._factor = slots, factor
        self._running: list[tuple[float, int, SimulatedRequest]] = []
        """(position at which it ends, serial, request)"""
        self._position = 0.0
        self._cached = 0.0
        """Tokens of keys and values of all running requests."""
        self._since = 0.0
        self._debt = 0.0
        """Seconds of prefill that come before the next token."""
        self._epoch = 0
        self._serial = 0
        self._paused = True
        self.usage = WorkerUsage()

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return self._slots - len(self._running)

    def pause(self) -> None:
        """Stop between two tokens."""
        self._advance_position()
        self._paused = True
        self._epoch += 1

    def resume(self, *, rebuild: bool) -> None:
        """Go on. With `rebuild`, keys and values are computed again because the weights changed."""
        self._since, self._paused = self._clock.now, False
        if rebuild and self._running:
            self._debt += self._prefill(self._cached)

    def admit_requests(
        self,
        queue: deque[SimulatedRequest],
        version: int,
        done: Callable[[SimulatedRequest], None],
        again: Callable[[], None],
    ) -> None:
        """Admit requests into free slots and plan the next end, which calls `done`, then `again`."""
        if self._paused:
            return
        self._advance_position()
        while queue and self.free_slots:
            request = queue.popleft()
            request.began_under = version
            self._debt += self._prefill(request.prompt)
            self._cached += request.prompt
            heapq.heappush(self._running, (self._position + request.length, self._serial, request))
            self._serial += 1
        self._epoch += 1
        if not self._running:
            return
        epoch = self._epoch

        def finish_requests() -> None:
            if epoch != self._epoch:
                return  # it was planned again in the meantime
            self._advance_position(self._running[0][0])
            while self._running and self._running[0][0] <= self._position:
                _, _, request = heapq.heappop(self._running)
                self._cached -= request.prompt + request.length
                done(request)
            if not self._running:
                self._cached = 0.0
            again()

        # Each decode step reads one more cached token per request.
        linear, square = self._step_costs()
        tokens = self._running[0][0] - self._position
        seconds = self._factor * (tokens * linear + square * tokens * tokens)
        self._clock.call_at(self._clock.now + self._debt + seconds, finish_requests)

    def _step_costs(self) -> tuple[float, float]:
        """Return a and b of the seconds of n decode steps, `a * n + b * n * n`, at the plan's speed."""
        decode, running = self._decode, len(self._running)
        return decode.fixed_seconds(running) + decode.per_token * self._cached, decode.per_token * running / 2

    def _advance_position(self, position: float | None = None) -> None:
        """Advance position and usage to the present, or to `position`, which is reached now."""
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if self._paused or not self._running:
            return
        self.usage.busy += elapsed
        paid = min(elapsed, self._debt)
        self._debt -= paid
        if position is not None:
            self._debt = 0.0
        else:  # the tokens of the rest of the seconds
            linear, square = self._step_costs()
            seconds = (elapsed - paid) / self._factor
            if square == 0 or linear == 0:
                decoded = seconds / linear if linear else math.sqrt(seconds / square) if square else math.inf
            else:
                decoded = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))
            position = self._position + decoded
        tokens = min(position, self._running[0][0]) - self._position
        self._cached += tokens * len(self._running)
        self._position += tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """One scoring pass over all teachers."""

    end: float
    """Seconds, on the clock of its begin."""
    busy: float
    stalled: float


class TeacherPasses:
    """Passes in sequence on the same ranks. As in `LayerStream`, the loader reads on into the window while
    nothing computes. So the first layers of a pass may be loaded before it begins.
    """

    def __init__(self, prefetch_bytes: float, *, ahead: bool = True) -> None:
        """`ahead`: read the first layers before the pass begins. Without it every pass starts empty."""
        self._prefetch = prefetch_bytes
        self._ahead = ahead
        self._loader_free = 0.0
        self._held: deque[tuple[float, float]] = deque()
        """(bytes, time of release) of layers in the window."""

    def run_pass(self, start: float, layers: Sequence[LayerCost]) -> Pass:
        """Run every layer of `layers` in order, from `start` on."""
        if not self._ahead:
            self._loader_free = max(self._loader_free, start)
        now, busy, stalled = start, 0.0, 0.0
        for layer in layers:
            # It is loaded after the previous layers, once the window has memory for it: the layer in use and
            # `prefetch` more. An empty window always has space.
            window = sum(nbytes for nbytes, _ in self._held)
            while self._held and window > self._prefetch:
                nbytes, released = self._held.popleft()
                window -= nbytes
                self._loader_free = max(self._loader_free, released)
            self._loader_free += layer.load
            waiting = max(0.0, self._loader_free - now)
            now += waiting + layer.compute
            stalled += waiting
            busy += layer.compute
            self._held.append((layer.nbytes, now))
        return Pass(now, busy, stalled)


@dataclass(slots=True)
class SimulatedBatch:
    """One step's requests, and the times of its events (seconds)."""

    requests: list[SimulatedRequest]
    unfinished: int
    """Requests that are not yet generated."""
    opened: float
    written: float = 0.0
    scored: float = 0.0
    score_seconds: float = 0.0
    stall_seconds: float = 0.0
    train_seconds: float = 0.0
    learnt: float = 0.0
    staleness: int = 0
    """Versions between the oldest first token and the weights that learn from it."""

    def token_sums(self, share: slice = slice(None)) -> tuple[float, float]:
        """Return (tokens, squares of lengths) of some of its sequences, prompts included."""
        lengths = np.array([r.prompt + r.length for r in self.requests[share]])
        return float(lengths.sum()), float((lengths**2).sum())


@dataclass(slots=True)
class SimulationResult:
    seconds: float
    """Time of the last update."""
    batches: list[SimulatedBatch]
    usage: dict[str, WorkerUsage]
    workers: dict[str, int]
    """Number of workers of each kind in `usage`."""
    limit: int
    """Requests of an engine at once."""

    @property
    def step_seconds(self) -> float:
        """Mean time from one update to the next, without the first step, where nothing overlaps yet."""
        learnt = [0.0, *(batch.learnt for batch in self.batches)]
        first = 1 if len(self.batches) > 1 else 0
        return (learnt[-1] - learnt[first]) / (len(self.batches) - first)


class _Simulation:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster, self.clock = cluster, Clock()
        self._rng = np.random.default_rng(cluster.seed)
        self._version = 0
        self._batches: list[SimulatedBatch] = []
        self._queue: deque[SimulatedRequest] = deque()
        self._scoring = self._training = self._syncing = False
        self._scored = 0
        """Batches with teacher scores."""
        decode, self.limit = decode_of(cluster), running_limit(cluster)
        prefill = partial(prefill_seconds, cluster)
        count = cluster.ranks.rollout // cluster.ranks.per_engine
        self.engines = [
            SimulatedEngine(self.clock, decode, prefill, self.limit, self._random_factor())
            for _ in range(count)
        ]
        self._usage = {"trainer": WorkerUsage()}
        self._own_ranks = cluster.ranks.teachers > 0 and not cluster.ranks.colocated
        if self._own_ranks:
            self._usage["teachers"] = WorkerUsage()
        self._passes = TeacherPasses(cluster.prefetch_gb * 1e9)

    def run(self) -> SimulationResult:
        for engine in self.engines:
            engine.resume(rebuild=False)
        self._open_batches()
        self.clock.run()
        rollout = WorkerUsage(busy=sum(engine.usage.busy for engine in self.engines))
        usage = {"rollout": rollout, **self._usage}
        workers = dict.fromkeys(usage, 1) | {"rollout": len(self.engines)}
        return SimulationResult(self._batches[-1].learnt, self._batches, usage, workers, self.limit)

    def _random_factor(self) -> float:
        """Draw one random factor with mean 1."""
        sigma = self.cluster.jitter
        return float(self._rng.lognormal(-sigma * sigma / 2, sigma)) if sigma else 1.0

    def _open_batches(self) -> None:
        """Begin every batch that may begin: at most `ahead` updates before its turn."""
        work, lengths = self.cluster.work, self.cluster.lengths
        while len(self._batches) < min(work.steps, self._version + self.cluster.batches_ahead + 1):
            rng = np.random.default_rng((self.cluster.seed, len(self._batches)))
            drawn = rng.lognormal(-(lengths.sigma**2) / 2, lengths.sigma, work.request_count) * lengths.mean
            number = len(self._batches)
            requests = [
                SimulatedRequest(number, lengths.prompt / work.samples_per_prompt, float(tokens))
                for tokens in np.clip(np.round(drawn), 1, lengths.longest)
            ]
            self._batches.append(SimulatedBatch(requests, len(requests), self.clock.now))
            self._queue.extend(requests)
        if not self._syncing:
            for engine in self.engines:
                self._run_engine(engine)

    def _run_engine(self, engine: SimulatedEngine) -> None:
        def finish_request(request: SimulatedRequest) -> None:
            batch = self._batches[request.batch]
            batch.unfinished -= 1
            if batch.unfinished == 0:
                batch.written = self.clock.now
                self._start_scoring()

        again = partial(self._run_engine, engine)
        engine.admit_requests(self._queue, self._version, finish_request, again)

    def _start_scoring(self) -> None:
        """Begin the teachers' pass over the next batch, if it is generated and the ranks are free."""
        number = self._scored
        if self._scoring or number >= len(self._batches) or self._batches[number].unfinished:
            return
        if not self._own_ranks and (self._training or number > self._version or self._syncing):
            return
        self._scoring = True
        batch = self._batches[number]
        cluster, layers = self.cluster, []
        for teacher in range(cluster.teachers):  # each reads its share of the samples
            cost = layer_cost(cluster, *batch.token_sums(slice(teacher, None, cluster.teachers)))
            for _ in range(cluster.teacher.layers):
                load, compute = cost.load * self._random_factor(), cost.compute * self._random_factor()
                layers.append(LayerCost(cost.nbytes, load, compute))
        done = self._passes.run_pass(self.clock.now, layers)
        used = self._usage["teachers" if self._own_ranks else "trainer"]
        used.busy += done.busy
        used.stalled += done.stalled
        batch.stall_seconds = done.stalled
        batch.score_seconds = done.end - self.clock.now
        self.clock.call_at(done.end, lambda: self._on_scored(batch))

    def _on_scored(self, batch: SimulatedBatch) -> None:
        batch.scored = self.clock.now
        self._scoring = False
        self._scored += 1
        self._start_update()
        self._start_scoring()

    def _start_update(self) -> None:
        """Begin the next update, if its batch is scored and the trainer is free."""
        if self._training or self._syncing or self._scored <= self._version:
            return
        self._training = True
        batch = self._batches[self._version]
        batch.staleness = self._version - min(request.began_under for request in batch.requests)
        batch.train_seconds = train_seconds(self.cluster, *batch.token_sums()) * self._random_factor()
        self._usage["trainer"].busy += batch.train_seconds
        self.clock.call_at(self.clock.now + batch.train_seconds, lambda: self._start_sync(batch))

    def _start_sync(self, batch: SimulatedBatch) -> None:
        """Send new weights. Engines stop between two tokens and go on under them."""
        self._training, self._syncing = False, True
        for engine in self.engines:
            engine.pause()
        seconds = sync_seconds(self.cluster) * self._random_factor()
        self.clock.call_at(self.clock.now + seconds, lambda: self._on_synced(batch))

    def _on_synced(self, batch: SimulatedBatch) -> None:
        batch.learnt = self.clock.now
        self._version += 1
        self._syncing = False
        for engine in self.engines:
            engine.resume(rebuild=True)
        self._open_batches()
        self._start_update()
        self._start_scoring()


def simulate_cluster(cluster: SimulatedCluster) -> SimulationResult:
    """Run `cluster.work.steps` steps. The same cluster and seed give the same result. Raises `ConfigError` if
    the student does not fit into an engine.
    """
    return _Simulation(cluster).run()


def print_simulation(path: Path, values: Mapping[str, Any] | None = None) -> int:
    """Simulate the cluster in `path` and print the result. `values` as of `load_cluster`. Returns the exit
    status: 1 if a rank's memory does not suffice. Raises `ConfigError` if the file is wrong.
    """
    cluster = load_cluster(path, values)
    result = simulate_cluster(cluster)
    print("\n".join(format_simulation(cluster, result)))
    most = max(sum(parts.values()) for parts in memory_per_rank(cluster).values())
    return int(most > cluster.gpu.memory_gb * 1e9)


def format_simulation(cluster: SimulatedCluster, result: SimulationResult) -> Iterator[str]:
    """Yield the lines of the result."""
    work, steps = cluster.work, result.batches[1:] or result.batches
    mean = {
        "rollout": float(np.mean([batch.written - batch.opened for batch in steps])),
        "teachers": float(np.mean([batch.score_seconds for batch in steps])),
        "stall": float(np.mean([batch.stall_seconds for batch in steps])),
        "train": float(np.mean([batch.train_seconds for batch in steps])),
    }
    step = result.step_seconds
    trained = float(sum(one.length for batch in result.batches for one in batch.requests))
    tokens = trained / len(result.batches)
    ranks = cluster.ranks
    if ranks.colocated:
        gpus = f"{ranks.train} GPUs that take turns"
    else:
        roles = [f"{ranks.rollout} rollout in engines of {ranks.per_engine}", f"{ranks.train} train"]
        roles += [f"{ranks.teachers} teachers"] if ranks.teachers else []
        gpus = f"{ranks.rollout + ranks.train + ranks.teachers} GPUs ({', '.join(roles)})"
    yield (
        f"cluster   {gpus}; {cluster.teachers} teachers of {_format_count(cluster.teacher.parameters)}"
        f" parameters, student of {_format_count(cluster.student.parameters)}; schedule {cluster.schedule}"
    )
    yield (
        f"step      {_format_seconds(step)}: {work.request_count:,} responses, {_format_count(tokens)}"
        f" tokens, {tokens / step:,.0f} tokens/s"
    )
    stalled = 100 * mean["stall"] / mean["teachers"] if mean["teachers"] else 0.0
    yield (
        f"rollout   {_format_seconds(mean['rollout'])} from a batch's begin to its last token, at most"
        f" {result.limit} requests an engine"
    )
    cost = layer_cost(cluster, *result.batches[-1].token_sums(slice(0, None, cluster.teachers)))
    yield (
        f"teachers  {_format_seconds(mean['teachers'])}, of which {_format_seconds(mean['stall'])}"
        f" ({stalled:.0f} %) wait for weights; a layer of {cost.nbytes / 1e9:.2f} GB arrives in"
        f" {1e3 * cost.load:.0f} ms and computes for {1e3 * cost.compute:.0f} ms:"
        f" {'reading' if cost.load > cost.compute else 'computing'} limits"
    )
    yield f"train     {_format_seconds(mean['train'])}"
    yield "in use    " + ", ".join(
        f"{name} {100 * usage.busy / (result.workers[name] * result.seconds):.0f} %"
        for name, usage in result.usage.items()
    )
    worst = max(batch.staleness for batch in result.batches)
    yield f"staleness at most {worst} updates (bound {cluster.batches_ahead})"
    for role, parts in memory_per_rank(cluster).items():
        total, memory = sum(parts.values()), cluster.gpu.memory_gb * 1e9
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)
        verdict = "fits" if total <= memory else "DOES NOT FIT"
        yield f"memory    {role}: {total / 1e9:.1f} of {memory / 1e9:g} GB, {verdict} ({listed})"


def _format_count(number: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.3g}"


def _format_seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"
