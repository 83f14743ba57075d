"""Compiled layers against the layers' own code: what is traced, which inputs share a graph, what is refused.

Some tests run both parts of a layer as they are, some through the compiler with PyTorch's own operators as
its back end (`aot_eager`), one through all of it.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from opd.config.train import LoRAConfig
from opd.models import compiled_layers
from opd.models.causal_lm import CausalLM
from opd.models.compiled_layers import compile_fault, layer_graphs
from opd.models.long_sequence import WHOLE, LayerMemory

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2 with biases": {"model_type": "qwen2"},
    "qwen3 with norms of heads": {"model_type": "qwen3", "head_dim": 8},
    "gemma2 with windows of every other layer": {"model_type": "gemma2", "sliding_window": 9, "head_dim": 8},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9},
}


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts of a layer without a compiler."""
    parts = SimpleNamespace(
        before_attention=compiled_layers._before_attention,
        after_attention=compiled_layers._after_attention,
        count=2,
    )
    monkeypatch.setattr(compiled_layers, "layer_graphs", lambda: parts)


def passes(model: CausalLM, lengths: list[int], memory: LayerMemory = WHOLE) -> list[Tensor]:
    """The hidden states without a gradient and with one, and the gradients of all that learns."""
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    ids = (torch.arange(ends[-1]) * 7 + 1) % model.vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        quiet = model.hidden(ids, positions, ends, memory)
    hidden = model.hidden(ids, positions, ends, memory)
    weight = torch.sin(torch.arange(hidden.numel())).view_as(hidden)
    learning = [one for one in model.module.parameters() if one.requires_grad]
    slopes = torch.autograd.grad((hidden * weight).sum(), learning, allow_unused=True)
    return [quiet, hidden.detach(), *(one for one in slopes if one is not None)]


def apart(found: list[Tensor], own: list[Tensor]) -> float:
    """The largest difference, of the norm of the tensor or a hundredth of the largest one's."""
    floor = max(float(one.norm()) for one in own) / 100
    pairs = zip(found, own, strict=True)
    return max(float((a - b).norm()) / max(float(b.norm()), floor) for a, b in pairs)


