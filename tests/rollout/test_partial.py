"""Groups taken as they finish: each once, with the tokens of an undisturbed run; no length is favoured."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import arms
import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog
from packed import plain_choices
from test_expert_choices import engine_of, mixture

from opd.config.writing import RolloutConfig
from opd.errors import CheckpointError
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.partial import Carried, PartialRollouts
from opd.rollout.request_state import Recovery
from opd.rollout.streams import StoppedError
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, Sample, SamplingParams, no_ids

STEPS, SIZE, SEED = 7, 2, 5
DOMAINS = {"short": 4, "long": 3}
"""Domain -> prompts of each step."""
SAMPLING = {
    "short": SamplingParams(max_new_tokens=12, stop_ids=(arms.STOP,)),
    "long": SamplingParams(max_new_tokens=arms.LIMIT, stop_ids=(arms.STOP,)),
}


HOW: list[dict[str, Any]] = [{}, {"max_age": 1}, {"over_sample": 2.0}]


class Killed(BaseException):
    """What a process dies of."""


class DyingEngine(TorchEngine):
    """Counts the requests of each decode step, and dies before one of them."""

    dies_at = -1

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.rows: list[int] = []

    def next_chunk(self):
        if len(self.rows) == self.dies_at:
            raise Killed
        chunk = super().next_chunk()
        if chunk is not None:
            self.rows.append(len(chunk.uids))
        return chunk


def prompts_of(batch: int) -> list[EncodedPrompt]:
    rng = np.random.default_rng(batch)
    return [
        EncodedPrompt(f"{domain}/{batch * count + i}", domain, rng.integers(4, 20, 5).astype(np.int32), None)
        for domain, count in DOMAINS.items()
        for i in range(count)
    ]


def partial_rollouts(over_sample: float = 1.5, **settings: Any) -> PartialRollouts:
    early = RolloutConfig(over_sample=over_sample).early_prompts
    return PartialRollouts(prompts_of, SIZE, early, SAMPLING, SEED, **({"steps": STEPS} | settings))


Started = tuple[FaultTolerantRollout, DyingEngine, PartialRollouts, Callable[[int], None], int]


class Stage:
    """A learner whose weights are a function of their version, with a log and checkpoints that survive it."""

    def __init__(self, drift: float = 0.03, every: int = 2, **settings: Any) -> None:
        self.drift, self.every, self.settings = drift, every, settings
        self.log, self.checkpoints = MemoryLog(), [(0, [])]
        self.taken: dict[int, list] = {}
        """By step, its groups."""
        self.carried: dict[int, Carried] = {}

    def start(self, dies_at: int, **more: Any) -> Started:
        """An engine, what takes its groups, what gives it weights, and the step of the newest checkpoint."""
        model = arms.build_model()
        initial = [(name, tensor.detach().clone()) for name, tensor in model.weights()]
        engine = DyingEngine(model)
        engine.dies_at = dies_at
        rollout = FaultTolerantRollout([engine], self.log, recovery=Recovery(accept_newer=True))
        partial = partial_rollouts(**self.settings, **more)
        first, entries = self.checkpoints[-1]

        def push(version: int) -> None:
            rollout.pause()
            rollout.flush()
            rollout.update_weights([(n, t * (1 + self.drift * version)) for n, t in initial], version)
            rollout.resume()

        if first:
            push(first)
        partial.restore(first, entries)
        return rollout, engine, partial, push, first

    def run(self, dies_at: int = -1, most: int = STEPS) -> DyingEngine:
        """Go on from the newest checkpoint."""
        rollout, engine, partial, push, first = self.start(dies_at)
        for step in range(first, most):
            self.taken[step] = partial.write(
                rollout, step, rollout.policy_version, lambda: rollout.is_replaying
            )
            self.carried[step] = carried = partial.carried.pop(step)
            push(step + 1)
            if (step + 1) % self.every == 0:
                self.checkpoints.append((step + 1, *carried.by_rank))
                self.log.retire([uid for uid in self.log.entries if uid not in carried.uids])
        self.counters, self.decoded = rollout.take_counters(), engine.rows
        return engine

    def rows(self) -> list[tuple]:
        """Step, uid, tokens and versions of each response, in the order in which it is taken."""
        return [
            (step, s.uid, s.status, s.response_ids.tolist(), s.policy_versions.tolist())
            for step, groups in sorted(self.taken.items())
            for group in groups
            for s in group.samples
        ]


class AsyncStage(Stage):
    """Such a stage with asynchronous weights: those of a step arrive somewhere while it is written.

    `pace`: after how many chunks, in turn. With another pace an attempt writes other tokens.
    """

    def run(self, dies_at: int = -1, most: int = STEPS, pace: tuple[int, ...] = (9,)) -> DyingEngine:
        rollout, engine, partial, push, first = self.start(dies_at, log=self.log, asynchronous=True)
        for step in range(first, most):
            left = iter(range(pace[step % len(pace)]))

            def arrives(step: int = step, left: Any = left) -> bool:
                if rollout.policy_version < step and next(left, None) is None:
                    push(step)
                return rollout.is_replaying

            groups = partial.write(rollout, step, rollout.policy_version, arrives)
            if rollout.policy_version < step:
                push(step)
            for group in self.taken.setdefault(step, groups):  # a repeated step has the same
                assert [vars_of(s) for s in group.samples] == [
                    vars_of(s) for s in next(one for one in groups if one.uid == group.uid).samples
                ]
            assert len(groups) == len(self.taken[step])
            self.carried[step] = carried = partial.pop_carried(step)
            if (step + 1) % self.every == 0:
                self.checkpoints.append((step + 1, *carried.by_rank))
                kept = carried.uids | partial.record_uids()
                self.log.retire([uid for uid in self.log.entries if uid not in kept])
        self.counters, self.decoded = rollout.take_counters(), engine.rows
        return engine


def vars_of(sample: Sample) -> tuple:
    """What a learner sees of a sample."""
    arrays = (sample.response_ids, sample.policy_versions, sample.rollout_logprobs)
    return (sample.uid, sample.status, *(array.tolist() for array in arrays))


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple, list[tuple]]:
    """By settings, what stages take that nobody kills."""
    found = {}
    for how in HOW:
        stage = Stage(**how)
        stage.run()
        found[tuple(how.items())] = stage.rows()
    return found


@pytest.fixture(scope="module")
def steady() -> Stage:
    """A stage whose weights stay the same."""
    stage = Stage(drift=0.0)
    stage.run()
    return stage


@pytest.mark.parametrize("kind", [Stage, AsyncStage])
def test_every_group_is_taken_once_and_no_length_is_favoured(kind):
    """The answers are those of batches that wait for their last one."""
    stage = kind(drift=0.0)
    stage.run()
    engine = TorchEngine(arms.build_model())
    waited = [
        s
        for batch in range(STEPS)
        for group in collect(engine, prompts_of(batch), SIZE, SAMPLING, SEED)
        for s in group.samples
    ]
    found = {uid: (status, ids) for _, uid, status, ids, _ in stage.rows()}
    assert found == {s.uid: (s.status, s.response_ids.tolist()) for s in waited}
    assert len(stage.rows()) == len(waited) == STEPS * SIZE * sum(DOMAINS.values())
    for groups in stage.taken.values():
        assert Counter(group.domain for group in groups) == DOMAINS
    # The groups did finish out of order, and the long ones went on.
    assert sum(one.metrics["rollout/out_of_order"] for one in stage.carried.values()) > 10
    assert max(len(set(row[4])) for row in stage.rows()) > 2
    assert (
        stage.counters["requests"]
        == len(waited)
        == stage.counters["completed"] + stage.counters.get("truncated", 0)
    )


def test_to_leave_out_what_has_not_ended_would_favour_short_answers(steady):
    """What the exact counts above are worth: without the groups that went on, lengths are others."""
    rows = [(len(ids), len(set(versions))) for _, _, _, ids, versions in steady.rows()]
    at_once = [length for length, versions in rows if versions == 1]
    assert len(at_once) > len(rows) / 2
    assert np.mean(at_once) < 0.7 * np.mean([length for length, _ in rows])


def test_tokens_have_the_version_that_wrote_them(undisturbed):
    rows = undisturbed[()]
    for step, _, _, ids, versions in rows:
        assert len(ids) == len(versions)
        assert versions == sorted(versions)
        assert versions[-1] <= step
    assert any(versions[0] < versions[-1] for *_, versions in rows)


@pytest.mark.parametrize("max_age", [1, 2, None])
def test_a_step_waits_for_a_group_that_would_be_too_old(max_age):
    stage = Stage(max_age=max_age)
    stage.run()
    oldest = max(step - min(versions) for step, _, _, _, versions in stage.rows())
    if max_age is None:
        assert oldest > 2
    else:
        assert oldest == max_age
    assert len(stage.rows()) == STEPS * SIZE * sum(DOMAINS.values())
    assert max(one.metrics["rollout/age"] for one in stage.carried.values()) == oldest


def test_the_engine_stops_with_the_last_group_that_a_step_needs(steady):
    """So it makes fewer decode steps, and a smaller share of its slots is empty in them."""
    waiting = Stage(drift=0.0, over_sample=1.0)
    waited, rows = waiting.run().rows, steady.decoded
    assert len(rows) < 0.8 * len(waited)
    assert sum(rows) == sum(waited)
    assert sum(rows) / (len(rows) * max(rows)) > sum(waited) / (len(waited) * max(waited))


@settings(max_examples=cases(20))
@given(
    deaths=st.lists(st.integers(0, 240), min_size=1, max_size=3),
    every=st.integers(1, 4),
    how=st.sampled_from(HOW),
)
def test_killed_at_any_token_a_stage_takes_the_same_groups(undisturbed, deaths, every, how):
    stage = Stage(every=every, **how)
    for dies_at in deaths:
        try:
            stage.run(dies_at)
        except Killed:
            continue
        break
    stage.run()
    assert stage.rows() == undisturbed[tuple(how.items())]


@settings(max_examples=cases(40))
@given(
    deaths=st.lists(st.integers(0, 240), min_size=1, max_size=3),
    paces=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=4), min_size=4, max_size=4),
    every=st.integers(1, 8),
    how=st.sampled_from([*HOW, {"max_age": 2, "over_sample": 1.2}]),
)
def test_with_weights_that_come_at_any_token_a_step_is_repeated_as_it_was(deaths, paces, every, how):
    """An attempt that others follow, each at a pace of its own: none takes otherwise what one has taken."""
    stage = AsyncStage(every=every, **how)
    for dies_at, pace in zip(deaths, paces, strict=False):
        try:
            stage.run(dies_at, pace=tuple(pace))
        except Killed:
            continue
        break
    stage.run(pace=tuple(paces[-1]))
    assert len(stage.rows()) == len({row[1] for row in stage.rows()}) == STEPS * SIZE * sum(DOMAINS.values())
    for step, groups in stage.taken.items():
        assert Counter(group.domain for group in groups) == DOMAINS
        ages = [step - version for g in groups for s in g.samples for version in s.policy_versions.tolist()]
        assert min(ages) >= 0
        assert max(ages) <= how.get("max_age", STEPS) + 1


def test_a_record_that_does_not_fit_is_not_followed():
    """One of an attempt that had later checkpoints, or of steps of another size."""
    stage = AsyncStage()
    stage.run(most=3)
    stage.checkpoints = stage.checkpoints[:1]
    for step, uids in enumerate((["long/0"], ["nobody"], "long/0")):
        stage.log.retire([f"taken/{step}"])
        stage.log.open(RolloutRequest(f"taken/{step}", no_ids(), SamplingParams()), {"taken": uids})
    stage.log.retire([uid for uid in stage.log.entries if not uid.startswith("taken")])
    stage.taken.clear()
    stage.run()
    assert len(stage.rows()) == STEPS * SIZE * sum(DOMAINS.values())


@pytest.mark.parametrize("dies_at", [-1, 3])
def test_threads_take_turns_in_the_order_of_steps(dies_at):
    engine = DyingEngine(arms.build_model())
    engine.dies_at = dies_at
    log = MemoryLog()
    rollout = FaultTolerantRollout([engine], log)
    partial, found = partial_rollouts(log=log, asynchronous=True), {}

    def write(step: int) -> None:
        try:
            found[step] = partial.write(rollout, step, 0, lambda: rollout.is_replaying)
        except (StoppedError, Killed) as error:
            found[step] = type(error)

    threads = [threading.Thread(target=write, args=(step,)) for step in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if dies_at >= 0:
        assert found == {0: Killed, 1: StoppedError, 2: StoppedError}
    else:
        assert [len(found[step]) for step in range(3)] == [sum(DOMAINS.values())] * 3
        assert [log.entries[f"taken/{s}"].metadata["taken"] for s in range(3)] == [
            sorted(group.uid for group in found[step]) for step in range(3)
        ]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_take_every_group_once_and_as_many_as_the_step_has(count):
    """Each from its own share of the prompts, killed at another token, and its entries are of its groups."""
    stages = [Stage(share=lambda prompts, rank=rank: prompts[rank::count]) for rank in range(count)]
    for rank, stage in enumerate(stages):
        with pytest.raises(Killed):
            stage.run(30 + 10 * rank)
        stage.run()
    uids = [uid for stage in stages for _, uid, *_ in stage.rows()]
    assert len(uids) == len(set(uids)) == STEPS * SIZE * sum(DOMAINS.values())
    for step in range(STEPS):
        of_step = [Counter(group.domain for group in stage.taken[step]) for stage in stages]
        assert sum(of_step, Counter()) == DOMAINS
        assert of_step == [Counter(p.domain for p in prompts_of(step)[rank::count]) for rank in range(count)]
    early = math.ceil(DOMAINS["short"] / 2) + math.ceil(DOMAINS["long"] / 2)
    for step in range(STEPS - 1):
        assert sum(len(stage.carried[step].by_rank[0]) for stage in stages) == early
    assert any(stage.carried[step].metrics["rollout/out_of_order"] for stage in stages for step in (1, 2))


def test_steps_that_a_finished_stage_gets_later_take_every_group():
    stage = Stage(steps=4)
    stage.run(most=4)
    assert stage.checkpoints[-1] == (4, [])
    stage.settings["steps"] = 6
    stage.run(most=6)
    uids = [uid for _, uid, *_ in stage.rows()]
    assert len(uids) == len(set(uids)) == 6 * SIZE * sum(DOMAINS.values())
    assert all(len(groups) == sum(DOMAINS.values()) for groups in stage.taken.values())


@pytest.mark.parametrize(
    "entry",
    [
        ["0", "long/0", 0],
        [9, "long/0", 0],
        [0, "long/99", 0],
        [0, "long/0", 1],
        [0, "long/0", -1],
        [0, "long/0"],
        "long/0",
        None,
    ],
)
def test_a_checkpoint_of_another_run_is_refused(entry):
    with pytest.raises(CheckpointError, match="unfinished group"):
        partial_rollouts().restore(2, [entry])
    with pytest.raises(CheckpointError, match="unfinished group"):
        partial_rollouts().restore(2, entry)


def test_a_mixture_keeps_the_choices_of_every_token(tmp_path):
    """Those of a plain forward, also of groups that went on."""
    model, versions = mixture(), set()
    with TokenWAL(tmp_path) as log:
        rollout = FaultTolerantRollout([engine_of(model, max_running=64)], log)
        params = SamplingParams(max_new_tokens=40, stop_ids=(3, 4, 5))
        early = RolloutConfig(over_sample=2.0).early_prompts
        partial = PartialRollouts(prompts_of, SIZE, early, dict.fromkeys(DOMAINS, params), SEED, 4)
        for step in range(4):
            for group in partial.write(rollout, step, step, lambda: rollout.is_replaying):
                for sample in group.samples:
                    versions |= set(sample.policy_versions.tolist())
                    assert np.array_equal(sample.expert_choices, plain_choices(model, sample.token_ids))
            rollout.pause()
            rollout.flush()
            rollout.update_weights(model.weights(), step + 1)
            rollout.resume()
            assert partial.carried[step].metrics["rollout/carried"] == (7.0 if step < 3 else 0.0)
    assert versions == {0, 1, 2, 3}
