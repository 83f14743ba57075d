"""Megatron-Core's ranks that share sequences, or have layers of their own, make the steps of one process.

More models and combinations than test_backends.py has.
"""

import functools
import json
from pathlib import Path

import backend_ranks
import numpy as np
import pytest
from backend_ranks import assert_same, assert_same_gradients
from rank_processes import run_ranks
from safetensors.torch import load_file

from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 3
UNTIED = {"tie_word_embeddings": False}
WINDOW = {"model_type": "mistral", "sliding_window": 5, **UNTIED}
ADAPTERS = {"lora": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
TENSOR_CONTEXT = {"tensor_parallel": 2, "context_parallel": 2}
TASKS = {
    2: {
        "context": {"train": {"context_parallel": 2}},
        "context, again": {
            "train": {"context_parallel": 2},
            "model": WINDOW,
            "batch": {"recompute_layers": True},
        },
        "data, overlapping": {"train": {"overlap": True}, "model": UNTIED},
        "stages": {"train": {"pipeline_parallel": 2}},
        "stages, again": {
            "train": {"pipeline_parallel": 2},
            "model": WINDOW | {"num_hidden_layers": 3},
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
        "stages and tensor": {"train": {"pipeline_parallel": 2, "tensor_parallel": 2}},
        "stages and context": {"train": {"pipeline_parallel": 2, "context_parallel": 2}, "model": UNTIED},
        "stages and data": {"train": {"pipeline_parallel": 2}},
        "stages and data, overlapping": {"train": {"pipeline_parallel": 2, "overlap": True}},
        "stages and data, distributed": {
            "train": {"pipeline_parallel": 2, "overlap": True, "distributed_optimizer": True},
            "gradients": False,  # each rank has the sum of its part alone
        },
        "context and data, overlapping": {"train": {"context_parallel": 2, "overlap": True}, "model": UNTIED},
        "tensor and context, adapters": {"train": TENSOR_CONTEXT, "model": ADAPTERS},
        "stages and tensor, adapters": {
            "train": {"pipeline_parallel": 2, "tensor_parallel": 2},
            "model": ADAPTERS | UNTIED,
            "batch": {"recompute_layers": True},
        },
        "tensor and data, adapters, distributed": {
            "train": {"tensor_parallel": 2, "distributed_optimizer": True},
            "model": ADAPTERS,
            "gradients": False,
        },
        "stages and data, adapters, distributed": {
            "train": {"pipeline_parallel": 2, "overlap": True, "distributed_optimizer": True},
            "model": ADAPTERS,
            "gradients": False,
        },
        "four stages": {"train": {"pipeline_parallel": 4}, "model": {"num_hidden_layers": 6}},
    },
}
STAGES = {"backend": "megatron", "pipeline_parallel": 2}
AFTER = [
    {"name": "fsdp", "train": {"backend": "torch"}, "load": "stages", "first": 3, "last": 5},
    {"name": "stages of fsdp", "train": STAGES, "load": "fsdp", "first": 5, "last": 6},
]
"""Tasks that go on from one another's checkpoints."""
CASES = [(world, name) for world, tasks in TASKS.items() for name in tasks]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder in which so many ranks have left what every task gave; run when first asked for."""

    @functools.cache
    def folder_of(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{world}")
        run_tasks(folder, world, TASKS[world], AFTER if world == 2 else [])
        return folder

    return folder_of


def run_tasks(folder: Path, world: int, named: dict[str, dict], after: list[dict]) -> None:
    """Let so many ranks do each of the tasks on both kinds of batches, and then those `after`."""
    tasks = [
        {"name": name, "first": 0, "last": STEPS, "gradients": True}
        | task
        | {"train": {"backend": "megatron", **task["train"]}}
        for name, task in named.items()
    ]
    tasks += [
        task | {"name": f"{task['name']}, uneven", "last": 2, "batches": "uneven", "gradients": False}
        for task in tasks
    ]
    (folder / "tasks.json").write_text(json.dumps(tasks + after))
    run_ranks(backend_ranks.__file__, world, folder, seconds=60 + 40 * len(tasks))


@functools.cache
def one_process(model: str):
    """A back end with a model of these changes, the gradient of the first batch, the metrics of its steps."""
    backend = TorchBackend(backend_ranks.student(**json.loads(model)), backend_ranks.training())
    gradients = backend_ranks.gradients_of(backend)
    return backend, gradients, backend_ranks.train(backend, 0, STEPS)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(ranks, world, name):
    assert_trained_alike(ranks(world) / name, TASKS[world][name])


def assert_trained_alike(folder: Path, task: dict) -> None:
    """What a task left in `folder` is what one process makes of its model."""
    backend, gradients, metrics = one_process(json.dumps(task.get("model", {})))
    result = json.loads((folder / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    if task.get("gradients", True):
        assert_same_gradients(load_file(folder / "gradients.safetensors"), gradients)
    weights, own = load_file(folder / "weights.safetensors"), dict(backend.weights())
    assert weights.keys() == own.keys()
    for key, tensor in own.items():  # AdamW divides what is rounding in a gradient by its size
        assert float((weights[key] - tensor).float().norm()) <= 1e-4 * float(tensor.float().norm()), key
    for mine, theirs in zip(
        backend.recompute_logprobs(backend_ranks.batch(0).samples), result["logprobs"], strict=True
    ):
        np.testing.assert_allclose(mine, np.array(theirs, np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_one_long_sample_and_none_are_trained_as_by_one_process(ranks, world, name):
    assert_uneven_alike(ranks(world) / f"{name}, uneven", TASKS[world][name])


def assert_uneven_alike(folder: Path, task: dict) -> None:
    """What a task left of uneven batches is what one process makes of them."""
    backend = TorchBackend(backend_ranks.student(**task.get("model", {})), backend_ranks.training())
    expected = backend_ranks.train(backend, 0, 2, backend_ranks.uneven)
    assert_same(json.loads((folder / "result.json").read_text())["metrics"], expected)


def test_stages_go_on_as_one_process_or_with_fsdp_and_back(ranks):
    expected = backend_ranks.train(TorchBackend(backend_ranks.student(), backend_ranks.training()), 0, 6)
    folder = ranks(2)
    alone = TorchBackend(backend_ranks.student(seed=3), backend_ranks.training())
    alone.load_state(backend_ranks.read_state(folder / "stages"))
    assert_same(backend_ranks.train(alone, 3, 6), expected[3:])
    for task in AFTER:
        result = json.loads((folder / task["name"] / "result.json").read_text())
        assert_same(result["metrics"], expected[task["first"] : task["last"]])


def test_every_rank_of_stages_writes_its_own_layers(ranks):
    files = [load_file(path) for path in sorted((ranks(2) / "stages").glob("model*.safetensors"))]
    assert len(files) == 2
    layers = [{name for name in file if ".layers." in name} for file in files]
    assert not layers[0] & layers[1]
    assert len(layers[0]) == len(layers[1]) > 0
