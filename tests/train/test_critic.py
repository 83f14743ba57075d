"""GAE against its double sum, the value loss and the critic's gradient against float64."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opd.config import Recipe
from opd.config.distill import DistillConfig
from opd.config.rl import GAEAdvantage
from opd.config.specialist import SpecialistConfig
from opd.errors import RewardError, TrainingError
from opd.models.attention import PackedAttention
from opd.train.advantages import Moments
from opd.train.critic import (
    GAE,
    ValueQuality,
    ValueTerm,
    local_critic_values,
    token_rewards,
    value_loss,
    with_value_head,
)
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

number = st.floats(-5.0, 5.0)
responses = st.lists(st.tuples(number, number, st.booleans()), max_size=12)
"""Of each token its reward, its value, and whether it counts."""
share = st.floats(0.0, 1.0)


def columns(tokens):
    """(rewards float64, values float32, mask), `[R]` each."""
    rewards, values, mask = (np.array([row[i] for row in tokens]) for i in range(3))
    return rewards.astype(np.float64), values.astype(np.float32), mask.astype(bool)


@given(responses, share, share)
def test_gae_is_the_double_sum_over_the_tokens_that_count(tokens, gamma, lam):
    """1506.02438, equation 16, term by term in float64."""
    rewards, values, mask = columns(tokens)
    found = GAE(gamma, lam)(rewards, values, mask)
    places = np.flatnonzero(mask)
    expected = np.zeros(len(mask))
    for i, place in enumerate(places):
        for k, later in enumerate(places[i:]):
            after = float(values[places[i + k + 1]]) if i + k + 1 < len(places) else 0.0
            expected[place] += (gamma * lam) ** k * (rewards[later] + gamma * after - float(values[later]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@given(responses, share)
def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_the_error_of_one_step(tokens, gamma):
    rewards, values, mask = columns(tokens)
    own, kept = values[mask].astype(np.float64), rewards[mask]
    returns = [sum(gamma**k * r for k, r in enumerate(kept[i:])) for i in range(len(kept))]
    whole = GAE(gamma, 1.0)(rewards, values, mask)[mask]
    np.testing.assert_allclose(whole, np.array(returns) - own, rtol=1e-5, atol=1e-5)
    after = np.append(own[1:], 0.0)[: len(own)]
    one = GAE(gamma, 0.0)(rewards, values, mask)[mask]
    np.testing.assert_allclose(one, kept + gamma * after - own, rtol=1e-5, atol=1e-5)


@given(responses, number, share)
def test_true_values_leave_no_advantage(tokens, reward, gamma):
    """Where the values are what really comes, every lambda says so."""
    _, _, mask = columns(tokens)
    count = int(mask.sum())
    rewards, values = np.zeros(len(mask)), np.zeros(len(mask), np.float32)
    if count:
        rewards[np.flatnonzero(mask)[-1]] = reward
        values[mask] = reward * gamma ** np.arange(count)[::-1]
    for lam in (0.0, 0.7, 1.0):
        np.testing.assert_allclose(GAE(gamma, lam)(rewards, values, mask), 0.0, atol=1e-5)


def test_a_reward_comes_with_the_last_token_that_counts_and_a_penalty_with_every_one(group):
    (sample,) = group([2.0], [5]).samples
    sample.loss_mask = np.array([True, True, False, True, False])
    np.testing.assert_array_equal(token_rewards(sample), [0, 0, 0, 2, 0])
    penalty = np.array([0.5, -0.5, 9.0, 1.0, np.nan])  # what does not count may be anything
    np.testing.assert_array_equal(token_rewards(sample, penalty), [-0.5, 0.5, 0, 1, 0])
    sample.loss_mask[:] = False
    assert not token_rewards(sample).any()
    for reward in (None, float("nan"), float("inf")):
        sample.reward = reward
        with pytest.raises(RewardError, match="sample g/0"):
            token_rewards(sample)


losses = st.lists(st.tuples(number, number, number), min_size=1, max_size=8)


@given(losses, st.one_of(st.none(), st.floats(0.05, 3.0)))
def test_the_value_loss_is_ppos_and_has_its_gradient(rows, clip):
    values, old, returns = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    values.requires_grad_()
    loss, held = value_loss(values, old, returns, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    for i, (value, before, wanted) in enumerate(rows):
        plain, error, moves = (value - wanted) ** 2 / 2, value - wanted, True
        if clip is not None:
            bounded = (min(max(value, before - clip), before + clip) - wanted) ** 2 / 2
            if bounded > plain:
                plain, moves = bounded, False
        assert loss[i].item() == pytest.approx(plain, rel=1e-9, abs=1e-12)
        assert bool(held[i]) is not moves
        if clip is None or abs(abs(value - before) - clip) > 1e-9:
            assert gradient[i].item() == pytest.approx(error if moves else 0.0, rel=1e-9, abs=1e-12)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="shape"):
        value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), None)


LENGTHS = [(3, 4), (5, 1), (2, 9), (4, 0), (6, 3)]


def critic(max_tokens=16, clip=None):
    """A back end in float64, its value head no longer 0, so that the trunk has a gradient."""
    model = with_value_head(tiny.model())
    model.module.double()
    with torch.no_grad():
        head = model.module.get_output_embeddings()
        head.weight.copy_(torch.linspace(-0.3, 0.4, head.weight.numel()).view_as(head.weight))
        head.bias.fill_(0.2)
    return TorchBackend(model, tiny.training([ValueTerm(clip)], max_tokens=max_tokens))


def batch():
    made, rng = tiny.samples(LENGTHS), np.random.default_rng(3)
    terms = []
    for sample in made:
        found = TokenTerms.zeros(len(sample.response_ids))
        found.values, found.returns, found.policy_weight = (
            rng.normal(size=len(sample.response_ids)).astype(np.float32) for _ in range(3)
        )
        found.policy_weight = np.where(rng.random(len(found.values)) < 0.8, abs(found.policy_weight), 0)
        found.policy_weight = found.policy_weight.astype(np.float32)
        terms.append(found)
    return RolloutBatch(made, terms)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_critics_gradient_is_that_of_each_response_alone(clip):
    """However responses are packed: one by one, without `opd`'s packing, losses and back end."""
    backend, given_ = critic(clip=clip), batch()
    metrics = backend.forward_backward(given_)
    found = {name: p.grad.clone() for name, p in backend.model.module.named_parameters()}
    module = critic().model.module
    total, plain, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for sample, terms in given_:
        size, length = len(sample.prompt_ids), len(sample.response_ids)
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]

        out = module(input_ids=ids, use_cache=False, attend=PackedAttention([0, size + length])).logits[0]
        values = out[size - 1 : size - 1 + length, 0]
        old, wanted, weight = (
            torch.from_numpy(x).double() for x in (terms.values, terms.returns, terms.policy_weight)
        )
        each = (values - wanted) ** 2
        if clip is not None:
            each = torch.maximum(each, (old + (values - old).clamp(-clip, clip) - wanted) ** 2)
        total = total + (weight * each / 2).sum()
        plain += float((each.detach() / 2)[weight != 0].sum())
        count += int((weight != 0).sum())
    total.backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert sum(float(grad.abs().sum()) for grad in found.values()) > 1
    assert metrics["critic/loss"] == pytest.approx(plain / count, rel=1e-6)
    assert ("critic/clip_ratio" in metrics) is (clip is not None)


