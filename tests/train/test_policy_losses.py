"""GSPO and CISPO against their papers' formulas in float64, and what no policy loss may depend on."""

import math

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.config.rl import CISPOLoss, GSPOLoss, PolicyLossConfig
from opd.config.specialist import SpecialistConfig
from opd.train.loss_weights import policy_scales
from opd.train.losses import Sequences, cispo_policy_loss, clipped_policy_loss, gspo_policy_loss
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

logprob = st.floats(-3.0, 0.0)
responses = st.lists(
    st.tuples(st.floats(-2.0, 2.0), st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=6)),
    min_size=1,
    max_size=5,
)
"""Of each response its advantage; of each of its tokens log-probability, old one, and whether it counts."""


def columns(step):
    """`(logprobs, old, advantages, mask, sequences)`, float64 and packed end to end."""
    rows = [(new, old, advantage, counts) for advantage, tokens in step for new, old, counts in tokens]
    new, old, advantage = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    mask = torch.tensor([row[3] for row in rows], dtype=torch.bool)
    return new.requires_grad_(), old, advantage, mask, Sequences([len(tokens) for _, tokens in step])


def by_response(mask, sequences):
    """[N] float64: what a token weighs where every response weighs the same."""
    lengths = sequences.lengths.tolist()
    counts = [int(part.sum()) for part in mask.split(lengths)]
    scales = torch.tensor(policy_scales(counts, "sequence"), dtype=torch.float64)
    return torch.where(mask, scales.repeat_interleave(sequences.lengths), 0.0)


@given(responses, st.floats(0.01, 0.9), st.floats(0.01, 2.0))
def test_gspo_is_the_clipped_objective_of_whole_responses(step, low, high):
    """2507.18071, equations 5 and 7: the mean over responses of min(s A, clip(s) A)."""
    new, old, advantage, mask, sequences = columns(step)
    loss, stats = gspo_policy_loss(
        new, old, advantage, GSPOLoss(clip_low=low, clip_high=high), mask, sequences
    )
    found = (by_response(mask, sequences) * loss).sum()
    objectives, held = [], 0
    for (worth, _), log_ratio, counted in zip(
        step,
        (new - old).split(sequences.lengths.tolist()),
        mask.split(sequences.lengths.tolist()),
        strict=True,
    ):
        if not counted.any():
            continue
        ratio = (log_ratio[counted].sum() / counted.sum()).exp()
        if min(abs(ratio.item() - (1 - low)), abs(ratio.item() - (1 + high))) < 1e-9:
            return  # on a bound any subgradient is right
        objectives.append(torch.minimum(ratio * worth, ratio.clamp(1 - low, 1 + high) * worth))
        held += int(counted.sum()) * bool((worth < 0 and ratio < 1 - low) or (worth > 0 and ratio > 1 + high))
    expected = -torch.stack(objectives).mean() if objectives else new.sum() * 0
    torch.testing.assert_close(found.detach(), expected.detach())
    for mine, theirs in zip(*(torch.autograd.grad(x, new) for x in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert stats.clipped_low + stats.clipped_high == held


@given(responses, st.floats(0.0, 1.0, width=16), st.floats(0.0, 3.0, width=16))
def test_cispo_weighs_every_tokens_score_with_a_clipped_number(step, low, high):
    """2506.13585, equation 4: the mean over tokens of sg(clip(r)) A log p."""
    new, old, advantage, mask, _ = columns(step)
    loss, stats = cispo_policy_loss(new, old, advantage, CISPOLoss(clip_low=low, clip_high=high), mask)
    ratios = (new.detach() - old).exp().tolist()
    weights = [-a * min(max(r, 1 - low), 1 + high) for r, a in zip(ratios, advantage.tolist(), strict=True)]
    expected = torch.where(mask, torch.tensor(weights, dtype=torch.float64), 0.0)
    torch.testing.assert_close(loss.detach(), expected * new.detach())
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, expected)
    outside = sum((r < 1 - low or r > 1 + high) and bool(m) for r, m in zip(ratios, mask, strict=True))
    assert stats.clipped_low + stats.clipped_high == outside


@given(responses)
def test_at_the_old_policy_all_are_the_plain_policy_gradient(step):
    new, _, advantage, mask, sequences = columns(step)
    for loss, config in (
        (clipped_policy_loss, PolicyLossConfig()),
        (gspo_policy_loss, GSPOLoss()),
        (cispo_policy_loss, CISPOLoss()),
    ):
        found, stats = loss(new, new.detach(), advantage, config, mask, sequences)
        (gradient,) = torch.autograd.grad(found.sum(), new)
        torch.testing.assert_close(gradient, torch.where(mask, -advantage, 0.0))
        assert stats.metrics().get("policy/clip_ratio", 0.0) == 0.0


@given(responses, st.integers(1, 4))
def test_a_response_that_ranks_share_has_the_mean_of_all_its_tokens(step, ranks):
    new, old, _, mask, whole = columns(step)
    values = new.detach() - old
    kept = [torch.arange(len(values))[rank::ranks] for rank in range(ranks)]
    sums: list[torch.Tensor] = []
    for own in kept:
        cut = Sequences(whole.lengths.tolist(), kept=own, summed=lambda part: (sums.append(part), part)[1])
        cut.response_mean(values[own], mask[own])
    total = torch.stack(sums).sum(0)
    for own in kept:
        cut = Sequences(whole.lengths.tolist(), kept=own, summed=lambda _: total)
        torch.testing.assert_close(
            cut.response_mean(values[own], mask[own]), whole.response_mean(values, mask)[own]
        )


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (clipped_policy_loss, PolicyLossConfig()),
        (clipped_policy_loss, PolicyLossConfig(dual_clip=3.0)),
        (gspo_policy_loss, GSPOLoss()),
        (cispo_policy_loss, CISPOLoss()),
    ],
    ids=["clipped", "dual clip", "gspo", "cispo"],
)
def test_extreme_ratios_stay_finite(loss, config):
    old = torch.tensor([-500.0, 0.0, -500.0, 0.0])
    new = torch.tensor([0.0, -500.0, 0.0, -500.0], requires_grad=True)
    found, stats = loss(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), config, None, Sequences([1, 1, 2]))
    found.sum().backward()
    assert found.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert all(math.isfinite(value) for value in stats.metrics().values())
    if getattr(config, "dual_clip", None) is not None:
        assert found.max().item() == pytest.approx(3.0)
    assert loss(old[:0], old[:0], old[:0], config, None, Sequences([0]))[0].shape == (0,)


