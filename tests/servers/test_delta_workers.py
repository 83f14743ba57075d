"""Workers that are sent what has changed: paused, given it, proved and resumed as with any other push."""

import copy
from contextlib import contextmanager

import pytest
import torch
from dialects import ALL_ROWS, LITTLE, on

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.rollout.delta_push import DeltaPush
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.vllm_engine import Outputs, VLLMEngine, read_folder
from opd.rollout.weight_mirror import WeightMirror
from opd.rollout.weight_sync import sync_weights
from opd.served.http_client import PoolOptions

pytestmark = on("little-vllm")


@pytest.fixture
def little(server):
    return server.own


@pytest.fixture
def folders(server):
    return server.folders


@pytest.fixture
def mirror(tmp_path):
    place = tmp_path / "opd-weights-1"
    place.mkdir()
    return WeightMirror([place])


@pytest.fixture
def rollout(little, folders, mirror):
    with given(little, folders["a"], mirror, "float32") as made:
        yield made


@contextmanager
def given(little, model, mirror, dtype):
    """An engine of which `little` is the worker, for a student of that dtype."""
    push = DeltaPush({little.url: mirror}, bytes, read_folder, model, 1 << 20)
    options, outputs = PoolOptions([little.url], patience=LITTLE), Outputs(model, dtype)
    engine = VLLMEngine(options, ALL_ROWS, push, version=-1, outputs=outputs)
    try:
        yield FaultTolerantRollout([engine])
    finally:
        engine.close()


def learnt(model: CausalLM) -> CausalLM:
    """The same with few other weights."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        found.module.model.layers[0].mlp.up_proj.weight[3] += 0.25
    return found


def pushed(rollout: FaultTolerantRollout) -> float:
    return rollout.take_counters().get("pushed_bytes", 0.0)


def test_a_worker_holds_what_was_sent_and_the_metric_says_how_much(rollout, little, folders):
    first = CausalLM.from_pretrained(folders["b"])
    whole = sum(tensor.nbytes for _, tensor in first.weights())
    sync_weights(rollout, first.weights(), 0)
    assert little.model.digest() == first.digest()
    assert whole < pushed(rollout) < 1.5 * whole
    second = learnt(first)
    sync_weights(rollout, second.weights(), 1)
    assert little.model.digest() == second.digest()
    assert 0 < pushed(rollout) < whole / 10
    assert not little.paused
    sync_weights(rollout, second.weights(), 2)
    assert pushed(rollout) == 0
    assert little.version.endswith(".2")
    little.lose()  # started again: it reads the mirror that is still there
    rollout.engines[0]._workers.pool.servers[0].admitted = False
    third = learnt(second)
    sync_weights(rollout, third.weights(), 3)
    assert little.model.digest() == third.digest()
    assert 0 < pushed(rollout) < whole / 10


def test_a_worker_in_float32_takes_a_student_in_bfloat16(little, folders, mirror):
    first = CausalLM.from_pretrained(folders["b"], dtype="bfloat16")
    with torch.no_grad():
        first.module.lm_head.weight.mul_(4.0)  # what is rounded here makes more than float32 would let pass
    with given(little, folders["a"], mirror, "bfloat16") as rollout:
        sync_weights(rollout, first.weights(), 0)
        sync_weights(rollout, learnt(first).weights(), 1)
        assert little.version.endswith(".1")


def test_a_worker_that_does_not_hold_what_was_sent_is_not_used(rollout, little, folders):
    first = CausalLM.from_pretrained(folders["b"])
    sync_weights(rollout, first.weights(), 0)
    little.reads = False
    second = learnt(first)
    with torch.no_grad():
        second.module.model.norm.weight += 0.5
    with pytest.raises(RolloutError, match="holds another"):
        sync_weights(rollout, second.weights(), 1)
    assert little.version.endswith(".reading")
    assert little.paused
