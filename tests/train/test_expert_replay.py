"""The engine's choices of experts in the trainer: its log-probabilities and its gradient, and the loads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from opd.config import PolicyLossConfig
from opd.errors import TrainingError
from opd.models.attention import PackedAttention
from opd.models.causal_lm import CausalLM
from opd.models.routing import RoutedTokens
from opd.train.routers import ExpertLoad, pack_choices
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "initializer_range": 0.3,
}
LENGTHS = [(3, 4), (5, 2), (2, 7)]
CPU = torch.device("cpu")


def mixture() -> CausalLM:
    return tiny.model(**MIXTURE)


def drawn_samples(model: CausalLM, short: int = 1) -> list[Sample]:
    """Samples with choices that no router made, of all positions but the last `short` ones. The last sample
    has none.
    """
    samples = tiny.samples(LENGTHS)
    tiny.draw_choices(model.routing, samples[:-1], short)
    return samples


def backend(model: CausalLM, replay: bool = True, **batch) -> TorchBackend:
    made = TorchBackend(model, tiny.training([PolicyTerm(PolicyLossConfig())], 1.0, **batch))
    assert made.replay_experts(replay) is replay
    return made


def plain_logprobs(model: CausalLM, sample: Sample, replay: bool = True) -> Tensor:
    """[R]: one sample alone, with the choices written out position by position."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    routing = model.routing
    assert routing is not None
    choices = routing.new_choices(len(ids))
    if replay and sample.expert_choices is not None:
        choices[: len(sample.expert_choices)] = torch.from_numpy(sample.expert_choices.astype(np.int16))
    with routing.replay(RoutedTokens(choices)):
        hidden = model.run(ids, torch.arange(len(ids)), PackedAttention([0, len(ids)]))
    prompt = len(sample.prompt_ids)
    logits = model.head().logits(hidden[prompt - 1 : -1])
    return logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


def batch_of(samples: list[Sample]) -> RolloutBatch:
    """Plain policy gradient with weight 1 and an advantage of 1 for each token."""
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for term in terms:
        term.advantages = term.policy_weight = np.ones_like(term.policy_weight)
        term.old_logprobs = None
    return RolloutBatch(samples, terms)


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 8}, {"recompute_layers": True}, {"sequence_chunk": 4}], ids=str
)
def test_the_trainer_learns_with_the_choices_of_the_engine(limits):
    model = mixture()
    samples = drawn_samples(model)
    back = backend(model, **limits)
    expected = [plain_logprobs(model, sample) for sample in samples]
    for found, due, sample in zip(back.recompute_logprobs(samples), expected, samples, strict=True):
        np.testing.assert_allclose(found, due.detach().numpy(), rtol=0, atol=2e-5)
        alone = plain_logprobs(model, sample, replay=False)
        apart = float((due - alone).detach().abs().max())
        assert (apart > 1e-3) is (sample.expert_choices is not None)

    (-torch.cat(expected).sum()).backward()  # at a ratio of 1 the loss has this gradient
    due = {name: one.grad for name, one in model.module.named_parameters() if one.grad is not None}
    model.module.zero_grad()
    back.forward_backward(batch_of(samples))
    for name, parameter in model.module.named_parameters():
        if name in due:
            assert parameter.grad is not None
            torch.testing.assert_close(
                parameter.grad, due[name], rtol=1e-3, atol=2e-5 * float(due[name].abs().max()), msg=name
            )
    assert any("gate.weight" in name and float(grad.norm()) > 0 for name, grad in due.items())


def test_what_is_not_asked_for_changes_no_bit():
    model = mixture()
    with_choices, without = drawn_samples(model), tiny.samples(LENGTHS)
    back = backend(model, replay=False)
    found, due = (np.concatenate(back.recompute_logprobs(some)) for some in (with_choices, without))
    assert np.array_equal(found, due)
    metrics = back.forward_backward(batch_of(with_choices))
    assert not any(name.startswith("routing/") for name in metrics)


def test_metrics_count_what_the_trainer_would_choose_otherwise():
    model = mixture()
    samples, routing = drawn_samples(model), model.routing
    assert routing is not None
    back = backend(model)
    metrics = back.forward_backward(batch_of(samples))
    # Of the model's own choices none is apart.
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad(), routing.record(routing.new_choices(len(ids))) as choices:
            model.run(ids, torch.arange(len(ids)), PackedAttention([0, len(ids)]))
        sample.expert_choices = choices.numpy()[:-1].astype(np.uint8)
    assert back.forward_backward(batch_of(samples))["routing/apart"] == 0.0
    # One position of one layer, at the end of a sequence, where nothing follows from it.
    first = samples[0].expert_choices
    assert first is not None
    free = next(expert for expert in range(routing.experts) if expert not in first[-1, -1])
    first[-1, -1, 0] = free
    count = sum((prompt + response - 1) * routing.layers for prompt, response in LENGTHS)
    assert back.forward_backward(batch_of(samples))["routing/apart"] == pytest.approx(1 / count)
    assert metrics["routing/apart"] > 0.3


