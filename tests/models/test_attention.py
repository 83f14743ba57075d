"""Packed attention against a float64 softmax over an explicit block-diagonal causal mask."""

from itertools import pairwise

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import bounds, inputs_of, make_call, reference

from opd.errors import ModelError
from opd.models import attention
from opd.models.attention import (
    SHORT,
    PackedAttention,
    attend_backward,
    attend_more,
    buckets_of,
    nothing_seen,
    opd_attention,
    sinks_gradient,
)

lengths_of = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.sampled_from([1, 3, 20, 40, 90]), min_size=1, max_size=6),
    st.integers(1, 12).flatmap(lambda n: st.lists(st.just(n), min_size=1, max_size=5)),
)


@settings(max_examples=cases(80), deadline=None)
@given(
    lengths=lengths_of,
    kv_heads=st.sampled_from([1, 2, 4]),
    head_major=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    window=st.sampled_from([None, 1, 3, 1000]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_masked_softmax(
    lengths, kv_heads, head_major, softcap, window, sinks, seed
):
    options = {"softcap": softcap, "sliding_window": window, "sinks": sinks}
    call = make_call(sum(lengths), kv_heads, head_major, seed, **options)
    attend = PackedAttention(torch.tensor(bounds(lengths), dtype=torch.int32))
    inputs = inputs_of(call)
    output = attend(call)
    expected = reference(call, lengths)
    assert output.shape == (1, sum(lengths), 4, 5 if sum(lengths) else 6)
    if not sum(lengths):
        return
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 1))
    ours = torch.autograd.grad(output, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, upstream.double())
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, atol=2e-5, rtol=1e-4)


@settings(max_examples=cases(60), deadline=None)
@given(
    tokens=st.integers(1, 90),
    cuts=st.sets(st.integers(1, 89), max_size=4),
    kv_heads=st.sampled_from([1, 4]),
    softcap=st.sampled_from([None, 1.5]),
    window=st.sampled_from([None, 1, 3, 40]),
    sinks=st.booleans(),
    data=st.data(),
)
def test_keys_that_come_in_parts_and_in_any_order_give_the_same(
    tokens, cuts, kv_heads, softcap, window, sinks, data
):
    options = {"softcap": softcap, "sliding_window": window, "sinks": sinks}
    call = make_call(tokens, kv_heads, True, tokens, **options)
    inputs = tuple(x.detach() for x in call.packed_inputs)
    ends = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
    parts = data.draw(st.permutations([slice(*pair) for pair in pairwise(ends)]))
    first_query = data.draw(st.integers(0, tokens - 1))
    query = inputs[0][:, first_query:]
    found = nothing_seen(query, inputs[2], call.sinks)
    for part in parts:
        attend_more(
            (query, *(x[:, part] for x in inputs[1:])), call.score_form, found, first_query - part.start
        )
    expected = reference(call, [tokens])[:, first_query:]
    torch.testing.assert_close(found[0].transpose(0, 1)[None].double(), expected, atol=1e-5, rtol=1e-5)

    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad(expected, inputs_of(call), upstream.double())
    gradients = [torch.zeros_like(x) for x in inputs]
    ahead = (*found, upstream[0].transpose(0, 1))
    for part in parts:
        seen = (query, *(x[:, part] for x in inputs[1:]))
        added = [gradients[0][:, first_query:], *(x[:, part] for x in gradients[1:])]
        attend_backward(seen, ahead, added, call.score_form, first_query - part.start)
    for mine, exact in zip(gradients, theirs[:3], strict=True):
        torch.testing.assert_close(mine[None], exact, atol=2e-5, rtol=1e-4)
    of_sinks = sinks_gradient(call.sinks, ahead)
    assert (of_sinks is not None) == sinks
    if of_sinks is not None:
        torch.testing.assert_close(of_sinks, theirs[3], atol=2e-5, rtol=1e-4)


def test_long_sequences_with_sinks_equal_the_masked_softmax(monkeypatch):
    """Above the longest mask they go block by block."""
    monkeypatch.setattr(attention, "_MASKED", 16)
    lengths = [40, 3, 70]
    call = make_call(sum(lengths), 2, True, 0, sinks=True)
    upstream = torch.randn(1, sum(lengths), 4, 5, generator=torch.Generator().manual_seed(1))
    output, expected = PackedAttention(bounds(lengths))(call), reference(call, lengths)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(output, inputs_of(call), upstream)
    theirs = torch.autograd.grad(expected, inputs_of(call), upstream.double())
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, atol=2e-5, rtol=1e-4)


@settings(max_examples=cases(100), deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40))
def test_buckets_hold_every_row_once_and_at_most_double_the_memory(lengths):
    buckets, places = buckets_of(lengths, torch.device("cpu"))
    laid_out = torch.cat([bucket.source for bucket in buckets])
    assert torch.equal(laid_out[places], torch.arange(sum(lengths)))
    assert len(set(places.tolist())) == sum(lengths)
    assert len(laid_out) <= 2 * sum(lengths) + SHORT * len(lengths)
    assert sum(bucket.shape[0] for bucket in buckets) == len(lengths)


def test_one_object_serves_many_layers_with_one_index():
    lengths = [3, 5, 2]
    attend = PackedAttention(bounds(lengths))
    for seed in range(3):
        call = make_call(10, 2, False, seed)
        torch.testing.assert_close(attend(call).double(), reference(call, lengths), atol=1e-5, rtol=1e-5)


def test_half_precision_stays_half_precision():
    call = make_call(9, 4, False, 0, softcap=3.0)
    lengths = [4, 5]
    expected = reference(call, lengths)
    call.query, call.key, call.value = (x.bfloat16() for x in (call.query, call.key, call.value))
    output = PackedAttention(bounds(lengths))(call)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("wrong", [[0], [1, 3], [0, 3, 2]])
def test_bad_boundaries_are_refused(wrong):
    with pytest.raises(ModelError, match="cu_seqlens must start at 0"):
        PackedAttention(wrong)


def test_another_number_of_tokens_is_refused():
    with pytest.raises(ModelError, match="describes 5 tokens but the model was given 6"):
        PackedAttention([0, 5])(make_call(6, 2, False, 0))


def test_the_interface_refuses_what_it_cannot_do():
    call = make_call(3, 2, False, 0)
    tensors = (torch.nn.Identity(), call.query, call.key, call.value)
    with pytest.raises(ModelError, match="is not handed on what its decoder is given"):
        opd_attention(*tensors)
    with pytest.raises(ModelError, match="does not support"):
        opd_attention(*tensors, attend=PackedAttention([0, 3]), position_bias=torch.zeros(4))
    with pytest.raises(ModelError, match="does not support"):
        opd_attention(*tensors, torch.zeros(3, 3), attend=PackedAttention([0, 3]))
