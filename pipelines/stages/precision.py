"""Choose the precision of a recipe's models, and whether each rank has memory for an engine's copy.

It also estimates the updates that are lost without master weights. Without enough memory, ranks share one
copy of the student.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from opd.config import Recipe
from opd.config.teachers import TorchEngineConfig
from opd.errors import ConfigError
from opd.models.hf_folder import described_in, plain_form_of, quantisation_in
from opd.storage.weight_folder import read_headers
from opd.untrusted import group_memory, ranks_here

if TYPE_CHECKING:
    from torch import Tensor

    from opd.ranks import Ranks


WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by name of the dtype."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""dtype names of safetensors."""
_CODES = ("F8_E4M3", "U8")
"""Types of quantised weights."""
_LOOK = 1 << 16
"""Values of each tensor that stand for all of it."""


def model_dtype(recipe: Recipe) -> str:
    """Return the name of the dtype of student and teachers, in computation and in files.

    It is the recipe's, else that of the start checkpoint, else float32. Raises `StorageError` if that
    checkpoint cannot be read.
    """
    if recipe.model.dtype is not None:
        return recipe.model.dtype
    return "float32" if recipe.model.path is None else checkpoint_dtype(described_in(Path(recipe.model.path)))


def checkpoint_dtype(folder: Path) -> str:
    """Return the dtype of most bytes of a Hugging Face folder's weights: bfloat16 for quantised ones, float32
    if models cannot be computed in that dtype here. Raises `StorageError` if a file is missing or damaged.
    """
    sizes: dict[str, int] = {}
    for source in read_headers(folder).values():
        sizes[source.dtype] = sizes.get(source.dtype, 0) + source.nbytes
    if not sizes.keys().isdisjoint(_CODES) and quantisation_in(folder) is not None:
        return "bfloat16"
    return _STORED.get(max(sizes, key=lambda name: sizes[name], default=""), "float32")


def has_masters(recipe: Recipe) -> bool:
    """Return whether trained weights are in float32 while layers compute in another dtype."""
    return recipe.train.precision == "mixed" and model_dtype(recipe) != "float32"


def learning_width(recipe: Recipe) -> int:
    """Return the bytes of a weight in the optimiser, and of each of its two moments."""
    return 4 if has_masters(recipe) else WIDTH[model_dtype(recipe)]


def some_weights(folder: Path) -> Iterator[Tensor]:
    """Yield the first values of every floating-point tensor of a Hugging Face folder, `[n]` each."""
    import torch

    folder = described_in(folder)
    numbers, _ = plain_form_of(folder)
    for name, source in read_headers(folder).items():
        if source.dtype in _STORED and source.nbytes and name in numbers:
            dtype = getattr(torch, _STORED[source.dtype])
            with source.path.open("rb") as file:
                file.seek(source.start)
                values = bytearray(file.read(min(source.nbytes, _LOOK * dtype.itemsize)))
            yield torch.frombuffer(values, dtype=dtype)


def lost_share(weights: Iterable[Tensor], dtype: str, lr: float) -> float:
    """Return the share of `weights`, stored in `dtype`, that an update of `lr` does not change. `lr` is about
    the size of AdamW's updates. A weight stays if that is less than half the distance to the next number.
    """
    import torch

    lost, count, eps = 0, 0, torch.finfo(getattr(torch, dtype)).eps
    for tensor in weights:
        values = tensor.float()
        exponent = torch.frexp(values).exponent  # a value is in [0.5, 1) * 2 ** exponent
        half = torch.ldexp(torch.full_like(values, eps / 2), exponent - 1)
        lost += int(((half > lr) & (values != 0)).sum())
        count += tensor.numel()
    return lost / count if count else math.nan