def test_values_do_not_ask_how_responses_are_packed_and_begin_at_nothing():
    made, torch_state = tiny.samples(LENGTHS), torch.get_rng_state()
    fresh = TorchBackend(with_value_head(tiny.model()), tiny.training([ValueTerm()]))
    assert torch.equal(torch.get_rng_state(), torch_state), "a new head drew random numbers"
    assert not np.concatenate(local_critic_values(fresh, made)).any()
    together, alone = (
        local_critic_values(critic(max_tokens=1000), made),
        local_critic_values(critic(max_tokens=1), made),
    )
    assert [len(values) for values in together] == [response for _, response in LENGTHS]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_critic_learns_what_prompts_are_worth():
    """A return that only the first token of the prompt tells, from a head and a trunk that know nothing."""
    made = tiny.samples([(3, 4)] * 24, seed=5)
    backend = TorchBackend(with_value_head(tiny.model()), tiny.training([ValueTerm()]))
    terms = []
    for sample in made:
        found = TokenTerms.zeros(4)
        found.values, found.policy_weight = np.zeros(4, np.float32), np.full(4, 1 / 96, np.float32)
        found.returns = np.full(4, float(sample.prompt_ids[0] % 2), np.float32)
        terms.append(found)
    losses = []
    for _ in range(60):
        losses.append(backend.forward_backward(RolloutBatch(made, terms))["critic/loss"])
        backend.step(3e-3)
    variance = np.var([float(sample.prompt_ids[0] % 2) for sample in made])
    assert losses[-1] < 0.1 * variance / 2 < losses[0]


