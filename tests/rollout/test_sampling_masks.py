"""Sampling masks of the embedded engine: of every token those from which it was drawn, and kept with it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from faulty_engines import FaultyEngine, raises_at
from test_expert_choices import interruptions, run
from test_expert_choices import prompts as larger_prompts

from opd.environments.episodes import assemble_sample
from opd.models.causal_lm import CausalLM
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.graphs import _draw_tokens
from opd.rollout.sampling import SamplingPlan, mask_rows, sample_tokens
from opd.rollout.shared_groups import decode_groups, encode_groups
from opd.rollout.torch_engine import TorchEngine
from opd.storage.transcript import Tokens, masks_of
from opd.storage.wal import TokenWAL
from opd.train.masks import pack_masks
from opd.types import RolloutRequest, Sample, SamplingParams

VOCABULARY = 15
CUT = SamplingParams(0.8, top_p=0.7, max_new_tokens=9, stop_ids=(3,))
FEW = SamplingParams(1.3, top_p=0.9, top_k=4, max_new_tokens=9, stop_ids=(3,))
PLAIN = SamplingParams(max_new_tokens=9, stop_ids=(3,))


def prompts(count: int, seed: int = 0) -> list[EncodedPrompt]:
    return [replace(one, token_ids=one.token_ids % VOCABULARY) for one in larger_prompts(count, seed)]


def engine_of(most: int = 1000, **options: Any) -> TorchEngine:
    model = tiny.model(4, initializer_range=0.3)
    engine = TorchEngine(model, **{"max_sequence": 60, "max_running": 4, **options})
    engine.record_masks(most)
    return engine


def rows_of(masks: np.ndarray | None, count: int) -> list[list[int]]:
    """The ids of each of `count` tokens."""
    if masks is None:
        return [[]] * count
    ends = np.cumsum(masks[:count])
    assert ends[-1] == len(masks) - count
    return [part.tolist() for part in np.split(masks[count:], ends[:-1])]


def logprobs_of(model: CausalLM, prompt: np.ndarray, response: np.ndarray, heat: float) -> np.ndarray:
    """[R, V] float64, by one forward."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model.hidden(ids, torch.arange(len(ids)), bounds)[len(prompt) - 1 : -1]
        return (model.head().logits(hidden).double() / heat).log_softmax(-1).numpy()


