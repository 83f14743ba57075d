"""A merge's gradient on tokens that an older student drew, against enumeration: one state, every token."""

import numpy as np
import pytest
import tiny
import torch
from pydantic import ValidationError
from recipes import tiny_recipe
from whole_step import correct, opd_advantages

from opd.config import DistillConfig, SampledTokenK1
from opd.kernels.head import Head
from opd.pipelines.check.checks import check_schedule
from opd.pipelines.stages.distill import loss_terms, policy_loss, token_terms
from opd.pipelines.stages.policy_stream import PolicyTokens
from opd.train.loss_weights import token_weights
from opd.train.teacher_views import TeacherView
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample

PROMPT = np.array([3, 1, 4], np.int32)
EXACT = {"type": "tis", "upper": 1e6}
VOCABULARY, WIDTH = len(tiny.tokenizer()), 32
REWARDS = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32)
GENERATOR = torch.Generator().manual_seed(7)
TEACHER = torch.randn(1, WIDTH, generator=GENERATOR), torch.randn(VOCABULARY, WIDTH, generator=GENERATOR) / 4


def teacher(micro):
    return [TeacherView("t", 1.0, TEACHER[0].expand(len(micro.targets), -1), Head(TEACHER[1]))]


def student():
    model = tiny.model(0)
    with torch.no_grad():  # far enough from uniform that who wrote matters
        for parameter in model.module.parameters():
            parameter.mul_(4.0)
    return model


def logprobs(model) -> torch.Tensor:
    """[V] at the state after the prompt, with gradient."""
    ids = torch.from_numpy(PROMPT.astype(np.int64))
    hidden = model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])[-1]
    return (hidden @ model.head().weight.T).log_softmax(-1)


def flat(model) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.module.parameters()])


def expected(config: DistillConfig) -> torch.Tensor:
    """Of `KL(student || teacher) - rl_coef * E[reward]`."""
    model = student()
    own = logprobs(model)
    other = (TEACHER[0] @ TEACHER[1].T).log_softmax(-1)[0]
    objective = (own.exp() * (own - other)).sum()
    (objective - config.rl_coef * (own.exp() * torch.from_numpy(REWARDS)).sum()).backward()
    return flat(model)


def found(config: DistillConfig) -> torch.Tensor:
    """The mean over what an older student draws, as a step of the merge makes it."""
    writer = (logprobs(student()) / 1.5 + torch.linspace(-1, 1, VOCABULARY)).log_softmax(-1).detach().numpy()
    model = student()
    backend = TorchBackend(model, tiny.training(loss_terms(config, teacher)))
    samples = []
    for token in range(VOCABULARY):
        drawn = {"response_ids": [token], "rollout_logprobs": writer[token : token + 1], "loss_mask": [True]}
        arrays = {name: np.array(value) for name, value in drawn.items()}
        arrays["response_ids"] = arrays["response_ids"].astype(np.int32)
        samples.append(Sample(f"s{token}", "g", "d", PROMPT, teacher="t", **arrays))
    backend.assign_samples(samples)
    old = backend.recompute_logprobs(samples)
    masks = [s.loss_mask for s in samples]
    correction = correct(policy_loss(config).correction, [s.rollout_logprobs for s in samples], old, masks)
    advantages = [config.rl_coef * REWARDS[token : token + 1] for token in range(VOCABULARY)]
    if isinstance(config.loss, SampledTokenK1):
        other = (TEACHER[0] @ TEACHER[1].T).log_softmax(-1)[0].numpy()
        scores = [other[token : token + 1] for token in range(VOCABULARY)]
        advantages = opd_advantages(
            advantages,
            old,
            scores,
            masks,
            coef=1.0,
            baseline="none",
            discount=0.0,
            teachers=["t"] * VOCABULARY,
        )
    terms = []
    for place, chance in enumerate(np.exp(writer)):
        mask, weight = correction.masks[place], correction.weights[place]
        policy = PolicyTokens(old[place], advantages[place], mask, weight)
        given = (token_weights(masks[place], chance), token_weights(mask, chance))
        terms.append(token_terms(config, samples[place], policy, *given))
    backend.forward_backward(RolloutBatch(samples, terms))
    return flat(model)


