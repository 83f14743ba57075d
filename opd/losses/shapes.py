"""Shape checks shared by the losses."""

from __future__ import annotations

from torch import Tensor


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise `ValueError` naming tensors whose shapes differ: broadcasting would silently sum wrong things."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"tensors of one loss have different shapes ({listed}); give one entry per token to each"
        )
