"""The kernels of packed attention on a real GPU, against a softmax in float64."""

from dataclasses import replace

import pytest
import torch
from packed import bounds, make_call, off, reference, results

from opd.kernels import triton_rows
from opd.models.attention import PackedAttention
from opd.models.fused_attention import EXACT, AttentionForm, attention_fault, flash, flex
from opd.models.tiled_attention import GPU, TRIED_SIDE, kernel_tried

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_rows.missing() is not None, reason=str(triton_rows.missing())),
    pytest.mark.filterwarnings("default"),
]
LENGTHS = [1, 2000, 0, 130, 1, 5, 128, 300]
CALLS = [{}, {"sliding_window": 70}, {"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 700}]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (96, 80), (256, 256)], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_flex_attention_is_trusted_here(dtype, sizes, call):
    options = {"capped": "softcap" in call, "windowed": "sliding_window" in call}
    form = AttentionForm("flex", torch.device("cuda", 0), dtype, (8, 2), sizes, sizes[0] ** -0.5, **options)
    assert attention_fault(form) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("windowed", [False, True])
def test_flash_attention_is_trusted_here(dtype, size, windowed):
    form = AttentionForm(
        "flash", torch.device("cuda", 0), dtype, (8, 2), (size, size), size**-0.5, False, windowed
    )
    assert attention_fault(form) is None


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (96, 80)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (3, 3)], ids=str)
def test_tiles_of_flex_attention_are_trusted_here(dtype, sizes, heads):
    form = AttentionForm("flex", torch.device("cuda", 0), dtype, heads, sizes, sizes[0] ** -0.5, False, False)
    assert attention_fault(form, kernel_tried(replace(GPU, side=TRIED_SIDE))) is None


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_flex_attention_gives_the_same_bits_again(dtype, call):
    options = {"dtype": dtype, "device": "cuda", "scaling": 0.125}
    given = make_call(sum(LENGTHS), 2, False, 0, (64, 64), **options, **call)
    ours, again = (results(flex(PackedAttention(bounds(LENGTHS)), given), given) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(ours, again, strict=True))
    theirs = results(reference(given, LENGTHS), given)
    assert all(off(*pair) < EXACT[dtype] for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("window", [None, 70])
def test_flash_attention_takes_ragged_lengths(window):
    options = {"dtype": torch.bfloat16, "device": "cuda", "scaling": 0.125, "learns": False}
    given = make_call(sum(LENGTHS), 2, False, 0, (64, 64), sliding_window=window, **options)
    with torch.inference_mode():
        output = flash(PackedAttention(bounds(LENGTHS)), given)
    assert off(output, reference(given, LENGTHS)) < EXACT[torch.bfloat16]


def test_a_micro_batch_of_other_lengths_compiles_nothing():
    def run(lengths: list[int]) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        call = make_call(sum(lengths), 2, False, 0, (64, 64), **options)
        results(flex(PackedAttention(bounds(lengths)), call), call)

    run([700])
    run([300, 1, 200])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for lengths in ([129], [5, 900], [4096, 33]):
        run(lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
