"""The simulated cluster: time is conserved, limits are right, ages are bounded, a seed fixes everything."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import ConfigError
from opd.pipelines.check.cluster import (
    Gpu,
    LayerCost,
    SimulatedCluster,
    decode_of,
    layer_cost,
    load_cluster,
    sync_seconds,
    train_efficiency,
    train_seconds,
)
from opd.pipelines.check.simulate import SimulationResult, TeacherPasses, simulate_cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "ten_teachers.yaml"
MODEL = {
    "parameters": 8e9,
    "layers": 4,
    "hidden_size": 512,
    "vocabulary": 32_000,
    "cache_bytes_per_token": 100_000,
}


def cluster(**changes: Any) -> SimulatedCluster:
    """Eight rollout GPUs in four engines, four that train, two with three teachers."""
    document: dict[str, Any] = {
        "gpu": {
            "tflops": 1000,
            "memory_gb": 192,
            "memory_gb_per_s": 8000,
            "link_gb_per_s": 400,
            "step_overhead_ms": 5,
        },
        "store": {"gb_per_s": 100, "gb_per_s_per_rank": 10},
        "ranks": {"rollout": 8, "per_engine": 2, "train": 4, "teachers": 2},
        "student": MODEL,
        "teacher": MODEL,
        "teachers": 3,
        "prefetch_gb": 8,
        "lengths": {"prompt": 100, "mean": 800, "sigma": 0.7, "longest": 4000},
        "work": {"prompts": 24, "samples_per_prompt": 2, "running_per_engine": 8, "steps": 5},
    }
    for name, change in changes.items():
        old = document.get(name)
        document[name] = old | change if isinstance(old, dict) else change
    return SimulatedCluster.model_validate(document)


clusters = st.builds(
    lambda schedule, ahead, seed, jitter, rollout, teachers, own, sigma: cluster(
        schedule=schedule,
        max_staleness=ahead,
        seed=seed,
        jitter=jitter,
        teachers=teachers,
        ranks={"rollout": rollout, "per_engine": 1, "teachers": own},
        lengths={"sigma": sigma},
    ),
    st.sampled_from(["in_turn", "ahead", "async"]),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 1.5]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 1.2]),
)


def check_conservation(given_cluster: SimulatedCluster, found: SimulationResult) -> None:
    for name, usage in found.usage.items():
        total = found.workers[name] * found.seconds
        assert usage.busy >= 0
        assert usage.stalled >= 0
        assert usage.busy + usage.stalled <= (1 + 1e-9) * total, name
    if "teachers" in found.usage:
        used = found.usage["teachers"]
        scoring = sum(batch.score_seconds for batch in found.batches)
        assert used.busy + used.stalled == pytest.approx(scoring)
    for number, batch in enumerate(found.batches):
        assert batch.unfinished == 0
        assert batch.opened <= batch.written <= batch.scored <= batch.learnt
        assert batch.stall_seconds <= batch.score_seconds * (1 + 1e-12)
        if number:
            assert batch.learnt > found.batches[number - 1].learnt
    assert len(found.batches) == given_cluster.work.steps


@given(clusters)
@settings(max_examples=60, deadline=None)
def test_time_is_conserved_and_no_token_is_older_than_allowed(some: SimulatedCluster):
    found = simulate_cluster(some)
    check_conservation(some, found)
    for number, batch in enumerate(found.batches):
        assert 0 <= batch.staleness <= some.batches_ahead
        for request in batch.requests:
            assert number - some.batches_ahead <= request.began_under <= number


def test_a_seed_fixes_everything_and_another_one_does_not():
    some = cluster(jitter=0.5, schedule="async", max_staleness=2)
    times = [
        [b.learnt for b in simulate_cluster(c).batches]
        for c in (some, some, some.model_copy(update={"seed": 1}))
    ]
    assert times[0] == times[1] != times[2]


def test_a_store_and_link_beyond_all_measure_leave_no_stall():
    fast = cluster(gpu={"link_gb_per_s": 1e9}, store={"gb_per_s": 1e9, "gb_per_s_per_rank": 1e9})
    found = simulate_cluster(fast)
    assert found.usage["teachers"].stalled < 1e-6 * found.usage["teachers"].busy
    busy = sum(
        4 * layer_cost(fast, *b.token_sums(slice(t, None, 3))).compute
        for b in found.batches
        for t in range(3)
    )
    assert found.usage["teachers"].busy == pytest.approx(busy)


def test_a_slow_store_makes_the_pass_as_long_as_reading():
    slow = cluster(store={"gb_per_s": 0.5})
    found = simulate_cluster(slow)
    load = layer_cost(slow, 1.0, 1.0).load
    for batch in found.batches[1:]:
        layers = 3 * slow.teacher.layers
        assert batch.score_seconds <= layers * load * 1.001
        assert batch.score_seconds >= (layers - 3) * load  # what lay in the window when the pass began


def test_in_turn_with_one_teacher_is_the_sum_of_its_parts():
    one = cluster(teachers=1, lengths={"sigma": 0.0}, ranks={"rollout": 1, "per_engine": 1, "teachers": 0})
    one = one.model_copy(update={"work": one.work.model_copy(update={"running_per_engine": 64})})
    found = simulate_cluster(one)
    decode, length, running = decode_of(one), 800, 48
    cached = running * 50 + running * length / 2
    prefill = running * 50 * 2 * one.student.parameters / (1e15 * one.gpu.prefill_efficiency)
    written = prefill + length * (decode.fixed_seconds(running) + decode.per_token * cached)
    for batch in found.batches[1:]:
        assert batch.written - batch.opened == pytest.approx(written, rel=1e-6)
        assert batch.train_seconds == pytest.approx(train_seconds(one, *batch.token_sums()))
        whole = batch.learnt - batch.opened
        assert whole == pytest.approx(
            written + batch.score_seconds + batch.train_seconds + sync_seconds(one), rel=1e-6
        )


def test_writing_ahead_is_never_slower_and_hides_the_shorter_side():
    steps = {
        name: simulate_cluster(cluster(schedule=name)).step_seconds for name in ("in_turn", "ahead", "async")
    }
    assert steps["ahead"] < steps["in_turn"]
    longer = simulate_cluster(cluster(schedule="async", max_staleness=4, work={"steps": 12})).step_seconds
    assert longer <= simulate_cluster(cluster(schedule="ahead", work={"steps": 12})).step_seconds * 1.001


def test_more_engines_write_faster_until_the_longest_response_sets_the_time():
    times = []
    for count in (1, 2, 4, 8, 64):
        found = simulate_cluster(cluster(ranks={"rollout": count, "per_engine": 1}))
        times.append(found.batches[0].written)
        longest = max(request.length for request in found.batches[0].requests)
        assert times[-1] >= longest * 5e-3
    assert times == sorted(times, reverse=True)


def test_the_pass_by_hand():
    layers = [LayerCost(10, 2.0, 3.0)] * 3
    empty = TeacherPasses(0.0, ahead=False).run_pass(5.0, layers)
    assert (empty.end, empty.busy, empty.stalled) == (5 + 3 * 5, 9, 6)  # nothing is read ahead
    ahead = TeacherPasses(10.0, ahead=False).run_pass(5.0, layers)
    assert (ahead.end, ahead.stalled) == (5 + 2 + 9, 2)
    early = TeacherPasses(10.0)
    assert early.run_pass(5.0, layers).stalled == 0
    slow = TeacherPasses(10.0, ahead=False).run_pass(0.0, [LayerCost(10, 4.0, 3.0)] * 3)
    assert slow.end == 3 * 4 + 3


def test_the_command_prints_an_answer_and_says_what_does_not_fit(tmp_path, ends):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster().model_dump(mode="json", exclude_none=True)))
    assert load_cluster(path) == cluster()
    text = ends(0, ["plan", "--simulate", str(path)]).out
    assert "14 GPUs (8 rollout in engines of 2, 4 train, 2 teachers)" in text
    assert "staleness at most 0 updates (bound 0)" in text
    small = cluster(gpu={"memory_gb": 30})
    path.write_text(yaml.safe_dump(small.model_dump(mode="json", exclude_none=True)))
    assert "DOES NOT FIT" in ends(1, ["plan", "--simulate", str(path)]).out


def test_the_example_is_answered(ends):
    text = ends(0, ["plan", "--simulate", str(EXAMPLE)]).out
    assert "256 GPUs" in text
    assert "10 teachers of 1 T parameters" in text
    readme = (EXAMPLE.parent / "README.md").read_text()
    for line in text.splitlines():
        assert line in readme


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranks": {"per_engine": 3}}, "8 rollout ranks do not make engines of 3"),
        ({"ranks": {"colocated": True}}, "give the same count"),
        ({"teachers": 0}, "teachers"),
        ({"gpus": {}}, "gpus"),
        ({"seed": -1}, "seed"),
        ({"jitter": 1000.0}, "jitter"),
        ({"work": {"prompts": 1_000_000, "steps": 100_000}}, "100,000,000,000 requests in all steps"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, change, sentence):
    document = cluster().model_dump(mode="json", exclude_none=True)
    for name, values in change.items():
        document[name] = document[name] | values if name == "ranks" else values
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_cluster(path)
    assert "\n" not in str(caught.value)


def test_an_engine_too_small_for_the_student_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot hold the student and one request; raise ranks.per_engine"):
        simulate_cluster(cluster(gpu={"memory_gb": 4}))
    with pytest.raises(ConfigError, match="no such cluster file"):
        load_cluster(tmp_path / "missing.yaml")


@pytest.mark.parametrize(("used", "share"), [(1e6, 0.1), (0.6e9, 0.1), (8e9, 0.35), (1e12, 0.35)])
def test_small_students_train_at_a_smaller_share_of_the_peak(used, share):
    gpu = Gpu(tflops=1000, memory_gb=80, memory_gb_per_s=3000, link_gb_per_s=100)
    assert train_efficiency(gpu, used) == pytest.approx(share)
    assert train_efficiency(gpu.model_copy(update={"train_efficiency": 0.2}), used) == 0.2
    assert 0.1 < train_efficiency(gpu, 2e9) < train_efficiency(gpu, 4e9) < 0.35
