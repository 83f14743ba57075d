"""One rank of two that gather published units on devices that are not there; run by test_on_cuda.py.

    python gathering_rank.py RANK WORLD FOLDER

Gloo moves what NCCL would, after all that the rank's stream was given before, as NCCL does.
"""

from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch
import torch.distributed as dist
import xxhash
from rank_processes import do_tasks

from opd.storage.published import PublishedModel
from opd.teachers import unit_gather
from opd.teachers.layer_stream import LayerStream


def on_hosts(call: Any) -> Any:
    """A collective of the device's tensors by their hosts."""

    def run(*tensors: Any, **options: Any) -> None:
        gpu = pretend_cuda.current()
        gpu.stream.finish()
        with pretend_cuda.no_modes():
            call(*(x.host if isinstance(x, pretend_cuda.OnDevice) else x for x in tensors), **options)

    return run


def gathered(rank: int, task: dict, folder: Path) -> dict:
    """Whether every unit of some passes is what was published, and what was on its way when each was read."""
    del folder
    group, left = dist.new_group(), []
    read = PublishedModel.read_part
    with (
        pretend_cuda.gpu(rank),
        PublishedModel.open(task["url"]) as model,
        pytest.MonkeyPatch.context() as patch,
    ):
        stream = LayerStream(prefetch_bytes=task["window"], device=f"cuda:{rank}", group=group)

        def noted(*args: Any) -> None:
            left.append(stream.gather._stream.left)
            read(*args)

        patch.setattr(PublishedModel, "read_part", noted)
        patch.setattr(dist, "all_reduce", on_hosts(dist.all_reduce))
        patch.setattr(unit_gather, "_all_gather", on_hosts(unit_gather._all_gather))
        copies = []
        for _ in range(3):
            for unit, flat in stream.iterate_pass(stream.request_pass(model, list(model.manifest.units))):
                into = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
                copies.append((into.copy_(flat, non_blocking=True), model.manifest.units[unit].checksum))
        torch.cuda.synchronize()
        right = [xxhash.xxh3_128(into.numpy()).hexdigest() == due for into, due in copies]
        stream.close()
    return {"right": right, "left": left}


if __name__ == "__main__":
    do_tasks(gathered, seconds=120)