def batch() -> RolloutBatch:
    """Responses of one advantage each, some of whose tokens do not count."""
    samples = tiny.samples([(3, 4), (5, 1), (2, 7), (4, 0), (6, 3), (1, 5)])
    rng = np.random.default_rng(1)
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for sample, term in zip(samples, terms, strict=True):
        n = len(sample.response_ids)
        term.advantages = np.full(n, rng.normal(), np.float32)
        term.old_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        term.policy_weight = ((rng.random(n) < 0.8) / 20).astype(np.float32)
    return RolloutBatch(samples, terms)


def gradient(config, order=None, max_tokens=1000):
    whole = batch()
    backend = TorchBackend(tiny.model(), tiny.training([PolicyTerm(config)], 0.7, max_tokens=max_tokens))
    metrics = backend.forward_backward(whole if order is None else whole.select_samples(order))
    return torch.cat([p.grad.flatten() for p in backend.model.module.parameters()]), metrics


WIDE = {"clip_low": 0.3, "clip_high": 0.5}


@pytest.mark.parametrize("config", [GSPOLoss(**WIDE), CISPOLoss(**WIDE)], ids=lambda config: config.type)
def test_neither_packing_nor_order_changes_a_step(config):
    one, metrics = gradient(config)
    for order, max_tokens in ((None, 7), ([4, 2, 0, 5, 3, 1], 1000), ([4, 2, 0, 5, 3, 1], 9)):
        other, same = gradient(config, order, max_tokens)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert same == pytest.approx(metrics, rel=1e-5)
    assert one.norm() > 0
    assert not torch.allclose(one, gradient(PolicyLossConfig(**WIDE))[0], rtol=1e-2)


def test_the_entropy_bonus_is_that_of_the_whole_vocabulary():
    """Against autograd on plain logits; the kernel never holds them for all tokens."""
    whole = batch()
    config = PolicyLossConfig()
    backends = [
        TorchBackend(tiny.model(), tiny.training([PolicyTerm(config, coef)], 0.7, kl_chunk=5))
        for coef in (0.0, 0.3)
    ]
    plain = tiny.model()
    bonus = torch.zeros(())
    for sample, terms in whole:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        hidden = plain.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
        logs = (hidden @ plain.module.lm_head.weight.T / 0.7).log_softmax(-1)
        logs = logs[len(sample.prompt_ids) - 1 : len(ids) - 1]
        bonus = bonus - (torch.from_numpy(terms.policy_weight) * (logs.exp() * logs).sum(-1)).sum()
    (-0.3 * bonus).backward()
    metrics = [backend.forward_backward(whole) for backend in backends]
    without, with_bonus, expected = (
        torch.cat([p.grad.flatten() for p in model.module.parameters()])
        for model in (backends[0].model, backends[1].model, plain)
    )
    torch.testing.assert_close(with_bonus - without, expected, rtol=1e-3, atol=1e-5)
    assert expected.norm() > 1e-3
    assert metrics[0] == metrics[1]


def test_a_recipe_names_the_loss_and_one_without_a_type_is_the_clipped_one():
    def read(**loss):
        return SpecialistConfig.model_validate({"policy_loss": loss}).policy_loss

    assert read() == read(type="clip") == PolicyLossConfig()
    assert read(clip_low=0.1, correction={"type": "tis"}).type == "clip"
    assert (read(type="gspo").clip_high, read(type="gspo").aggregation) == (4e-4, "sequence")
    assert (read(type="cispo").clip_low, read(type="cispo").aggregation) == (1.0, "token")
