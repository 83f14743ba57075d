"""One rank of a Megatron-Core group; run by test_megatron_ranks.py, one process a rank.

    python megatron_rank.py RANK WORLD FOLDER

`FOLDER/tasks.json` lists what to score, one after the other; `FOLDER/NAME-R.json` says how a task went on a
rank, and `FOLDER/NAME-R.safetensors` holds what it computed.
"""

from pathlib import Path

import megatron_models as models
import tiny
import torch
from rank_processes import do_tasks
from safetensors.torch import save_file

from opd.kernels.ops import linear_kl
from opd.megatron.module import megatron_core
from opd.teachers.kinds import Placement
from opd.teachers.megatron_teacher import MegatronTeacher, megatron_teachers

megatron_core()  # once for all ranks, which are forks: it imports a compiler
VOCABULARY = 13
"""Of the tokenizer; the heads have 15 rows, so both ranks hold padding or tokens that are cut off."""
TEMPERATURE = 0.7


def divergence(teacher: MegatronTeacher, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The KL of a tiny student to `rows` [N, D], from shards of both heads, and its gradients."""
    student = tiny.model(seed=77, hidden_size=32)
    shard = teacher.load_head_shard()
    own = shard.shard_like(student.head(VOCABULARY))
    own.head.weight.retain_grad()
    input_ids, position_ids, cu_seqlens, at = models.packed()
    hidden = student.hidden(input_ids, position_ids, cu_seqlens)[at].detach().requires_grad_()
    values = linear_kl(hidden, own, rows, shard, temperature=TEMPERATURE)
    values.sum().backward()
    assert hidden.grad is not None
    assert own.head.weight.grad is not None
    return {"kl": values.detach(), "grad_hidden": hidden.grad, "grad_head": own.head.weight.grad}


def one_task(task: dict, rank: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """How it went, and what was computed."""
    sources = task["sources"][rank] if isinstance(task["sources"], list) else task["sources"]
    samples = tiny.samples(models.LENGTHS)
    placement = Placement(max_tokens=24, vocabulary=VOCABULARY)
    found: dict[str, torch.Tensor] = {}
    with megatron_teachers(sources, placement, tensor_parallel=2, keep=task["keep"]) as teachers:
        opened = {name: teacher.bytes_read for name, teacher in teachers.items()}
        for _ in range(2):
            for name, teacher in teachers.items():
                rows = teacher.score(samples).rows
                found[f"{name}/rows"] = rows
                found[f"{name}/logits"] = teacher.load_head().logits(rows)
                found |= {f"{name}/{key}": value for key, value in divergence(teacher, rows).items()}
        read = {name: teacher.bytes_read - opened[name] for name, teacher in teachers.items()}
        loads = next(iter(teachers.values())).tags.loads
    return {"read": read, "loads": loads}, {name: t.contiguous().clone() for name, t in found.items()}


def save_task(rank: int, task: dict, folder: Path) -> dict:
    """Do `task`, keep its tensors beside its result."""
    result, tensors = one_task(task, rank)
    save_file(tensors, folder / f"{task['name']}-{rank}.safetensors")
    return result


if __name__ == "__main__":
    do_tasks(save_task, seconds=120)
