"""Layers that carry a state from token to token: packed, written with, streamed, and refused with what only
attends.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sweep
import tiny_types
import torch
from recipes import tiny_recipe

from opd.errors import ModelError, OpdError, RolloutError
from opd.models.architecture import cached_layers
from opd.models.attention import PackedAttention
from opd.models.causal_lm import CausalLM
from opd.models.long_sequence import LayerMemory
from opd.models.recurrence import mixers_of
from opd.pipelines.check import models as doctor
from opd.pipelines.check.checks import run_check
from opd.pipelines.check.memory import memory_parts, sizes_of
from opd.pipelines.check.shapes import ModelShape
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

TYPES = ("qwen3_5_text", "lfm2_moe", "falcon_h1", "granitemoehybrid")
"""A gated delta rule, short convolutions, attention and a state space in one layer, and in turn."""


@pytest.fixture(scope="module", params=TYPES)
def folder(request, tmp_path_factory) -> Path:
    return tiny_types.write_folder(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.mark.filterwarnings("ignore")
def test_student_and_teacher_are_what_transformers_computes(folder, tmp_path):
    bench = sweep.Bench(folder, tmp_path, sweep.plain_model(folder))
    assert sweep.as_local(bench) < sweep.EXACT
    if "falcon" not in folder.parent.name:
        assert sweep.as_streamed(bench) < sweep.EXACT
    assert sweep.as_student(bench) < sweep.EXACT


def answers(engine: TorchEngine, asked: list[RolloutRequest]) -> dict[str, tuple[list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for chunk in engine.generate(asked):
        for uid, token, score in zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True):
            ids, scores = found.setdefault(uid, ([], []))
            ids.append(int(token))
            scores.append(float(score))
    return found


def requests(count: int, **more) -> list[RolloutRequest]:
    generator = np.random.default_rng(0)
    settings = [SamplingParams(max_new_tokens=3 + 5 * (i % 4), temperature=1.0) for i in range(count)]
    prompts = [generator.integers(2, 14, 4 + 3 * (i % 5)).astype(np.int32) for i in range(count)]
    prompts[1] = prompts[0]  # one prompt of two requests
    return [RolloutRequest(str(i), prompts[i], settings[i], seed=7, **more) for i in range(count)]


def check_written(model: CausalLM, asked: list[RolloutRequest]) -> None:
    """Require of each token the log-probability of a packed pass, with three slots and with one."""
    found = answers(TorchEngine(model, max_running=3), asked)
    alone = answers(TorchEngine(model, max_running=1), asked)
    for one in asked:
        ids, scores = found[one.uid]
        assert ids == alone[one.uid][0]
        text = torch.tensor([*one.prompt_ids.tolist(), *ids])
        table = torch.log_softmax(sweep.packed_logits(model, [text]).double(), -1)[
            len(one.prompt_ids) - 1 : -1
        ]
        due = table[torch.arange(len(ids)), torch.tensor(ids)]
        assert float((due - torch.tensor(scores).double()).abs().max()) < sweep.EXACT


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_slots_that_move_and_wait_keep_their_states(folder):
    check_written(CausalLM.from_pretrained(folder), requests(9))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_states_are_saved_and_go_on_in_another_engine(folder):
    model, asked = CausalLM.from_pretrained(folder), requests(4)
    whole = answers(TorchEngine(model), asked)
    engine = TorchEngine(model)
    engine.submit(asked)
    for _ in range(2):
        engine.next_chunk()
    engine.pause()
    saved = engine.snapshot()
    assert any(name.startswith("state.") for name in saved)
    resumed = [replace(one, prefix_ids=np.array(whole[one.uid][0][:2], np.int32)) for one in asked]
    other = TorchEngine(model)
    other.pause()
    state = next(name for name in saved if name.startswith("state."))
    for damage in (
        {state: saved[state][..., :-1]},
        {state: saved[state][:-1]},
        {state: saved[state].half()},
        {state.replace("state.", "state.x"): saved[state]},
        {state.rpartition(".")[0] + ".x": saved[state]},
        {state + ".0": saved[state]},
    ):
        left = {name: tensor for name, tensor in saved.items() if name != state}
        with pytest.raises(RolloutError):
            other.restore(left | damage)
    with pytest.raises(RolloutError, match="are not the model's"):
        other.restore({name: tensor for name, tensor in saved.items() if name != state})
    assert other.restore(saved) == len(asked)
    other.resume()
    rest = answers(other, resumed)
    assert other.restored_tokens > 0
    assert {uid: rest[uid][0] for uid in rest} == {uid: whole[uid][0][2:] for uid in rest}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_second_turn_goes_on_from_the_states_of_the_first(folder):
    model = CausalLM.from_pretrained(folder)
    engine, prompt = TorchEngine(model), np.arange(2, 12, dtype=np.int32)
    settings = SamplingParams(max_new_tokens=5, temperature=1.0)
    first = RolloutRequest("a", prompt, settings, seed=1, session="s", continues=True)
    ids = answers(engine, [first])["a"][0]
    longer = np.array([*prompt, *ids, 3, 4, 5], np.int32)
    again = RolloutRequest("b", longer, settings, seed=1, session="s")
    got = answers(engine, [again])["b"]
    assert engine.kept_tokens == len(prompt) + len(ids) - 1
    fresh = answers(TorchEngine(model), [again])["b"]
    assert got[0] == fresh[0]
    assert got[1] == pytest.approx(fresh[1], abs=sweep.EXACT)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_copy_of_a_model_computes_with_its_own_weights(folder):
    model = CausalLM.from_pretrained(folder)
    ids, places, bounds = torch.arange(2, 12), torch.arange(10), PackedAttention([0, 4, 10])
    before = model.run(ids, places, bounds)
    twin = copy.deepcopy(model)
    for part in mixers_of(model.module):
        for parameter in part.parameters():
            parameter.zero_()
    assert torch.equal(twin.run(ids, places, bounds), before)
    assert not torch.equal(model.run(ids, places, bounds), before)


@pytest.mark.filterwarnings("ignore")
def test_sequences_in_pieces_are_refused(folder):
    model = CausalLM.from_pretrained(folder)
    with pytest.raises(ModelError, match="carries a state from token to token"):
        model.hidden(torch.arange(2, 12), torch.arange(10), [0, 10], LayerMemory(chunk=4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"distill": {"batch": {"sequence_chunk": 8}}},
            "distill.batch.sequence_chunk is set, and the student",
        ),
        ({"train": {"context_parallel": 2, "ranks": 2}}, "train.context_parallel is set, and the student"),
    ],
)
def test_the_doctor_refuses_what_only_attends(folder, changes, said):
    recipe = tiny_recipe(model={"path": str(folder)}, base=None, **changes)
    [error] = [
        one.detail
        for one in run_check("student", lambda: doctor._check_student(recipe, {}, doctor.Models()))
        if one.level == "error"
    ]
    assert error.startswith(said)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_one_token_keeps_the_limits_of_time_steps(tmp_path):
    """The least step is so large that most are raised to it."""
    folder = tiny_types.write_folder("nemotron_h", tmp_path / "model", time_step_min=1.5)
    check_written(CausalLM.from_pretrained(folder), requests(3))


@pytest.mark.filterwarnings("ignore")
def test_scaled_time_steps_within_limits_are_refused(tmp_path):
    folder = tiny_types.write_folder("falcon_h1", tmp_path / "model", time_step_limit=(0.1, 1.0))
    with pytest.raises(OpdError, match="keeps its time steps between"):
        CausalLM.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_knows_what_a_sequence_keeps(folder, dtype):
    model = CausalLM.from_pretrained(folder, dtype=str(dtype).removeprefix("torch."))
    config = model.config
    attending, state_bytes = cached_layers(config, dtype)
    kv_width = config.num_key_value_heads * model.decoder.layers[-1].self_attn.head_dim
    assert (2 * attending * kv_width, state_bytes) == (model.kv_numbers, model.state_bytes)
    recipe = tiny_recipe(model={"path": str(folder)}, base=None)
    shape = ModelShape(10, 4, (None,) * 2, 15, kv_width, recurrent=2 - attending, state_bytes=state_bytes)
    parts = sizes_of(memory_parts(recipe, shape, {}))
    slots, most = recipe.rollout.max_running, 2 * recipe.rollout.max_new_tokens
    assert (parts["states"], parts["KV cache"]) == (slots * state_bytes, slots * most * 4 * model.kv_numbers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_key_heads": 3}, "its sizes do not fit together"),
        ({"num_key_value_heads": 3}, "its sizes do not fit together"),
        ({"linear_num_value_heads": 3}, "its sizes do not fit together"),
        ({"hidden_size": 10**9}, "hidden_size 1,000,000,000; no model has so many"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers 0; a model has one or more"),
    ],
)
def test_the_doctor_refuses_a_new_model_of_impossible_sizes(tmp_path, changes, said):
    sizes = tiny_types.tiny_config("qwen3_5_text").to_dict()
    names = ("num_hidden_layers", "layer_types", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("hidden_size", "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
    config = {"model_type": "qwen3_5_text"} | {name: sizes[name] for name in names} | changes
    tiny_types.tokenizer().save_pretrained(tmp_path)
    recipe = tiny_recipe(model={"config": config, "tokenizer": str(tmp_path)})
    [error] = run_check("student", lambda: doctor._check_student(recipe, {}, doctor.Models()))
    assert error.level == "error"
    assert said in error.detail
