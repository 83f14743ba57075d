"""Sampling masks in the trainer: log-probabilities, entropy and gradient are those of the cut policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from opd.config import PolicyLossConfig
from opd.config.rl import ReferenceKLConfig
from opd.errors import TrainingError
from opd.kernels.head import Head
from opd.ranks import Ranks
from opd.train.frozen import FrozenModel
from opd.train.masks import pack_masks, policy_logprobs
from opd.train.packing import pack
from opd.train.terms import PolicyTerm, ReferenceTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

LENGTHS = [(3, 4), (5, 2), (2, 7), (1, 3)]
CPU, FAR, HEAT = torch.device("cpu"), -torch.inf, 0.7


def masked_samples() -> list[Sample]:
    """The last has no masks, and each other one a token without."""
    samples = tiny.samples(LENGTHS)
    tiny.draw_masks(samples[:-1])
    return samples


def cut_logprobs(logits: Tensor, targets: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Written out: softmax [N, V] with -inf outside of each mask."""
    outside = torch.zeros_like(logits, dtype=torch.bool)
    for row, mask in enumerate([] if masks is None else masks.tolist()):
        if ids := [one for one in mask if one >= 0]:
            outside[row] = True
            outside[row, ids] = False
    logprobs = logits.masked_fill(outside, FAR).log_softmax(-1)
    entropy = -torch.where(outside, 0, logprobs.exp() * logprobs.masked_fill(outside, 0)).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients_equal_a_masked_softmax(softcap):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 5, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(13, 5, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(13, (9,), generator=generator)
    masks = torch.full((9, 6), -1)
    for row in range(8):  # one token of one id, and the last of the whole vocabulary
        others = torch.randperm(13, generator=generator)[: row % 6]
        kept = torch.cat([targets[row : row + 1], others]).unique()[:6]
        kept = kept if targets[row] in kept else torch.cat([kept[:5], targets[row : row + 1]]).sort().values
        masks[row, : len(kept)] = kept
    coefs = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    logits = hidden @ weight.T
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / HEAT
    results = []
    for logprobs, entropy in (
        policy_logprobs(hidden, Head(weight, softcap=softcap), targets, masks, HEAT, 4)[:2],
        cut_logprobs(logits, targets, masks),
    ):
        gradients = torch.autograd.grad((coefs[0] * logprobs + coefs[1] * entropy).sum(), (hidden, weight))
        results.append((logprobs.detach(), entropy.detach(), *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def kept_masses(model, sample: Sample) -> np.ndarray:
    """The probability of each mask of a sample, whose whole log-probabilities are lower by its log."""
    whole = plain(model, [replace(sample, sampling_masks=None)])[0]
    masked = sample.sampling_masks[: len(sample.response_ids)] > 0  # pyright: ignore[reportOptionalSubscript]
    return (whole - plain(model, [sample])[0]).exp().detach().numpy()[masked]


def plain(model, samples: list[Sample]) -> list[Tensor]:
    """[R] each: one sample alone, with masks written out."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model.hidden(ids, torch.arange(len(ids)), bounds)[len(sample.prompt_ids) - 1 : -1]
        targets = ids[len(sample.prompt_ids) :]
        found.append(cut_logprobs(model.head().logits(hidden) / HEAT, targets, pack_masks([sample]))[0])
    return found


def test_the_step_of_the_cut_policy_is_exact():
    """Recomputed and reference log-probabilities, the clipped loss, its reference KL, and their gradient."""
    samples, rng = masked_samples(), np.random.default_rng(1)
    reference = FrozenModel(tiny.model(5), tiny.training([]).batch, Ranks())
    penalty = ReferenceKLConfig(coef=0.3, estimator="k3", placement="loss")
    terms = [PolicyTerm(PolicyLossConfig()), ReferenceTerm(penalty)]
    back = TorchBackend(tiny.model(), tiny.training(terms, HEAT, max_tokens=12, kl_chunk=3))
    old, other = back.recompute_logprobs(samples), reference.local_logprobs(samples, HEAT)
    for ours, theirs in ((old, plain(tiny.model(), samples)), (other, plain(tiny.model(5), samples))):
        np.testing.assert_allclose(np.concatenate(ours), torch.cat(theirs).detach(), atol=2e-6)
    made = []
    for ours, theirs in zip(old, other, strict=True):
        term = TokenTerms.zeros(len(ours))
        term.advantages = rng.normal(size=len(ours)).astype(np.float32)
        term.old_logprobs = ours + rng.normal(0, 0.3, len(ours)).astype(np.float32)
        term.policy_weight, term.ref_logprobs = np.full(len(ours), 0.1, np.float32), theirs
        made.append(term)
    metrics = back.forward_backward(RolloutBatch(samples, made))
    counts = np.concatenate([s.sampling_masks[: len(s.response_ids)] for s in samples[:-1]])  # pyright: ignore[reportOptionalSubscript]
    assert metrics["sampling/kept"] == pytest.approx(counts[counts > 0].mean())
    masses = np.concatenate([kept_masses(tiny.model(), sample) for sample in samples[:-1]])
    assert metrics["sampling/mass"] == pytest.approx(masses.mean(), rel=1e-5)

    model, loss = tiny.model(), torch.zeros(())
    for logprobs, term in zip(plain(model, samples), made, strict=True):
        advantages, before, beside = map(
            torch.from_numpy, (term.advantages, term.old_logprobs, term.ref_logprobs)
        )
        ratio = (logprobs - before).exp()
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        apart = beside - logprobs
        loss = loss + (0.1 * (0.3 * (apart.exp() - 1 - apart) - clipped)).sum()
    loss.backward()
    for (name, ours), theirs in zip(
        back.model.module.named_parameters(), model.module.parameters(), strict=True
    ):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-4, atol=2e-6)


def test_samples_without_masks_take_the_way_they_took():
    """Also beside others: a pack of uncut samples has no masks."""
    pairs = [(sample, TokenTerms.zeros(len(sample.response_ids))) for sample in tiny.samples(LENGTHS)]
    assert pack(pairs, CPU).masks is None
    empty = tiny.samples([(2, 3)])
    empty[0].sampling_masks = np.zeros(3, np.int32)
    assert pack_masks(empty) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda flat, ids: flat[:1], "do not fit its 2 tokens"),
        (lambda flat, ids: flat[:-1], "do not fit its 2 tokens"),
        (lambda flat, ids: np.append(flat, 3), "do not fit its 2 tokens"),
        (lambda flat, ids: [-1, *flat[1:]], "do not fit its 2 tokens"),
        (lambda flat, ids: [1025, 1, *range(1025), ids[1]], "have one of 1025 tokens, and 1024 is the most"),
        (lambda flat, ids: [2, 1, *sorted({ids[0], 0, 1})[1::-1], ids[1]], "are not ascending token ids"),
        (lambda flat, ids: [2, 1, ids[0], ids[0], ids[1]], "are not ascending token ids"),
        (lambda flat, ids: [2, 1, -5, ids[0], ids[1]], "are not ascending token ids"),
        (lambda flat, ids: [1, 1, ids[0], (ids[1] + 1) % 9], "leave out its token 1, which was drawn"),
        (lambda flat, ids: [2, 1, ids[0], 15, ids[1]], "of sample .* names token 15, and the student has 15"),
        (lambda flat, ids: [2, 1, ids[0], 2**31 - 1, ids[1]], "names token 2147483647"),
    ],
)
def test_masks_that_are_not_the_engines_are_refused(change, words):
    samples = tiny.samples([(5, 2)], seed=2)
    tiny.draw_masks(samples, every=True)
    flat, ids = samples[0].sampling_masks, samples[0].response_ids.tolist()
    samples[0].sampling_masks = np.array(change(flat, ids), np.int32)
    back = TorchBackend(tiny.model(), tiny.training([PolicyTerm(PolicyLossConfig())], 1.0))
    assert back.head().vocabulary == 15
    with pytest.raises(TrainingError, match=words):
        back.recompute_logprobs(samples)
    terms = TokenTerms.zeros(2)
    terms.policy_weight, terms.advantages = np.ones(2, np.float32), np.ones(2, np.float32)
    with pytest.raises(TrainingError, match=words):
        back.forward_backward(RolloutBatch(samples, [terms]))