def compiled(model: CausalLM) -> CausalLM:
    assert compile_fault(model) is None
    model.compiled = compiled_layers.compiled_layers
    return model


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("family", FAMILIES)
def test_both_parts_of_a_layer_are_the_layer(family: str) -> None:
    own, ours = tiny.model(**FAMILIES[family]), compiled(tiny.model(**FAMILIES[family]))
    for lengths in ([30, 20, 7], [16, 16], [1, 1], [1]):
        found = passes(ours, lengths)
        assert apart(found, passes(own, lengths)) < 1e-5
        assert torch.equal(found[0], found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_and_lengths_share_two_graphs(family: str) -> None:
    shape = {"num_hidden_layers": 4, **FAMILIES[family]}
    own, ours = tiny.model(**shape), compiled(tiny.model(**shape))
    kinds = 2 if "every other" in family else 1
    assert layer_graphs().count == 2 * kinds
    for lengths in ([30, 20, 7], [16, 16], [1, 1], [61]):
        found = passes(ours, lengths)
        assert apart(found, passes(own, lengths)) < 1e-5
        assert torch.equal(found[0], found[1])
    assert layer_graphs().count == 2 * kinds


@pytest.mark.usefixtures("untraced")
def test_computed_again_and_in_pieces_it_is_the_same() -> None:
    own, ours = tiny.model(), compiled(tiny.model())
    lengths = [30, 5]
    whole = passes(ours, lengths)
    again = passes(ours, lengths, LayerMemory(recompute=True))
    assert all(map(torch.equal, again, whole))
    memory = LayerMemory(chunk=8)
    assert apart(passes(ours, lengths, memory)[:2], passes(own, lengths)[:2]) < 1e-5
    hidden = [model.hidden(torch.arange(13), torch.arange(13), [0, 13], memory) for model in (ours, own)]
    for model, one in zip((ours, own), hidden, strict=True):
        model.module.zero_grad()
        one.square().sum().backward()  # pieces add to `.grad`
    slopes = [[part.grad for part in model.decoder.layers.parameters()] for model in (ours, own)]
    assert apart(*slopes) < 1e-5
    assert not any("forward" in vars(layer) for layer in ours.layers)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_adapters_over_a_frozen_base_learn_as_without_graphs() -> None:
    pytest.importorskip("peft")
    from opd.models.adapters import AdaptedLM

    def adapted() -> CausalLM:
        model = AdaptedLM(tiny.model(), LoRAConfig(rank=2), "base")
        generator = torch.Generator().manual_seed(1)
        for _, tensor in model.adapters():
            tensor.normal_(std=0.1, generator=generator)
        return model

    own, ours = adapted(), compiled(adapted())
    found, exact = passes(ours, [9, 30]), passes(own, [9, 30])
    assert len(found) == 2 + 2 * 2 * 7
    assert apart(found, exact) < 1e-5
    assert layer_graphs().count == 2


def outputs_off(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler whose code is wrong by a thousandth."""
    run = aot_eager(graph, inputs)
    return lambda *given: [one * 1.001 if isinstance(one, Tensor) else one for one in run(*given)]


def other_bits(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler whose sums have another order each time."""
    run, calls = aot_eager(graph, inputs), []

    def forward(*given: Any) -> list[Any]:
        calls.append(None)
        return [one * (1 + len(calls) * 2**-22) if isinstance(one, Tensor) else one for one in run(*given)]

    return forward


def no_compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """No C++ compiler."""
    raise RuntimeError("No working C++ compiler found")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("compiler", "fault"),
    [
        (outputs_off, "give other results than the layers' own code"),
        (other_bits, "give other bits the second time"),
        (no_compiler, "cannot be compiled or run"),
    ],
)
def test_code_that_fails_its_check_is_not_taken(monkeypatch, compiler, fault) -> None:
    monkeypatch.setattr(compiled_layers, "compile_graph", compiler)
    model = tiny.model()
    before = passes(model, [7])
    assert str(compile_fault(model)).startswith(fault)
    assert all(map(torch.equal, passes(model, [7]), before))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_graph_for_each_length_is_not_taken(monkeypatch) -> None:
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda tensor, along: None)
    assert compile_fault(tiny.model()) == "need another graph for other lengths"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("family", "graphs"), [("mixtral", 2), ("gpt_oss", 4)])
def test_experts_learn_as_without_graphs(family: str, graphs: int) -> None:
    shape = {"model_type": family, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    own, ours = tiny.model(**shape), compiled(tiny.model(**shape))
    assert apart(passes(ours, [30, 7]), passes(own, [30, 7])) < 1e-5
    assert layer_graphs().count == graphs  # layers with a window have their own


LAYER_KERNELS = 33
"""Of a Llama's layer, forward and backward: 21 products, 11 of the compiler's, a sum of two gradients. With
attention's three that is 36, where PyTorch's own operators launch 127."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_this_processors_compiler_gives_the_same_in_few_kernels(tmp_path, monkeypatch, dtype) -> None:
    from torch._inductor import metrics

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    layer_graphs.cache_clear()
    metrics.reset()
    shape = {"num_hidden_layers": 3}
    own, ours = (
        CausalLM.from_config(tiny.LLAMA | shape, tokenizer=tiny.tokenizer(), dtype=dtype) for _ in "ab"
    )
    compiled(ours)
    assert metrics.generated_kernel_count <= LAYER_KERNELS
    found = passes(ours, [30, 20, 7])
    assert apart(found, passes(own, [30, 20, 7])) < (1e-5 if dtype == "float32" else 3e-2)
    assert all(map(torch.equal, passes(ours, [30, 20, 7]), found))
    assert layer_graphs().count == 2
    layer_graphs.cache_clear()
    torch._dynamo.reset()
