"""Batches written ahead of the learner: the right ones, never too old, whatever either side's speed."""

import threading
import time

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import RolloutError
from opd.rollout.ahead import RolloutAhead
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

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
            ahead.on_weights_updated(index)
        groups = ahead.pop_batch(index)
        assert [group.uid for group in groups] == [f"{index}.{i}" for i in range(BATCH)]
        time.sleep(delay(index))
        if not whole:
            with ahead.lock.between_chunks():
                push(engine, model, index + 1)
            ahead.on_weights_updated(index + 1)
        taken.append(groups)
    return taken


def versions(groups):
    return np.concatenate([s.policy_versions for group in groups for s in group.samples])


delays = st.lists(st.floats(0, 0.01), min_size=6, max_size=6)


WAYS = ("whole", "apart", "joined")
"""Batches of one version each; new weights in the middle; and of several batches at once."""


@settings(max_examples=cases(12))
@given(write=delays, learn_delays=delays, max_ahead=st.integers(1, 3), how=st.sampled_from(WAYS))
def test_no_token_is_too_old(build, write, learn_delays, max_ahead, how):
    model, _ = build()
    engine, whole = TorchEngine(model), how == "whole"
    max_ahead = 1 if whole else max_ahead
    ahead = RolloutAhead(engine, writer(lambda i: write[i % 6]), 0, max_ahead, joined=how == "joined")
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
    begun, pushed = threading.Event(), threading.Event()
    write = writer()

    class Paused:
        """Waits for new weights once it has its first tokens."""

        def __init__(self, gate):
            self.gate = gate

        def generate(self, requests):
            for step in self.gate.generate(requests):
                yield step
                begun.set()
                assert pushed.wait(30)

    ahead = RolloutAhead(engine, lambda gate, index: write(Paused(gate) if index else gate, index), 0)
    try:
        ahead.pop_batch(0)
        assert begun.wait(30)
        with ahead.lock.between_chunks():
            push(engine, model, 1)
        pushed.set()
        ahead.on_weights_updated(1)
        found = versions(ahead.pop_batch(1))
    finally:
        pushed.set()
        ahead.close()
    assert set(found.tolist()) == {0, 1}


class Spy:
    """An engine that is paced, and remembers what it was asked for and which requests it decoded together."""

    def __init__(self, engine):
        self.engine, self.together, self.asked = engine, [], []

    def submit(self, requests):
        self.asked += [(request.uid, len(request.prefix_ids)) for request in requests]
        self.engine.submit(requests)

    def next_chunk(self):
        chunk = self.engine.next_chunk()
        if chunk is not None:
            self.together.append(set(chunk.uids))
            time.sleep(0.001)
        return chunk

    def abort(self, uids):
        self.engine.abort(uids)


def samples_of(groups):
    return {sample.uid: sample for group in groups for sample in group.samples}


def test_responses_of_two_batches_are_decoded_together(build):
    """And are those that each batch gets alone, as their noise goes by uid and position."""
    model, _ = build()
    apart = TorchEngine(model)
    alone = {uid: s for i in range(3) for uid, s in samples_of(writer()(apart, i)).items()}
    spy = Spy(TorchEngine(model))
    ahead = RolloutAhead(spy, writer(), 0, max_ahead=2, joined=True)
    try:
        found = {}
        for index in range(3):
            found |= samples_of(ahead.pop_batch(index))
    finally:
        ahead.close()
    assert any(len({uid.split(".")[0] for uid in step}) > 1 for step in spy.together)
    assert found.keys() == alone.keys()
    for uid, sample in found.items():
        assert np.array_equal(sample.response_ids, alone[uid].response_ids)
        np.testing.assert_allclose(sample.rollout_logprobs, alone[uid].rollout_logprobs, atol=1e-4)


def test_a_batch_that_comes_later_joins_what_is_in_flight(build):
    """Nothing is begun twice for it."""
    model, _ = build()
    spy = Spy(TorchEngine(model))
    ahead = RolloutAhead(spy, writer(), 0, max_ahead=1, joined=True)
    try:
        ahead.pop_batch(0)
        with ahead.lock.between_chunks():
            ahead.on_weights_updated(1)
        ahead.pop_batch(1)
        ahead.pop_batch(2)
    finally:
        ahead.close()
    expected = [(f"{b}.{i}/{j}", 0) for b in range(3) for i in range(BATCH) for j in range(GROUP)]
    assert sorted(spy.asked) == expected


