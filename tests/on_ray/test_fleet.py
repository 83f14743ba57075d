"""Engines of a fleet that sleep and wake, and one that is lost meanwhile: the actor's own code, called here.

What travels through Ray is tried by `test_recovery.py`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe

from opd.config import RayLaunch
from opd.config.train import LoRAConfig
from opd.config.writing import MOST_KEPT
from opd.errors import RolloutError
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.launch.ray import engine as engine_module
from opd.pipelines.launch.ray.engine import EngineActor, EngineFleet
from opd.protocols import SleepingEngine
from opd.rollout.collect import responses
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import Streaming
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.storage.transcript import Tokens, choices_of, masks_of
from opd.types import RolloutRequest, SamplingParams

LORA = {"rank": 2, "alpha": 4}


class Direct:
    """One actor in this process, whose calls are done in their order; `die` puts a new one in its place."""

    name, limits = "engine-0", RayLaunch()

    def __init__(self, recipe) -> None:
        self._recipe, self.told, self._lock = recipe, [], threading.RLock()
        self.die()

    def die(self) -> None:
        self.actor = EngineActor.__new__(EngineActor)
        self.actor._recipe, self.actor._engine, self.actor._loaded_with = self._recipe, None, None
        self.actor._most_kept = 0

    def send(self, verb, *arguments, **_):
        with self._lock:
            self.told.append(verb)
            return getattr(self.actor, verb)(*arguments)

    def get(self, result, *_, **__):
        return result

    call = send

    def await_return(self) -> None:
        pass


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A folder, and an object store of this process."""
    store = SimpleNamespace(put=lambda found: found, get=lambda found: found)
    monkeypatch.setattr(engine_module, "import_ray", lambda: store)
    return save_checkpoint(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "model", {})


def remote_of(model: Path, rollout: dict | None = None, **changes) -> Direct:
    of_model = {"path": str(model), "device": "cpu"} | changes
    recipe = tiny_recipe(base=None, model=of_model, **({} if rollout is None else {"rollout": rollout}))
    return Direct(recipe)


def answers(engine) -> dict[str, list[int]]:
    sampling, found = SamplingParams(max_new_tokens=6), {}
    engine.submit([RolloutRequest(str(i), np.array([3, i, 4], np.int32), sampling) for i in range(4)])
    while (chunk := engine.next_chunk()) is not None:
        for uid, token in zip(chunk.uids, chunk.token_ids.tolist(), strict=True):
            found.setdefault(uid, []).append(token)
    return found


CUT = SamplingParams(top_p=0.7, max_new_tokens=30)


def cut_requests() -> list[RolloutRequest]:
    return [RolloutRequest(str(i), np.array([3, i, 4], np.int32), CUT, 7) for i in range(4)]


def drawn(engine: Streaming) -> dict[str, Tokens]:
    return {uid: tokens for uid, _, tokens in responses(engine, cut_requests())}


def drawn_here(model: CausalLM, **options: bool) -> dict[str, Tokens]:
    engine = TorchEngine(model, vocab_size=len(tiny.tokenizer()), **options)
    engine.record_masks(MOST_KEPT)
    return drawn(engine)


def assert_drawn_alike(found: dict[str, Tokens], expected: dict[str, Tokens], rounding: float = 0.0) -> None:
    """Tokens, masks and choices are the same, and log-probabilities but for `rounding`."""
    assert found.keys() == expected.keys()
    for uid, tokens in expected.items():
        masks, choices = masks_of(tokens), choices_of([(3, tokens)])
        assert masks is not None
        assert np.array_equal(found[uid].token_ids, tokens.token_ids)
        assert np.array_equal(masks_of(found[uid]), masks)
        assert found[uid].logprobs == pytest.approx(tokens.logprobs, rel=0, abs=rounding)
        assert (choices is None) == (choices_of([(3, found[uid])]) is None)
        assert choices is None or np.array_equal(choices_of([(3, found[uid])]), choices)


def test_engines_elsewhere_give_masks_if_a_stage_asks_for_them(model):
    """Also one that died, or sleeps until the first weights; and not for the next stage."""
    remote, here = remote_of(model, {"max_sequence": 60}), CausalLM.from_pretrained(model)
    [engine] = (pool := EngineFleet([remote], model).engine_pool()).engines
    rollout = FaultTolerantRollout(pool)
    assert all(masks_of(tokens) is None for tokens in drawn(rollout).values())
    engine.record_masks(MOST_KEPT)
    for died in (False, True):
        if died:
            remote.die()
            engine.come_back()
            engine.await_return()
        assert_drawn_alike(drawn(rollout), drawn_here(here))
    engine.sleep()
    remote.die()
    engine.come_back()
    engine.await_return()
    sync_weights(rollout, tiny.model(seed=2).weights(), 1)
    assert_drawn_alike(drawn(rollout), drawn_here(tiny.model(seed=2)))
    rollout = FaultTolerantRollout(EngineFleet([remote], model).engine_pool())
    assert all(masks_of(tokens) is None for tokens in drawn(rollout).values())


