"""One of two ranks that do a small task of each kind; run by test_two_ranks.py through `run_ranks`."""

from pathlib import Path

import backend_ranks
import context_ranks
import expert_ranks
import ring_ranks
import sharded_engine_ranks
import sharded_ranks
import torch
import torch.distributed as dist
import vocab_parallel_worker
from rank_processes import do_tasks

from opd.megatron.module import megatron_core
from opd.ranks import Ranks

megatron_core()  # once for both: it imports a compiler


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What became of a task."""
    kind = task["kind"]
    if kind == "backend":
        backend_ranks.run_task(task, folder, Ranks(dist.group.WORLD))
        return {}
    if kind == "step":
        return context_ranks.make_step(task["case"], rank, folder, dist.group.WORLD)
    if kind == "ring":
        return ring_ranks.compare(dist.group.WORLD, ring_ranks.CASES[task["case"]])
    if kind == "engine":
        return sharded_engine_ranks.one_task(rank, task, folder, Ranks(dist.group.WORLD, store(task, folder)))
    if kind == "experts":
        return expert_ranks.one_task(rank, task, folder)
    if kind == "head":
        return vocab_parallel_worker.cases_of(torch.float64, task["form"], dist.group.WORLD)
    return sharded_ranks.one_task(rank, task, folder)


def store(task: dict, folder: Path) -> dist.PrefixStore:
    """Where the ranks of an engine that is shared tell each other that they go on."""
    return dist.PrefixStore(task["name"], dist.FileStore(str(folder / "store"), 2))


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
