"""Routing of a mixture of experts: the experts that each token was sent to, recorded and replayed.

An engine that computes in other precision, with other kernels or in other batches may send a token to other
experts than the trainer does. The trainer can replay the engine's choices (R3: Ma et al. 2025,
arXiv:2510.11370; Zheng et al. 2025, arXiv:2512.01374). The weights of the chosen experts still come from the
trainer's own scores, by the family's own code, with their gradient.

A *routed block* is the parent of a transformers experts module. It chooses by one call of `topk` over the
scores [T, E] of its experts. While choices are recorded or replayed, that one call is answered here. Whether
a family works this way is tried on a few tokens. No family is listed by name.

Shapes: `T` packed tokens, `L` routed blocks, `E` experts of a block, `K` experts of a token.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opd.errors import ModelError, reason_of
from opd.models.architecture import chosen_experts, expert_parts
from opd.models.attention import PackedAttention
from opd.models.long_sequence import decoder_of, layers_of, replace_forward

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

CHOICES_DTYPE = torch.int16
"""Of choices as tensors. -1 leaves a choice to the model."""
ARGUMENT = "expert_choices"
"""A decoder hands this argument, [1, T, L, K], to its layers, as it hands `attend`."""
_TOPK = (torch.topk, Tensor.topk)
_PROBED, _LARGE = 8, 1 << 23
_BALANCING = "load_balancing_loss_func"
"""Transformers' function, in the module of each family that has the loss."""
Choose = Callable[[Tensor, Callable[[], Any]], Any]
"""`choose(scores [t, E], own) -> (values, indices)`, [t, K] each; `own()` is the model's own answer."""


