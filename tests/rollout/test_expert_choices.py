"""Expert choices of the embedded engine: of every position those that a plain forward of the sample makes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny_types
import torch
from faulty_engines import FaultyEngine, raises_at
from packed import plain_choices
from test_kept_turns import Talk, first_turns

from opd.errors import RolloutError
from opd.models.attention import ATTENTION_NAME
from opd.models.causal_lm import CausalLM
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.shared_groups import decode_groups, encode_groups
from opd.rollout.torch_engine import TorchEngine
from opd.storage.transcript import Tokens, Transcript, choices_of
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
VOCABULARY = 30
SAMPLING = SamplingParams(max_new_tokens=9, stop_ids=(3,))


@cache
def mixture(family: str = "qwen3_moe", seed: int = 0) -> CausalLM:
    """Six experts, of which a token has three."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {} if family == "mixtral" else {"num_experts": 6, "num_experts_per_tok": 3}
    module = tiny_types.tiny_model(family, **sizes)
    module.set_attn_implementation(ATTENTION_NAME)
    return CausalLM(module)


def engine_of(model: CausalLM, **options: Any) -> TorchEngine:
    return TorchEngine(
        model,
        vocab_size=VOCABULARY,
        max_sequence=120,
        **{"record_experts": True, "max_running": 4, **options},
    )


def assert_recorded(model: CausalLM, prompt: np.ndarray, tokens: Tokens) -> None:
    ids = np.concatenate([prompt, tokens.token_ids])
    choices = choices_of([(len(prompt), tokens)])
    assert choices is not None
    assert choices.dtype == np.uint8
    assert np.array_equal(choices, plain_choices(model, ids))


