"""Packed attention by one kernel: what a GPU is told, computed on a CPU, against a softmax in float64."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pretend_kernels
import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import bounds, make_call, off, reference, results
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from opd.kernels import triton_rows
from opd.models import fused_attention
from opd.models.attention import AttentionCall, PackedAttention
from opd.models.fused_attention import BLOCK, AttentionForm, attention_fault, flash, flex, kernel_for, visible

RAGGED = [1, 700, 0, 130, 1, 5, 128]
FLAT = [256, 256]
SHORT = [1] * 60 + [3, 0, 90]
LONG = pytest.mark.long


@pytest.fixture
def differentiable(monkeypatch):
    """Flex attention without a compiler, with gradients."""
    pretend_kernels.allow_gradients(monkeypatch)
    monkeypatch.setattr(fused_attention, "compiled", lambda: fused_attention.attend_compiled)


@pytest.fixture
def flash_here():
    with pretend_kernels.flash_on_cpu():
        yield


@pytest.mark.some(1)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, pytest.param(2, marks=LONG), 70, pytest.param(4000, marks=LONG)])
@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [(RAGGED, 2), (FLAT, 4), (SHORT, 1), ([129], 2)],
    ids=["ragged", "flat", "short", "one"],
)
def test_flex_attention_is_the_masked_softmax_and_its_gradient(
    differentiable, lengths, kv_heads, softcap, window, sinks
):
    options = {"softcap": softcap, "sliding_window": window, "sinks": sinks}
    call = make_call(sum(lengths), kv_heads, kv_heads == 2, 0, (16, 24), **options)
    ours = results(flex(PackedAttention(bounds(lengths)), call), call)
    theirs = results(reference(call, lengths), call)
    assert [off(*pair) < 1e-5 for pair in zip(ours, theirs, strict=True)] == [True] * (4 + sinks)


@pytest.mark.slow
@settings(max_examples=cases(150), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=9),
    window=st.one_of(st.none(), st.integers(1, 600)),
)
def test_blocks_that_are_skipped_are_those_that_nobody_sees(lengths, window):
    first, *arrays = visible(lengths, window)
    tokens = sum(lengths)
    position = np.arange(tokens)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen = (owner[:, None] == owner) & (position <= position[:, None])
    if window is not None:
        seen &= position[:, None] - position < window
    assert np.array_equal(seen, (position >= first[:, None]) & (position <= position[:, None]))
    blocks = -(-tokens // BLOCK)
    room = np.zeros((blocks * BLOCK, blocks * BLOCK), dtype=bool)
    room[:tokens, :tokens] = seen
    tiles = room.reshape(blocks, BLOCK, blocks, BLOCK)
    some, whole = tiles.any((1, 3)), tiles.all((1, 3))
    expected = [dense for by in (some & ~whole, whole) for dense in (by,)]
    for dense, (number, index) in zip(
        [*expected, *(x.T for x in expected)], zip(arrays[::2], arrays[1::2], strict=True), strict=True
    ):
        told = np.zeros((blocks, blocks), dtype=bool)
        for row in range(blocks):
            told[row, index[0, 0, row, : number[0, 0, row]]] = True
        assert np.array_equal(told, dense)
        assert index.shape == (1, 1, blocks, blocks)
        assert number.shape == (1, 1, blocks)


@pytest.mark.slow
def test_one_compilation_serves_all_lengths_windows_and_softcaps(monkeypatch):
    """What Dynamo traces anew, without what a device makes of it."""
    pretend_kernels.allow_gradients(monkeypatch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(fused_attention.attend_compiled, backend=counter, dynamic=True, fullgraph=True)
    monkeypatch.setattr(fused_attention, "compiled", lambda: made)

    def compilations(lengths: list[int], **options) -> int:
        call = make_call(sum(lengths), 2, False, 0, (16, 16), **options)
        results(flex(PackedAttention(bounds(lengths)), call), call)
        return counter.frame_count

    for lengths in ([700], [300, 1, 200], [1000], [129]):
        plain = compilations(lengths, sliding_window=None if lengths[0] > 500 else 9)
    assert plain <= 2
    capped = compilations([200], softcap=2.0)
    assert capped == plain + 1
    sunk = compilations([200], sinks=True)
    assert sunk == compilations([500, 90], sinks=True, sliding_window=30) == capped + 1
    capped = sunk
    assert compilations([500, 90], softcap=5.0, sliding_window=30) == capped
    assert compilations([200], scaling=0.25) == capped + 1
    assert compilations([300], scaling=0.7) == compilations([800], scaling=0.25) == capped + 1


def blind(lengths: list[int], window: int | None) -> list[np.ndarray]:
    """Blocks that are seen whole are left out."""
    found = visible(lengths, window)
    return [*found[:3], np.zeros_like(found[3]), *found[4:]]


@pytest.mark.parametrize("home", ["a folder", "used before", "none"])
def test_what_is_compiled_is_kept_where_others_cannot_write(monkeypatch, tmp_path, home):
    own = Path("/dev/null") if home == "none" else tmp_path
    if home == "used before":
        (own / ".cache/opd/torchinductor").mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    fused_attention.compiled.cache_clear()
    fused_attention.compiled()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert kept.is_relative_to(own) == (home != "none")
    assert kept.is_dir()
    assert kept.stat().st_mode & 0o022 == 0
    fused_attention.compiled.cache_clear()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_for_this_processor_it_gives_the_same(monkeypatch, tmp_path):
    """The compiler's own kernels, without gradients: for a CPU it has no others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    fused_attention.compiled.cache_clear()
    with torch.no_grad():
        for lengths, options in ((RAGGED, {}), ([500], {"softcap": 2.0, "sliding_window": 400})):
            call = make_call(sum(lengths), 2, False, 0, (16, 16), learns=False, **options)
            assert off(flex(PackedAttention(bounds(lengths)), call), reference(call, lengths)) < 1e-5
        monkeypatch.setattr(fused_attention, "visible", blind)
        assert off(flex(PackedAttention([0, 500]), call), reference(call, [500])) > 0.1
    fused_attention.compiled.cache_clear()


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("window", [None, 1, 70, 4000])
@pytest.mark.parametrize("lengths", [RAGGED, SHORT], ids=["long", "short"])
def test_flash_attention_is_told_lengths_and_windows(flash_here, lengths, window, kv_heads, dtype):
    """PyTorch's own function and operator, down to the kernel, which is a softmax in float64 here."""
    options = {"dtype": dtype, "sliding_window": window, "learns": False}
    call = make_call(sum(lengths), kv_heads, False, 0, (16, 16), **options)
    with torch.inference_mode():
        packed = PackedAttention(bounds(lengths))
        output = flash(packed, call)
        again = flash(packed, call)
    assert output.dtype == dtype
    assert torch.equal(output, again)
    assert off(output, reference(call, lengths)) < 2e-2