ROWS = {
    "in a string": (lambda rows: "masks", "are no whole ids"),
    "too few": (lambda rows: rows[:-1], "are no whole ids"),
    "of numbers": (lambda rows: np.zeros(len(rows), np.int32), "are no whole ids"),
    "cut": (lambda rows: with_first(rows, rows[0][:-1]), "are no whole ids"),
    "a list": (lambda rows: with_first(rows, [1, 2]), "are no whole ids"),
    "many": (lambda rows: with_first(rows, np.arange(1025, dtype="<i4").tobytes()), "1025 tokens, and 1024"),
    "not ascending": (lambda rows: with_first(rows, rows[0] * 2), "not ascending"),
    "negative": (lambda rows: with_first(rows, b"\xff" * 4), "not ascending"),
    "of another token": (lambda rows: with_first(rows, b"\0\0\1\0"), "leave out its token 0"),
}


def with_first(rows: np.ndarray, mask: object) -> np.ndarray:
    return np.array([mask, *rows[1:], None], object)[:-1]


@pytest.mark.parametrize("kind", ROWS)
def test_masks_that_no_engine_gives_are_refused(model, kind):
    change, words = ROWS[kind]
    remote = remote_of(model, {"max_sequence": 60})
    [engine] = EngineFleet([remote], model).engines
    engine.record_masks(MOST_KEPT)
    engine.submit(cut_requests())
    inner = remote.actor._engine
    chunk = inner.next_chunk()
    chunk.sampling_masks = change(chunk.sampling_masks)
    inner.next_chunk = lambda: chunk
    with pytest.raises(RolloutError, match=f"the engine gave tokens whose sampling masks .*{words}"):
        engine.next_chunk()


def test_an_engine_sleeps_until_the_next_weights_also_if_it_dies_meanwhile(model):
    remote = remote_of(model)
    pool = EngineFleet([remote], model).engine_pool()
    [engine], rollout = pool.engines, FaultTolerantRollout(pool)
    assert isinstance(engine, SleepingEngine)
    buffers = sum(buffer.nbytes for buffer in tiny.model().module.buffers())
    for version in (1, 2, 3):
        engine.sleep()
        assert remote.actor._engine.resident() == {"engine_weights": buffers, "engine_kv": 0}
        if version == 2:
            remote.die()
            remote.told.clear()
            engine.come_back()
            engine.await_return()
            assert "load" not in remote.told
            assert remote.actor._engine is None
        other = tiny.model(seed=version + 1)
        sync_weights(rollout, other.weights(), version)
        expected = answers(TorchEngine(other, vocab_size=len(tiny.tokenizer())))
        assert answers(rollout) == expected


def test_an_engine_on_its_way_back_sleeps_with_the_others(model):
    """It is told to while it loads, and takes weights after that."""
    remote = remote_of(model)
    fleet = EngineFleet([remote], model)
    [engine] = fleet.engines
    sync_weights(FaultTolerantRollout(fleet.engine_pool()), tiny.model(seed=2).weights(), 1)
    load = EngineActor.load

    def slept(self, asked):
        load(self, asked)
        engine.sleep()

    remote.die()
    remote.actor.load = slept.__get__(remote.actor)
    engine.come_back()
    engine.await_return()
    assert engine.lost is None
    assert remote.told[-1] == "sleep"
    assert remote.actor._engine.asleep


def test_another_fleet_loads_what_sleeps(model):
    """A trainer that is started anew knows nothing of who sleeps."""
    remote = remote_of(model)
    EngineFleet([remote], model).engines[0].sleep()
    pool = EngineFleet([remote], model).engine_pool()
    assert answers(FaultTolerantRollout(pool)) == answers(
        TorchEngine(CausalLM.from_pretrained(model), vocab_size=len(tiny.tokenizer()))
    )


def test_adapters_are_merged_by_the_engine_that_is_told_to(model):
    pytest.importorskip("peft")
    remote = remote_of(model, lora=LORA)
    rollout = FaultTolerantRollout(EngineFleet([remote], model, adapters=True).engine_pool())
    adapted = AdaptedLM(CausalLM.from_pretrained(model), LoRAConfig(**LORA), model)
    torch.manual_seed(0)
    for _, tensor in adapted.adapters():
        tensor.copy_(torch.randn_like(tensor) / 4)
    sync_weights(rollout, adapted.weights(), 1)
    assert rollout.take_counters()["pushed_bytes"] == 32 + sum(t.nbytes for _, t in adapted.adapters())
    plain = CausalLM.from_pretrained(model)
    plain.load_weights(adapted.merged_weights())
    expected = answers(TorchEngine(plain, vocab_size=len(tiny.tokenizer())))
    assert answers(rollout) == expected
    # The models of an evaluation are whole, whatever the recipe trains.
    rollout = FaultTolerantRollout(EngineFleet([remote], model).engine_pool())
    sync_weights(rollout, plain.weights(), 1)
    assert answers(rollout) == expected
