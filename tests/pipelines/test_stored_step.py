"""Merging with samples on disk: the step of samples in memory, one micro-batch in memory at a time."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import tiny_recipe

from opd.config import DistillConfig
from opd.errors import ConfigError, RolloutError, StorageError, TrainingError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.rollout_metrics import staleness_metrics
from opd.pipelines.stored import batch as stored_batch
from opd.pipelines.stored.batch import StoredBatch, written_by_all
from opd.pipelines.stored.files import SampleFiles, rows_by_uid
from opd.pipelines.stored.samples import check_stored
from opd.pipelines.stored.step import FIELDS, StoredSettings, StoredStep
from opd.ranks import Ranks
from opd.rewards.functions import wrap_reward
from opd.rewards.runner import RewardRunner
from opd.storage.hidden_cache import HiddenStateCache
from opd.storage.trajectories import TrajectoryBatch, TrajectoryUnion
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.torch_teacher import TorchTeacher
from opd.train.distill_terms import build_distill_term
from opd.train.plan_cost import CostModel, DeviceBudget
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, SampleGroup, TokenTerms

LENGTHS = [(3, 4), (5, 1), (2, 37), (4, 0), (6, 3), (1, 5), (2, 9)]
TEACHERS = ["a", "b", "a", "b", "b", "a", "b"]
SETTINGS = StoredSettings(CostModel(), DeviceBudget(1 << 20, max_tokens=16), 128, {"a": 0.25, "b": 0.75})


def samples():
    made = tiny.samples(LENGTHS, teachers=TEACHERS)
    rng = np.random.default_rng(5)
    for sample in made:
        sample.loss_mask = rng.random(len(sample.response_ids)) < 0.8
    return made


@contextmanager
def holding(files: SampleFiles, made: Sequence[Sample]) -> Iterator[tuple[TrajectoryUnion, np.ndarray]]:
    """`made` as batch 0 on disk, and their rows."""
    uids = [sample.uid for sample in made]
    files.put(made, 0, {sample.group_uid: "asked" for sample in made}, {uid: 0 for uid in uids})
    with files.view() as union:
        found = rows_by_uid(union, 0)
        yield union, np.array([found[uid] for uid in uids], np.int64)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for i, name in enumerate(("a", "b")):
        save_checkpoint(tiny.model(seed=10 + i), tiny.tokenizer(), folder / name, {})
    return {name: TorchTeacher(name, folder / name, sequence_chunk=16) for name in ("a", "b")}


def open_schedule(teachers, cache=None) -> TeacherSchedule:
    return TeacherSchedule(teachers, Router({"a": {"a": 1.0}, "b": {"b": 1.0}}, "one_hot"), cache=cache)


def open_backend(schedule, **memory) -> TorchBackend:
    term = build_distill_term(DistillConfig(), schedule)
    assert term is not None
    return TorchBackend(tiny.model(0), tiny.training([term], 0.7, max_tokens=16, **memory))


def gradient(backend: TorchBackend) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in backend.model.module.parameters()])


@pytest.fixture(scope="module")
def in_memory(teachers):
    """Gradient and metrics of the step as one batch in memory."""
    schedule, made = open_schedule(teachers), samples()
    schedule.assign(made)
    schedule.score(made)
    terms = []
    counts = {name: sum(s.trainable_tokens for s in made if s.teacher == name) for name in ("a", "b")}
    for sample in made:
        term = TokenTerms.zeros(len(sample.response_ids))
        share = SETTINGS.shares[sample.teacher] / counts[sample.teacher]
        term.kl_weight = np.where(sample.loss_mask, share, 0).astype(np.float32)
        terms.append(term)
    backend = open_backend(schedule)
    metrics = backend.forward_backward(RolloutBatch(made, terms))
    return gradient(backend), metrics


@pytest.mark.parametrize("cached", [True, False])
def test_a_stored_step_is_the_step_in_memory(teachers, in_memory, tmp_path, cached):
    cache = CachedScores(HiddenStateCache(tmp_path / "cache", quota_bytes=1 << 22)) if cached else None
    schedule = open_schedule(teachers, cache)
    backend = open_backend(schedule, sequence_chunk=16)
    with SampleFiles.open(tmp_path / "store") as files, holding(files, samples()) as (store, rows):
        step = StoredStep(store, rows, ["a", "b"], SETTINGS)
        plan = step.plan()
        assert store.counters.bytes_read == 0
        step.score(schedule, plan)
        assert schedule.counters.teacher_tokens == (sum(r for _, r in LENGTHS) if cached else 0)
        metrics = step.train(backend, schedule, plan)
    torch.testing.assert_close(gradient(backend), in_memory[0], rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(in_memory[1], rel=1e-4)
    counters = schedule.take_counters()
    assert counters["teacher_tokens"] == sum(r for _, r in LENGTHS)
    assert counters["head_loads"] == 2
    assert counters["resident_heads_peak"] == 1


def test_a_micro_batch_is_let_go_before_the_next_but_one_is_read(teachers, tmp_path, monkeypatch):
    schedule = open_schedule(teachers, CachedScores(HiddenStateCache(tmp_path / "c", quota_bytes=1 << 22)))
    backend = open_backend(schedule)
    held: set[int] = set()
    peaks: list[int] = []
    load, release = TrajectoryBatch.load, TrajectoryBatch.release

    def loading(batch, fields):
        held.add(id(batch))
        peaks.append(len(held))
        return load(batch, fields)

    monkeypatch.setattr(TrajectoryBatch, "load", loading)
    monkeypatch.setattr(TrajectoryBatch, "release", lambda b: (held.discard(id(b)), release(b))[1])
    with SampleFiles.open(tmp_path / "store") as files, holding(files, samples()) as (store, rows):
        step = StoredStep(store, rows, ["a", "b"], SETTINGS)
        plan = step.plan()
        assert len(plan) >= 4
        step.score(schedule, plan)
        assert not schedule._rows
        step.train(backend, schedule, plan)
        assert len(peaks) == len(plan)
        assert max(peaks) <= 2
        assert not held
        read = int(store.heavy_bytes(FIELDS)[step.rows].sum())
        assert read <= store.counters.bytes_read


def test_what_is_learnt_leaves_the_store_and_the_rest_is_there_for_the_next_attempt(tmp_path):
    made = samples()
    with SampleFiles.open(tmp_path / "store") as files:
        for number, sample in enumerate(made[:3]):
            files.put([sample], number, {sample.group_uid: "asked"}, {sample.uid: 0})
        files.retire_before(1)
    with SampleFiles.open(tmp_path / "store", keep=True) as files:
        groups = [files.group(sample.group_uid, "asked") for sample in made[:4]]
        assert groups == [{}, {0: "s1"}, {0: "s2"}, {}]
        with pytest.raises(RolloutError, match="response s1 to another prompt"):
            files.group(made[1].group_uid, "asked otherwise")
        with files.view() as union:
            assert list(union.table.uid) == ["s1", "s2"]
    with SampleFiles.open(tmp_path / "store") as files, files.view() as union:
        assert not len(union.table)


def test_empty_responses_are_refused(teachers, tmp_path):
    schedule = open_schedule(teachers)
    empty = tiny.samples([(3, 0), (2, 0)], teachers=["a", "b"])
    with SampleFiles.open(tmp_path / "store") as files, holding(files, empty) as (store, rows):
        step = StoredStep(store, rows, ["a", "b"], SETTINGS)
        with pytest.raises(TrainingError, match="all responses of this step are empty"):
            step.train(open_backend(schedule), schedule, step.plan())


def test_what_takes_samples_together_is_refused():
    check_stored(tiny_recipe())
    with pytest.raises(ConfigError, match=r"backend deepspeed takes a step's samples together"):
        check_stored(tiny_recipe(train={"backend": "deepspeed"}))
    with pytest.raises(ConfigError, match="to_batch is given the samples of a whole step"):
        check_stored(tiny_recipe(distill={"to_batch": "my_code:convert"}))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0, 1, 2, 5]))
def test_tokens_that_are_too_old_are_those_too_old_in_memory(seed, limit):
    """Responses of one policy and of several: metrics, counts, and the masks that are trained on."""
    rng, made = np.random.default_rng(seed), samples()
    for sample in made:
        count = len(sample.response_ids)
        sample.policy_versions = np.sort(rng.integers(1, 5, count)).astype(np.int32)
        if rng.random() < 0.5:
            sample.policy_versions[:] = rng.integers(1, 5)
        sample.loss_mask = rng.random(count) < 0.8
    with tempfile.TemporaryDirectory() as root, SampleFiles.open(Path(root)) as files:
        with holding(files, made) as (union, _):
            mine = [SampleGroup(s.group_uid, s.domain, [s]) for s in made]
            batch = StoredBatch.of(union, written_by_all(mine, Ranks()), Ranks())
            before = union.counters.bytes_read
            several = any(len(set(s.policy_versions.tolist())) > 1 and s.loss_mask.any() for s in made)
            found = batch.drop_stale(4, limit)
            assert (union.counters.bytes_read > before) == several
            step = StoredStep(union, batch.rows, ["a", "b"], SETTINGS, counted=batch.counted)
            read = [s for part in step.samples(open_schedule({}), step.plan()) for s in part]
        assert found == pytest.approx(staleness_metrics(made, 4, limit))  # drops them from `made`
        masks = {s.uid: s.loss_mask.tolist() for s in made if len(s.response_ids)}
        assert {s.uid: s.loss_mask.tolist() for s in read} == masks
        counts = {union.table.uid[row]: n for row, n in zip(step.rows, step.tokens.tolist(), strict=True)}
        assert counts == {uid: sum(mask) for uid, mask in masks.items()}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 30), st.sampled_from("ab")), min_size=1, max_size=20
    ),
    st.integers(1, 4),
)
def test_ranks_read_their_own_rows_and_each_teacher_together(drawn, size):
    made = tiny.samples([lengths[:2] for lengths in drawn], teachers=[teacher for *_, teacher in drawn])
    seen: list[list[list[Sample]]] = []
    with (
        tempfile.TemporaryDirectory() as root,
        SampleFiles.open(Path(root)) as files,
        holding(files, made) as (_, rows),
    ):
        for rank in range(size):
            ranks = Ranks()
            ranks.rank, ranks.size = rank, size
            with files.view() as union:
                step = StoredStep(union, rows, ["a", "b"], SETTINGS, data=ranks)
                plan = step.plan(7)
                assert union.counters.bytes_read == 0
                seen.append(list(step.samples(open_schedule({}), plan)))
                mine = {sample.uid for part in seen[-1] for sample in part}
                own = [row for row in rows.tolist() if union.table.uid[row] in mine]
                # The fields of a sample are read ahead, then handed out.
                assert union.counters.bytes_read == 2 * int(union.heavy_bytes(FIELDS)[own].sum())
    everyone = [sample.uid for rank in seen for part in rank for sample in part]
    assert sorted(everyone) == sorted(s.uid for s in made if len(s.response_ids))
    for together in zip(*seen, strict=True):
        assert len({sample.teacher for part in together for sample in part}) == 1


def test_rewards_are_those_in_memory_and_some_tokens_are_read_at_a_time(tmp_path, monkeypatch):
    """A function of a sample is given pieces, one of all completions all of its domain's."""
    monkeypatch.setattr(stored_batch, "_TOKENS", 10)
    together: list[int] = []

    def one(sample) -> float:
        return len(sample.text) + 0.5

    def many(completions, **columns) -> list[float]:
        together.append(len(completions))
        return [len(text) / max(map(len, completions)) for text in completions]

    functions = {"a": wrap_reward(one, "one"), "b": wrap_reward(many, "many")}
    rewards = RewardRunner(functions, tiny.tokenizer())
    made = samples()
    with SampleFiles.open(tmp_path / "store") as files, holding(files, made) as (union, _):
        mine = [SampleGroup(s.group_uid, s.domain, [s]) for s in made]
        batch = StoredBatch.of(union, written_by_all(mine, Ranks()), Ranks())
        leased: list[list[int]] = []
        lease = TrajectoryUnion.lease
        monkeypatch.setattr(
            TrajectoryUnion, "lease", lambda u, rows: (leased.append(list(rows)), lease(u, rows))[1]
        )
        batch.reward(rewards)
        assert len(leased) > 2
        assert together == [TEACHERS.count("b")]
        found = [sample.reward for sample in batch.samples]
    rewards.score(made)
    assert found == [sample.reward for sample in made]
    assert [len(sample.response_ids) for sample in batch.samples] == [0] * len(made)


def test_a_full_disk_ends_the_step_and_leaves_the_store_whole(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SampleFiles.open(tmp_path / "store") as files:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
        try:
            with pytest.raises(StorageError, match="given up; free disk space"):
                holding(files, tiny.samples([(10, 20_000)])).__enter__()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with holding(files, samples()) as (store, rows), store.lease(rows) as batch:
            assert [batch.sample(row).uid for row in batch.rows] == [s.uid for s in samples()]
