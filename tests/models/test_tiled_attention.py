"""Fused tiles merged by log-sum-exp, against one softmax in float64 and against the plain blocks."""

import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pretend_kernels
import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from opd.kernels import triton_rows
from opd.models import tiled_attention
from opd.models.attention import (
    AttentionCall,
    ScoreForm,
    attend_backward,
    attend_more,
    block_attention,
    nothing_seen,
)
from opd.models.context_parallel import ContextParallel, Ring
from opd.models.fused_attention import AttentionForm, attention_fault
from opd.models.long_sequence import ChunkedLayers, LayerCall, LayerMemory
from opd.models.tiled_attention import (
    CPU,
    GPU,
    TileKernel,
    attend_tile,
    kernel_for,
    kernel_tried,
    see_keys,
    see_more,
    seen_backward,
    tiles_of,
)

PLAIN = ScoreForm(0.3)
Triple = tuple[Tensor, Tensor, Tensor]


def drawn(
    heads: int, shared: int, count: int, size: int, width: int, seed: int = 0, **options: Any
) -> Triple:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, count), (shared, size), (shared, size))
    query, key, value = (torch.randn(*shape, width, generator=generator) for shape in shapes)
    return query.to(**options), key.to(**options), value.to(**options)


def exact(inputs: Triple, first: int, scores: ScoreForm) -> Tensor:
    """[H, C, d] float64: one softmax."""
    query, key, value = (x.double() for x in inputs)
    groups = query.shape[0] // key.shape[0]
    key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    distance = torch.arange(first, first + query.shape[1])[:, None] - torch.arange(key.shape[1])
    logits = (query @ key.transpose(1, 2) * scores.scaling).masked_fill(distance < 0, float("-inf"))
    return logits.softmax(-1) @ value


def seen(inputs: Triple, first: int, cut: int, upstream: Tensor, eager: bool) -> list[Tensor]:
    """Output and gradients, where the keys before `cut` come first."""
    query, key, value = inputs
    parts = [(slice(0, cut), first), (slice(cut, None), first - cut)]
    found = nothing_seen(query, value)
    for keys, begin in parts:
        given = (query, key[:, keys], value[:, keys])
        if eager:
            attend_more(given, PLAIN, found, begin)
        else:
            see_more(given, PLAIN, found, begin)
    gradients = [torch.zeros_like(x) for x in inputs]
    for keys, begin in parts:
        given, ahead = (query, key[:, keys], value[:, keys]), (*found, upstream)
        sums = [gradients[0], gradients[1][:, keys], gradients[2][:, keys]]
        if eager:
            attend_backward(given, ahead, sums, PLAIN, begin)
        else:
            seen_backward(given, ahead, sums, PLAIN, begin)
    return [found[0], *gradients]


