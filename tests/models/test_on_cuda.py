"""Attention and whole models on a device: the CPU's numbers, fused kernels where there are some, no waits."""

from __future__ import annotations

import numpy as np
import pretend_cuda
import pytest
import tiny
import torch

from opd.models import attention
from opd.models.attention import AttentionCall, PackedAttention
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.long_sequence import LayerMemory

LENGTHS = (5, 12, 3, 40, 12)
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def leaves(dtype: torch.dtype, heads: int, shared: int) -> list[torch.Tensor]:
    """Query, key, value [1, H, T, d] of packed sequences, and what arrives from above [1, T, H, d]."""
    generator = torch.Generator().manual_seed(0)
    tokens, size = sum(LENGTHS), 16
    made = [torch.randn(1, h, tokens, size, generator=generator) for h in (heads, shared, shared)]
    return [x.to(dtype) for x in [*made, torch.randn(1, tokens, heads, size, generator=generator)]]


def attend(given: list[torch.Tensor], **call) -> list[torch.Tensor]:
    """The output and the three gradients."""
    inputs = [x.clone().requires_grad_() for x in given[:3]]
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    output = PackedAttention(bounds)(AttentionCall(0, *inputs, scaling=0.3, **call))
    return [output.detach(), *torch.autograd.grad(output, inputs, given[3])]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shared", [4, 2], ids=["every head its own", "heads share keys"])
@pytest.mark.parametrize(
    ("call", "masked"),
    [
        ({}, 1024),
        ({"sliding_window": 8}, 1024),
        ({"softcap": 2.0}, 1024),
        ({"softcap": 2.0, "sliding_window": 8}, 16),
        ({"sliding_window": 8}, 16),
    ],
    ids=str,
)
def test_packed_attention(gpu, monkeypatch, dtype, shared, call, masked):
    monkeypatch.setattr(attention, "_MASKED", masked)  # longer ones go block by block
    given = leaves(dtype, 4, shared)
    exact = attend([x.double() for x in given], **call)
    here = [gpu.put(x) for x in given]
    with gpu.counted() as seen:
        found = attend(here, **call)
    assert not seen.waits, seen
    if isinstance(gpu, pretend_cuda.Gpu) and not call:
        assert seen.launches["attention"] == seen.launches["attention_backward"] == 2, seen  # two buckets
    for ours, theirs in zip(found, exact, strict=True):
        difference = (gpu.get(ours).double() - theirs).norm() / theirs.norm()
        assert difference < EXACT[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_loaded_onto_the_device_and_checked_there(gpu, tmp_path, dtype):
    folder = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "m", {})
    plain = CausalLM.from_pretrained(folder, dtype=dtype)
    model = CausalLM.from_pretrained(folder, dtype=dtype, device=str(gpu.device))
    assert model.device == gpu.device
    assert len({id(p) for p in model.module.parameters()}) == len({id(p) for p in plain.module.parameters()})
    ids = torch.arange(13)
    bounds, exact = [0, 5, 13], 1e-5 if dtype == "float32" else 2e-2
    with torch.no_grad():
        expected = plain.hidden(ids, ids, bounds)
        for memory in (LayerMemory(), LayerMemory(chunk=4)):
            found = model.hidden(ids.to(model.device), ids.to(model.device), bounds, memory)
            torch.testing.assert_close(gpu.get(found), expected, rtol=exact, atol=exact)
    assert model.digest() == plain.digest()


@pytest.mark.parametrize(
    "memory", [LayerMemory(), LayerMemory(recompute=True), LayerMemory(chunk=4)], ids=str
)
def test_a_forward_and_its_backward_do_not_wait(gpu, memory):
    model = gpu.model(tiny.model())
    model.pieces_checked = True
    ids = gpu.put(torch.arange(13))
    with gpu.counted() as seen:
        model.hidden(ids, ids, [0, 5, 13], memory).sum().backward()
    assert not seen.waits, seen
