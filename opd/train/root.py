"""A model's root for sharding libraries: whatever is computed with its weights happens inside one forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM


class Root(nn.Module):
    """Runs a function in place of a forward.

    The loss reads the head's weight itself, outside of any module's forward; FSDP2 and ZeRO-3 gather
    weights only around one. Inside this one those of `module` that belong to no layer are whole.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def layers_of(model: CausalLM) -> list[nn.Module]:
    """The decoder's layers. Raises `ModelError` if it has no list of them."""
    lists = [part for part in model.decoder.children() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1:
        raise ModelError(
            f"{type(model.decoder).__name__} has {len(lists)} lists of layers, so its weights cannot be"
            " sharded layer by layer; train it with one rank."
        )
    return list(lists[0])
