"""One rank that trains with compiled layers and without; run by test_compiled_steps.py through `run_ranks`.

`FOLDER/NAME-RANK.json`: the metrics of both, and whether the first were compiled. The compiler's back end is
PyTorch's own operators.
"""

from pathlib import Path

import backend_ranks
import torch.distributed as dist
from rank_processes import do_tasks
from torch._dynamo.backends.debugging import aot_eager

from opd.config import TrainConfig
from opd.models import compiled_layers
from opd.ranks import Ranks
from opd.train.backends import open_backend


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """Train twice, on the ranks' back end."""
    del rank, folder
    compiled_layers.compile_graph = aot_eager
    found: dict = {}
    for name, asked in (("compiled", True), ("own", False)):
        opened = open_backend(
            lambda dtype, empty=False: backend_ranks.student(dtype=dtype, **task.get("model", {})),
            TrainConfig.model_validate(task["train"]),
            backend_ranks.training(**task.get("batch", {})),
            Ranks(dist.group.WORLD),
        )
        with opened as backend:
            assert backend.compile_layers(asked, None) is asked
            found[name] = backend_ranks.train(backend, 0, 3, backend_ranks.batch)
    return found


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
