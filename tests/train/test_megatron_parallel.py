"""Megatron-Core's ranks that share sequences make the steps of one process."""

import functools
import json
from pathlib import Path

import backend_ranks
import numpy as np
import pytest
import torch
from backend_ranks import assert_same
from rank_processes import run_ranks
from safetensors.torch import load_file

from opd.train.backend import TorchBackend

pytestmark = pytest.mark.slow

STEPS = 3
UNTIED = {"tie_word_embeddings": False}
WINDOW = {"model_type": "mistral", "sliding_window": 5, **UNTIED}
TENSOR_CONTEXT = {"tensor_parallel": 2, "context_parallel": 2}
TASKS = {
    2: {
        "context": {"train": {"context_parallel": 2}},
        "context, again": {
            "train": {"context_parallel": 2},
            "model": WINDOW,
            "batch": {"recompute_layers": True},
        },
    },
    4: {
        "tensor and context": {"train": TENSOR_CONTEXT},
        "tensor and context, again": {
            "train": TENSOR_CONTEXT,
            "model": WINDOW,
            "batch": {"recompute_layers": True},
        },
        "context and data": {"train": {"context_parallel": 2}},
    },
}
CASES = [
    pytest.param(world, name, marks=[pytest.mark.long] if world > 2 else [])
    for world, tasks in TASKS.items()
    for name in tasks
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder in which so many ranks have left what every task gave; run when first asked for."""

    @functools.cache
    def folder_of(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{world}")
        tasks = [
            {"name": name, "first": 0, "last": STEPS, "gradients": True}
            | task
            | {"train": {"backend": "megatron", **task["train"]}}
            for name, task in TASKS[world].items()
        ]
        tasks += [
            task | {"name": f"{task['name']}, uneven", "last": 2, "batches": "uneven", "gradients": False}
            for task in tasks
        ]
        (folder / "tasks.json").write_text(json.dumps(tasks))
        run_ranks(backend_ranks.__file__, world, folder)
        return folder

    return folder_of


@functools.cache
def one_process(model: str):
    """A back end with a model of these changes, the gradient of the first batch, the metrics of its steps."""
    backend = TorchBackend(backend_ranks.student(**json.loads(model)), backend_ranks.training())
    gradients = backend_ranks.gradients_of(backend)
    return backend, gradients, backend_ranks.train(backend, 0, STEPS)


def expected_of(world: int, name: str):
    """`one_process` of a task's model."""
    return one_process(json.dumps(TASKS[world][name].get("model", {})))


@pytest.mark.parametrize(("world", "name"), CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(ranks, world, name):
    backend, gradients, metrics = expected_of(world, name)
    folder = ranks(world) / name
    result = json.loads((folder / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    found = load_file(folder / "gradients.safetensors")
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert float((found[key] - gradient).norm()) <= 1e-5 * float(gradient.norm()), key
    weights, own = load_file(folder / "weights.safetensors"), dict(backend.weights())
    assert weights.keys() == own.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(
        backend.logprobs(backend_ranks.batch(0).samples), result["logprobs"], strict=True
    ):
        np.testing.assert_allclose(mine, np.array(theirs, np.float32), atol=1e-5)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_one_long_sample_and_none_are_trained_as_by_one_process(ranks, world, name):
    model = TASKS[world][name].get("model", {})
    backend = TorchBackend(backend_ranks.student(**model), backend_ranks.training())
    expected = backend_ranks.train(backend, 0, 2, backend_ranks.uneven)
    result = json.loads((ranks(world) / f"{name}, uneven" / "result.json").read_text())
    assert_same(result["metrics"], expected)