def test_flash_attention_takes_tensors_of_a_gpu():
    """PyTorch's operators as CUDA declares them, without memory behind the tensors."""
    with FakeTensorMode(), torch.inference_mode():
        inputs = [torch.empty(1, 100, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
        call = AttentionCall(0, *(x.transpose(1, 2) for x in inputs), scaling=0.1, sliding_window=9)
        packed = PackedAttention([0, 40, 100])
        packed.cached_value(
            ("ends", call.query.device), lambda: torch.empty(3, dtype=torch.int32, device="cuda")
        )
        output = flash(packed, call)
    assert output.shape == (1, 100, 8, 64)
    assert output.device.type == "cuda"


def call_of(
    dtype=torch.bfloat16, sizes=(64, 64), tokens=300, **options
) -> tuple[PackedAttention, AttentionCall]:
    inputs = [torch.empty(1, 4, tokens, d, dtype=dtype) for d in (sizes[0], *sizes)]
    return PackedAttention([0, tokens]), AttentionCall(0, *inputs, scaling=1.0, **options)


@pytest.mark.parametrize(
    ("kernel", "inference", "options"),
    [
        ("flex", False, {}),
        ("flash", True, {}),
        ("flash", True, {"tokens": 3, "sliding_window": 2}),
        ("flex", True, {"softcap": 3.0}),
        ("flex", True, {"sinks": torch.zeros(4)}),
        ("flex", True, {"dtype": torch.float32}),
        ("flex", False, {"dtype": torch.float16, "sizes": (96, 16)}),
        (None, False, {"tokens": 128}),
        (None, False, {"dtype": torch.float64}),
        (None, True, {"dtype": torch.float64}),
        (None, False, {"sizes": (64, 8)}),
        (None, False, {"sizes": (512, 64)}),
        (None, True, {"sizes": (60, 60)}),
        (None, True, {"sizes": (64, 32)}),
    ],
)
def test_which_kernel_takes_what(monkeypatch, kernel, inference, options):
    monkeypatch.setattr(triton_rows, "missing", lambda: None)
    monkeypatch.delenv("OPD_KERNELS", raising=False)
    with torch.inference_mode(inference):
        assert kernel_for(*call_of(**options)) == kernel
        monkeypatch.setenv("OPD_KERNELS", "chunked")
        assert kernel_for(*call_of(**options)) is None
        monkeypatch.delenv("OPD_KERNELS")
        monkeypatch.setattr(triton_rows, "missing", lambda: "no CUDA device can be used")
        assert kernel_for(*call_of(**options)) is None


def form(kernel: str = "flex", dtype: torch.dtype = torch.float32, **options) -> AttentionForm:
    given = {"heads": (4, 2), "sizes": (16, 16), "scaling": 0.25, "capped": False, "windowed": False}
    return AttentionForm(kernel, torch.device("cpu"), dtype, **given | options)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long), torch.bfloat16]
)
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_right_kernel_passes_its_proof(differentiable, flash_here, dtype, capped, windowed, sinks):
    assert attention_fault(form(dtype=dtype, capped=capped, windowed=windowed, sinks=sinks)) is None
    assert (
        attention_fault(form(dtype=dtype, sizes=(128, 64), heads=(3, 3), scaling=2.0, capped=capped)) is None
    )
    if dtype != torch.float32:
        with torch.inference_mode():
            assert attention_fault(form("flash", dtype, windowed=windowed)) is None