def apart(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """How far two are, of the largest entry, or of `floor`."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))


@settings(max_examples=cases(60), deadline=None)
@given(
    count=st.integers(1, 70),
    before=st.integers(0, 90),
    cut=st.integers(0, 90),
    shared=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([3, 8]),
    side=st.sampled_from([8, 32, 1024]),
    seed=st.integers(0, 1000),
)
def test_tiles_give_one_softmax_and_its_gradients(count, before, cut, shared, width, side, seed):
    inputs = drawn(4, shared, count, before + count, width, seed)
    upstream = torch.randn(4, count, width, generator=torch.Generator().manual_seed(seed + 1))
    cut = min(cut, before)  # a query sees some key of the first part
    kernel, tiled_attention.CPU = CPU, replace(CPU, side=side)
    try:
        assert kernel_for(inputs, PLAIN, before) is tiled_attention.CPU
        ours = seen(inputs, before, cut, upstream, eager=False)
    finally:
        tiled_attention.CPU = kernel
    blocks = seen(inputs, before, cut, upstream, eager=True)
    leaves = tuple(x.double().requires_grad_() for x in inputs)
    output = exact((leaves[0], leaves[1], leaves[2]), before, PLAIN)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, upstream.double())]
    floor = float(upstream.abs().max()) / 100  # one key for each query: softmax is 1, and its gradient is 0
    assert max(apart(*pair, floor) for pair in zip(ours, expected, strict=True)) < 1e-5
    assert max(apart(*pair, floor) for pair in zip(ours, blocks, strict=True)) < 1e-5


@settings(max_examples=cases(60))
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 60), st.integers(1, 20))
def test_tiles_are_the_pairs_that_see_each_other_once_and_no_others(count, size, first, side):
    times = torch.zeros(count, size, dtype=torch.int64)
    for tile in tiles_of(count, size, first, side):
        assert 0 < tile.shorter <= side
        shape = times[tile.queries, tile.keys].shape
        assert not tile.causal or shape[0] == shape[1]
        ones = torch.ones(shape, dtype=torch.int64)
        times[tile.queries, tile.keys] += ones.tril() if tile.causal else ones
    visible = torch.arange(first, first + count)[:, None] >= torch.arange(size)
    assert torch.equal(times, visible.long())


def test_tiles_beyond_the_diagonal_are_skipped():
    found = list(tiles_of(64, 64, 0, 8))
    assert len(found) == 8 * 9 // 2
    assert sum(tile.causal for tile in found) == 8
    assert len(list(tiles_of(8, 64, 64, 8))) == 8


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_of_a_ring_skips_half_of_the_blocks_as_all_do(world):
    """Of the 4 N pairs of its two blocks with all 2 N, 2 N + 1 are computed."""
    tokens, block = 16 * world, 8
    for rank in range(world):
        ranks = object.__new__(ContextParallel)
        ranks.rank, ranks.size = rank, world
        ids = torch.arange(tokens)
        ring = Ring(ranks, ranks.local_share(ids, ids, [0, tokens]).segments)
        tiles = [
            tile
            for owner in range(world)
            for own, keys, first in ring._visible_pairs(owner, torch.empty(1, 2 * block, 4), PLAIN)
            for tile in tiles_of(own.stop - own.start, keys.stop - keys.start, first, block)
        ]
        assert len(tiles) == 2 * world + 1
        assert sum(tile.causal for tile in tiles) == 2


def call_of(inputs: list[Tensor], span: slice) -> AttentionCall:
    query, key, value = (x[None, :, span] for x in inputs)
    return AttentionCall(0, query, key, value, PLAIN.scaling)


def attended(pieces: ChunkedLayers, given: list[Tensor]) -> list[Tensor]:
    """Output and gradients of attention in pieces. `given` is query, key, value and upstream [H, T, d]."""
    *inputs, upstream = given
    leaves = [x.detach().requires_grad_() for x in inputs]
    call = LayerCall(lambda hidden, attend: hidden, {})
    outputs = [
        attend(call_of(leaves, span)).transpose(1, 2)[0]
        for span, attend in pieces.chunk_attentions(inputs[0], call)
    ]
    for output, span in reversed(list(zip(outputs, pieces.spans, strict=True))):
        output.backward(upstream[:, span])
    return [torch.cat(outputs, dim=1).detach(), *(x.grad for x in leaves if x.grad is not None)]


class Shapes(TorchDispatchMode):
    """Keeps the shape of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Size] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        many = made if isinstance(made, tuple | list) else [made]
        self.found += [x.shape for x in many if isinstance(x, Tensor) and x.ndim > 1]
        return made

    def scores(self, width: int) -> list[torch.Size]:
        """Those with many queries and many keys."""
        return [shape for shape in self.found if min(shape[-2:]) > width]


@pytest.mark.parametrize("eager", [False, True])
def test_scores_of_queries_and_keys_are_never_written(monkeypatch, eager):
    if eager:
        monkeypatch.setenv("OPD_KERNELS", "chunked")
    width, tokens = 16, 400
    inputs = drawn(4, 2, tokens, tokens, width)
    attended(ChunkedLayers([0, 99], 40), [*(x[:, :99] for x in inputs), inputs[0][:, :99]])  # the proof
    with Shapes() as shapes:
        attended(ChunkedLayers([0, tokens], 100), [*inputs, inputs[0]])
    assert bool(shapes.scores(width)) == eager


