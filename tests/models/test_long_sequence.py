"""Layers computed again and sequences in pieces give what the whole model gives, in less memory."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import FREED_AT_ONCE
from torch import Tensor, nn

from opd.errors import ModelError
from opd.models import attention as blocks
from opd.models.attention import AttentionCall
from opd.models.causal_lm import CausalLM, check_pieces
from opd.models.long_sequence import ChunkedLayers, LayerCall, LayerMemory, chunks_of

LENGTHS = [3, 29, 4, 2, 17, 1]


def packed(lengths: list[int], vocabulary: int) -> tuple[Tensor, Tensor, list[int]]:
    """Token ids, positions and boundaries of random sequences end to end."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (bounds[-1],), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in lengths]), bounds


def run(model: CausalLM, memory: LayerMemory, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient in every parameter of a random linear function of them."""
    ids, positions, bounds = packed(lengths, model.vocab_size)
    model.module.zero_grad()
    hidden = model.hidden(ids, positions, bounds, memory)
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    gradients = [p.grad.flatten() for p in model.module.parameters() if p.grad is not None]
    model.module.zero_grad()
    return hidden.detach(), torch.cat(gradients)


@pytest.fixture(scope="module")
def whole(family):
    return run(family, LayerMemory())


@pytest.mark.some(4)
def test_layers_computed_again_change_no_bit(family, whole):
    hidden, gradient = run(family, LayerMemory(recompute=True))
    assert torch.equal(hidden, whole[0])
    assert torch.equal(gradient, whole[1])


@pytest.mark.some(6)
@pytest.mark.parametrize("chunk", [7, 16])
def test_pieces_give_the_hidden_states_and_gradients_of_the_whole(family, whole, chunk):
    hidden, gradient = run(family, LayerMemory(chunk=chunk))
    torch.testing.assert_close(hidden, whole[0], atol=2e-5, rtol=1e-4)
    assert (gradient - whole[1]).norm() <= 5e-5 * whole[1].norm()


def test_gradients_of_16_bits_are_summed_in_32_over_pieces():
    count, chunk = 1200, 4
    query, key = (torch.zeros(1, count, 2, dtype=torch.bfloat16) for _ in range(2))
    value = torch.zeros(1, count, 2, dtype=torch.bfloat16, requires_grad=True)
    # Each query sees all keys up to its own alike, and gives each of their values a gradient of 1.
    upstream = torch.arange(1.0, count + 1)[None, :, None].expand(1, count, 2)
    pieces = ChunkedLayers([0, count], chunk)
    call = LayerCall(lambda hidden, attend: hidden, {})
    outputs = [
        attend(AttentionCall(0, *(x[None, :, span] for x in (query, key, value)), 1.0)).transpose(1, 2)[0]
        for span, attend in pieces.chunk_attentions(query, call)
    ]
    for output, span in reversed(list(zip(outputs, pieces.spans, strict=True))):
        output.backward(upstream[:, span].to(output.dtype))
    assert value.grad is not None
    assert float(value.grad[0, 0, 0]) == pytest.approx(count, rel=2**-6)


def test_a_prefill_in_pieces_is_the_forward_without_a_gradient(family, whole):
    ids, positions, bounds = packed(LENGTHS, family.vocab_size)
    with torch.no_grad():
        hidden = family.hidden(ids, positions, bounds, LayerMemory(chunk=7))
    torch.testing.assert_close(hidden, whole[0], atol=2e-5, rtol=1e-4)
    again = family.hidden(ids, positions, bounds)
    assert torch.equal(again.detach(), whole[0])  # the model is as it was


def test_frozen_embeddings_leave_the_layers_their_gradients():
    model = tiny.model(tie_word_embeddings=False)
    model.module.get_input_embeddings().weight.requires_grad_(False)
    ours, theirs = (run(model, memory)[1] for memory in (LayerMemory(chunk=5), LayerMemory()))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_whole_sequences_that_fit_a_piece_are_run_as_they_were():
    model = tiny.model()
    lengths = [4, 4, 3, 5, 2]
    hidden, _ = run(model, LayerMemory(chunk=8), lengths)
    torch.testing.assert_close(hidden, run(model, LayerMemory(), lengths)[0], atol=1e-5, rtol=1e-4)
    assert [piece.bounds for piece in chunks_of([0, 4, 8, 11, 16, 18], 8)] == [(0, 4, 8), (0, 3, 8), (0, 2)]


@settings(max_examples=cases(100))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 16))
def test_pieces_cover_every_token_once_and_cut_only_long_sequences(lengths, chunk):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    pieces = chunks_of(bounds, chunk)
    assert [token for piece in pieces for token in range(piece.start, piece.stop)] == list(range(bounds[-1]))
    for piece in pieces:
        assert 0 < piece.stop - piece.start <= chunk
        assert piece.bounds[0] == 0
        assert piece.bounds[-1] == piece.stop - piece.start
        if piece.sequence is None:
            assert {piece.start + bound for bound in piece.bounds} <= set(bounds)
        else:
            assert piece.sequence in set(pairwise(bounds))
            assert piece.sequence[1] - piece.sequence[0] > chunk


@settings(max_examples=cases(60))
@given(
    count=st.integers(1, 70),
    before=st.integers(0, 90),
    kv_heads=st.sampled_from([1, 2, 4]),
    softcap=st.sampled_from([None, 1.5]),
    window=st.sampled_from([None, 1, 5, 40, 1000]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_block_attention_equals_a_float64_softmax(count, before, kv_heads, softcap, window, sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    size = count + before
    query = torch.randn(4, count, 6, generator=generator)
    key, value = (torch.randn(kv_heads, size, n, generator=generator) for n in (6, 5))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    if sinks:
        inputs.append(torch.tensor([-3.0, 0.0, 2.0, 5.0], requires_grad=True))
    scores = blocks.ScoreForm(0.7, softcap, window, *inputs[3:])
    largest, blocks._SCORES = blocks._SCORES, 4 * 32 * 32  # many blocks
    try:
        output = blocks.block_attention(*inputs[:3], scores)
        upstream = torch.randn(output.shape, generator=generator)
        ours = torch.autograd.grad(output, inputs, upstream)
    finally:
        blocks._SCORES = largest
    logits = query.double() @ key.double().repeat_interleave(4 // kv_heads, 0).transpose(1, 2) * 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(before, size)[:, None] - torch.arange(size)
    hidden = (distance < 0) | (distance >= (window or size))
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks:
        logits = torch.cat([logits, inputs[3].double()[:, None, None].expand(4, count, 1)], -1)
    weights = logits.softmax(-1)[..., :size]
    expected = weights @ value.double().repeat_interleave(4 // kv_heads, 0)
    theirs = torch.autograd.grad(expected, inputs, upstream.double())
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, atol=3e-5, rtol=1e-4)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_long_windows_equal_the_attention_of_transformers(name):
    changes = {"gemma2": {"attn_logit_softcapping": 5.0, "head_dim": 8}}.get(name, {})
    model = tiny.model(model_type=name, sliding_window=300, initializer_range=0.3, **changes)
    ids, positions, bounds = packed([1500], model.vocab_size)
    with torch.no_grad():
        ours = model.hidden(ids, positions, bounds)
        pieces = model.hidden(ids, positions, bounds, LayerMemory(chunk=256))
        model.module.set_attn_implementation("eager")
        theirs = model.decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        narrow = model.decoder(input_ids=ids[None, 900:], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(pieces, theirs, atol=5e-5, rtol=1e-4)
    assert not torch.allclose(theirs[900], narrow[0], atol=1e-3)  # what lies before is seen


def test_a_model_whose_layers_mix_tokens_otherwise_is_refused():
    model = tiny.model()
    mlp = model.decoder.layers[0].mlp

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mlp(x) + x.mean(1, keepdim=True)

    model.decoder.layers[0].mlp = Mean()
    with pytest.raises(ModelError, match="other hidden states in pieces"):
        check_pieces(model)


def grown_per_token(chunk: int, what: str) -> float:
    """Bytes a token by which a process grows with the length of its sequence."""
    script = Path(__file__).with_name("sequence_memory.py")
    environment = os.environ | FREED_AT_ONCE
    command = [sys.executable, str(script), str(chunk), what]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_memory_of_a_long_sequence_is_a_few_hidden_states_per_token():
    hidden_state = 64 * 4
    learning = grown_per_token(512, "LEARN")
    # Three layers' inputs, the norm's, its output, gradients, one layer's keys and values with theirs.
    assert learning < 16 * hidden_state
    # As a whole one layer alone keeps more than that.
    assert learning < grown_per_token(0, "LEARN") / 4
    assert grown_per_token(512, "READ") < 6 * hidden_state
