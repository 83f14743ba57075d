"""What a simulation says, for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opd.pipelines.plan.simulate.cluster import (
    Cluster,
    layer_cost,
    load_cluster,
    memory_per_rank,
    scoring_ranks,
)
from opd.pipelines.plan.simulate.run import Simulated, simulate


def print_simulation(path: Path) -> int:
    """Simulate the cluster in `path` and print the answer. Returns the exit status: 1 if a rank's memory does
    not suffice. Raises `ConfigError` for what is wrong with the file.
    """
    cluster = load_cluster(path)
    found = simulate(cluster)
    print("\n".join(describe(cluster, found)))
    most = max(sum(parts.values()) for parts in memory_per_rank(cluster).values())
    return int(most > cluster.gpu.memory_gb * 1e9)


def describe(cluster: Cluster, found: Simulated) -> Iterator[str]:
    """The lines of the answer."""
    work, steps = cluster.work, found.batches[1:] or found.batches
    mean = {
        "rollout": float(np.mean([batch.written - batch.opened for batch in steps])),
        "teachers": float(np.mean([batch.score_seconds for batch in steps])),
        "stall": float(np.mean([batch.stall_seconds for batch in steps])),
        "train": float(np.mean([batch.train_seconds for batch in steps])),
    }
    step = found.step_seconds
    tokens = found.tokens / len(found.batches)
    yield (
        f"cluster   {_gpus(cluster)}; {cluster.teachers} teachers of {_count(cluster.teacher.parameters)}"
        f" parameters, student of {_count(cluster.student.parameters)}; schedule {cluster.schedule}"
    )
    yield (
        f"step      {_seconds(step)}: {work.requests:,} responses, {_count(tokens)} tokens,"
        f" {tokens / step:,.0f} tokens/s"
    )
    stalled = 100 * mean["stall"] / mean["teachers"] if mean["teachers"] else 0.0
    yield (
        f"rollout   {_seconds(mean['rollout'])} from a batch's begin to its last token, at most"
        f" {found.limit} requests an engine"
    )
    yield (
        f"teachers  {_seconds(mean['teachers'])}, of which {_seconds(mean['stall'])} ({stalled:.0f} %) wait"
        f" for weights; {_bound(cluster, found)}"
    )
    yield f"train     {_seconds(mean['train'])}"
    yield "in use    " + ", ".join(
        f"{name} {100 * usage.busy / (found.workers[name] * found.seconds):.0f} %"
        for name, usage in found.usage.items()
    )
    worst = max(batch.staleness for batch in found.batches)
    yield f"staleness at most {worst} updates (bound {cluster.ahead})"
    for role, parts in memory_per_rank(cluster).items():
        total, room = sum(parts.values()), cluster.gpu.memory_gb * 1e9
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)
        verdict = "fits" if total <= room else "DOES NOT FIT"
        yield f"memory    {role}: {total / 1e9:.1f} of {room / 1e9:g} GB, {verdict} ({listed})"


def _bound(cluster: Cluster, found: Simulated) -> str:
    """What one teacher layer takes, and so what limits the pass."""
    tokens, squares = found.batches[-1].sizes(slice(0, None, cluster.teachers))
    cost = layer_cost(cluster, tokens, squares)
    limit = "reading" if cost.load > cost.compute else "computing"
    return (
        f"a layer of {cost.nbytes / 1e9:.2f} GB arrives in {1e3 * cost.load:.0f} ms and computes for"
        f" {1e3 * cost.compute:.0f} ms: {limit} limits"
    )


def _gpus(cluster: Cluster) -> str:
    ranks = cluster.ranks
    if ranks.colocated:
        return f"{ranks.train} GPUs that take turns"
    parts = [f"{ranks.rollout} rollout in engines of {ranks.per_engine}", f"{ranks.train} train"]
    parts += [f"{ranks.teachers} teachers"] if ranks.teachers else []
    total = ranks.rollout + ranks.train + (scoring_ranks(cluster) if ranks.teachers else 0)
    return f"{total} GPUs ({', '.join(parts)})"


def _count(number: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"
