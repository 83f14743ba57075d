"""Whether every rank has room for a copy of the student to write with, or ranks have to share one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from opd.config import Recipe
from opd.config.teachers import TorchEngineConfig
from opd.errors import ConfigError
from opd.foreign import machine_memory
from opd.models.hf_folder import described_in
from opd.pipelines.stages.precision import WIDTH, model_dtype
from opd.storage.weight_folder import read_headers

if TYPE_CHECKING:
    from opd.ranks import Ranks

_GROUP = Path("/sys/fs/cgroup/memory.max")


def cuts_engines(recipe: Recipe, path: Path, ranks: Ranks) -> bool:
    """Whether embedded engines of `ranks`, which ask together, share one copy of the model in `path`: where
    `is_cut` says so on one of their machines.

    Raises `ConfigError` where they have to, and the student writes while it learns.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or engine.sharded is False or ranks.alone:
        return False
    size = weight_bytes(path, model_dtype(recipe))
    if not ranks.any(is_cut(recipe, ranks.size, size), "the memory for engines"):
        return False
    check_turns(recipe, path, size)
    return True


def check_turns(recipe: Recipe, path: Path, size: int) -> None:
    """Raise `ConfigError` if the student, in `path` and of `size` bytes, writes while it learns, which it
    cannot where ranks share it.
    """
    if recipe.rollout.schedule != "in_turn":
        raise ConfigError(
            f"the memory of a machine does not hold {path} ({size / 2**30:.1f} GiB) once more for each of its"
            " ranks to write with; set rollout.schedule to in_turn, where ranks share one, or let a server"
            " write (rollout.engine)."
        )


def is_cut(recipe: Recipe, ranks: int, size: int) -> bool:
    """Whether the embedded engines of so many ranks share one copy of a model of `size` bytes, as
    `rollout.engine.sharded` says: left to itself, where this machine's memory does not hold one for each.
    """
    engine = recipe.rollout.engine
    if ranks == 1 or not isinstance(engine, TorchEngineConfig) or recipe.launch.type == "ray":
        return False
    if engine.sharded is not None:
        return engine.sharded
    copies, memory = room_for(recipe, ranks)
    return copies * size > memory


def room_for(recipe: Recipe, ranks: int) -> tuple[int, int]:
    """How many of the ranks share the memory that one has, and its bytes, whoever uses them now."""
    import torch

    from opd.models.causal_lm import torch_device

    device = torch_device(recipe.model.device)
    if device.type == "cuda":
        return 1, torch.cuda.get_device_properties(device).total_memory
    limit = _GROUP.read_text().strip() if _GROUP.is_file() else "max"
    memory = machine_memory()
    together = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return together, min(memory, int(limit)) if limit.isdecimal() else memory


def weight_bytes(path: Path, dtype: str) -> int:
    """Bytes of the weights in a model's folder, in a dtype by name."""
    return WIDTH[dtype] * sum(math.prod(source.shape) for source in read_headers(described_in(path)).values())
