"""Every back end trains as one process does: one launch of two ranks, compared with this process."""

import json
from importlib.util import find_spec

import backend_ranks
import numpy as np
import pytest
import torch
from backend_ranks import assert_same, on_two_ranks, read_state
from full import FULL
from safetensors.torch import load_file

from opd.config import TrainConfig
from opd.errors import ConfigError
from opd.ranks import Ranks
from opd.train.backends import open_backend
from opd.train.megatron_backend import MegatronBackend
from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # one launch of all back ends

STEPS = 20 if FULL else 8
HALF = STEPS // 2
# So small that every tensor would stay whole on every rank.
PARTITION = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
TASKS = {
    "fsdp": {"backend": "torch"},
    "megatron-tensor": {"backend": "megatron", "tensor_parallel": 2},
    "megatron-data": {"backend": "megatron"},
    "megatron-context": {"backend": "megatron", "context_parallel": 2},
    "megatron-stages": {"backend": "megatron", "pipeline_parallel": 2},
    "megatron-tensor-distributed": {
        "backend": "megatron",
        "tensor_parallel": 2,
        "distributed_optimizer": True,
    },
    "megatron-data-distributed": {"backend": "megatron", "distributed_optimizer": True, "overlap": True},
} | {
    f"zero-{stage}": {"backend": "deepspeed", "zero_stage": stage, "deepspeed": PARTITION}
    for stage in (1, 2, 3)
}
TASKS["zero-3-offload"] = {
    "backend": "deepspeed",
    "deepspeed": {
        "zero_optimization": PARTITION["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}
    },
}
MISSING = {name for name, train in TASKS.items() if find_spec("deepspeed") is None and "deepspeed" in train}
NO_DEEPSPEED = pytest.mark.skip("needs DeepSpeed: .venv/bin/python -m pip install 'opd[deepspeed]'")
FEW = ("megatron-context", "megatron-stages")
"""By default of three steps; test_megatron_parallel.py has more models."""
LONG = {"megatron-data", "megatron-tensor-distributed", "zero-1", "zero-2", "zero-3-offload", *FEW}
"""The other two of Megatron's have both kinds of parallelism and of optimiser, and the third stage does what
the others do."""
MARKS = {
    name: [pytest.mark.long] * (name in LONG) + [NO_DEEPSPEED] * (name in MISSING) for name in LONG | MISSING
}
NAMES = [pytest.param(name, marks=MARKS.get(name, [])) for name in TASKS]


def one_process(first, last, state=None, batches=backend_ranks.batch, **model):
    """A back end in this process after steps `first` to `last`, and their metrics."""
    tiny_model = backend_ranks.student(**model)
    backend = TorchBackend(tiny_model, backend_ranks.training())
    if state is not None:
        backend.load_state(state)
    return backend, backend_ranks.train(backend, first, last, batches)


@pytest.fixture(scope="module")
def reference():
    """The whole run in this process: the back end at its end, the metrics of every step."""
    return one_process(0, STEPS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder in which two ranks have left what every task gave."""
    half, _ = one_process(0, HALF)
    left_out = MISSING if FULL else MISSING | LONG
    tasks = [
        task
        for name, train in TASKS.items()
        if name not in left_out
        for task in (
            {"name": name, "train": train, "first": 0, "last": STEPS},
            {"name": f"{name}-half", "train": train, "first": 0, "last": HALF},
            {
                "name": f"{name}-resumed",
                "train": train,
                "load": "half",
                "first": HALF,
                "last": STEPS,
                "away": True,
            },
            {"name": f"{name}-uneven", "train": train, "first": 0, "last": 4, "batches": "uneven"},
        )
    ]
    tasks += [
        {"name": f"{name}-few", "train": TASKS[name], "first": 0, "last": 3, "gradients": True}
        for name in FEW
    ]
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), half.state(), tasks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_distributed_optimiser_without_a_gpu_is_refused():
    train = TrainConfig(backend="megatron", distributed_optimizer=True)
    with pytest.raises(ConfigError, match="needs a GPU"):
        MegatronBackend(backend_ranks.student(), backend_ranks.training(), Ranks(), train=train)
    with pytest.raises(ValueError, match="distributed_optimizer has no effect with backend torch"):
        TrainConfig(distributed_optimizer=True)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("settings", [{"zero_optimization": {"no_such_key": 3}}, {"train_batch_size": 7}])
def test_settings_that_deepspeed_refuses_are_one_sentence(settings):
    train = TrainConfig(backend="deepspeed", deepspeed=settings)
    opened = open_backend(lambda *_, **__: backend_ranks.student(), train, backend_ranks.training(), Ranks())
    with (
        pytest.raises(ConfigError, match=r"DeepSpeed does not start with train.deepspeed as it is \("),
        opened,
    ):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_one_process(ranks, reference, name):
    backend, metrics = reference
    result = json.loads((ranks / name / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    assert metrics[0]["kl/mean"] != metrics[-1]["kl/mean"]
    weights = load_file(ranks / name / "weights.safetensors")
    own = dict(backend.weights())
    assert weights.keys() == own.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(
        backend.recompute_logprobs(backend_ranks.batch(0).samples), result["logprobs"], strict=True
    ):
        np.testing.assert_allclose(mine, np.array(theirs, np.float32), atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_gradients_and_steps_are_those_of_one_process_which_goes_on(ranks, reference, name):
    folder, (_, metrics) = ranks / f"{name}-few", reference
    expected = backend_ranks.gradients_of(one_process(0, 0)[0])
    backend_ranks.assert_same_gradients(load_file(folder / "gradients.safetensors"), expected)
    assert_same(json.loads((folder / "result.json").read_text())["metrics"], metrics[:3])
    _, alone = one_process(3, 5, read_state(folder))
    assert_same(alone, metrics[3:5])


@pytest.mark.parametrize("name", NAMES)
def test_a_token_counts_the_same_on_a_rank_with_many_and_on_one_with_few(ranks, name):
    _, metrics = one_process(0, 4, batches=backend_ranks.uneven)
    assert_same(json.loads((ranks / f"{name}-uneven" / "result.json").read_text())["metrics"], metrics)


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_is_that_of_an_engine_with_these_weights(ranks, name):
    engine = backend_ranks.student(seed=5)
    engine.load_weights(load_file(ranks / name / "weights.safetensors").items())
    assert engine.digest() == json.loads((ranks / name / "result.json").read_text())["digest"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_with_another_number_of_ranks(ranks, reference, name):
    _, metrics = reference
    _, alone = one_process(HALF, STEPS, read_state(ranks / f"{name}-half"))  # two ranks, then one
    assert_same(alone, metrics[HALF:])
    result = json.loads((ranks / f"{name}-resumed" / "result.json").read_text())  # one rank, then two
    assert_same(result["metrics"], metrics[HALF:])
