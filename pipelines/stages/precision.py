"""What a recipe's models compute in, learn in and are written in; and what is lost without master weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from opd.config import Recipe
from opd.models.hf_folder import described_in
from opd.storage.weight_folder import read_headers

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by name of the dtype."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""By safetensors' names."""
_LOOK = 1 << 16
"""Values of each tensor that are looked at to judge all of it."""


def model_dtype(recipe: Recipe) -> str:
    """Name of the dtype student and teachers compute in and models are written in: the recipe's, else that of
    the checkpoint it starts from, else float32.

    Raises `StorageError` if that checkpoint cannot be read.
    """
    if recipe.model.dtype is not None:
        return recipe.model.dtype
    return "float32" if recipe.model.path is None else checkpoint_dtype(described_in(Path(recipe.model.path)))


def checkpoint_dtype(folder: Path) -> str:
    """The dtype that most bytes of a Hugging Face folder's weights have, as its files say; float32 where that
    is none that models are computed in here. Raises `StorageError` if a file is missing or damaged.
    """
    sizes: dict[str, int] = {}
    for source in read_headers(folder).values():
        sizes[source.dtype] = sizes.get(source.dtype, 0) + source.nbytes
    return _STORED.get(max(sizes, key=lambda name: sizes[name], default=""), "float32")


def has_masters(recipe: Recipe) -> bool:
    """Whether what learns is kept in float32 while layers compute in another dtype."""
    return recipe.train.precision == "mixed" and model_dtype(recipe) != "float32"


def learning_width(recipe: Recipe) -> int:
    """Bytes of a weight as the optimiser keeps it, and of each of its two moments."""
    return 4 if has_masters(recipe) else WIDTH[model_dtype(recipe)]


def some_weights(folder: Path) -> Iterator[Tensor]:
    """The first values of every floating-point tensor of a Hugging Face folder, `[n]` each."""
    import torch

    for source in read_headers(described_in(folder)).values():
        if source.dtype in _STORED and source.nbytes:
            dtype = getattr(torch, _STORED[source.dtype])
            with source.path.open("rb") as file:
                file.seek(source.start)
                values = bytearray(file.read(min(source.nbytes, _LOOK * dtype.itemsize)))
            yield torch.frombuffer(values, dtype=dtype)


def lost_share(weights: Iterable[Tensor], dtype: str, lr: float) -> float:
    """Share of `weights`, kept in `dtype`, that an update of `lr`, about AdamW's own size, leaves as they
    were: those of which it is less than half the distance to the next number.
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
