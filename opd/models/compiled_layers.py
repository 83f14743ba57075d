"""Decoder layers through the compiler: all of a layer but its attention, as two graphs that all layers share.

The compiler (Ansel et al. 2024, "PyTorch 2") traces the family's own layer twice: up to queries, keys and
values, and from what attention gave onwards. What a graph does not return is left out of it. Attention lies
between the two as it is without a compiler, so every `attend` fits: packed sequences, rings, pieces.

The number of tokens is a variable of the graphs. They are made on the tokens of the check, before training:
what the compiler chooses by the first size it sees is the same in every run, so that a resumed one has the
same bits. A pass without a gradient takes the same graphs, so its log-probabilities are those of training.

Shapes: `T` packed tokens, `D` hidden size, `H` query heads, `dv` size of a value's head.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opd.errors import reason_of
from opd.kernels import triton_rows
from opd.models.attention import Attend, AttentionCall, PackedAttention, drops_options
from opd.models.causal_lm import CausalLM
from opd.models.fused_attention import set_compiler_folder
from opd.models.long_sequence import replace_forward

LENGTHS = ((1, 40, 5, 130, 7), (20, 3, 50))
"""Lengths of the sequences of a model's check: those that its graphs are made on, and others."""
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Most that a tensor may be apart from the layer's own, of its norm or a hundredth of the largest one's."""
_LEAST = 2
"""Passes of fewer tokens run the layer's own code: the compiler takes a size of 1 for a constant."""
Forward = Callable[..., Tensor]
Run = Callable[[Callable[[], Tensor]], Tensor]


def stays_plain() -> bool:
    """Return whether a GPU keeps to PyTorch's own kernels: `OPD_KERNELS` says so, or Triton is missing."""
    choice = os.environ.get("OPD_KERNELS", "auto")
    return choice not in ("auto", "triton") or triton_rows.missing() is not None


class LayerGraphs:
    """The two graphs of a layer, one pair for each form of layers; see `layer_graphs`."""

    def __init__(self) -> None:
        set_compiler_folder()
        self.count = 0
        """Graphs made so far in this process."""
        options: dict[str, Any] = {"backend": self._compile, "dynamic": None, "fullgraph": True}
        self.before_attention = torch.compile(_before_attention, **options)
        self.after_attention = torch.compile(_after_attention, **options)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return compile_graph(graph, inputs)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile `graph` for inputs like `inputs`, forward and backward."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    # No choice by a clock: another order of sums would be other bits.
    steady = {"deterministic": True} if hasattr(config, "deterministic") else {}
    return compile_fx(graph, inputs, config_patches=steady)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=1)
def layer_graphs() -> LayerGraphs:
    """The graphs of this process: models of the same form share them."""
    return LayerGraphs()


