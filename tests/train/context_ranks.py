"""One rank of steps whose sequences are shared; run by test_context_parallel.py through `run_ranks`."""

import json
from functools import partial
from pathlib import Path

import context_step
import torch.distributed as dist
from rank_processes import joined
from safetensors.torch import save_file

from opd.ranks import Ranks
from opd.train.fsdp_backend import ContextBackend, FSDPBackend


def make_step(name: str, rank: int, folder: Path, group: dist.ProcessGroup) -> dict[str, float]:
    """The metrics of a step on shared sequences, or on shared weights; its tensors are written."""
    if name in context_step.SHARDED:
        make = partial(FSDPBackend, data=Ranks(group))
    else:
        together = 2 if name in context_step.MESH else dist.get_world_size(group)
        together = "auto" if name in context_step.CHOSEN else together
        make = partial(ContextBackend, ranks=Ranks(group), row_size=together)
    tensors, metrics = context_step.step(name, make)
    save_file(tensors, folder / f"{name}-{rank}.safetensors")
    return metrics


def main() -> None:
    """The cases of `FOLDER/cases.json`; what came out is written for the test to compare."""
    with joined(240) as (rank, folder):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        for name in json.loads((folder / "cases.json").read_text()):
            metrics = make_step(name, rank, folder, group)
            (folder / f"{name}-{rank}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