def test_the_order_of_a_positions_experts_is_no_difference():
    model = mixture()
    samples, routing = drawn_samples(model), model.routing
    assert routing is not None
    packed = pack_choices(samples, routing, CPU)
    turned = pack_choices(samples, routing, CPU)
    assert packed is not None
    assert turned is not None
    ids = torch.from_numpy(np.concatenate([sample.token_ids for sample in samples]).astype(np.int64))
    bounds = np.cumsum([0, *(prompt + response for prompt, response in LENGTHS)])
    for routed in (packed, RoutedTokens(turned.choices.flip(-1), turned.count)):
        with torch.no_grad():
            model.hidden(ids, torch.zeros_like(ids), bounds, routed=routed)
    assert float(packed.count.apart) == float(turned.count.apart) > 0
    assert float(packed.count.replayed) == (6 + 6) * routing.layers


def test_choices_lie_behind_their_tokens():
    model = mixture()
    samples, routing = drawn_samples(model, short=2), model.routing
    assert routing is not None
    routed = pack_choices(samples, routing, CPU)
    assert routed is not None
    first, second = (sample.expert_choices for sample in samples[:2])
    assert first is not None
    assert second is not None
    rows = routed.choices.numpy()
    assert np.array_equal(rows[:5], first)
    assert np.array_equal(rows[7:12], second)
    left = [*range(5, 7), *range(12, 14), *range(14, 23)]
    assert (rows[left] == -1).all()
    chosen = routed.select(torch.tensor([8, 0, 23, 99]))
    assert np.array_equal(chosen.choices[:2].numpy(), rows[[8, 0]])
    assert (chosen.choices[2:] == -1).all()
    assert chosen.count is routed.count
    assert pack_choices(samples[2:], routing, CPU) is None


def test_choices_of_another_model_are_refused():
    model = mixture()
    routing = model.routing
    assert routing is not None
    samples = drawn_samples(model)
    good = samples[0].expert_choices
    assert good is not None
    for bad, message in (
        (good[..., :1], r"sample s0 are uint8 \[6, 2, 1\], but its 7 tokens .* \[7, 2, 2\]"),
        (np.concatenate([good, good]), r"\[12, 2, 2\]"),
        (good.astype(np.int16), "int16"),
        (np.full_like(good, 6), "expert 6, but a layer of this model has 6"),
    ):
        samples[0].expert_choices = bad
        with pytest.raises(TrainingError, match=message):
            pack_choices(samples, routing, CPU)


def test_loads_are_those_of_an_enumeration():
    model = mixture()
    samples, routing = drawn_samples(model), model.routing
    assert routing is not None
    load = ExpertLoad(routing)
    assert load.metrics() == {}
    load.add(samples)
    counts = [[0] * routing.experts for _ in range(routing.layers)]
    for sample in samples[:2]:
        for position in np.asarray(sample.expert_choices).tolist():
            for layer, experts in enumerate(position):
                for expert in experts:
                    counts[layer][expert] += 1
    assert load.counts.tolist() == counts
    shares = [[count / sum(row) for count in row] for row in counts]
    entropy = sum(-sum(p * math.log(p) for p in row if p) for row in shares) / len(shares)
    assert load.metrics() == pytest.approx(
        {
            "routing/load_max": max(max(row) for row in shares) * routing.experts,
            "routing/load_entropy": entropy / math.log(routing.experts),
            "routing/dead": sum(count == 0 for row in counts for count in row) / 12,
        }
    )


DEEP = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "initializer_range": 0.3,
}


def balanced(model: CausalLM, rate: float) -> TorchBackend:
    settings = tiny.training([PolicyTerm(PolicyLossConfig())])
    back = TorchBackend(model, replace(settings, balance_rate=rate))
    back.replay_experts("auto")
    return back


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_a_step_moves_the_bias_of_routers_towards_equal_loads(rate):
    model = tiny.model(**DEEP)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias, samples = model.module.state_dict()[name], drawn_samples(model)
    bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))
    before = bias.clone()
    back = balanced(model, rate)
    back.forward_backward(batch_of(samples))
    back.step(0.0)
    counts = [0] * 8
    for sample in samples[:2]:
        for expert in np.asarray(sample.expert_choices).ravel().tolist():
            counts[expert] += 1
    signs = torch.tensor([(count < sum(counts) / 8) - (count > sum(counts) / 8) for count in counts])
    assert {-1, 1} <= set(signs.tolist())
    torch.testing.assert_close(dict(back.weights())[name], before + rate * signs, rtol=0, atol=1e-7)
    other = tiny.model(**DEEP)
    balanced(other, rate).load_state(back.state())
    assert torch.equal(other.module.state_dict()[name], bias)


def test_a_balance_that_cannot_be_kept_is_refused():
    with pytest.raises(TrainingError, match="balance_rate is set, and the student has no e_score"):
        balanced(mixture(), 0.001)
    with pytest.raises(TrainingError, match="student learns without replayed choices"):
        balanced(tiny.model(), 0.001)


def test_what_cannot_be_replayed_is_said_before_the_first_step():
    dense = TorchBackend(tiny.model(), tiny.training([]))
    assert dense.replay_experts("auto") is False
    with pytest.raises(TrainingError, match="replay_experts is true, and the student has no experts"):
        dense.replay_experts(True)
    with pytest.raises(TrainingError, match=r"train\.compile is true, and layers with replayed"):
        backend(mixture()).compile_layers(True, None)