def _before_attention(
    layer: nn.Module, forward: Forward, hidden: Tensor, others: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[Any, ...]:
    """The fields of the layer's `AttentionCall`. What it computes after that is in no result."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        heads, tokens = call.query.shape[1:3]
        return call.query.new_zeros(1, tokens, heads, call.value.shape[-1])

    forward(layer, hidden, *others, attend=attend, **arguments)
    (call,) = calls
    return (
        *(call.query, call.key, call.value, call.scaling, call.softcap, call.sliding_window),
        *(call.sinks, call.chunk, call.growth),
    )


def _after_attention(
    layer: nn.Module,
    forward: Forward,
    hidden: Tensor,
    attended: Tensor,
    others: tuple[Any, ...],
    arguments: dict[str, Any],
) -> Tensor:
    """The layer's output, if its attention gives `attended` [1, T, H, dv]. No result depends on its queries,
    so they are not computed again.
    """
    return forward(layer, hidden, *others, attend=lambda call: attended, **arguments)


class _Apart(torch.autograd.Function):
    """The same tensor, but not a view: the compiler would ask for the base's form, which is the packing's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return upstream


def _leaf(tensor: Tensor) -> Tensor:
    """An input [1, T, ...] of a graph, with a gradient in any case. `T` is a variable."""
    if tensor.requires_grad and torch.is_grad_enabled():
        leaf = _Apart.apply(tensor)
    else:
        leaf = tensor.detach().contiguous().requires_grad_()
    torch._dynamo.maybe_mark_dynamic(leaf, 1)
    return leaf


def _argument(value: object, tokens: int) -> Any:
    """What a layer is given beside its hidden states: no tensor of it a view, `tokens` a variable."""
    if isinstance(value, Tensor):
        leaf = _Apart.apply(value) if value.requires_grad else value.detach()
        if leaf.ndim > 1 and leaf.shape[1] == tokens:
            torch._dynamo.maybe_mark_dynamic(leaf, 1)
        return leaf
    if isinstance(value, tuple | list):
        return type(value)(_argument(part, tokens) for part in value)
    return value


def run_compiled(layer: nn.Module, index: int, hidden: Tensor, *others: Any, **arguments: Any) -> Tensor:
    """The output [1, T, D] of `layer`, the decoder's layer number `index`, for `hidden` [1, T, D] and what
    else its decoder gives it, among it `attend`.
    """
    forward, tokens = type(layer).forward, hidden.shape[1]
    if tokens < _LEAST or torch.is_inference_mode_enabled():
        return forward(layer, hidden, *others, **arguments)
    learns, graphs, leaf = torch.is_grad_enabled(), layer_graphs(), _leaf(hidden)
    attend: Attend = arguments.pop("attend")
    others = _argument(others, tokens)
    arguments = {name: _argument(value, tokens) for name, value in arguments.items()}
    with torch.enable_grad():
        call = AttentionCall(index, *graphs.before_attention(layer, forward, leaf, others, arguments))
    if not learns:
        sinks = None if call.sinks is None else call.sinks.detach()
        query, key, value = (x.detach() for x in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value, sinks=sinks)
    attended = attend(call)
    with torch.enable_grad():
        output = graphs.after_attention(layer, forward, leaf, _leaf(attended), others, arguments)
    return output if learns else output.detach()


@contextmanager
def compiled_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, `layers` are their graphs and attention."""
    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            undo.enter_context(replace_forward(layer, partial(run_compiled, layer, index)))
        yield


def compile_fault(model: CausalLM, run: Run = lambda compute: compute()) -> str | None:
    """Compile the layers of `model`. Return what is wrong with them, as the end of a sentence; `None` if
    nothing is. `run` puts sharded weights in place, so all ranks call it together.

    Each layer is compared with its own code, on the hidden states that it gets: values and gradients, the
    same bits twice, and no further graph for other lengths.
    """
    if model.is_recurrent:
        return "carry states from token to token"
    if any(drops_options(type(layer)) for layer in model.layers):
        return "do not hand on what they are given"
    if any(hasattr(part, "index_topk") for part in model.decoder.modules()):
        return "choose the keys that they see"
    if "reuse" in (getattr(model.config, "kv_sharing_modes", None) or ()):
        return "attend to keys of earlier ones"
    fault: str | None = None
    count = 0  # of graphs, when the first lengths were done

    def try_layer(layer: nn.Module, index: int, hidden: Tensor, *others: Any, **arguments: Any) -> Tensor:
        """Return the layer's own output. Compare its graphs' with it."""
        nonlocal fault
        if fault is None:
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                fault = _layer_fault(layer, index, hidden, others, arguments)
        return type(layer).forward(layer, hidden, *others, **arguments)

    for number, lengths in enumerate(LENGTHS):
        ids = torch.arange(sum(lengths), device=model.device) * 7 % model.vocab_size
        ends = list(accumulate(lengths, initial=0))
        positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
        with torch.no_grad(), ExitStack() as undo:
            for index, layer in enumerate(model.layers):
                undo.enter_context(replace_forward(layer, partial(try_layer, layer, index)))
            run(lambda ids=ids, at=positions, ends=ends: model.run(ids, at, PackedAttention(ends)))
        if fault is None and number and layer_graphs().count > count:
            return "need another graph for other lengths"
        count = layer_graphs().count
    return fault if model.layers else "are not in one list"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _layer_fault(
    layer: nn.Module, index: int, hidden: Tensor, others: tuple[Any, ...], arguments: dict[str, Any]
) -> str | None:
    generator = torch.Generator(hidden.device).manual_seed(index)
    upstream = torch.randn(hidden.shape, generator=generator, device=hidden.device).to(hidden.dtype)
    learning = [one for one in layer.parameters() if one.requires_grad]

    def results(forward: Forward) -> list[Tensor]:
        leaf = hidden.detach().clone().requires_grad_()
        output = forward(leaf, *others, **arguments)
        slopes = torch.autograd.grad(output, [leaf, *learning], upstream, allow_unused=True)
        return [output.detach(), *(one for one in slopes if one is not None)]

    expected = results(partial(type(layer).forward, layer))
    try:
        with torch.no_grad():  # first, because the compiler wants leaves to trace
            quiet = run_compiled(layer, index, hidden, *others, **arguments)
        first, second = (results(partial(run_compiled, layer, index)) for _ in range(2))
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or run ({reason_of(error)[:300]})"
    if not torch.equal(quiet, first[0]) or not all(map(torch.equal, first, second)):
        return "give other bits the second time"
    largest = max(float(one.norm()) for one in expected[1:])
    floors = [0.0, *(largest / 100 for _ in expected[1:])]
    for ours, theirs, floor in zip(first, expected, floors, strict=True):
        limit = EXACT[theirs.dtype] * max(float(theirs.norm()), floor)
        if not float((ours - theirs).norm()) <= limit:
            return "give other results than the layers' own code"
    return None
