"""What the engine writes: the model's distribution, the same in any company, and right log-probabilities."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opd.kernels import projection
from opd.rollout import forward
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams, Status

LEAN = ["llama", "llama-ropescaled", "mistral", "qwen2", "qwen3", "granite"]
FAMILIES = [*LEAN, "gemma2", "gemma4_text", "llama4_text", "deepseek_v32", "cohere", "olmo2", "gpt_oss"]

Fixture = Callable[..., Any]


@pytest.mark.some(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_one_by_one_forwards(
    family: str, build: Fixture, collect: Fixture, requests_of: Fixture, reference: Fixture
) -> None:
    model, plain = build(family)
    assert forward.supports_model(model.config, model.decoder.layers) == (family in LEAN)
    requests = requests_of(9, samples=2)
    responses = collect(TorchEngine(model, max_running=7).generate(requests))
    assert set(responses) == {request.uid for request in requests}
    for request in requests:
        response, settings = responses[request.uid], request.sampling
        expected = reference(plain, request.prompt_ids, response.token_ids, settings.temperature or 1.0)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-5)
        assert response.positions == list(range(len(response.token_ids)))


@pytest.mark.some(4)
@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("onednn", [False, True])
def test_lean_decoder_equals_the_module(
    family: str,
    onednn: bool,
    build: Fixture,
    collect: Fixture,
    requests_of: Fixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if onednn:  # as for large weights where it is the faster library
        monkeypatch.setattr(projection, "onednn_is_faster", lambda: True)
        monkeypatch.setattr(projection, "LARGE", 1)
    model, _ = build(family)
    requests = requests_of(8, samples=2, seed=3)
    lean = collect(TorchEngine(model, lean=True).generate(requests))
    general = collect(TorchEngine(model, lean=False).generate(requests))
    for uid, response in lean.items():
        assert response.token_ids == general[uid].token_ids
        np.testing.assert_allclose(response.logprobs, general[uid].logprobs, atol=1e-5)
        assert response.status == general[uid].status


def test_which_tokens_share_a_chunk_changes_none(build: Fixture, requests_of: Fixture, collect: Fixture):
    """One decode step a chunk, and all decode steps in one."""
    model, requests = build()[0], requests_of(6, samples=2)
    engine = TorchEngine(model, max_running=5)
    steps = list(engine.generate(requests))
    engine.chunk_seconds = 1e9
    [chunk] = engine.generate(requests)
    assert collect([chunk]) == collect(steps)
    assert len(steps) > 20


@pytest.mark.parametrize("lean", [True, False])
def test_half_precision_is_the_model_but_for_rounding(
    build: Fixture, collect: Fixture, requests_of: Fixture, reference: Fixture, lean: bool
) -> None:
    model, plain = build("qwen3")
    model.module.to(torch.bfloat16)
    requests = requests_of(6, sampling=SamplingParams(max_new_tokens=8))
    responses = collect(TorchEngine(model, lean=lean).generate(requests))
    for request in requests:
        response = responses[request.uid]
        assert len(response.token_ids) == 8
        expected = reference(plain, request.prompt_ids, response.token_ids, 1.0)
        np.testing.assert_allclose(response.logprobs, expected, atol=0.1)


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_alone_equals_in_a_batch_equals_few_slots(
    family: str, build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build(family)
    requests = requests_of(12, samples=3, seed=1)
    together = collect(TorchEngine(model).generate(requests))
    few = collect(TorchEngine(model, max_running=5).generate(requests[::-1]))
    engine = TorchEngine(model, max_running=1)
    for request in requests:
        alone = collect(engine.generate([request]))[request.uid]
        for other in (together[request.uid], few[request.uid]):
            assert other.token_ids == alone.token_ids
            assert other.status == alone.status
            np.testing.assert_allclose(other.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_interrupted_at_any_token_and_resumed_equals_undisturbed(
    family: str, build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build(family)
    engine = TorchEngine(model, max_running=6)
    requests = requests_of(4, samples=2, seed=2)
    whole = collect(engine.generate(requests))
    for request in requests:
        response = whole[request.uid]
        for done in range(len(response.token_ids) + 1):
            prefix = np.array(response.token_ids[:done], dtype=np.int32)
            rest = collect(engine.generate([replace(request, prefix_ids=prefix)]))[request.uid]
            assert rest.token_ids == response.token_ids[done:]
            assert rest.positions == list(range(done, len(response.token_ids)))
            assert rest.status == response.status
            np.testing.assert_allclose(rest.logprobs, response.logprobs[done:], atol=1e-5)


def test_responses_end_on_a_stop_id_or_at_the_limit(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    sampling = SamplingParams(max_new_tokens=12, stop_ids=(3, 11, 17))
    responses = collect(TorchEngine(model).generate(requests_of(30, sampling=sampling)))
    endings = {response.status for response in responses.values()}
    assert endings == {Status.COMPLETED, Status.TRUNCATED}
    for response in responses.values():
        stops = [token in sampling.stop_ids for token in response.token_ids]
        assert not any(stops[:-1])
        assert response.status == (Status.COMPLETED if stops[-1] else Status.TRUNCATED)
        assert stops[-1] or len(stops) == 12


def test_each_shared_prompt_is_computed_once_however_few_slots(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    prompts = requests_of(5, samples=8, sampling=SamplingParams(max_new_tokens=6))
    shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))]
    distinct = {request.prompt_ids.tobytes(): len(request.prompt_ids) for request in prompts}
    for slots in (512, 8, 3, 1):
        engine = TorchEngine(model, max_running=slots)
        collect(engine.generate(shuffled))
        assert engine.prefilled_tokens == sum(distinct.values())


def test_long_prefills_are_split(
    build: Fixture, collect: Fixture, requests_of: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build()
    requests = requests_of(10, samples=2, seed=5)
    whole = collect(TorchEngine(model).generate(requests))
    monkeypatch.setattr(forward, "PREFILL_TOKENS", 10)
    split = collect(TorchEngine(model).generate(requests))
    assert {uid: r.token_ids for uid, r in split.items()} == {uid: r.token_ids for uid, r in whole.items()}


@pytest.mark.parametrize(("temperature", "lean"), [(1.0, True), (0.6, False)])
def test_frequencies_match_the_models_probabilities(
    temperature: float, lean: bool, build: Fixture, collect: Fixture
) -> None:
    """Chi-square over all two-token responses the model makes likely; fixed seed."""
    model, plain = build()
    prompt = np.array([1, 5, 2], dtype=np.int32)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=2)
    count = 8000
    requests = [RolloutRequest(f"{i}", prompt, sampling, seed=7) for i in range(count)]
    responses = collect(TorchEngine(model, lean=lean).generate(requests))
    with torch.no_grad():
        vocabulary = torch.arange(model.vocab_size)
        ids = torch.cat([torch.tensor(prompt).long().expand(len(vocabulary), -1), vocabulary[:, None]], dim=1)
        table = torch.softmax(plain(ids, use_cache=False).logits.double() / temperature, dim=-1)
    expected = count * (table[0, 2][:, None] * table[:, 3]).flatten().numpy()
    seen = np.zeros_like(expected)
    for response in responses.values():
        seen[response.token_ids[0] * model.vocab_size + response.token_ids[1]] += 1
    likely = expected >= 5
    seen, expected = (
        np.append(seen[likely], seen[~likely].sum()),
        np.append(expected[likely], expected[~likely].sum()),
    )
    statistic, freedom = ((seen - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 20
    # Wilson-Hilferty: the 99.9 % quantile of chi-square.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def test_vocab_size_keeps_padding_rows_out(build: Fixture, collect: Fixture, requests_of: Fixture) -> None:
    model, _ = build()
    requests = [
        replace(request, prompt_ids=request.prompt_ids % 9)
        for request in requests_of(40, sampling=SamplingParams(max_new_tokens=10))
    ]
    responses = collect(TorchEngine(model, vocab_size=9).generate(requests))
    assert max(max(response.token_ids) for response in responses.values()) == 8


def test_long_responses_grow_the_cache_and_stay_right(
    build: Fixture, collect: Fixture, reference: Fixture
) -> None:
    model, plain = build("qwen3")
    prompts = [np.array([i, 2 * i], dtype=np.int32) for i in range(4)]
    requests = [
        RolloutRequest(f"{i}", prompt, SamplingParams(max_new_tokens=30 * (i + 1)))
        for i, prompt in enumerate(prompts)
    ]
    responses = collect(TorchEngine(model, max_running=3).generate(requests))
    for request in requests:
        response = responses[request.uid]
        assert len(response.token_ids) == request.sampling.max_new_tokens
        expected = reference(plain, request.prompt_ids, response.token_ids)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-5)


def test_a_used_engine_gives_the_same_bits_as_a_fresh_one(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    requests = requests_of(8, samples=3, seed=8)
    fresh = collect(TorchEngine(model, max_running=10).generate(requests))
    used = TorchEngine(model, max_running=10)
    collect(used.generate(requests_of(20, sampling=SamplingParams(max_new_tokens=90), seed=9)))
    assert collect(used.generate(requests)) == fresh


def test_a_call_without_requests_ends_at_once(build: Fixture) -> None:
    assert list(TorchEngine(build()[0]).generate([])) == []
