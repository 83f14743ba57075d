"""Expert choices from servers: those of a plain forward, also over pauses and turns; servers without them are
refused with one sentence.
"""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from little_models import ROUTED, LittleSGLang
from packed import plain_choices
from served_models import write_model
from served_writing import PROMPTS, collected

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_engine import SGLangEngine
from opd.rollout.vllm_engine import VLLMEngine
from opd.served.http_client import PoolOptions, UnavailableError
from opd.served.routed_experts import ServedRouting
from opd.storage.transcript import Tokens, Transcript, choices_of
from opd.types import RolloutRequest, SamplingParams

MIXTURE = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": 24,
}
"""Its first layer has no experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    write_model(path, seed=0, **MIXTURE)
    return path


@pytest.fixture
def server(folder: Path):
    little = LittleSGLang(folder)
    little.settings |= {ROUTED: True}
    yield little
    little.kill()


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder)


def form_of(model: CausalLM) -> ServedRouting:
    routing = model.routing
    assert routing is not None
    return ServedRouting(routing.block_layers, routing.depth, routing.experts, routing.per_token)


@pytest.fixture
def engine(server: LittleSGLang, model: CausalLM):
    made = SGLangEngine(PoolOptions([server.url]), ServedModel(24, 200))
    made.record_experts(form_of(model))
    yield made
    made.close()


def test_samples_have_the_choices_of_a_plain_forward(engine, model):
    for sample in collected(engine, 2, 1, max_new_tokens=9):
        assert sample.expert_choices is not None
        assert sample.expert_choices.shape[1:] == (2, 3)
        assert np.array_equal(sample.expert_choices, plain_choices(model, sample.token_ids))


def test_a_turn_is_asked_only_for_what_its_caller_has_not(engine, model, server):
    """The first turn's answer and its own start of the text are not sent a second time."""
    request = RolloutRequest("a/0", PROMPTS[0], SamplingParams(max_new_tokens=6))
    turns: list[tuple[int, Tokens]] = []
    for _ in range(2):
        transcript = Transcript({request.uid: Tokens.empty()})
        for chunk in engine.generate(request):
            transcript.add_chunk(chunk)
        turns.append((len(request.prompt_ids), transcript.request_tokens(request.uid)))
        ids = np.concatenate([request.prompt_ids, turns[-1][1].token_ids])
        assert turns[-1][1].routed_positions(turns[-1][0]) == len(ids) - 1
        more = np.concatenate([ids, PROMPTS[1]]).astype(np.int32)
        request = replace(request, uid="a/1", prompt_ids=more, routed=len(ids) - 1)
    assert turns[1][1].expert_spans[0].first == len(PROMPTS[0]) + 5
    choices = choices_of(turns)
    assert choices is not None
    assert np.array_equal(choices, plain_choices(model, ids))


class Forgetful(LittleSGLang):
    """Says that it gives expert choices, and gives none."""

    def answer(self, path, body):
        return super().answer(path, {k: v for k, v in body.items() if k != "return_routed_experts"})


@pytest.mark.parametrize(
    ("kind", "says", "words"),
    [
        (LittleSGLang, {}, "was not started with --enable-return-routed-experts"),
        (Forgetful, {ROUTED: True}, "without its expert choices, which rollout.replay_experts true"),
    ],
)
def test_a_server_that_gives_none_is_refused(folder, model, kind, says, words):
    server = kind(folder)
    server.settings |= says
    engine = SGLangEngine(PoolOptions([server.url]), ServedModel(24, 200))
    engine.record_experts(form_of(model))
    try:
        with pytest.raises(RolloutError, match=words):
            list(engine.generate(RolloutRequest("r", PROMPTS[0], SamplingParams(max_new_tokens=2))))
    finally:
        engine.close()
        server.kill()


def test_streams_of_vllm_are_refused(model):
    engine = VLLMEngine(PoolOptions(["http://127.0.0.1:9"]), ServedModel(24, 200))
    with pytest.raises(RolloutError, match="streams have no expert choices"):
        engine.record_experts(form_of(model))
    engine.close()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (np.zeros(17), "17 expert choices came"),
        (np.full(54, 8), "an expert that there is not"),
        (np.r_[np.zeros(53), -1], "an expert that there is not"),
    ],
)
def test_other_choices_are_refused(numbers, words):
    routing = ServedRouting((1, 2), 3, 8, 3)
    text = base64.b64encode(numbers.astype("<i4").tobytes()).decode()
    with pytest.raises(UnavailableError, match=words):
        routing.read_span(text, 4, 10)
    with pytest.raises(UnavailableError):
        routing.read_span("no base64!", 4, 10)


@pytest.mark.parametrize(("first", "depth", "experts"), [(4, 3, 8), (4, 2, 256), (0, 3, 257)])
def test_a_span_is_read_with_all_layers_or_those_with_experts(first, depth, experts):
    """Also all of it from a server that does not know where to begin."""
    rows = experts - 1 - np.arange((10 - first) * depth * 3)[::-1].reshape(-1, depth, 3) % 8
    text = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    span = ServedRouting((1, 2), 3, experts, 3).read_span(text, 4, 10)
    assert span.first == first
    assert np.array_equal(span.choices, rows[:, -2:])
