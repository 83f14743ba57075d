"""One rank of a mixture whose experts ranks share; run by test_two_ranks.py and test_expert_parallel.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import backend_ranks
import sharded_ranks
import torch
import torch.distributed as dist
from rank_processes import do_tasks
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opd.kernels.vocab_parallel import HeadShard
from opd.models.adapters import weight_name
from opd.models.causal_lm import CausalLM
from opd.models.expert_parallel import expert_modules, experts_are_shared, share_experts
from opd.models.sharded import gather_full, local_part
from opd.ranks import Ranks
from opd.storage.tensors import TensorParts
from opd.train.fsdp_backend import FSDPBackend
from opd.train.megatron_backend import MegatronBackend
from opd.train.torch_backend import TorchBackend

IDS = torch.arange(11)
"""Tokens of the compared logits."""


class Gathered(TorchDispatchMode):
    """Notes how many numbers each gathering of all ranks' parts gives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "allgather" in str(func).replace("_", ""):
            self.sizes += [one.numel() for one in tree_leaves((args, result)) if isinstance(one, Tensor)]
        return result


@contextmanager
def noted_reads() -> Iterator[list[int]]:
    """The sizes of what is read of files while the block runs."""
    sizes: list[int] = []
    read = TensorParts.read

    def noted(self: TensorParts, name: str, start: int, into: Tensor) -> None:
        sizes.append(into.numel())
        read(self, name, start, into)

    TensorParts.read = noted
    try:
        yield sizes
    finally:
        TensorParts.read = read


def logits_of(backend: TorchBackend) -> Tensor:
    """[11, V] of `IDS`, without a gradient."""
    model, positions = backend.model, torch.arange(len(IDS))
    with torch.no_grad():
        return backend.run(lambda: model.head().logits(model.hidden(IDS, positions, [0, len(IDS)])))


def gradients_of(backend: TorchBackend) -> dict[str, Tensor]:
    """The accumulated gradient of all that learns, whole, by Hugging Face's names; it is zeroed."""
    found = {}
    for name, parameter in backend.model.module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[weight_name(name)] = gather_full(parameter.grad).clone()
    backend.zero_grad()
    return found


def lives(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Load, compute, learn, save, resume and export a mixture. What came out is written, or returned."""
    batch, out = backend_ranks.BATCHES[task.get("batches", "new")], folder / f"{task['name']} out"
    out.mkdir(exist_ok=True)
    opened = sharded_ranks.opened
    with noted_reads() as read, opened(folder, task, ranks, whole=False) as backend:
        assert isinstance(backend, FSDPBackend)
        backend.replay_experts("losses" in task and "auto")
        model = backend.model
        shares = {
            name: local_part(t)[0].numel() for name, t in CausalLM.weights(model) if t.is_floating_point()
        }
        result = {"shared": experts_are_shared(model.module), "shares": shares, "read": sum(read)}
        logits = logits_of(backend)
        with Gathered() as gathered:
            backend.forward_backward(batch(0))
        result["gathered"] = max(gathered.sizes)
        gradients = gradients_of(backend)
        metrics = backend_ranks.train(backend, 0, 2, batch)
        backend_ranks.save_state(out, backend.state(), ranks)
        digest = backend.digest()
    ranks.barrier("the state")
    with opened(folder, task, ranks, whole=False) as backend:
        assert isinstance(backend, FSDPBackend)
        backend.replay_experts("losses" in task and "auto")
        backend.load_state(backend_ranks.read_state(out))
        result["digests"] = [digest, backend.digest()]
        metrics += backend_ranks.train(backend, 2, 3, batch)
        sharded_ranks.exports(backend, sharded_ranks.formed(folder, task), folder, task, ranks)
        after = logits_of(backend)
    if ranks.is_main:
        save_file(gradients | {"logits": logits, "after": after}, out / "computed.safetensors")
    return result | {"metrics": metrics}


def cut(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Load, learn, save, go on and resume a mixture on Megatron-Core, and export it. What came out is
    written, or returned.
    """
    batch, out = backend_ranks.batch, folder / f"{task['name']} out"
    out.mkdir(exist_ok=True)
    opened = partial(sharded_ranks.opened, folder, task, ranks, whole=False)
    with noted_reads() as read, opened() as backend:
        assert isinstance(backend, MegatronBackend)
        held = [p.numel() for name, p in backend._parameters.items() if ".experts." in name]
        result = {"held": sum(held), "read": sum(read)}
        with torch.no_grad():
            positions, bounds = torch.arange(len(IDS)), torch.tensor([0, len(IDS)], dtype=torch.int32)
            hidden, head = backend.hidden(IDS, positions, bounds), backend.head()
            rows = (head.head if isinstance(head, HeadShard) else head).logits(hidden)
        backend_ranks.train(backend, 0, 2, batch)
        backend_ranks.save_state(out, backend.state(), ranks)
        backend.assign_samples([])  # as a stage does for each step
        result["metrics"] = [backend_ranks.train(backend, 2, 4, batch)]
        digests = [backend.digest()]
    ranks.barrier("the state")
    with opened() as backend:
        backend.load_state(backend_ranks.read_state(out))
        result["metrics"].append(backend_ranks.train(backend, 2, 4, batch))
        digests.append(backend.digest())
        sharded_ranks.exports(backend, sharded_ranks.formed(folder, task), folder, task, ranks)
    save_file({"rows": rows}, out / f"rows-{ranks.rank}.safetensors")
    return result | {"digests": digests}


def idle(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Route all tokens to experts of the first rank: what differs from experts that nobody shares, and the
    largest gradient of a rank's own experts.
    """
    experts, *_ = expert_modules(CausalLM.from_pretrained(folder / task["model"]).module)
    whole, mesh = deepcopy(experts), init_device_mesh("cpu", (ranks.size,))
    share_experts(experts, mesh)
    drawn = torch.Generator().manual_seed(ranks.rank)
    chosen, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2, generator=drawn)
    hidden = torch.randn(5, 32, generator=drawn)
    inputs, outputs = [hidden.clone().requires_grad_() for _ in range(2)], []
    for module, given in zip((experts, whole), inputs, strict=True):
        outputs.append(module(given, chosen, weights))
        outputs[-1].square().sum().backward()
    pairs = [outputs, [given.grad for given in inputs]]
    for mine, theirs in zip(experts.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        pairs.append([gather_full(mine.grad) * ranks.size, theirs.grad])
    differences = [float((one - other).norm() / other.norm()) for one, other in pairs]
    largest = max(float(local_part(one.grad)[0].abs().max()) for one in experts.parameters())
    return {"differences": differences, "largest": largest}


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What became of a task."""
    does = {"idle": idle, "cut": cut, "lives": lives}[task.get("does", "lives")]
    return does(folder, task, Ranks(dist.group.WORLD))


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
