"""pause -> keep keys and values -> release -> resume, by call and by signal, in one process and in two."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import preempted_process
import pytest
import tiny
import torch
from faulty_engines import assert_same
from memory_log import MemoryLog

from opd.errors import RolloutError
from opd.pipelines.stages.stage_rollout import KVFile
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.preemption import PreemptedError, Preemption
from opd.rollout.request_state import Recovery
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import SamplingParams, Status

Fixture = Callable[..., Any]

FAMILIES = ["llama", "qwen3", "gemma2", "gemma4_text", "llama4_text", "deepseek_v32"]
LONGEST_PROMPT = 14
"""Of `requests_of`."""


class MemoryKV:
    """Keeps tensors in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] | None = None
        self.saves = 0

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.kept, self.saves = dict(tensors), self.saves + 1

    def load(self) -> dict[str, torch.Tensor] | None:
        return self.kept

    def clear(self) -> None:
        self.kept = None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [20, 5])
def test_suspend_and_wake_change_nothing(
    family: str, slots: int, build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build(family)
    requests = requests_of(6, samples=2, seed=3)
    undisturbed = TorchEngine(model, max_running=slots)
    expected = collect(undisturbed.generate(requests))
    store = MemoryKV()
    engine = TorchEngine(model, max_running=slots)
    rollout = FaultTolerantRollout([engine], MemoryLog(), recovery=Recovery(store))
    steps, seen = rollout.generate(requests), []
    for number, step in enumerate(steps):
        seen.append(step)
        if number in (0, 3, 8):
            rollout.suspend()
            assert engine._runner.cache.nbytes == 0
            with pytest.raises(RolloutError, match="paused"):
                next(steps)
            rollout.wake()
    assert_same(collect(seen), expected)
    assert store.saves == 3
    assert store.kept is None
    assert engine.restored_tokens > 0
    # With few slots, a prompt whose next requests wait for a slot is computed once more each time.
    again = 0 if slots == 20 else 3 * LONGEST_PROMPT
    assert engine.prefilled_tokens <= undisturbed.prefilled_tokens + again


def test_without_a_store_the_cache_is_prefilled_again(
    build: Fixture, collect: Fixture, requests_of: Fixture, caplog
) -> None:
    caplog.set_level("INFO", "opd")
    model, _ = build()
    requests = requests_of(5, samples=2, seed=3)
    undisturbed = TorchEngine(model)
    expected = collect(undisturbed.generate(requests))
    engine = TorchEngine(model)
    rollout = FaultTolerantRollout([engine], MemoryLog())
    steps, seen = rollout.generate(requests), []
    for number, step in enumerate(steps):
        seen.append(step)
        if number == 4:
            rollout.suspend()
            rollout.wake()
    assert caplog.messages == ["keys and values are computed again from the tokens"]
    responses = collect(seen)
    assert {u: r.token_ids for u, r in responses.items()} == {u: r.token_ids for u, r in expected.items()}
    assert engine.restored_tokens == 0
    assert engine.prefilled_tokens > undisturbed.prefilled_tokens


@pytest.mark.parametrize("slots", [20, 5])
def test_another_process_continues_from_the_store(
    slots: int, build: Fixture, collect: Fixture, requests_of: Fixture, tmp_path: Path, caplog
) -> None:
    caplog.set_level("INFO", "opd")
    model, _ = build()
    requests = requests_of(6, samples=2, seed=3)
    undisturbed = TorchEngine(model, max_running=slots)
    expected = collect(undisturbed.generate(requests))
    log, engines = MemoryLog(), []
    for stop_after in (2, 3, 4, 100):
        asked = Preemption()
        engine = TorchEngine(build()[0], max_running=slots)
        engines.append(engine)
        rollout = FaultTolerantRollout(
            [engine], log, preemption=asked, recovery=Recovery(KVFile(tmp_path / "kv"))
        )
        seen = []
        try:
            for step in rollout.generate(requests):
                seen.append(step)
                fresh = rollout.counters["tokens"] > 0
                if fresh and rollout.counters["tokens"] >= stop_after * 3:
                    asked.stop()
        except PreemptedError:
            pass
        else:
            break
    else:
        pytest.fail("the rollout never came to its end")
    assert_same(collect(seen), expected)
    assert "restored keys and values" in caplog.text
    assert not (tmp_path / "kv").exists()
    again = 0 if slots == 20 else 3 * LONGEST_PROMPT
    assert sum(e.prefilled_tokens for e in engines) <= undisturbed.prefilled_tokens + again
    assert all(e.restored_tokens for e in engines[1:])


def test_other_weights_refuse_kept_keys_and_values(
    build: Fixture, collect: Fixture, requests_of: Fixture, caplog
) -> None:
    caplog.set_level("INFO", "opd")
    model, _ = build()
    requests = requests_of(4, sampling=SamplingParams(max_new_tokens=8))
    log, store = MemoryLog(), MemoryKV()
    first = FaultTolerantRollout([TorchEngine(model)], log, recovery=Recovery(store))
    steps = first.generate(requests)
    for _ in range(3):
        next(steps)
    first.suspend()
    other, _ = build(seed=5)
    second = FaultTolerantRollout([TorchEngine(other, version=1)], log, recovery=Recovery(store))
    responses = collect(second.generate(requests))
    assert all(response.versions == [0] * 3 + [1] * 5 for response in responses.values())
    assert "prefills" in caplog.messages[0]
    assert store.kept is None


def test_a_damaged_store_is_no_error(build: Fixture, tmp_path: Path) -> None:
    store = KVFile(tmp_path / "kv")
    store.path.write_bytes(b"not tensors")
    assert store.load() is None
    with pytest.raises(RolloutError, match="not readable"):
        TorchEngine(build()[0]).restore({"tokens": torch.zeros(1)})


def test_a_short_grace_period_leaves_keys_and_values_behind(build: Fixture, requests_of: Fixture) -> None:
    model, _ = build()
    asked, store = Preemption(grace=1e-9), MemoryKV()
    rollout = FaultTolerantRollout(
        [TorchEngine(model)], MemoryLog(), preemption=asked, recovery=Recovery(store)
    )
    steps = rollout.generate(requests_of(3, sampling=SamplingParams(max_new_tokens=8)))
    next(steps)
    asked.stop()
    with pytest.raises(PreemptedError, match="--resume"):
        next(steps)
    assert store.saves == 0


def test_weights_change_in_flight_and_every_token_keeps_its_version(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    generator = torch.Generator().manual_seed(1)
    new = [(name, w + 0.1 * torch.randn(w.shape, generator=generator)) for name, w in model.weights()]
    log = MemoryLog()
    requests = requests_of(4, samples=2, sampling=SamplingParams(max_new_tokens=9))
    rollout = FaultTolerantRollout([TorchEngine(model, version=3)], log)
    steps, seen = rollout.generate(requests), []
    for number, step in enumerate(steps):
        seen.append(step)
        if number == 3:
            rollout.pause()
            rollout.flush()
            assert rollout.update_weights(new, 4) == model.quick_digest()
            rollout.resume()
    for uid, response in collect(seen).items():
        assert response.versions == [3] * 4 + [4] * 5
        logged = log.find(uid)
        assert logged is not None
        assert logged.policy_versions.tolist() == response.versions


def test_abort_stops_running_and_waiting_requests_alone(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> None:
    model, _ = build()
    requests = requests_of(12, sampling=SamplingParams(max_new_tokens=10))
    expected = collect(TorchEngine(model, max_running=6).generate(requests))
    engine = TorchEngine(model, max_running=6)
    engine.submit(requests)
    seen = [engine.next_chunk() for _ in range(3)]
    engine.abort(["0/0", "5/0", "11/0", "nobody"])
    while (chunk := engine.next_chunk()) is not None:
        seen.append(chunk)
    responses = collect(seen)
    for uid, response in responses.items():
        if uid in ("0/0", "5/0"):
            assert response.status is None
            assert response.token_ids == expected[uid].token_ids[:3]
        else:
            assert response.status is Status.TRUNCATED
            assert response.token_ids == expected[uid].token_ids
            np.testing.assert_allclose(response.logprobs, expected[uid].logprobs, atol=1e-5)
    assert responses.keys() == expected.keys() - {"11/0"}


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    pytest.fail(f"the process ended without saying {start!r}")


@pytest.mark.parametrize("end", [Preemption.wake, Preemption.stop])
def test_a_suspended_rollout_waits_until_it_is_woken_or_stopped(
    end: Callable[[Preemption], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, waits = Preemption(), []

    def pass_time(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            end(asked)

    monkeypatch.setattr("opd.rollout.preemption.time", SimpleNamespace(sleep=pass_time, monotonic=float))
    asked.wait()
    asked.suspend()
    asked.wait()
    assert len(waits) == 3


def test_asking_again_does_not_extend_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("opd.rollout.preemption.time", SimpleNamespace(monotonic=lambda: now[0]))
    asked = Preemption(grace=10.0)
    asked.stop()
    now[0] = 107.0
    asked.stop()
    assert asked.seconds_left() == 3.0


def test_signals_suspend_wake_and_stop_a_real_process(tmp_path: Path, collect: Fixture, caplog) -> None:
    expected = collect(TorchEngine(tiny.model()).generate(preempted_process.requests()))
    with started([sys.executable, preempted_process.__file__, str(tmp_path)]) as process:
        read_until(process, "step 5")
        os.kill(process.pid, signal.SIGUSR1)
        read_until(process, "made room")
        time.sleep(0.2)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGUSR2)
        read_until(process, "step 9")
        os.kill(process.pid, signal.SIGTERM)
        assert "--resume" in read_until(process, "preempted")
        assert process.wait(300) == 0
    caplog.set_level("INFO", "opd")
    with TokenWAL(tmp_path / "wal") as log:
        held = [log.find(uid) for uid in log.uids()]
        engine = TorchEngine(tiny.model())
        rollout = FaultTolerantRollout([engine], log, recovery=Recovery(KVFile(tmp_path / "kv")))
        responses = collect(rollout.generate(preempted_process.requests()))
    assert all(entry is not None and len(entry.token_ids) >= 9 for entry in held)
    assert caplog.messages == ["engine 0 restored keys and values of 6 sequences"]
    assert engine.prefilled_tokens == 0
    assert_same(responses, expected)


def test_a_process_that_does_not_leave_in_time_is_ended() -> None:
    code = (
        "import time\nfrom opd.rollout.preemption import Preemption\n"
        "with Preemption(grace=0.2).handle_signals():\n    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    with started([sys.executable, "-c", code]) as process:
        read_until(process, "ready")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(300) == 143