def prompts(count: int, seed: int = 0) -> list[EncodedPrompt]:
    rng = np.random.default_rng(seed)
    return [
        EncodedPrompt(f"p{i}", "d", rng.integers(0, VOCABULARY, rng.integers(1, 14)).astype(np.int32), None)
        for i in range(count)
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_samples_have_the_choices_of_a_plain_forward(family):
    """Groups share their prompts, and more wait than run: prompts are computed once, some held for later."""
    model = mixture(family)
    engine = engine_of(model)
    groups = collect(engine, prompts(5), 3, SAMPLING, seed=1)
    assert engine.prefilled_tokens == sum(len(prompt.token_ids) for prompt in prompts(5))
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.expert_choices is not None
        assert np.array_equal(sample.expert_choices, plain_choices(model, sample.token_ids))
    plain = collect(engine_of(model, record_experts=False), prompts(5), 3, SAMPLING, seed=1)
    for group, other in zip(groups, plain, strict=True):
        for sample, without in zip(group.samples, other.samples, strict=True):
            assert without.expert_choices is None
            assert sample.response_ids.tolist() == without.response_ids.tolist()
            assert np.array_equal(sample.rollout_logprobs, without.rollout_logprobs)


def test_requests_of_one_prompt_share_its_choices():
    engine = engine_of(mixture())
    prompt = np.arange(2, 9, dtype=np.int32)
    engine.submit([RolloutRequest(f"r{i}", prompt, SAMPLING, 0) for i in range(6)])
    spans = []
    while (chunk := engine.next_chunk()) is not None:
        spans += [span for _, span in chunk.expert_spans]
    assert len(spans) == 6
    assert len({span.choices.__array_interface__["data"][0] for span in spans}) == 1


def test_a_model_without_experts_is_refused(build: Fixture):
    with pytest.raises(RolloutError, match="llama has no experts; set rollout"):
        TorchEngine(build("llama")[0], record_experts=True)


def test_choices_go_from_rank_to_rank_with_their_samples():
    groups = collect(engine_of(mixture()), prompts(3), 2, SAMPLING, seed=1)
    groups[1].samples[0].expert_choices = None
    groups[2].samples[1].expert_choices = np.full((2, 2, 3), 300, np.uint16)
    by_uid = {prompt.uid: prompt for prompt in prompts(3)}
    received, _ = decode_groups(encode_groups(groups, by_uid), by_uid)
    for group, other in zip(received, groups, strict=True):
        for sample, sent in zip(group.samples, other.samples, strict=True):
            if sent.expert_choices is None:
                assert sample.expert_choices is None
                continue
            assert sample.expert_choices is not None
            assert sample.expert_choices.dtype == sent.expert_choices.dtype
            assert np.array_equal(sample.expert_choices, sent.expert_choices)


@pytest.mark.parametrize("kept", [True, False])
def test_turns_bring_only_the_choices_that_the_turns_before_have_not(kept):
    model = mixture()
    engine = engine_of(model, max_running=3)
    talk = Talk(engine, first_turns(5), kept=kept)
    transcript, prompts, turns = Transcript(), dict[str, np.ndarray](), dict[str, list[tuple[int, Tokens]]]()
    given = 0
    ask = talk.more

    def with_routed(idle: bool) -> list[RolloutRequest] | None:
        asked = ask(idle)
        requests = []
        for request in asked or []:
            before = turns.get(request.uid.split("/")[0], [])
            routed = before[-1][1].routed_positions(before[-1][0]) if before else 0
            requests.append(replace(request, routed=routed))
            prompts[request.uid] = request.prompt_ids
        transcript.add_requests({request.uid: Tokens.empty() for request in requests})
        return None if asked is None else requests

    talk.more = with_routed
    for chunk in talk.chunks():
        given += sum(len(span.choices) for _, span in chunk.expert_spans) + len(chunk.uids)
        transcript.add_chunk(chunk)
        for uid in chunk.finished:
            part = (len(prompts[uid]), transcript.request_tokens(uid))
            turns.setdefault(uid.split("/")[0], []).append(part)
    assert (engine.kept_tokens > 0) == kept
    total = 0
    for session, parts in turns.items():
        assert len(parts) == 4
        last = np.concatenate([prompts[f"{session}/3"], parts[-1][1].token_ids])
        choices = choices_of(parts)
        assert choices is not None
        assert np.array_equal(choices, plain_choices(model, last))
        total += len(choices)
    assert given == total  # none was given twice


def run(engine: Any, requests: list[RolloutRequest], event: Callable[[int], None]) -> dict[str, Tokens]:
    transcript = Transcript({request.uid: Tokens.empty() for request in requests})
    engine.submit(requests)
    count = 0
    while (chunk := engine.next_chunk()) is not None:
        transcript.add_chunk(chunk)
        count += 1
        event(count)
    return {request.uid: transcript.request_tokens(request.uid) for request in requests}


def interruptions(engine: TorchEngine, event: str) -> Callable[[int], None]:
    """For `run`: take keys and values away twice, or bring them back from a snapshot."""

    def interrupt(count: int) -> None:
        if count in (3, 8):
            engine.pause()
            if event == "flush":
                engine.flush()
            else:
                saved = engine.snapshot()
                engine.release()
                engine.restore(saved)
            engine.resume()

    return interrupt


def some_requests(count: int = 7) -> list[RolloutRequest]:
    sampling = SamplingParams(max_new_tokens=14, stop_ids=(3,))
    return [RolloutRequest(prompt.uid, prompt.token_ids, sampling, 5) for prompt in prompts(count, seed=2)]


@pytest.mark.parametrize("event", ["flush", "snapshot", "other engine"])
def test_an_interruption_changes_no_choice(event):
    """Keys and values are lost, or come back from a snapshot, in the middle of responses."""
    model = mixture()
    engine = engine_of(model)

    if event == "other engine":
        copies = [engine_of(mixture.__wrapped__()) for _ in range(2)]
        rollout = FaultTolerantRollout([FaultyEngine(copies[0], raises_at(4)), copies[1]])
        found = run(rollout, some_requests(), lambda count: None)
        assert rollout.counters["interrupted_requests"]
    else:
        found = run(engine, some_requests(), interruptions(engine, event))
        assert engine.restored_tokens or event == "flush"
    for request in some_requests():
        assert_recorded(model, request.prompt_ids, found[request.uid])


def test_logged_choices_are_told_again_and_not_recorded_again(tmp_path):
    """A process that opens the log has them from there; what it computes again brings no choices of it."""
    model = mixture()
    requests = some_requests()
    with TokenWAL(tmp_path) as log:
        rollout = FaultTolerantRollout([engine_of(model)], log)
        rollout.submit(requests)
        for _ in range(6):
            rollout.next_chunk()
        before = {uid: len(logged.token_ids) for uid, logged in log.requests().items()}
    assert sum(before.values()) > 0
    fresh = engine_of(model)
    given: list[Chunk] = []
    step = fresh.next_chunk

    def watched() -> Chunk | None:
        chunk = step()
        given.extend([] if chunk is None else [chunk])
        return chunk

    fresh.next_chunk = watched  # pyright: ignore[reportAttributeAccessIssue]
    with TokenWAL(tmp_path) as log:
        found = run(FaultTolerantRollout([fresh], log), requests, lambda count: None)
        for request in requests:
            assert_recorded(model, request.prompt_ids, found[request.uid])
            logged = log.find(request.uid)
            assert logged is not None
            assert_recorded(model, request.prompt_ids, Tokens.from_logged(logged))
    told = {uid for chunk in given for uid, _ in chunk.expert_spans}
    assert told == {uid for uid, count in before.items() if not count}