def test_a_critic_gone_wrong_is_said():
    backend = critic()
    with torch.no_grad():
        backend.model.module.get_output_embeddings().bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"values of sample s0 are not finite; lower specialist\.critic"):
        local_critic_values(backend, tiny.samples(LENGTHS))


def test_what_is_told_of_the_values():
    rng = np.random.default_rng(1)
    values, returns = rng.normal(size=(2, 40)).astype(np.float32)
    mask = rng.random(40) < 0.7
    parts = [
        ValueQuality.from_sample(values[a : a + 10], returns[a : a + 10], mask[a : a + 10])
        for a in range(0, 40, 10)
    ]
    found = ValueQuality.metrics([{}, *(vars_of(part) for part in parts)])
    v, r = values[mask].astype(np.float64), returns[mask].astype(np.float64)
    assert found == pytest.approx(
        {
            "critic/value_mean": v.mean(),
            "critic/return_mean": r.mean(),
            "critic/explained_variance": 1 - (r - v).var() / r.var(),
        }
    )
    assert ValueQuality.metrics([{}]) == {}
    equal = ValueQuality.metrics(
        [vars_of(ValueQuality.from_sample(values, np.full(40, 0.7, np.float32), mask))]
    )
    assert "critic/explained_variance" not in equal


def vars_of(judged):
    """Its fields as a checkpoint or another rank has them."""
    return {
        name: {key: getattr(getattr(judged, name), key) for key in Moments.__slots__}
        for name in ("values", "returns", "errors")
    }


GAE_ = {"advantage": {"type": "gae"}, "filter_zero_variance": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": {"type": "gae"}}, "set filter_zero_variance to false"),
        ({"critic": {}}, "critic has no effect with advantage grpo; set it to null, or"),
        (GAE_ | {"to_batch": "a.b:c"}, "to_batch cannot say what the critic"),
        (GAE_ | {"steps": 5, "critic": {"warmup_steps": 5}}, "leaves none of the 5 steps to the policy"),
        ({"reference_kl": {"coef": 0.1, "estimator": "k1", "placement": "reward"}}, "placement reward has"),
        (
            GAE_ | {"reference_kl": {"coef": 0.1, "estimator": "k2", "placement": "reward"}},
            "zero or wrong gradient",
        ),
        (
            GAE_ | {"reference_kl": {"coef": 0.1, "estimator": "k1", "placement": "reward", "discount": 0.5}},
            "the advantage's gamma is the discount",
        ),
        (GAE_ | {"critic": {"clip": 0}}, "greater than 0"),
        ({"advantage": {"type": "gae", "lam": 1.1}, "filter_zero_variance": False}, "less than or equal"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        SpecialistConfig.model_validate(settings)


def test_one_response_a_prompt_is_enough_for_a_critic():
    assert SpecialistConfig.model_validate(GAE_ | {"group_size": 1}).advantage == GAEAdvantage()
    with pytest.raises(ValidationError, match="only specialists train"):
        DistillConfig.model_validate({"advantage": {"type": "gae"}})


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"train": {"backend": "deepspeed"}},
        {"train": {"backend": "megatron"}},
        {"train": {"context_parallel": "auto"}},
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_a_critic_cannot_be_had_with_is_one_sentence(elsewhere, own):
    domain = {"source": "procedural:sort"}
    given_ = {"domains": {"sort": domain | {"specialist": GAE_}}} if own else {"specialist": GAE_}
    plain = {"name": "x", "model": {"config": {"model_type": "llama"}}, "domains": {"sort": domain}}
    with pytest.raises(ValidationError, match="the critic of advantage gae needs"):
        Recipe.model_validate(plain | given_ | elsewhere)