def cuts_engines(recipe: Recipe, path: Path, ranks: Ranks) -> bool:
    """Return whether embedded engines of `ranks` share one copy of the model in `path`.

    All ranks call this together. They share if `is_cut` is true on one of their machines. Raises
    `ConfigError` if they must share but the student generates while it trains.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or engine.sharded is False or ranks.is_alone:
        return False
    size = weight_bytes(path, model_dtype(recipe))
    if not ranks.any_rank(is_cut(recipe, ranks.size, size), "the memory for engines"):
        return False
    check_turns(recipe, path, size)
    return True


def check_turns(recipe: Recipe, path: Path, size: int) -> None:
    """Raise `ConfigError` if the student generates while it trains, because ranks that share it cannot. The
    model is in `path` and has `size` bytes.
    """
    if recipe.rollout.schedule != "in_turn":
        raise ConfigError(
            f"the memory of a machine does not hold {path} ({size / 2**30:.1f} GiB) once more for each of its"
            " ranks to write with; set rollout.schedule to in_turn, where ranks share one, or let a server"
            " write (rollout.engine)."
        )


def is_cut(recipe: Recipe, ranks: int, size: int) -> bool:
    """Return whether the embedded engines of `ranks` ranks share one copy of a model of `size` bytes.
    `rollout.engine.sharded` decides. By default they share if this machine's memory does not hold one for
    each.
    """
    engine = recipe.rollout.engine
    if ranks == 1 or not isinstance(engine, TorchEngineConfig) or recipe.launch.type == "ray":
        return False
    if engine.sharded is not None:
        return engine.sharded
    copies, memory = room_for(recipe, ranks, size)
    return copies * size > memory


_MERGED_SHARE = 16
"""Layers that are kept merged too, and laid out for decode again, may have one part of so many of the memory:
all of it together is about twice as much."""


def merges_adapters(recipe: Recipe, adapted: int) -> bool:
    """Return whether embedded engines also keep the adapted layers (`adapted` bytes) in merged form.
    `rollout.engine.lora` decides. If it is null, the device's total memory does, so that a resumed run makes
    the same choice.
    """
    import torch

    from opd.models.causal_lm import torch_device

    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig) and engine.lora is not None:
        return engine.lora == "merged"
    device = torch_device(recipe.model.device)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else group_memory()
    return adapted * _MERGED_SHARE <= memory


def shares_base(recipe: Recipe, ranks: int) -> bool:
    """Return whether all that compute with the base of a student of adapters share it in this process. The
    base must be whole, and `train.backend` must leave it as it is.
    """
    return recipe.model.lora is not None and recipe.train.backend == "torch" and ranks == 1


ABSENT_GPU = ContextVar("ABSENT_GPU", default=80 << 30)
"""Bytes of a GPU that a recipe names and this machine does not have, for plans."""
LAID_OUT = 0.65
"""Share of a copy's bytes that its engine lays out again on CUDA, about: fused weights."""


def room_for(recipe: Recipe, ranks: int, size: int = 0) -> tuple[int, int]:
    """Return the number of ranks that share one memory, and its bytes for copies of `size` bytes.

    On a GPU these are the bytes left by other processes, minus the training here and the engine's own layout
    of its copy, which may exist already or not. The training takes a rank's share of weights and moments as
    trained, with adapters of the base alone, and nothing if they leave the device.
    """
    import torch

    from opd.models.causal_lm import torch_device

    if recipe.model.device.startswith("cuda") and not torch.cuda.is_available():  # a plan for another machine
        free = ABSENT_GPU.get()
    else:
        device = torch_device(recipe.model.device)
        if device.type != "cuda":
            return ranks_here(ranks), group_memory()
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if recipe.runtime.offload.trainer:
        trained = 0
    elif recipe.model.lora is not None:
        trained = size // ranks
    else:
        trained = 3 * learning_width(recipe) * (size // WIDTH[model_dtype(recipe)]) // ranks
    return 1, int(free - LAID_OUT * size) - trained


def weight_bytes(path: Path, dtype: str) -> int:
    """Return the bytes of the weights in a model's folder, in a dtype by name."""
    shapes, _ = plain_form_of(described_in(path))
    return WIDTH[dtype] * sum(map(math.prod, shapes.values()))
