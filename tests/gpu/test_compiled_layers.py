"""Layers that Triton has compiled, against their own code."""

import pytest
import tiny
import torch

from opd.models.causal_lm import CausalLM
from opd.models.compiled_layers import compile_fault, compiled_layers, layer_graphs

FORM = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "model_type": "qwen3"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_pass_their_check_and_learn_the_same(dtype: str) -> None:
    config = tiny.LLAMA | FORM | {"head_dim": 64}
    model = CausalLM.from_config(config, tokenizer=tiny.tokenizer(), dtype=dtype, device="cuda")
    before = layer_graphs().count
    assert compile_fault(model) is None
    assert layer_graphs().count <= before + 2

    def slopes(length: int) -> torch.Tensor:
        ids = torch.arange(length, device="cuda") * 7 % model.vocab_size
        model.module.zero_grad()
        hidden = model.hidden(ids, torch.arange(length, device="cuda"), [0, length])
        hidden.float().square().mean().backward()
        learning = [one.grad.flatten().float() for one in model.decoder.layers.parameters()]
        return torch.cat(learning)

    for length in (300, 1000):
        model.compiled = None
        own = slopes(length)
        model.compiled = compiled_layers
        found = slopes(length)
        assert float((found - own).norm()) <= (1e-4 if dtype == "float32" else 5e-2) * float(own.norm())
        assert torch.equal(slopes(length), found)
    assert layer_graphs().count <= before + 2
