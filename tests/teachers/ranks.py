"""One rank of a group that reads its teachers together; run by test_ranks.py, one process a rank.

    python ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` lists what to do, one after the other; `FOLDER/NAME-R.json` says how a task went on a
rank, and `FOLDER/NAME-R.safetensors` holds its gradient.
"""

import os
import signal
from pathlib import Path

import numpy as np
import tiny
import torch
import torch.distributed as dist
from rank_processes import do_tasks
from safetensors.torch import save_file

from opd.config import DistillConfig
from opd.models.causal_lm import CausalLM
from opd.storage.published import PublishedModel
from opd.storage.shard_cache import ShardCache
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.skeleton import Skeleton
from opd.teachers.streamed_teacher import streamed_teachers
from opd.train.distill_terms import build_distill_term
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

LENGTHS = [(3, 4), (5, 6), (2, 3), (7, 12), (1, 1), (4, 9), (2, 2), (6, 1)]


def samples(domains: list[str]) -> list[Sample]:
    """The samples of all ranks, at least one of each of `domains`, which cycle through them."""
    lengths = LENGTHS * -(-len(domains) // len(LENGTHS))
    names = [domains[i % len(domains)] for i in range(len(lengths))]
    made = tiny.samples(lengths, teachers=names)
    for sample in made:
        sample.teacher = None
    return made


def batch_of(mine: list[Sample]) -> RolloutBatch:
    """Equal weights, normalised over the samples of all ranks."""
    total = sum(response for _, response in LENGTHS)
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in mine]
    for term in terms:
        term.kl_weight = np.full(len(term.kl_weight), 1 / total, dtype=np.float32)
    return RolloutBatch(mine, terms)


def gradient(schedule: TeacherSchedule, mine: list[Sample]) -> dict[str, torch.Tensor]:
    """The gradient of a tiny student that follows its teachers on `mine`."""
    return gradient_of(tiny.model(seed=77), schedule, mine)


def gradient_of(student: CausalLM, schedule: TeacherSchedule, mine: list[Sample]) -> dict[str, torch.Tensor]:
    """That of `student`."""
    term = build_distill_term(DistillConfig(), schedule)
    assert term is not None
    backend = TorchBackend(student, tiny.training([term], 0.7, max_tokens=16))
    schedule.assign(mine)
    schedule.score(mine)
    backend.forward_backward(schedule.sort(batch_of(mine)))
    schedule.release()
    grads = ((name, p.grad) for name, p in student.module.named_parameters())
    return {name: grad for name, grad in grads if grad is not None}


def one_step(rank: int, task: dict, folder: Path) -> dict:
    """The gradient summed over ranks, and the counters."""
    urls = task["urls"][rank] if isinstance(task["urls"], list) else task["urls"]
    cache = ShardCache(task["copies"]) if "copies" in task else None
    teachers = streamed_teachers(
        urls,
        Placement(max_tokens=16),
        prefetch_bytes=task["prefetch_bytes"],
        group=dist.new_group(),
        cache=cache,
    )
    if task.get("dies") == rank:
        Skeleton.run_layer = lambda *_: os._exit(0)
    if task.get("killed") == rank:
        ShardCache._store_block = killing(ShardCache._store_block)
    router = Router({name: {name: 1.0} for name in urls}, "one_hot")
    schedule = TeacherSchedule(teachers, router, group=dist.group.WORLD)
    mine = [s for i, s in enumerate(samples(task["domains"])) if task["owner"][i] == rank]
    opened = {name: teacher.bytes_read for name, teacher in teachers.items() if teacher.digest}
    came = [read_by(teachers)]
    for _ in range(task["steps"]):
        grads = gradient(schedule, mine)
        came.append(read_by(teachers))
    for grad in grads.values():
        dist.all_reduce(grad)
    dist.barrier()
    save_file(grads, folder / f"{task['name']}-{rank}.safetensors")
    counters = schedule.take_counters()
    read = {name: teacher.bytes_read - opened[name] for name, teacher in teachers.items()}
    next(iter(teachers.values())).close()
    if cache is not None:
        cache.close()
    return {"counters": counters, "read": read, "came": came}


def read_by(teachers: dict) -> list[int]:
    """Bytes from the stores, and from the node's copies, so far."""
    return [sum(getattr(t, what) for t in teachers.values()) for what in ("bytes_read", "cached_bytes")]


def killing(keep):
    """`keep`, which ends the process at its 20th call, in the middle of a teacher."""
    calls = []

    def kept(*words) -> None:
        calls.append(words)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(*words)

    return kept


def one_leaves(rank: int, task: dict, folder: Path) -> dict:
    """Rank 1 closes its stream while it uses the first unit; the others go on to the end."""
    stream = LayerStream(prefetch_bytes=0, group=dist.new_group())
    with PublishedModel.open(next(iter(task["urls"].values()))) as model:
        units = stream.iterate_pass(stream.request_pass(model, list(model.manifest.units)))
        next(units)
        try:
            return {"units": 1 if rank == 1 else 1 + len(list(units))}
        finally:
            stream.close()


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What `task` asks for."""
    return (one_leaves if task["name"] == "leaves" else one_step)(rank, task, folder)


if __name__ == "__main__":
    do_tasks(one_task, seconds=120)
