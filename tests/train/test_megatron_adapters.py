"""Adapters on Megatron-Core's fused and cut layers: gradients and steps of peft's, on one rank and on two."""

import json
from pathlib import Path

import backend_ranks
import pytest
import torch
from backend_ranks import assert_same, assert_same_gradients, on_two_ranks, read_state
from safetensors.torch import load_file

from opd.config import TrainConfig
from opd.errors import CheckpointError, ModelError
from opd.models.adapters import BASE_DIGEST
from opd.ranks import Ranks
from opd.train.backends import open_backend
from opd.train.torch_backend import TorchBackend

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "all": ATTENTION + MLP,
    "one of a fused layer": ["k_proj", "up_proj"],
    "two of a fused layer": ["q_proj", "v_proj"],
    "cut by columns": ["o_proj", "down_proj"],
}
MODELS = {"tied": {}, "biases": {"model_type": "qwen2"}, "norms of heads": {"model_type": "qwen3"}}
STEPS = 3
TASKS = {
    "tensor": {"train": {"tensor_parallel": 2}, "model": {"lora": TARGETS["all"]}},
    "one of each": {"train": {"tensor_parallel": 2}, "model": {"lora": TARGETS["one of a fused layer"]}},
    "stages": {"train": {"pipeline_parallel": 2}, "model": {"lora": TARGETS["all"]}},
    "data, overlapping": {"train": {"overlap": True}, "model": {"lora": TARGETS["two of a fused layer"]}},
    "recomputed": {
        "train": {"tensor_parallel": 2},
        "model": {"lora": TARGETS["all"], "tie_word_embeddings": False},
        "batch": {"recompute_layers": True},
    },
}


def on_megatron(model: dict):
    """The back end of one rank around a student of these changes, while a block runs."""
    train = TrainConfig(backend="megatron")
    load = lambda *_, **__: backend_ranks.student(**model)  # noqa: E731
    return open_backend(load, train, backend_ranks.training(), Ranks())


def alone(model: dict) -> TorchBackend:
    """The back end with peft's layers."""
    return TorchBackend(backend_ranks.student(**model), backend_ranks.training())


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """What this file needs."""
    pytest.importorskip("peft")
    pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """The folder in which two ranks have left what every task gave."""
    tasks = [
        {"name": name, "first": 0, "last": STEPS, "gradients": True}
        | task
        | {"train": {"backend": "megatron", **task["train"]}}
        for name, task in TASKS.items()
    ]
    start = alone(TASKS["tensor"]["model"])
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), start.state(), tasks)


@pytest.mark.some(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("targets", TARGETS)
def test_the_gradients_of_fused_layers_are_those_of_pefts(targets, model):
    changes = {"lora": TARGETS[targets], **MODELS[model]}
    expected = alone(changes)
    with on_megatron(changes) as backend:
        assert_same_gradients(backend_ranks.gradients_of(backend), backend_ranks.gradients_of(expected))
        for mine, theirs in zip(
            backend.recompute_logprobs(backend_ranks.batch(0).samples),
            expected.recompute_logprobs(backend_ranks.batch(0).samples),
            strict=True,
        ):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-5, rtol=0)
        before = dict(backend.weights())
        assert before.keys() == dict(expected.weights()).keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in expected.weights())
        assert backend.digest() == expected.digest()
        for (name, mine), (other, theirs) in zip(
            backend.plain_weights(), expected.plain_weights(), strict=True
        ):
            assert name == other
            assert torch.equal(mine, theirs), name


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_make_the_steps_of_one_process(ranks, name):
    backend = alone(TASKS[name]["model"])
    gradients = backend_ranks.gradients_of(backend)
    assert_same_gradients(load_file(ranks / name / "gradients.safetensors"), gradients)
    metrics = backend_ranks.train(backend, 0, STEPS)
    result = json.loads((ranks / name / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    weights, own = load_file(ranks / name / "weights.safetensors"), dict(backend.weights())
    assert weights.keys() == own.keys()
    for key, tensor in own.items():  # AdamW divides what is rounding in a gradient by its size
        assert float((weights[key] - tensor).float().norm()) <= 1e-4 * float(tensor.float().norm()), key


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_checkpoint_holds_what_one_process_writes(ranks, name):
    backend = alone(TASKS[name]["model"])
    backend_ranks.train(backend, 0, STEPS)
    kept, own = read_state(ranks / name), backend.state()
    for file, tensors in own.items():
        assert set(kept[file]) == set(tensors)
        for key, tensor in tensors.items():
            found = kept[file][key]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            torch.testing.assert_close(found, tensor, rtol=1e-3, atol=2e-5)
    backend.load_state(kept)
    with on_megatron(TASKS[name]["model"]) as other:
        other.load_state(kept)
        assert_same(
            backend_ranks.train(other, STEPS, STEPS + 1), backend_ranks.train(backend, STEPS, STEPS + 1)
        )


def test_a_checkpoint_of_another_base_or_of_other_adapters_is_refused():
    own = {"lora": ["q_proj"]}
    with on_megatron(own) as backend:
        with pytest.raises(ModelError, match="adapters belong to a base of digest"):
            backend.load_state(alone(own | {"seed": 1}).state())
        with pytest.raises(CheckpointError, match="do not have the same tensors"):
            backend.load_state(alone({"lora": ["k_proj"]}).state())
        assert BASE_DIGEST in dict(backend.weights())
