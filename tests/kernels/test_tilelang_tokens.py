"""TileLang's kernel of single tokens on this machine's CPU: against float64, and where `auto` takes it."""

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.kernels import divergences, ops, tilelang_rows, tilelang_target, tilelang_tokens
from opd.kernels.divergences import ALL_COLUMNS
from opd.kernels.head import Head

TILE = tilelang_target.CPU.lanes * tilelang_target.CPU.unroll

pytestmark = pytest.mark.skipif(
    tilelang_target.missing("cpu") is not None, reason=str(tilelang_target.missing("cpu"))
)


def problem(seed, rows, vocabulary, width, scale, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale + offset
    ids = torch.randint(vocabulary, (rows, width), generator=generator)
    return logits, ids, torch.randn(rows, width, generator=generator), torch.randn(rows, generator=generator)


@settings(max_examples=cases(120))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([TILE - 1, TILE, TILE + 1, 3 * TILE + 17])),
    width=st.sampled_from([1, 3]),
    scale=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
    offset=st.sampled_from([0.0, 100.0, -100.0]),
    entropy=st.booleans(),
)
def test_values_and_gradient_match_float64(seed, rows, vocabulary, width, scale, offset, entropy):
    logits, ids, coef, of_entropy = problem(seed, rows, vocabulary, width, scale, offset)
    exact, kept = logits.double(), logits.clone()
    values = divergences.token_statistics_(exact.clone(), ids, entropy)
    divergences.token_gradient_(exact, ids, coef.double(), of_entropy.double() if entropy else None)
    for got, value in zip(tilelang_tokens.launch_statistics(logits, ids, entropy), values, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=2e-5)
    assert torch.equal(logits, kept)
    tilelang_tokens.launch_gradient(logits, ids, coef, of_entropy if entropy else None, None)
    # p (log p + H) cancels: its error is relative to the spread of the logits.
    spread = float((kept.max(1).values - kept.min(1).values).max()) if entropy else 1.0
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=5e-6 * max(1.0, spread))


@pytest.mark.parametrize("place", [0, TILE - 1, TILE + 6])
def test_nan_passes_through_to_its_own_row(place):
    logits, ids, coef, of_entropy = problem(1, 3, TILE + 7, 1, 1.0)
    logits[1, place] = float("nan")
    for got in tilelang_tokens.launch_statistics(logits, ids, True):
        assert got.reshape(3, -1).isnan().any(1).tolist() == [False, True, False]
    tilelang_tokens.launch_gradient(logits, ids, coef, of_entropy, None)
    assert logits.isnan().all(1).tolist() == [False, True, False]


def test_masked_tokens_take_no_probability():
    logits, ids, coef, _ = problem(2, 3, TILE + 90, 1, 2.0)
    ids.clamp_max_(TILE)
    masked = logits.clone()
    masked[:, TILE + 1 :] = float("-inf")
    exact = logits[:, : TILE + 1].double()
    values, _ = divergences.token_statistics_(exact.clone(), ids, False)
    got, _ = tilelang_tokens.launch_statistics(masked, ids, False)
    torch.testing.assert_close(got.double(), values, rtol=1e-5, atol=1e-5)
    divergences.token_gradient_(exact, ids, coef.double(), None)
    tilelang_tokens.launch_gradient(masked, ids, coef, None, None)
    assert torch.equal(masked[:, TILE + 1 :], torch.zeros(3, 89))
    torch.testing.assert_close(masked[:, : TILE + 1].double(), exact, rtol=1e-5, atol=5e-6)


def test_a_row_depends_on_no_other_row_and_on_no_thread():
    logits, ids, coef, of_entropy = problem(3, 7, 2 * TILE + 5, 1, 2.0)
    together = logits.clone()
    values = tilelang_tokens.launch_statistics(logits, ids, True)
    tilelang_tokens.launch_gradient(together, ids, coef, of_entropy, None)
    for row in range(7):
        one = slice(row, row + 1)
        alone = logits[one].clone()
        for got, value in zip(tilelang_tokens.launch_statistics(alone, ids[one], True), values, strict=True):
            assert torch.equal(got, value[one])
        tilelang_tokens.launch_gradient(alone, ids[one], coef[one], of_entropy[one], None)
        assert torch.equal(alone, together[one])
    torch.set_num_threads(3)
    again = logits.clone()
    tilelang_tokens.launch_gradient(again, ids, coef, of_entropy, None)
    assert torch.equal(again, together)


@pytest.mark.parametrize("vocabulary", [ops.LARGE - 1, ops.LARGE])
@pytest.mark.parametrize("chosen", ["auto", "tilelang"])
def test_auto_takes_it_over_large_vocabularies_alone(vocabulary, chosen, monkeypatch):
    monkeypatch.setattr(tilelang_rows, "PROVED", set())
    tilelang_tokens.trusted.cache_clear()
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(vocabulary, 8, generator=generator)
    ids = torch.randint(vocabulary, (5,), generator=generator)
    results = {}
    for name in ("chunked", chosen):
        monkeypatch.setenv("OPD_KERNELS", name)
        hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
        logprobs, entropy = ops.linear_logprobs_entropy(hidden, Head(weight), ids)
        (logprobs.sum() - entropy.sum()).backward()
        results[name] = logprobs.detach(), entropy.detach(), hidden.grad
    for ours, plain in zip(results[chosen], results["chunked"], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    taken = chosen == "tilelang" or vocabulary >= ops.LARGE
    assert ("tokens" in tilelang_rows.PROVED) == taken


def test_a_kernel_that_fails_its_proof_is_left_aside(monkeypatch):
    def wrong(logits, ids, entropy):
        values, spread = divergences.token_statistics_(logits.clone(), ids, entropy)
        return values * 1.001, spread

    monkeypatch.setattr(tilelang_rows, "PROVED", set())
    monkeypatch.setattr(tilelang_tokens, "launch_statistics", wrong)
    tilelang_tokens.trusted.cache_clear()
    logits, ids, _, _ = problem(6, 3, 600, 1, 2.0)
    values, _ = divergences.token_statistics_(logits.clone(), ids, True)
    try:
        with pytest.warns(RuntimeWarning, match="single tokens over 600 tokens gives other values than"):
            got, _ = tilelang_tokens.ROWS.statistics(logits, ids, True, ALL_COLUMNS)
    finally:
        tilelang_tokens.trusted.cache_clear()
    assert torch.equal(got, values)
    assert not tilelang_rows.PROVED