def kept_ids(logprobs: np.ndarray, sampling: SamplingParams) -> list[int]:
    order = np.argsort(-logprobs, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k else order
    mass = np.exp(logprobs[order])
    return sorted(order[np.cumsum(mass) - mass < sampling.top_p * mass.sum()].tolist())


def assert_recorded(
    model: CausalLM, sampling: SamplingParams, prompt: np.ndarray, response: Tokens | Sample
) -> None:
    if isinstance(response, Sample):
        ids, told, masks = response.response_ids, response.rollout_logprobs, response.sampling_masks
    else:
        ids, told, masks = response.token_ids, response.logprobs, masks_of(response)
    whole = logprobs_of(model, prompt, ids, sampling.temperature)
    for logprobs, token, value, mask in zip(whole, ids, told, rows_of(masks, len(ids)), strict=True):
        assert mask == kept_ids(logprobs, sampling)
        assert token in mask
        assert value == pytest.approx(logprobs[token] - np.log(np.exp(logprobs[mask]).sum()), abs=2e-5)


@pytest.mark.parametrize("sampling", [CUT, FEW])
def test_samples_have_the_kept_tokens_of_a_plain_forward(sampling):
    engine = engine_of()
    groups = collect(engine, prompts(5), 3, sampling, seed=1)
    plain = collect(engine_of(0), prompts(5), 3, sampling, seed=1)
    for group, other in zip(groups, plain, strict=True):
        for sample, without in zip(group.samples, other.samples, strict=True):
            assert_recorded(engine.model, sampling, sample.prompt_ids, sample)
            assert without.sampling_masks is None
            assert sample.response_ids.tolist() == without.response_ids.tolist()
            mass = without.rollout_logprobs.astype(np.float64) - sample.rollout_logprobs
            assert mass.max() < 1e-6
            assert sampling.top_k or mass.min() > np.log(sampling.top_p) - 1e-6


def test_what_is_not_cut_has_no_mask_and_the_same_bits():
    """Not beside requests that are cut, if greedy, or if a cut leaves more tokens than a mask may have."""
    greedy = SamplingParams(0.0, top_p=0.5, max_new_tokens=9, stop_ids=(3,))
    uncut = SamplingParams(top_k=40, max_new_tokens=9, stop_ids=(3,))
    ways = [PLAIN, CUT, greedy, uncut]
    found = {}
    for most in (1000, 0):
        engine = engine_of(most)
        requests = [RolloutRequest(f"{i}", prompts(4)[i].token_ids, way, 2) for i, way in enumerate(ways)]
        found[most] = run(engine, requests, lambda count: None)
    for name, tokens in found[1000].items():
        assert tokens.token_ids.tolist() == found[0][name].token_ids.tolist()
        if name != "1":
            assert masks_of(tokens) is None
            assert np.array_equal(tokens.logprobs, found[0][name].logprobs)
    few = collect(engine_of(2), prompts(5), 3, CUT, seed=1)
    whole = collect(engine_of(0), prompts(5), 3, CUT, seed=1)
    sizes = set()
    for group, other in zip(few, whole, strict=True):
        for sample, without in zip(group.samples, other.samples, strict=True):
            masks = rows_of(sample.sampling_masks, len(sample.response_ids))
            sizes |= {len(mask) for mask in masks}
            uncut = np.array([not mask for mask in masks])
            assert np.array_equal(sample.rollout_logprobs[uncut], without.rollout_logprobs[uncut])
    assert sizes == {0, 1, 2}


def test_masks_go_from_rank_to_rank_with_their_samples():
    groups = collect(engine_of(), prompts(3), 2, CUT, seed=1)
    groups[1].samples[0].sampling_masks = None
    groups[0].samples[0].expert_choices = np.ones((2, 2, 3), np.uint16)
    by_uid = {prompt.uid: prompt for prompt in prompts(3)}
    received, _ = decode_groups(encode_groups(groups, by_uid), by_uid)
    for group, other in zip(received, groups, strict=True):
        for sample, sent in zip(group.samples, other.samples, strict=True):
            for name in ("sampling_masks", "expert_choices"):
                got, gave = getattr(sample, name), getattr(sent, name)
                assert (got is None) == (gave is None)
                assert got is None or np.array_equal(got, gave)


def requests_of() -> list[RolloutRequest]:
    return [RolloutRequest(prompt.uid, prompt.token_ids, CUT, 5) for prompt in prompts(7, seed=2)]


@pytest.mark.parametrize("event", ["flush", "snapshot", "other engine"])
def test_an_interruption_changes_no_mask(event):
    engine = engine_of()

    if event == "other engine":
        writer = FaultTolerantRollout([FaultyEngine(engine_of(), raises_at(4)), engine_of()])
        found = run(writer, requests_of(), lambda count: None)
    else:
        found = run(engine, requests_of(), interruptions(engine, event))
    for request in requests_of():
        assert_recorded(engine.model, CUT, request.prompt_ids, found[request.uid])


def test_logged_masks_are_told_again(tmp_path):
    """By a process that opens the log in the middle of responses, and goes on."""
    requests = requests_of()
    with TokenWAL(tmp_path) as log:
        rollout = FaultTolerantRollout([engine_of()], log)
        rollout.submit(requests)
        for _ in range(6):
            rollout.next_chunk()
        before = sum(len(logged.token_ids) for logged in log.requests().values())
    assert before > 10
    engine = engine_of()
    with TokenWAL(tmp_path) as log:
        found = run(FaultTolerantRollout([engine], log), requests, lambda count: None)
        for request in requests:
            assert_recorded(engine.model, CUT, request.prompt_ids, found[request.uid])
            logged = log.find(request.uid)
            assert logged is not None
            assert_recorded(engine.model, CUT, request.prompt_ids, Tokens.from_logged(logged))


def test_a_captured_draw_leaves_the_masks_in_its_buffers():
    """The step that CUDA captures, on memory of the CPU."""
    rng, head = np.random.default_rng(3), tiny.model(4, initializer_range=0.3).head()
    hidden = torch.from_numpy(rng.normal(size=(5, head.weight.shape[1])).astype(np.float32))
    heat, top_p, top_k = (
        np.array([1, 0.7, 0, 1, 2.0]),
        np.array([0.6, 1, 0.5, 1, 0.9]),
        np.array([0, 3, 0, 0, 4]),
    )
    uniforms = rng.random(5)
    full = np.where(top_k == 0, VOCABULARY, top_k)
    settings = np.stack([uniforms, np.where(heat == 0, 1, heat), heat == 0, full, top_p]).astype(np.float64)
    buffers = SimpleNamespace(
        settings=torch.from_numpy(settings),
        hidden=hidden,
        masks=torch.zeros(5, VOCABULARY, dtype=torch.int32),
        drawn=torch.zeros(3, 5, dtype=torch.float64),
    )
    _draw_tokens(buffers, head, 5, (True, True, True, True))  # pyright: ignore[reportArgumentType]
    plan = SamplingPlan.build(heat, top_p, top_k, torch.device("cpu"))
    ids, logprobs, masks = sample_tokens(head.logits(hidden), torch.from_numpy(uniforms), plan, 1000)
    assert masks is not None
    assert torch.equal(buffers.masks, masks.int())
    counts = (masks < VOCABULARY).sum(1)
    assert torch.equal(buffers.drawn, torch.stack([ids.double(), logprobs.double(), counts.double()]))
    assert (counts > 0).tolist() == [True, True, False, False, True]
    rows = mask_rows(buffers.masks[:, : int(counts.max())].numpy(), VOCABULARY)
    assert rows is not None
    for row, mask in enumerate(rows):
        assert (
            mask is None
            if not counts[row]
            else np.frombuffer(mask, "<i4").tolist()
            == [one for one in masks[row].tolist() if one < VOCABULARY]
        )


def test_an_episode_has_the_masks_of_what_the_model_wrote():
    """Turns of a conversation, and between them tokens of the environment, which have none."""

    def tokens(ids: list[int], masks: list[list[int]] | None) -> Tokens:
        rows = None
        if masks is not None:
            rows = np.full(len(ids), None)
            rows[:] = [np.array(mask, "<i4").tobytes() or None for mask in masks]
        values = np.zeros(len(ids), np.float32)
        return Tokens(np.array(ids, np.int32), values, np.zeros(len(ids), np.int32), sampling_masks=rows)

    sample = Sample("a", "a", "d", np.array([1], np.int32))
    parts = [
        (tokens([4, 5], [[2, 4], [5]]), True),
        (tokens([7, 8, 9], None), False),
        (tokens([6, 2], [[], [0, 1, 2]]), True),
    ]
    assemble_sample(sample, None, parts)
    assert sample.sampling_masks is not None
    assert rows_of(sample.sampling_masks, 7) == [[2, 4], [5], [], [], [], [], [0, 1, 2]]
    assert pack_masks([sample]).tolist() == [  # pyright: ignore[reportOptionalMemberAccess]
        *([2, 4, -1], [5, -1, -1], [-1] * 3, [-1] * 3, [-1] * 3, [-1] * 3, [0, 1, 2])
    ]
    assemble_sample(sample, None, parts[1:2])
    assert sample.sampling_masks is None
