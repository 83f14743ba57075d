"""An engine that sleeps holds nothing, and writes only with weights that it was given after."""

import numpy as np
import pytest
import tiny
import torch

from opd.config.train import LoRAConfig
from opd.errors import ModelError, RolloutError
from opd.models.adapters import AdaptedLM, MergingLM
from opd.models.causal_lm import CausalLM
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.types import RolloutRequest, SamplingParams


def asked(count: int = 4) -> list[RolloutRequest]:
    sampling = SamplingParams(max_new_tokens=8)
    return [RolloutRequest(str(i), np.array([3, i, 4], np.int32), sampling) for i in range(count)]


def written(engine: TorchEngine) -> dict[str, list[int]]:
    """What is written from now on, by uid."""
    found: dict[str, list[int]] = {}
    while (chunk := engine.next_chunk()) is not None:
        for uid, token in zip(chunk.uids, chunk.token_ids.tolist(), strict=True):
            found.setdefault(uid, []).append(token)
    return found


def answers(engine: TorchEngine) -> dict[str, list[int]]:
    engine.submit(asked())
    return written(engine)


@pytest.mark.some(1)
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sleeping_engine_holds_nothing_and_wakes_as_another_would_be(lean, dtype):
    model = tiny.model(seed=1)
    model.module.to(dtype)
    engine = TorchEngine(model, lean=lean)
    buffers = sum(buffer.nbytes for buffer in model.module.buffers())
    answers(engine)
    whole = engine.resident()
    assert whole["engine_weights"] > sum(p.nbytes for p in model.module.parameters())
    assert whole["engine_kv"] > 0
    for version in (1, 2):
        engine.sleep()
        engine.sleep()
        rotary = 0 if engine._runner.lean is None else engine._runner.lean._rotary.nbytes
        assert engine.resident() == {"engine_weights": buffers, "engine_kv": 0}
        assert rotary <= 1 << 16  # a table of angles, which no weight changes
        other = tiny.model(seed=version + 1)
        other.module.to(dtype)
        sync_weights(engine, other.weights(), version)
        assert answers(engine) == answers(TorchEngine(other, lean=lean))
        assert engine.resident() == whole


def test_nothing_is_written_asleep():
    engine = TorchEngine(tiny.model(seed=1))
    engine.submit(asked())
    engine.sleep()
    with pytest.raises(RolloutError, match="sleeps and holds no weights; call update_weights"):
        engine.resume()
    with pytest.raises(RolloutError, match="paused"):
        engine.next_chunk()


def test_what_was_in_flight_goes_on():
    model = tiny.model(seed=1)
    expected = answers(TorchEngine(model))
    engine = TorchEngine(tiny.model(seed=1))
    engine.submit(asked())
    first = engine.next_chunk()
    assert first is not None
    engine.sleep()
    sync_weights(engine, model.weights(), 1)
    rest = written(engine)
    begun = dict(zip(first.uids, first.token_ids.tolist(), strict=True))
    assert {uid: [token, *rest[uid]] for uid, token in begun.items()} == expected


def test_weights_that_are_refused_leave_it_asleep():
    engine = TorchEngine(tiny.model(seed=1))
    engine.sleep()
    some = list(tiny.model(seed=2).weights())
    with pytest.raises(ModelError, match="were not given"):
        sync_weights(engine, some[:-1], 1)
    with pytest.raises(RolloutError, match="sleeps"):
        engine.resume()
    assert engine.resident()["engine_kv"] == 0
    sync_weights(engine, some, 1)
    assert answers(engine) == answers(TorchEngine(tiny.model(seed=2)))


def adapted(tmp_path, seed: int) -> AdaptedLM:
    """Adapters that do something."""
    model = AdaptedLM(tiny.model(seed=1), LoRAConfig(rank=2), tmp_path)
    torch.manual_seed(seed)
    for _, tensor in model.adapters():
        tensor.copy_(torch.randn_like(tensor) / 4)
    return model


def test_an_engine_with_adapters_keeps_the_base_that_nobody_pushes(tmp_path):
    received: CausalLM = MergingLM(tiny.model(seed=1), LoRAConfig(rank=2))
    engine = TorchEngine(received)
    whole = engine.resident()["engine_weights"]
    for version in (1, 2):
        engine.sleep()
        assert 0 < engine.resident()["engine_weights"] < whole / 2
        learner = adapted(tmp_path, version)
        sync_weights(engine, learner.weights(), version)
        plain = tiny.model(seed=3)
        plain.load_weights(learner.merged_weights())
        assert answers(engine) == answers(TorchEngine(plain))
