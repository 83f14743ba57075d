"""One rank of a mixture whose experts ranks share; run by test_two_ranks.py and test_expert_parallel.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import backend_ranks
import sharded_ranks
import torch
import torch.distributed as dist
from rank_processes import do_tasks
from safetensors.torch import save_file
from torch import Tensor

from opd.models.adapters import weight_name
from opd.models.causal_lm import CausalLM
from opd.models.expert_parallel import experts_are_shared
from opd.models.sharded import gather_full, local_part
from opd.ranks import Ranks
from opd.storage.tensors import TensorParts
from opd.train.fsdp_backend import FSDPBackend

IDS = torch.arange(11)
"""Tokens of the compared logits."""


@contextmanager
def counted(kind: type, name: str, size: Callable[..., int]) -> Iterator[list[int]]:
    """The sizes of the calls of `kind.name` while the block runs."""
    sizes: list[int] = []
    original = getattr(kind, name)

    def call(*given, **more):
        sizes.append(size(*given))
        return original(*given, **more)

    setattr(kind, name, call)
    try:
        yield sizes
    finally:
        setattr(kind, name, original)


def logits_of(model: CausalLM, run: Callable = lambda compute: compute()) -> Tensor:
    """[11, V] of `IDS`, without a gradient."""
    with torch.no_grad():
        positions = torch.arange(len(IDS))
        return run(lambda: model.head().logits(model.hidden(IDS, positions, [0, len(IDS)])))


def gradients_of(backend: FSDPBackend, batch) -> dict[str, Tensor]:
    """Of a step's loss, whole, by Hugging Face's names; nothing is learnt from it."""
    backend.forward_backward(batch)
    learn = {name: p for name, p in backend.model.module.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in learn.values())
    found = {weight_name(name): gather_full(p.grad).clone() for name, p in learn.items() if p.grad is not None}
    backend.zero_grad()
    return found


def lives(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Load, compute, learn, save, resume and export a mixture. What came out is written, or returned."""
    batch, out = backend_ranks.BATCHES[task.get("batches", "new")], folder / task["name"]
    out.mkdir(exist_ok=True)
    opened = sharded_ranks.opened
    with (
        counted(TensorParts, "read", lambda parts, name, start, into: into.numel()) as read,
        opened(folder, task, ranks, whole=False) as backend,
    ):
        assert isinstance(backend, FSDPBackend)
        model = backend.model
        experts = {name: local_part(t)[0].numel() for name, t in model.weights() if ".experts." in name}
        result = {"shared": experts_are_shared(model.module), "experts": experts, "read": sum(read)}
        logits = logits_of(model, backend.root)
        with counted(dist, "all_gather_into_tensor", lambda into, *_, **__: into.numel()) as gathered:
            gradients = gradients_of(backend, batch(0))
        result["gathered"] = max(gathered)
        if "lora" not in task and "tolerates" not in task:
            assert not any(isinstance(one, str) for one in gathered)
        metrics = backend_ranks.train(backend, 0, 2, batch)
        backend_ranks.save_state(out, backend.state(), ranks)
        digest = backend.digest()
    ranks.barrier("the state")
    with opened(folder, task, ranks, whole=False) as backend:
        backend.load_state(backend_ranks.read_state(out))
        result |= {"digests": [digest, backend.digest()]}
        metrics += backend_ranks.train(backend, 2, 3, batch)
        sharded_ranks.exports(backend, sharded_ranks.formed(folder, task), folder, task, ranks)
        after = logits_of(backend.model, backend.root)
    if ranks.is_main:
        save_file(gradients | {"logits": logits, "after": after}, out / "computed.safetensors")
    return result | {"metrics": metrics}


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What became of a task."""
    return lives(folder, task, Ranks(dist.group.WORLD))


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