def leaking(lengths: list[int], window: int | None) -> list[np.ndarray]:
    """Each sequence sees the last token of the one before."""
    first, *blocks = visible(lengths, window)
    starts = np.cumsum(lengths)[:-1]
    first[starts] -= 1
    return [first, *blocks]


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_wrong_kernel_is_found(differentiable, monkeypatch, dtype):
    monkeypatch.setattr(fused_attention, "visible", leaking)
    assert attention_fault(form(dtype=dtype)) == "gives another result than float64"


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["no sinks", "no gradient"])
def test_a_kernel_without_the_sinks_or_their_gradient_is_found(differentiable, dtype, fault):
    def wrong(packed: PackedAttention, call: AttentionCall) -> Tensor:
        assert call.sinks is not None
        sinks = None if fault == "no sinks" else call.sinks.detach()
        return flex(packed, replace(call, sinks=sinks)) + 0 * call.sinks[:, None]

    assert attention_fault(form(dtype=dtype, sinks=True), wrong) == "gives another result than float64"


def test_a_kernel_whose_bits_change_is_found(monkeypatch):
    def unsteady(packed: PackedAttention, call: AttentionCall) -> Tensor:
        return packed(call, exact=True) + torch.rand(())  # what atomic sums do, and more

    monkeypatch.setitem(fused_attention.KERNELS, "flex", unsteady)
    assert attention_fault(form()) == "gives other bits the second time"


def test_a_kernel_that_fails_is_left_aside_and_said_once(monkeypatch):
    """A process goes on with what there was without it."""

    def broken(packed: PackedAttention, call: AttentionCall) -> Tensor:
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(triton_rows, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setitem(fused_attention.KERNELS, "flex", broken)
    fused_attention.trusted.cache_clear()
    packed, call = call_of(torch.float32)
    said = "flex attention of torch.float32 .*no such instruction.* on a GPU: padded sequences"
    with pytest.warns(RuntimeWarning, match=said):
        assert fused_attention.run_fused(packed, call) is None
    assert fused_attention.run_fused(packed, call) is None  # a second warning would be an error
    fused_attention.trusted.cache_clear()