def counting(kernel: TileKernel, calls: list[str]) -> TileKernel:
    def forward(inputs: Triple, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
        calls.append("causal" if causal else "whole")
        return kernel.forward(inputs, scaling, causal)

    def backward(inputs: Triple, ahead: Triple, scaling: float, causal: bool):
        calls.append("back")
        return kernel.backward(inputs, ahead, scaling, causal)

    return replace(kernel, forward=forward, backward=backward)


def test_pieces_launch_one_kernel_a_pair_that_is_seen(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(tiled_attention, "trusted", lambda form: True)
    monkeypatch.setattr(tiled_attention, "CPU", counting(replace(CPU, side=16), calls))
    inputs = drawn(2, 1, 96, 96, 8)
    attended(ChunkedLayers([0, 96], 16), [*inputs, inputs[0]])
    assert [calls.count(name) for name in ("causal", "whole", "back")] == [6, 15, 21]


@pytest.mark.parametrize("layout", ["whole tokens", "a slope of no memory"])
def test_tensors_may_lie_in_memory_as_layers_leave_them(layout):
    tokens, inputs = 50, drawn(4, 2, 50, 50, 8)
    if layout == "whole tokens":  # [T, H, d]
        given = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
        slope = torch.ones(tokens, 4, 8).transpose(0, 1)
    else:
        given, slope = list(inputs), torch.ones(()).expand(4, tokens, 8)
    ours = attended(ChunkedLayers([0, tokens], 20), [*given, slope])
    theirs = seen(inputs, 0, 0, torch.ones(4, tokens, 8), eager=True)
    assert max(apart(*pair) for pair in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("bounds", [[0, 90], [0, 40, 43, 90]])
def test_a_model_in_pieces_is_the_whole_model_in_float64(monkeypatch, bounds):
    model = tiny.model(initializer_range=0.2)
    ids = torch.randint(0, model.vocab_size, (90,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])

    def run(memory: LayerMemory) -> tuple[Tensor, Tensor]:
        model.module.zero_grad()
        hidden = model.hidden(ids, positions, bounds, memory)
        slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * slope).sum().backward()
        return hidden.detach(), torch.cat([p.grad.flatten() for p in model.module.parameters()])

    monkeypatch.setattr(tiled_attention, "CPU", replace(CPU, side=16))
    tiles = run(LayerMemory(chunk=30))
    monkeypatch.setenv("OPD_KERNELS", "chunked")
    blocks = run(LayerMemory(chunk=30))
    model.module.double()
    whole = run(LayerMemory())
    assert whole[0].dtype == torch.float64
    for ours, plain, theirs in zip(tiles, blocks, whole, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert float((ours - plain).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize(
    ("options", "scores", "first"),
    [
        ({}, ScoreForm(0.3, window=59), 20),
        ({}, ScoreForm(0.3, softcap=2.0), 20),
        ({}, PLAIN, -1),
        ({"dtype": torch.float64}, PLAIN, 20),
        ({"dtype": torch.bfloat16}, PLAIN, 20),
    ],
    ids=["window", "softcap", "before the keys", "float64", "small heads of 16 bits"],
)
def test_what_no_kernel_takes_goes_to_the_blocks(options, scores, first):
    assert kernel_for(drawn(4, 2, 40, 60, 8, **options), scores, first) is None


def test_what_the_kernel_of_a_cpu_takes(monkeypatch):
    inputs = drawn(4, 2, 40, 60, 16)
    assert kernel_for(inputs, PLAIN, 20) is CPU
    assert kernel_for(inputs, ScoreForm(0.3, window=60), 20) is CPU  # it hides nothing
    assert kernel_for((inputs[0], inputs[1], inputs[2][..., :5]), PLAIN, 20) is None
    half = drawn(4, 2, 40, 60, 16, dtype=torch.bfloat16)
    assert kernel_for(half, PLAIN, 20) is CPU
    monkeypatch.setenv("OPD_KERNELS", "chunked")
    assert kernel_for(inputs, PLAIN, 20) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_rounded_once_a_tile(dtype):
    inputs = drawn(4, 2, 300, 300, 16, dtype=dtype)
    output, _ = see_keys(*inputs, PLAIN)
    assert output.dtype == dtype
    assert apart(output.double(), exact(inputs, 0, PLAIN)) < 2e-2


def test_small_gradients_of_float16_are_as_the_blocks_give_them():
    inputs = drawn(4, 2, 300, 300, 16, dtype=torch.float16)
    assert kernel_for(inputs, PLAIN, 0) is CPU  # without a gradient
    upstream = 1e-5 * torch.randn(4, 300, 16, generator=torch.Generator().manual_seed(1))
    output, level = see_keys(*inputs, PLAIN)
    sums = [torch.zeros(x.shape) for x in inputs]
    seen_backward(inputs, (output, level, upstream), sums, PLAIN, 0)
    leaves = tuple(x.double().requires_grad_() for x in inputs)
    expected = torch.autograd.grad(
        exact((leaves[0], leaves[1], leaves[2]), 0, PLAIN), leaves, upstream.double()
    )
    for ours, theirs in zip(sums, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_inputs_of_several_dtypes_go_to_the_blocks():
    query, key, value = drawn(4, 2, 40, 60, 16)
    for inputs in ((query, key.bfloat16(), value.bfloat16()), (query, key, value.half())):
        assert kernel_for(inputs, PLAIN, 20) is None
        output, _ = see_keys(*inputs, PLAIN)
        assert apart(output.double(), exact(inputs, 20, PLAIN)) < 2e-2


def form(kernel: TileKernel, dtype: torch.dtype = torch.float32, **options: Any) -> AttentionForm:
    given = {"heads": (4, 2), "sizes": (16, 16), "scaling": 0.25, "capped": False, "windowed": False}
    return AttentionForm(kernel.name, torch.device("cpu"), dtype, **given | options)


@pytest.fixture
def differentiable(monkeypatch):
    """Flex attention without a compiler, with gradients."""
    pretend_kernels.allow_gradients(monkeypatch)
    monkeypatch.setattr(tiled_attention, "compiled_tile", lambda: attend_tile)


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_right_kernel_passes_its_proof(differentiable, kernel, dtype):
    tried = kernel_tried(replace(kernel, side=200))
    assert attention_fault(form(kernel, dtype), tried) is None
    assert attention_fault(form(kernel, dtype, heads=(3, 3), sizes=(64, 64), scaling=2.0), tried) is None


def test_the_gpus_kernel_takes_values_of_another_size(differentiable):
    assert attention_fault(form(GPU, sizes=(32, 16)), kernel_tried(replace(GPU, side=200))) is None


@pytest.mark.parametrize("kernel", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("what", ["causal", "log-sum-exp", "output"])
def test_a_wrong_kernel_is_found(differentiable, kernel, what):
    """One that takes the diagonal's tiles for whole ones; and gradients from what a tile alone has found."""

    def backward(inputs: Triple, ahead: Triple, scaling: float, causal: bool):
        output, level = kernel.forward(inputs, scaling, causal)
        own = (ahead[0], level, ahead[2]) if what == "log-sum-exp" else (output, *ahead[1:])
        return kernel.backward(inputs, own, scaling, causal)

    if what == "causal":
        wrong = replace(
            kernel, forward=lambda inputs, scaling, causal: kernel.forward(inputs, scaling, False)
        )
    else:
        wrong = replace(kernel, backward=backward)
    tried = kernel_tried(replace(wrong, side=200))
    assert attention_fault(form(kernel), tried) == "gives another result than float64"


@pytest.mark.filterwarnings("default")
def test_a_kernel_that_fails_is_left_aside_and_said_once(monkeypatch):
    def broken(*_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(tiled_attention, "CPU", replace(CPU, forward=broken))
    tiled_attention.trusted.cache_clear()
    inputs = drawn(4, 2, 40, 60, 16)
    with pytest.warns(
        RuntimeWarning, match=r"flash attention by tiles .*no such operator.* on this processor"
    ):
        output, _ = see_keys(*inputs, PLAIN)
    assert apart(output, exact(inputs, 20, PLAIN)) < 1e-5
    with warnings.catch_warnings(action="error"):
        see_keys(*inputs, PLAIN)
    tiled_attention.trusted.cache_clear()


def test_a_kernel_may_prove_itself_in_a_layer_that_is_computed_again():
    """What the proof saves for its gradients is none of the layer's."""
    tiled_attention.trusted.cache_clear()
    inputs = drawn(4, 2, 60, 60, 16)
    leaves = [x.requires_grad_() for x in inputs]

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert kernel_for((query, key, value), PLAIN, 0) is CPU
        return block_attention(query, key, value, PLAIN, see_more, seen_backward)

    output = checkpoint(layer, *leaves, use_reentrant=False)
    theirs = torch.autograd.grad(exact(inputs, 0, PLAIN).sum(), leaves)
    ours = torch.autograd.grad(output.sum(), leaves)
    assert max(apart(*pair) for pair in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.slow
def test_one_compilation_serves_tiles_of_all_lengths(monkeypatch):
    pretend_kernels.allow_gradients(monkeypatch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(attend_tile, backend=counter, dynamic=True, fullgraph=True)
    monkeypatch.setattr(tiled_attention, "compiled_tile", lambda: made)
    counts = []
    for count, size in ((300, 500), (400, 400), (200, 700), (129, 1000)):
        inputs = drawn(4, 2, count, size, 16)
        upstream = torch.randn(inputs[0].shape)
        for causal in (False, True) if count == size else (False,):
            output, level = GPU.forward(inputs, 0.3, causal)
            GPU.backward(inputs, (output, level, upstream), 0.3, causal)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1] <= 4  # whole and causal, with and without a gradient


def test_a_gpu_without_triton_keeps_to_the_blocks(monkeypatch):
    class OnGpu:
        """Tells of a tensor what is asked of one on a GPU."""

        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    given: Any = (OnGpu(4, 300, 64), OnGpu(2, 300, 64), OnGpu(2, 300, 64))
    monkeypatch.setattr(tiled_attention, "trusted", lambda form: form.kernel == "flex")
    monkeypatch.setattr(triton_rows, "missing", lambda: None)
    assert kernel_for(given, PLAIN, 0) is GPU
    small: Any = (OnGpu(4, 300, 8), *given[1:])
    assert kernel_for(small, PLAIN, 0) is None
    monkeypatch.setattr(triton_rows, "missing", lambda: "no CUDA device can be used")
    assert kernel_for(given, PLAIN, 0) is None
