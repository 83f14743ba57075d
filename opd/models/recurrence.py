"""Layers that carry a state from token to token: gated delta rules, state spaces, short convolutions.

Their own modules compute them, on whole sequences `[B, L, D]`. In a packed forward each of them (a mixer) is
handed to the pass, which calls it on every sequence by itself. The engine keeps the states by slot, in the
form of transformers' cache: convolution states and recurrent states of a layer, `[B, ...]` each.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from opd.errors import ModelError

_WRITES = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' cache by which a module keeps a state."""
_NO_LIMIT = (0.0, math.inf)
UNMIXED = ("mlp", "moe")
"""Kinds of layers in which no token sees another (Nemotron-H)."""
IN_PIECES = (
    "and layers that take a sequence in pieces, or share it with other ranks, only attend; leave"
    " batch.sequence_chunk out, and set train.context_parallel to 1"
)
_KERNEL_LOG = logging.getLogger("transformers.integrations.hub_kernels")
States = dict[str, Tensor]
"""States of a layer by name (`conv.0`, `recurrent.0`), `[B, ...]` each."""


@dataclass(frozen=True, slots=True)
class MixerCall:
    """A mixer and the packed tokens that it is to mix."""

    layer_index: int
    hidden: Tensor
    """[T, D]."""
    forward: Callable[..., Any]

    def run(self, hidden: Tensor, cache: Any = None) -> Tensor:
        """Mix sequences `hidden` [B, L, D] -> [B, L, D], from the states in `cache` on, which it updates."""
        output = self.forward(hidden, cache=cache)
        if not isinstance(output, Tensor) or output.shape[:2] != hidden.shape[:2]:
            raise ModelError(
                f"its layer {self.layer_index} does not give a state for each token; choose a model of"
                " another architecture."
            )
        return output


def measured_states(call: MixerCall, config: PreTrainedConfig) -> list[Tensor]:
    """Return the states that a mixer of a model of `config` keeps of a sequence."""
    cache = DynamicCache(config=config)
    call.run(call.hidden[None, :2], cache)
    return [*read_states(cache, call.layer_index).values()]


@lru_cache(maxsize=256)
def keeps_state(kind: type) -> bool:
    """Return True if modules of class `kind` keep a state in transformers' cache themselves."""
    own = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value))
    return any(_WRITES & set(one.__code__.co_names) for one in own)


def mixers_of(module: nn.Module) -> list[Any]:
    """Return the mixers of a decoder or of a causal language model."""
    return [part for part in module.modules() if any(map(keeps_state, type(part).__mro__))]


def step_fault(module: nn.Module) -> str | None:
    """Return why `module` computes one token otherwise than many, as the end of a sentence."""
    for part in mixers_of(module):
        if _has_limit(part) and hasattr(part, "mup_vector"):  # its time steps are scaled before the limit
            least, most = part.time_step_limit
            return (
                f"its layer {part.layer_idx} keeps its time steps between {least:g} and {most:g}, which"
                " transformers' code for one token does not"
            )
    return None


def _has_limit(mixer: Any) -> bool:
    return tuple(getattr(mixer, "time_step_limit", _NO_LIMIT)) != _NO_LIMIT


def _run_limited(mixer: Any, hidden: Tensor, **options: Any) -> Tensor:
    """Run `mixer` within its limits of time steps, which transformers' code for one token leaves out."""
    from opd.models.long_sequence import replace_forward  # which needs attention, which needs this module

    if hidden.shape[1] > 1:
        return type(mixer).forward(mixer, hidden, **options)
    project, bias = mixer.in_proj.forward, mixer.dt_bias
    # softplus(step + bias) is within the limits if `step` is within these.
    least, most = (torch.special.expm1(bias.new_tensor(one)).log() - bias for one in mixer.time_step_limit)

    def project_limited(states: Tensor) -> Tensor:
        rest, step = project(states).tensor_split([-len(bias)], -1)
        return torch.cat([rest, step.clamp(least, most).to(rest.dtype)], -1)

    with replace_forward(mixer.in_proj, project_limited):
        return type(mixer).forward(mixer, hidden, **options)


def install_mixers(module: nn.Module) -> bool:
    """Let the mixers of `module` hand their tokens to the `attend` that they are given. Without one they
    compute what they always did. Return whether there are any.
    """
    _KERNEL_LOG.addFilter(_is_of_use)
    mixers = mixers_of(module)
    for part in mixers:
        part.forward = MethodType(_mix, part)
    return bool(mixers)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return False for transformers' advice to install faster kernels where there is no GPU for them."""
    return torch.cuda.is_available() or "falling back to its reference" not in str(record.msg)


def _mix(mixer: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Stand for the `forward` of `mixer`, as a method, so that a copy of the module calls the copy."""
    attend = options.get("attend")
    forward = partial(_run_limited if _has_limit(mixer) else type(mixer).forward, mixer)
    if attend is None:
        return forward(hidden_states, *arguments, **options)
    return mix_by(attend, MixerCall(int(mixer.layer_idx), hidden_states[0], forward))[None]


def mix_by(attend: Any, call: MixerCall) -> Tensor:
    """Return [T, D] of `call`, mixed by `attend`. Raises `ModelError` if it cannot carry states."""
    if not hasattr(attend, "mix"):
        raise ModelError(f"its layer {call.layer_index} carries a state from token to token, {IN_PIECES}.")
    return attend.mix(call)


def put_states(cache: DynamicCache, index: int, states: Mapping[str, Tensor]) -> None:
    """Let layer `index` of `cache` go on from `states`, whose memory it updates."""
    layer: Any = cache.layers[index]
    for name, tensor in states.items():
        kind, _, number = name.partition(".")
        place = int(number)
        getattr(layer, f"{kind}_states")[place] = tensor
        getattr(layer, f"is_{kind}_states_initialized")[place] = True
        if kind == "conv":
            layer.conv_kernel_size[place] = tensor.shape[-1]
        layer.dtype, layer.device = tensor.dtype, tensor.device
    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def read_states(cache: DynamicCache, index: int) -> States:
    """Return the states of layer `index` of `cache`."""
    layer: Any = cache.layers[index]
    return {
        f"{kind}.{place}": tensor
        for kind in ("conv", "recurrent")
        for place, tensor in getattr(layer, f"{kind}_states").items()
        if tensor is not None
    }
