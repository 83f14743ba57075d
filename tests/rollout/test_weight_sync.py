"""pause -> flush -> update -> resume, with requests in flight."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

Fixture = Callable[..., Any]


def perturbed(model: CausalLM) -> list[tuple[str, torch.Tensor]]:
    """Other weights of the same form."""
    generator = torch.Generator().manual_seed(1)
    return [(name, w + 0.1 * torch.randn(w.shape, generator=generator)) for name, w in model.weights()]


def advance(steps: Iterator[Any], count: int) -> list[Any]:
    return [next(steps) for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_update_in_flight_continues_under_the_new_weights(
    family: str, build: Fixture, collect: Fixture, requests_of: Fixture, reference: Fixture
) -> None:
    model, old = build(family)
    _, new = build(family)
    engine = TorchEngine(model, max_running=5, version=3)
    requests = requests_of(4, samples=2, sampling=SamplingParams(max_new_tokens=9), seed=4)
    steps = engine.generate(requests)
    before = advance(steps, 4)
    engine.pause()
    engine.flush()
    digest = engine.update_weights(perturbed(model), 4)
    assert digest == model.quick_digest()
    engine.resume()
    new.load_state_dict(model.module.state_dict())
    responses = collect([*before, *steps])
    for request in requests:
        response = responses[request.uid]
        assert len(response.token_ids) == 9
        split = response.versions.count(3)
        assert response.versions == [3] * split + [4] * (9 - split)
        both = [reference(plain, request.prompt_ids, response.token_ids) for plain in (old, new)]
        np.testing.assert_allclose(response.logprobs[:split], both[0][:split], atol=1e-5)
        np.testing.assert_allclose(response.logprobs[split:], both[1][split:], atol=1e-5)
    assert sum(3 in response.versions for response in responses.values()) == 5


def test_a_flush_alone_changes_nothing(build: Fixture, collect: Fixture, requests_of: Fixture) -> None:
    model, _ = build()
    requests = requests_of(6, samples=2, seed=6)
    undisturbed = collect(TorchEngine(model, max_running=5).generate(requests))
    engine = TorchEngine(model, max_running=5)
    steps, seen = engine.generate(requests), []
    for number, step in enumerate(steps):
        seen.append(step)
        if number % 3 == 1:
            engine.pause()
            engine.flush()
            engine.resume()
    responses = collect(seen)
    for uid, response in undisturbed.items():
        assert responses[uid].token_ids == response.token_ids
        np.testing.assert_allclose(responses[uid].logprobs, response.logprobs, atol=1e-5)


def test_a_paused_engine_refuses_to_step_and_loses_nothing(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    requests = requests_of(3, sampling=SamplingParams(max_new_tokens=5))
    expected = collect(TorchEngine(model).generate(requests))
    engine = TorchEngine(model)
    steps = engine.generate(requests)
    first = advance(steps, 2)
    engine.pause()
    with pytest.raises(RolloutError, match="resume"):
        next(steps)
    engine.resume()
    assert collect([*first, *steps]) == expected


def test_updates_need_a_pause_and_a_growing_version(build: Fixture) -> None:
    model, _ = build()
    engine = TorchEngine(model, version=2)
    digest = model.quick_digest()
    with pytest.raises(RolloutError, match="pause"):
        engine.update_weights(perturbed(model), 3)
    engine.pause()
    for version in (1, 2):
        with pytest.raises(RolloutError, match="must grow"):
            engine.update_weights(perturbed(model), version)
    assert model.quick_digest() == digest
    assert engine.policy_version == 2
    assert engine.update_weights(perturbed(model), 7) != digest
    assert engine.policy_version == 7


def test_update_without_flush_never_uses_old_keys_and_values(
    build: Fixture, collect: Fixture, reference: Fixture
) -> None:
    model, plain = build()
    engine = TorchEngine(model)
    prompt = np.array([1, 2, 3], dtype=np.int32)
    steps = engine.generate([RolloutRequest("r", prompt, SamplingParams(max_new_tokens=6))])
    first = advance(steps, 3)
    engine.pause()
    engine.update_weights(perturbed(model), 1)
    engine.resume()
    response = collect([*first, *steps])["r"]
    plain.load_state_dict(model.module.state_dict())
    expected = reference(plain, prompt, response.token_ids)
    np.testing.assert_allclose(response.logprobs[3:], expected[3:], atol=1e-5)


def test_a_stream_that_is_closed_or_dropped_leaves_nothing_in_flight(
    build: Fixture, requests_of: Fixture
) -> None:
    engine = TorchEngine(build()[0])
    requests = requests_of(3, sampling=SamplingParams(max_new_tokens=4))
    steps = engine.generate(requests)
    next(steps)
    with pytest.raises(RolloutError, match="is given twice"):
        engine.generate(requests)
    steps.close()
    assert engine.in_flight == []
    assert list(steps) == []
    steps = engine.generate(requests)
    next(steps)
    del steps
    assert len(list(engine.generate(requests))) == 4
    assert len(list(engine.generate(requests))) == 4


def test_an_engine_recovers_from_weights_that_are_not_finite(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    good = [(name, weight.clone()) for name, weight in model.weights()]
    requests = requests_of(6, sampling=SamplingParams(max_new_tokens=20))
    expected = collect(TorchEngine(model).generate(requests))
    engine = TorchEngine(model)
    steps = engine.generate(requests)
    advance(steps, 2)
    engine.pause()
    engine.update_weights([(name, torch.full_like(weight, float("nan"))) for name, weight in good], 1)
    engine.resume()
    with pytest.raises(RolloutError, match="not finite"):
        next(steps)
    engine.pause()
    engine.update_weights(good, 2)
    engine.resume()
    recovered = collect(engine.generate(requests))
    for uid, response in expected.items():
        assert recovered[uid].token_ids == response.token_ids
        np.testing.assert_allclose(recovered[uid].logprobs, response.logprobs, atol=1e-5)