def merge(loss, rl_coef, correction):
    settings = {"loss": loss, "rl_coef": rl_coef, "samples_per_prompt": 2}
    if loss["type"] == "k1":
        return DistillConfig.model_validate(settings | {"loss": loss | {"loss": {"correction": correction}}})
    return DistillConfig.model_validate(settings | {"policy_loss": {"correction": correction}})


@pytest.mark.parametrize(
    ("loss", "rl_coef"),
    [
        ({"type": "full"}, 0.5),
        ({"type": "k1"}, 0.0),
        ({"type": "k1"}, 0.5),
        ({"type": "k2"}, 0.0),
        ({"type": "k2"}, 0.5),
        ({"type": "topk", "k": 4, "form": "hybrid"}, 0.0),
        ({"type": "topk", "k": 4, "form": "hybrid"}, 0.5),
    ],
    ids=str,
)
def test_every_sampled_stream_is_corrected_for_who_drew_it(loss, rl_coef):
    exact = expected(merge(loss, rl_coef, EXACT))
    corrected = found(merge(loss, rl_coef, EXACT))
    assert (corrected - exact).norm() < 1e-4 * exact.norm()
    assert (found(merge(loss, rl_coef, None)) - exact).norm() > 0.02 * exact.norm()


def test_what_is_exact_at_every_state_is_left_as_it_is():
    loss = {"type": "full"}
    exact = expected(DistillConfig.model_validate({"loss": loss}))
    assert (found(DistillConfig.model_validate({"loss": loss})) - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy_loss": {"correction": EXACT}}, "no effect on loss full without rl_coef"),
        (
            {"loss": {"type": "topk", "form": "tail"}, "policy_loss": {"correction": EXACT}},
            "no effect on loss topk without rl_coef",
        ),
        ({"loss": {"type": "k2"}, "policy_loss": {"clip_low": 0.1}}, "no effect on loss k2 without rl_coef"),
        ({"loss": {"type": "k1"}, "policy_loss": {"correction": EXACT}}, "set loss.loss instead"),
    ],
)
def test_a_correction_without_an_effect_is_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        DistillConfig.model_validate(settings)


def test_a_rejected_token_leaves_k2_and_its_normaliser():
    config = merge({"type": "k2"}, 0.0, {"type": "icepop", "lower": 0.5, "upper": 2.0})
    samples = tiny.samples([(2, 3)], teachers=["t"])
    old = [np.array([-1.0, -1.0, -1.0], np.float32)]
    samples[0].rollout_logprobs = np.array([-1.0, -9.0, -1.5], np.float32)
    masks = [samples[0].loss_mask]
    correction = correct(config.policy_loss.correction, [samples[0].rollout_logprobs], old, masks)
    policy = PolicyTokens(old[0], old[0], correction.masks[0], correction.weights[0])
    given = [(mask / mask.sum()).astype(np.float32) for mask in (masks[0], policy.mask)]
    term = token_terms(config, samples[0], policy, *given)
    np.testing.assert_allclose(term.kl_weight, [0.5, 0, 0.5])
    np.testing.assert_allclose(term.importance, [1, 0, np.exp(0.5)], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "distill", "named"),
    [
        ("in_turn", {"rl_coef": 0.5, "samples_per_prompt": 2}, None),
        ("async", {}, "specialist.policy_loss.correction to"),
        ("async", {"rl_coef": 0.5, "samples_per_prompt": 2}, "and distill.policy_loss.correction to"),
        ("ahead", {"loss": {"type": "k2"}}, "and distill.policy_loss.correction to"),
        ("ahead", {"loss": {"type": "k1"}}, "and distill.loss.loss.correction to"),
        ("ahead", {"loss": {"type": "k2"}, "policy_loss": {"correction": EXACT}}, "set specialist"),
    ],
    ids=str,
)
def test_the_doctor_names_what_is_not_corrected(schedule, distill, named):
    findings = check_schedule(tiny_recipe(rollout={"schedule": schedule}, distill=distill))
    assert [f.level for f in findings] == ["warning"] * (named is not None)
    assert named is None or named in findings[0].detail
