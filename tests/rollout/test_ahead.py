"""Batches written ahead of the learner: the right ones, never too old, whatever either side's speed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import RolloutError
from opd.rollout.ahead import RolloutAhead, Turnstile
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams

VOCABULARY = 24
LONG = SamplingParams(max_new_tokens=24)
BATCH, GROUP = 3, 2


def writer(delay=lambda index: 0.0):
    """Writes batch `index`: prompts and uids are functions of it."""

    def write(engine, index):
        time.sleep(delay(index))
        rng = np.random.default_rng(index)
        prompts = [
            EncodedPrompt(f"{index}.{i}", "d", rng.integers(0, VOCABULARY, 5).astype(np.int32), None)
            for i in range(BATCH)
        ]
        return collect(engine, prompts, GROUP, LONG, seed=0)

    return write


def push(engine, model, version):
    """New weights: those there are, scaled a little, so that every version samples differently."""
    engine.pause()
    engine.flush()
    scaled = [(name, tensor.detach() * 1.01) for name, tensor in model.weights()]
    engine.update_weights(scaled, version)
    engine.resume()


def learn(engine, model, ahead, steps, *, whole, delay=lambda index: 0.0):
    """Take and learn `steps` batches; returns them. `whole`: as the schedule that writes one batch ahead."""
    taken = []
    for index in range(steps):
        if whole and index:
            ahead.wait(index)
            push(engine, model, index)
            ahead.learnt(index)
        groups = ahead.take(index)
        assert [group.uid for group in groups] == [f"{index}.{i}" for i in range(BATCH)]
        time.sleep(delay(index))
        if not whole:
            with ahead.turnstile.between():
                push(engine, model, index + 1)
            ahead.learnt(index + 1)
        taken.append(groups)
    return taken


def versions(groups):
    return np.concatenate([s.policy_versions for group in groups for s in group.samples])


delays = st.lists(st.floats(0, 0.01), min_size=6, max_size=6)


@settings(max_examples=8)
@given(write=delays, learn_delays=delays, max_ahead=st.integers(1, 3), whole=st.booleans())
def test_no_token_is_too_old(build, write, learn_delays, max_ahead, whole):
    model, _ = build()
    engine = TorchEngine(model)
    max_ahead = 1 if whole else max_ahead
    ahead = RolloutAhead(engine, writer(lambda i: write[i % 6]), 0, max_ahead)
    try:
        taken = learn(engine, model, ahead, 6, whole=whole, delay=lambda i: learn_delays[i])
    finally:
        ahead.close()
    for index, groups in enumerate(taken):
        ages = index - versions(groups)
        assert (ages >= 0).all()
        assert (ages <= max_ahead).all()
        if whole:
            assert len(set(versions(groups).tolist())) == 1


def test_one_batch_ahead_is_reproducible(build):
    def run(write_delay, learn_delay):
        model, _ = build()
        engine = TorchEngine(model)
        ahead = RolloutAhead(engine, writer(lambda i: write_delay), 0)
        try:
            return learn(engine, model, ahead, 4, whole=True, delay=lambda i: learn_delay)
        finally:
            ahead.close()

    slow_writer, slow_learner = run(0.02, 0.0), run(0.0, 0.02)
    for index, (a, b) in enumerate(zip(slow_writer, slow_learner, strict=True)):
        assert set(versions(a).tolist()) == {max(index - 1, 0)}
        for one, other in zip(a, b, strict=True):
            for x, y in zip(one.samples, other.samples, strict=True):
                assert np.array_equal(x.response_ids, y.response_ids)


def test_weights_change_in_the_middle_of_responses(build):
    model, _ = build()
    engine = TorchEngine(model)
    begun = threading.Event()
    write = writer()

    def slow(gate, index):
        if index == 1:
            begun.set()
        return write(Slow(gate), index)

    class Slow:
        def __init__(self, gate):
            self.gate = gate

        def generate(self, requests):
            for step in self.gate.generate(requests):
                time.sleep(0.002)
                yield step

    ahead = RolloutAhead(engine, slow, 0)
    try:
        ahead.take(0)
        assert begun.wait(10)
        time.sleep(0.01)
        with ahead.turnstile.between():
            push(engine, model, 1)
        ahead.learnt(1)
        found = versions(ahead.take(1))
    finally:
        ahead.close()
    assert set(found.tolist()) == {0, 1}


def test_an_error_of_the_writer_reaches_the_learner(build):
    model, _ = build()

    def write(engine, index):
        if index:
            raise RolloutError("no more prompts.")
        return writer()(engine, index)

    ahead = RolloutAhead(TorchEngine(model), write, 0)
    assert ahead.take(0)
    with pytest.raises(RolloutError, match="no more prompts"):
        ahead.take(1)
    ahead.close()


def test_closing_stops_in_the_middle_of_a_batch(build):
    model, _ = build()
    engine = TorchEngine(model)
    ahead = RolloutAhead(engine, writer(), 0)
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "rollout" and t.is_alive()]
    assert ahead.untaken <= {f"{b}.{i}/{j}" for b in (0, 1) for i in range(BATCH) for j in range(GROUP)}
    # The engine is free again.
    assert collect(engine, [EncodedPrompt("x", "d", np.arange(3, dtype=np.int32), None)], 1, LONG, 0)


def test_what_was_taken_may_be_forgotten(build):
    model, _ = build()
    engine = TorchEngine(model)
    ahead = RolloutAhead(engine, writer(), 0)
    try:
        ahead.take(0)
        with ahead.idle(), ahead.turnstile.between():
            assert ahead.untaken == {f"1.{i}/{j}" for i in range(BATCH) for j in range(GROUP)}
    finally:
        ahead.close()


def test_the_learner_gets_in_between_fast_steps():
    turnstile, stop, steps = Turnstile(), threading.Event(), []

    def run():
        while not stop.is_set():
            with turnstile.step():
                steps.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(50):
            with turnstile.between():
                before = len(steps)
                time.sleep(0.0005)
                assert len(steps) == before
    finally:
        stop.set()
        thread.join()


def test_zero_batches_ahead_is_refused(build):
    with pytest.raises(RolloutError, match="at least 1"):
        RolloutAhead(TorchEngine(build()[0]), writer(), 0, 0)
