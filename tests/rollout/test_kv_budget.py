"""Keys and values within a budget of bytes: who waits, who can never fit, and that no token changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny

from opd.config.train import DecodeConfig
from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
MIB = DecodeConfig(kv_cache_mb=1)


def request(uid: str, tokens: int, stop: tuple[int, ...] = ()) -> RolloutRequest:
    params = SamplingParams(max_new_tokens=tokens - 3, stop_ids=stop)
    return RolloutRequest(uid, np.array([1, 2, 3], np.int32), params)


def model() -> CausalLM:
    """Two layers of 64 numbers a side and token: 1 KiB a token in float32, 1024 tokens in a MiB."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    return tiny.model(max_position_embeddings=2048, **shape)


def check_running(engine: TorchEngine, collect: Fixture) -> None:
    """Requests of 100 tokens and more: nine or ten fit."""
    asked = [request(f"{i}", 100 + i, stop=(i % 11,)) for i in range(24)]
    expected = collect(TorchEngine(model()).generate(asked))
    engine.submit(asked)
    chunks, most = [], 0
    while (chunk := engine.next_chunk()) is not None:
        chunks.append(chunk)
        most = max(most, len(set(chunk.uids)))
        assert engine._runner.cache.nbytes <= 1 << 20
    assert 8 <= most <= 10
    found = collect(chunks)
    assert {uid: r.token_ids for uid, r in found.items()} == {uid: r.token_ids for uid, r in expected.items()}


def test_as_many_run_as_may_grow_to_their_limits(collect: Fixture) -> None:
    check_running(TorchEngine(model(), settings=MIB), collect)


def test_as_many_run_on_a_device(gpu: Any, collect: Fixture) -> None:
    check_running(TorchEngine(gpu.model(model()), settings=MIB), collect)


def test_a_long_one_waits_for_room_and_then_others_for_it() -> None:
    engine = TorchEngine(model(), settings=MIB)
    engine.submit([request(f"short{i}", 20) for i in range(4)])
    engine.next_chunk()
    engine.submit([request("long", 1000), *(request(f"behind{i}", 20) for i in range(3))])
    running, order = [], []
    while (chunk := engine.next_chunk()) is not None:
        running.append(sorted(set(chunk.uids)))
        order += list(chunk.finished)
        assert engine._runner.cache.nbytes <= 1 << 20
    assert running[0] == [f"short{i}" for i in range(4)]
    assert ["long"] in running
    assert order == [*(f"short{i}" for i in range(4)), "long", *(f"behind{i}" for i in range(3))]


def test_what_can_never_fit_is_refused_in_one_sentence() -> None:
    engine = TorchEngine(model(), settings=MIB)
    with pytest.raises(RolloutError, match=r"'a' may take 1025 tokens, whose keys and values are 2 MiB, but"):
        engine.submit([request("a", 1025)])
    engine.submit([request("b", 1024)])
    assert engine.in_flight == ["b"]
