"""One token per row: right distribution, right support, right log-probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import RolloutError
from opd.rollout import sampling
from opd.rollout.sampling import SamplingPlan, check_finite, invert_cdf, sample_tokens


def plan_of(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingPlan:
    return SamplingPlan.build(
        np.full(rows, temperature), np.full(rows, top_p), np.full(rows, top_k), torch.device("cpu")
    )


def draw(logits: np.ndarray, count: int, **settings: float) -> np.ndarray:
    """Counts of each token over `count` evenly spread uniforms: `count * probability` within 1."""
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    table = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    ids, *_ = sample_tokens(table, uniforms, plan_of(count, **settings))  # pyright: ignore[reportArgumentType]
    return np.bincount(ids.numpy(), minlength=len(logits))


def reference_probabilities(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Token by token in float64, most likely first."""
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


@settings(max_examples=cases(80), deadline=None)
@given(
    # Distinct multiples of 1/8: no rank or top-p boundary depends on float32 rounding.
    ranks=st.lists(st.integers(-24, 24), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.931, 0.517, 0.013]),
    top_k=st.integers(0, 13),
)
def test_counts_are_the_reference_probabilities(
    ranks: list[int], temperature: float, top_p: float, top_k: int
) -> None:
    logits = np.array(ranks) / 8
    counts = draw(logits, 2000, temperature=temperature, top_p=top_p, top_k=top_k)
    expected = reference_probabilities(logits, temperature, top_p, top_k)
    np.testing.assert_allclose(counts, 2000 * expected, atol=1.01)
    assert not counts[expected == 0].any()


def test_settings_differ_by_row_and_equal_the_rows_alone() -> None:
    rng = np.random.default_rng(0)
    rows = 60
    logits = torch.tensor(rng.normal(0, 2, (rows, 9)), dtype=torch.float32)
    uniforms = torch.tensor(rng.random(rows))
    heat, top_p = rng.choice([0.0, 0.5, 1.0, 2.0], rows), rng.choice([1.0, 0.7], rows)
    top_k = rng.choice([0, 3, 20], rows)
    ids, logprobs, _ = sample_tokens(
        logits, uniforms, SamplingPlan.build(heat, top_p, top_k, torch.device("cpu"))
    )
    for row in range(rows):
        alone = slice(row, row + 1)
        settings = SamplingPlan.build(heat[alone], top_p[alone], top_k[alone], torch.device("cpu"))
        one, logprob, _ = sample_tokens(logits[alone], uniforms[alone], settings)
        assert ids[row] == one[0]
        assert logprobs[row] == pytest.approx(float(logprob[0]), abs=1e-6)
        expected = torch.log_softmax(logits[row].double() / (heat[row] or 1.0), 0)[ids[row]]
        assert float(logprobs[row]) == pytest.approx(float(expected), abs=1e-5)
        if heat[row] == 0:
            assert ids[row] == logits[row].argmax()


def test_extreme_uniforms_never_pick_a_token_of_probability_zero() -> None:
    probabilities = torch.rand(1000, 7, generator=torch.Generator().manual_seed(0))
    probabilities[:, [0, 3, 5, 6]] = 0.0
    for uniform, token in ((0.0, 1), (1 - 2**-53, 4)):
        ids = invert_cdf(probabilities, torch.full((1000,), uniform, dtype=torch.float64))
        assert (ids == token).all()


def test_equal_logits_keep_exactly_k_tokens_and_the_lowest_ids() -> None:
    assert draw(np.zeros(8), 300, top_k=3).tolist() == [100, 100, 100, 0, 0, 0, 0, 0]
    assert draw(np.zeros(8), 300, top_p=0.37).tolist() == [100, 100, 100, 0, 0, 0, 0, 0]
    assert draw(np.zeros(8), 300, top_k=4, top_p=0.37).tolist() == [150, 150, 0, 0, 0, 0, 0, 0]  # of the four


def test_long_vocabularies_are_done_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(0, 2, (33, 500)), dtype=torch.float32)
    uniforms = torch.tensor(rng.random(33))
    plan = SamplingPlan.build(
        rng.choice([0.0, 0.8], 33), rng.choice([1.0, 0.9], 33), rng.choice([0, 40], 33), torch.device("cpu")
    )
    whole = sample_tokens(logits, uniforms, plan)
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 8 * 500 * 5)
    parts = sample_tokens(logits, uniforms, plan)
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_naming_the_row(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(RolloutError, match="row 1"):
        check_finite(sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), plan_of(3))[1].numpy())


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 1000])
def test_two_steps_find_what_one_scan_finds(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(400, vocabulary, generator=generator) * torch.rand(400, 1, generator=generator) * 20
    probabilities = logits.softmax(-1)
    probabilities[torch.rand(400, vocabulary, generator=generator) < 0.4] = 0.0
    probabilities[torch.arange(400), torch.randint(vocabulary, (400,), generator=generator)] += 1e-6
    uniforms = torch.rand(400, dtype=torch.float64, generator=generator)
    uniforms[:40], uniforms[40:80] = 0.0, 1 - 2.0**-53
    scanned = invert_cdf(probabilities, uniforms)
    monkeypatch.setattr(sampling, "LONG", 1)
    found = invert_cdf(probabilities, uniforms)
    # At the last uniform below 1 it is rounding that chooses among tokens of less than 1e-16.
    assert torch.equal(torch.cat([found[:40], found[80:]]), torch.cat([scanned[:40], scanned[80:]]))
    assert bool((probabilities.gather(1, found[:, None]) > 0).all())
    spoiled = logits.clone()
    spoiled[7, 0] = float("nan")
    ids, logprobs, _ = sample_tokens(spoiled, uniforms, plan_of(400))
    assert bool(((ids >= 0) & (ids < vocabulary)).all())
    assert logprobs.isnan().nonzero().flatten().tolist() == [7]
    with pytest.raises(RolloutError, match="row 7"):
        check_finite(logprobs.numpy())