def test_an_error_of_the_engine_reaches_every_batch(build):
    model, _ = build()

    class Broken(Spy):
        def next_chunk(self):
            if len(self.together) == 3:
                self.engine.abort(self.engine.in_flight)
                raise RolloutError("the engine broke.")
            return super().next_chunk()

    ahead = RolloutAhead(Broken(TorchEngine(model)), writer(), 0, max_ahead=2, joined=True)
    try:
        for index in range(3):
            with pytest.raises(RolloutError, match="the engine broke"):
                ahead.pop_batch(index)
    finally:
        ahead.close()


def test_what_a_caller_leaves_is_not_decoded_on(build):
    """A `generate` may stop in the middle; the other callers' responses come all the same."""
    model, _ = build()
    spy = Spy(TorchEngine(model))

    def write(engine, index):
        if index:
            return writer()(engine, index)
        steps = engine.generate([RolloutRequest(f"left/{i}", np.arange(4), LONG, 0) for i in range(4)])
        for _ in range(2):
            next(steps)
        steps.close()
        return []

    ahead = RolloutAhead(spy, write, 0, max_ahead=1, joined=True)
    try:
        assert ahead.pop_batch(0) == []
        assert len(samples_of(ahead.pop_batch(1))) == BATCH * GROUP
    finally:
        ahead.close()
    assert not any(uid.startswith("left") for uid in spy.together[-1])


def test_an_error_of_the_writer_reaches_the_learner(build):
    model, _ = build()

    def write(engine, index):
        if index:
            raise RolloutError("no more prompts.")
        return writer()(engine, index)

    ahead = RolloutAhead(TorchEngine(model), write, 0)
    assert ahead.pop_batch(0)
    with pytest.raises(RolloutError, match="no more prompts"):
        ahead.pop_batch(1)
    ahead.close()


@pytest.mark.parametrize("joined", [False, True])
def test_closing_stops_in_the_middle_of_a_batch(build, joined):
    model, _ = build()
    engine = TorchEngine(model)
    ahead = RolloutAhead(engine, writer(), 0, joined=joined)
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "rollout" and t.is_alive()]
    assert ahead.pending_uids <= {f"{b}.{i}/{j}" for b in (0, 1) for i in range(BATCH) for j in range(GROUP)}
    # The engine is free again.
    assert collect(engine, [EncodedPrompt("x", "d", np.arange(3, dtype=np.int32), None)], 1, LONG, 0)


def test_what_was_taken_may_be_forgotten(build):
    model, _ = build()
    engine = TorchEngine(model)
    ahead = RolloutAhead(engine, writer(), 0)
    try:
        ahead.pop_batch(0)
        with ahead.idle_engine(), ahead.lock.between_chunks():
            assert ahead.pending_uids == {f"1.{i}/{j}" for i in range(BATCH) for j in range(GROUP)}
    finally:
        ahead.close()


def test_zero_batches_ahead_is_refused(build):
    with pytest.raises(RolloutError, match="at least 1"):
        RolloutAhead(TorchEngine(build()[0]), writer(), 0, 0)


def until_begun(ahead: RolloutAhead, batches: int) -> None:
    over = time.monotonic() + 60
    while ahead._next < batches:
        assert time.monotonic() < over
        time.sleep(0.001)


def test_ranks_that_rest_first_write_what_one_of_them_has_begun(build):
    """One is held before it begins the batch at which the other already waits for its share."""
    meet = [threading.Barrier(2, timeout=60) for _ in range(3)]
    held, both, said = threading.Event(), threading.Barrier(2, timeout=60), []

    def agree(begun: int) -> int:
        said.append(begun)
        held.set()
        both.wait()
        return max(said)

    def writes(rank: int):
        def write(gate, index: int) -> list:
            meet[index].wait()
            if rank == 0 and index == 1:
                assert held.wait(60)
            return []

        return write

    engine = TorchEngine(build()[0])
    aheads = [RolloutAhead(engine, writes(rank), 0, max_ahead=2, agree=agree) for rank in (0, 1)]
    written: list[set[int]] = [set(), set()]

    def rest(rank: int) -> None:
        with aheads[rank].idle_engine():
            written[rank] = set(aheads[rank]._ready)

    threads = [threading.Thread(target=rest, args=(rank,)) for rank in (0, 1)]
    try:
        until_begun(aheads[0], 2)
        threads[0].start()
        assert held.wait(60)
        until_begun(aheads[1], 3)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert sorted(said) == [2, 3]
        assert written == [{0, 1, 2}] * 2
    finally:
        for barrier in (*meet, both):
            barrier.abort()
        for ahead in aheads:
            ahead.close()