class _AnswerTopk(TorchFunctionMode):
    """While it is entered, `choose` answers calls of `topk` for `per_token` of `experts` scores a token."""

    def __init__(self, experts: int, per_token: int, choose: Choose) -> None:
        super().__init__()
        self._form = experts, per_token
        self._choose = choose

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = partial(func, *args, **kwargs)
        if func in _TOPK and self._chooses(*args, **kwargs):
            return self._choose(kwargs["input"] if "input" in kwargs else args[0], own)
        return own()

    def _chooses(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
        return input.ndim == 2 and dim in (-1, 1) and (input.shape[1], k) == self._form


@dataclass(slots=True)
class ChoiceCount:
    """How many choices a model would have made otherwise; a choice is a position in a routed block."""

    apart: Tensor | float = 0.0
    """Those in which its own scores name another set of experts."""
    replayed: Tensor | float = 0.0
    """All that were replayed."""
    is_open: bool = False
    """True inside `replay`. What a backward computes again is not counted again."""


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The choices of packed tokens, to be replayed."""

    choices: Tensor
    """[T, L, K], of a signed dtype, on the model's device. A row of -1 leaves a choice to the model."""
    count: ChoiceCount = field(default_factory=ChoiceCount)

    def select(self, places: Tensor) -> RoutedTokens:
        """Return the tokens at `places` [t] int64, with the same count. `T` and above is padding."""
        inside = places < len(self.choices)
        chosen = self.choices[torch.where(inside, places, 0)]
        return replace(self, choices=torch.where(inside[:, None, None], chosen, -1))


@contextmanager
def counted(routed: RoutedTokens | None) -> Iterator[None]:
    """While the block runs, replayed choices of `routed` are counted, if there are any."""
    if routed is None:
        yield
        return
    routed.count.is_open = True
    try:
        yield
    finally:
        routed.count.is_open = False


class ExpertRouting:
    """The routed blocks of one model."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        blocks: Sequence[tuple[int, nn.Module]],
        experts: int,
        per_token: int,
    ) -> None:
        """`blocks`: the index of each one's layer, and the block."""
        self._layers = list(layers)
        self._blocks = list(blocks)
        self.experts = experts
        """`E`"""
        self.per_token = per_token
        """`K`"""
        self.is_active = False
        """True inside `record` and `replay`. Layers are not compiled then."""
        self._replayed: RoutedTokens | None = None
        self._is_paused = False

    @property
    def layers(self) -> int:
        """`L`, the number of routed blocks."""
        return len(self._blocks)

    @property
    def corrections(self) -> list[Tensor] | None:
        """[E] of each block: what its router adds to the scores that it chooses by, and to no weight
        (DeepSeek-V3's `e_score_correction_bias`). `None` if a block has none.
        """
        named = [
            [one for name, one in block.named_buffers() if name.endswith("e_score_correction_bias")]
            for _, block in self._blocks
        ]
        return [of_block[0] for of_block in named] if all(len(one) == 1 for one in named) else None

    @property
    def block_layers(self) -> tuple[int, ...]:
        """The decoder's layers that have a routed block."""
        return tuple(index for index, _ in self._blocks)

    @property
    def depth(self) -> int:
        """All layers of the decoder."""
        return len(self._layers)

    def new_choices(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Return `[tokens, L, K]` int16, all of them left to the model (-1)."""
        return torch.full((tokens, self.layers, self.per_token), -1, dtype=CHOICES_DTYPE, device=device)

    @contextmanager
    def record(self, into: Tensor) -> Iterator[Tensor]:
        """While the block runs, write the choices of the forward in it to `into` [T, L, K], of an integer
        dtype, and yield it. The tokens may go through a layer in pieces, in their order.

        Leave the block before a backward that computes layers again.
        """
        with self._active() as undo:
            for at, (_, block) in enumerate(self._blocks):
                choose = _Recorded(into[:, at])
                undo.enter_context(replace_forward(block, partial(self._answer, block.forward, choose)))
            yield into

    @contextmanager
    def replay(self, routed: RoutedTokens) -> Iterator[None]:
        """While the block runs, the tokens of a forward go to the experts that `routed` names, and its count
        grows.

        Layers that a backward computes again get the same choices, also after the block.
        """
        choices = routed.choices
        if choices.shape[1:] != (self.layers, self.per_token):
            raise ModelError(
                f"choices of experts have shape {list(choices.shape)}, but this model has {self.layers}"
                f" routed layers that send a token to {self.per_token} experts each; record them with it."
            )
        at = {layer: number for number, (layer, _) in enumerate(self._blocks)}
        with self._active() as undo:
            for index, layer in enumerate(self._layers):
                forward = partial(self._run_layer, layer.forward, at.get(index), routed.count)
                undo.enter_context(replace_forward(layer, forward))
            self._replayed = routed
            undo.enter_context(counted(routed))
            yield

    @contextmanager
    def record_logits(self, routers: Sequence[Router]) -> Iterator[list[Tensor]]:
        """While the block runs, collect the logits [T, E] that `routers` give in a forward, with their graph.
        The list has one of each when the forward is done.

        Leave the block before a backward that computes layers again. The graph then computes them again, too.
        """
        collected: list[Tensor] = []

        def collect(at: int, _part: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._is_paused:
                logits = output[at] if isinstance(output, tuple) else output
                collected.append(logits.reshape(-1, self.experts))

        with ExitStack() as undo:
            for router, at in routers:
                undo.callback(router.register_forward_hook(partial(collect, at)).remove)
            yield collected

    @contextmanager
    def _active(self) -> Iterator[ExitStack]:
        if self.is_active:
            raise ModelError("a model's choices of experts are recorded or replayed once at a time.")
        self.is_active = True
        try:
            with ExitStack() as undo:
                yield undo
        finally:
            self.is_active, self._replayed = False, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, nothing is recorded: a check of the model can run before a replay."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def arguments(self, tokens: int) -> dict[str, Tensor]:
        """Return what a decoder is called with beside its inputs: nothing outside of `replay`."""
        if self._replayed is None:
            return {}
        choices = self._replayed.choices
        if len(choices) != tokens:
            raise ModelError(
                f"there are choices of experts for {len(choices)} tokens, and {tokens} tokens to run;"
                " give each packed token its row."
            )
        return {ARGUMENT: choices[None]}

    def _run_layer(
        self,
        forward: Callable[..., Tensor],
        at: int | None,
        count: ChoiceCount,
        hidden: Tensor,
        *others: Any,
        **arguments: Any,
    ) -> Tensor:
        """Run a layer with the routed block number `at`, or without one."""
        choices = arguments.pop(ARGUMENT, None)
        if at is None or choices is None:
            return forward(hidden, *others, **arguments)
        block, choose = self._blocks[at][1], Replayed(choices[0, :, at], count)
        with replace_forward(block, partial(self._answer, block.forward, choose)):
            return forward(hidden, *others, **arguments)

    def _answer(self, forward: Callable[..., Any], choose: Choose, *inputs: Any, **options: Any) -> Any:
        """Run a block while `choose` chooses its experts."""
        if self._is_paused:
            return forward(*inputs, **options)
        with _AnswerTopk(self.experts, self.per_token, choose):
            return forward(*inputs, **options)


Router = tuple[nn.Module, int]
"""A part of a routed block, and which of its outputs are the logits of experts."""


def balancing_fault(module: nn.Module) -> str | None:
    """Return why a loss of the routers of `module` has no meaning here, as the end of a sentence; `None` if
    transformers has a balancing loss for its family.
    """
    if not any(size for *_, size in expert_parts(module)):
        return "has no experts"
    families = type(module).__mro__
    if not any(hasattr(sys.modules.get(one.__module__), _BALANCING) for one in families):
        return "is of a family without a balancing loss in transformers"
    return None


def find_routers(module: Any, routing: ExpertRouting) -> list[Router] | str:
    """Return the router of each routed block, or why there is none whose logits a loss can be taken of, as
    the end of a sentence.
    """
    fault = balancing_fault(module)
    if fault is not None:
        return fault
    named = getattr(type(decoder_of(module)), "_can_record_outputs", None) or {}
    recorder: Any = named.get("router_logits")
    kind = getattr(recorder, "target_class", ())
    routers = [[part for part in block.modules() if isinstance(part, kind)] for _, block in routing._blocks]
    if any(len(of_block) != 1 for of_block in routers):
        return "has blocks whose router transformers does not name"
    return [(of_block[0], recorder.index) for of_block in routers]


class _Recorded:
    """Writes the model's own choices to `into` [T, K], in the order of calls."""

    def __init__(self, into: Tensor) -> None:
        self._into, self._written = into, 0

    def __call__(self, scores: Tensor, own: Callable[[], Any]) -> Any:
        chosen = own()
        stop = self._written + len(scores)
        if stop > len(self._into):
            raise ModelError(
                f"more tokens were run than the {len(self._into)} whose choices of experts have room."
            )
        self._into[self._written : stop] = chosen[1]
        self._written = stop
        return chosen


class Replayed:
    """Returns the choices [t, K], and the model's own where they are -1."""

    def __init__(self, choices: Tensor, count: ChoiceCount) -> None:
        self._choices, self._count = choices, count

    def __call__(self, scores: Tensor, own: Callable[[], Any]) -> Any:
        indices = own()[1]
        free = self._choices[:, :1] < 0
        chosen = torch.where(free, indices, self._choices.to(indices.dtype))
        if self._count.is_open:
            differs = (chosen.sort(-1)[0] != indices.sort(-1)[0]).any(-1)
            self._count.apart = self._count.apart + differs.sum()
            self._count.replayed = self._count.replayed + (~free).sum()
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def find_routing(module: Any) -> ExpertRouting | str | None:
    """Return the routing of a model, `None` for one without experts, or the end of a sentence that says why
    its choices cannot be replayed. Nothing is run.
    """
    layers = layers_of(decoder_of(module))
    parents = {id(child): part for part in module.modules() for child in part.children()}
    layer_of = {id(part): index for index, layer in enumerate(layers) for part in layer.modules()}
    blocks: list[tuple[int, nn.Module]] = []
    counts: set[int] = set()
    for part, count, size in expert_parts(module):
        if size:
            block = parents[id(part)]
            if id(block) not in layer_of or any(block is layer for layer in layers):
                return f"has {type(part).__name__} outside of a block of its layers"
            blocks.append((layer_of[id(block)], block))
            counts.add(count)
    chosen = chosen_experts(module.config.get_text_config())
    if not blocks:
        return None if not chosen or not chosen[1] else "does not keep its experts as transformers does"
    if chosen is None:
        return "does not say how many experts a token has"
    if len(counts) > 1 or len({layer for layer, _ in blocks}) < len(blocks):
        return "has layers with several routed blocks, or blocks with other counts of experts"
    return ExpertRouting(layers, blocks, counts.pop(), chosen[1])


@torch.no_grad()
def routing_fault(model: CausalLM, routing: ExpertRouting) -> str | None:
    """Run a few tokens with drawn choices. Return why they cannot be replayed, as the end of a sentence, and
    `None` if every block's experts got these and no others. All ranks call it together.
    """
    ids = torch.arange(_PROBED, device=model.device) % model.vocab_size
    choices = _draw_choices(routing).to(model.device)
    passed: list[list[Any]] = [[] for _ in range(routing.layers)]
    with ExitStack() as undo:
        for calls, (_, block) in zip(passed, routing._blocks, strict=True):
            for part in (one for one, _, size in expert_parts(block) if size):
                hook = part.register_forward_pre_hook(partial(_watch_calls, calls), with_kwargs=True)
                undo.callback(hook.remove)
        undo.enter_context(routing.replay(RoutedTokens(choices)))
        try:
            model.run(ids, ids, PackedAttention([0, _PROBED]))
        except (RuntimeError, AttributeError, TypeError, LookupError, ModelError) as error:
            return f"cannot run with choices of experts ({reason_of(error).rstrip('.')})"
    for at, (layer, _) in enumerate(routing._blocks):
        if (fault := _calls_fault(passed[at], choices[:, at], layer)) is not None:
            return fault
    return None


def _draw_choices(routing: ExpertRouting) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(_PROBED, routing.layers, routing.experts, generator=generator).argsort(-1)
    return drawn[..., : routing.per_token].to(CHOICES_DTYPE)


def _watch_calls(
    calls: list[Any], _part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> None:
    calls.append([*inputs, *options.values()])


def _zeros_of(width: int, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden.new_zeros(*hidden.shape[:-1], width)


def _calls_fault(calls: list[Any], choices: Tensor, layer: int) -> str | None:
    """Return why the `calls` of a block's experts are not those of `choices` [T, K]."""
    if len(calls) != 1 or len(calls[0]) < 3 or not torch.equal(calls[0][1], choices.long()):
        return f"chooses the experts of layer {layer} in another way than by one topk of their scores"
    if not bool((calls[0][2] != 0).all()):
        return f"gives experts of layer {layer} no weight where it would not choose them"
    return None


@torch.no_grad()
def empty_routing_fault(module: Any, routing: ExpertRouting) -> str | None:
    """Return `routing_fault` of a model on the meta device, as far as it shows without weights: one block of
    each class gets drawn ones, and its experts do nothing.
    """
    choices, width = _draw_choices(routing), module.config.get_text_config().hidden_size
    blocks = reversed(list(enumerate(routing._blocks)))
    for at, (layer, block) in {type(one[1]): (n, one) for n, one in blocks}.values():
        probe, calls = copy.deepcopy(block), []
        (part,) = (one for one, _, size in expert_parts(probe) if size)
        part.register_forward_pre_hook(partial(_watch_calls, calls), with_kwargs=True)
        for one in probe.modules():  # shared experts take memory and choose nothing
            if one is part or (isinstance(one, nn.Linear) and one.weight.numel() >= _LARGE):
                empty: Any = one
                empty.forward = partial(_zeros_of, getattr(one, "out_features", width))
                for name, _ in list(one.named_parameters(recurse=False)):
                    setattr(one, name, None)
        probe.float().to_empty(device="cpu")
        for tensor in chain(probe.parameters(), probe.buffers()):
            tensor.zero_()
            if tensor.is_floating_point():  # scores of about 1, of which no softmax is 0
                tensor.normal_(std=width**-0.5, generator=torch.Generator().manual_seed(0))
        try:
            with _AnswerTopk(routing.experts, routing.per_token, Replayed(choices[:, at], ChoiceCount())):
                probe(torch.randn(1, _PROBED, width, generator=torch.Generator().manual_seed(1)))
        except Exception:  # it is not called with hidden states alone
            continue
        if (fault := _calls_fault(calls, choices[:, at], layer)) is not None:
            return fault
    return None
