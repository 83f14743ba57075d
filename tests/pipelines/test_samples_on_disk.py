"""Samples on disk: what they are in memory, two micro-batches at a time."""

import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import NO_CURVE, tiny_recipe

from opd.config import DistillConfig
from opd.errors import RolloutError, StorageError, TrainingError
from opd.metrics import read_metrics
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import samples_on_disk
from opd.pipelines.stages.sample_files import SampleFiles, SignalFiles, gather_uids, groups_of
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.samples_on_disk import SamplesOnDisk
from opd.ranks import Ranks
from opd.rollout.rewards import RewardRunner, wrap_reward
from opd.storage.node_cache import NodeCache
from opd.storage.sample_store import SampleBatch, SampleStore
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.train.distill_terms import build_distill_term
from opd.train.packing import Shares
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, SampleGroup, TokenTerms

LENGTHS = [(3, 4), (5, 1), (2, 37), (4, 0), (6, 3), (1, 5), (2, 9)]
TEACHERS = ["a", "b", "a", "b", "b", "a", "b"]


def samples():
    made = tiny.samples(LENGTHS, teachers=TEACHERS)
    rng = np.random.default_rng(5)
    for sample in made:
        sample.loss_mask = rng.random(len(sample.response_ids)) < 0.8
    return made


@contextmanager
def holding(folder: Path, made: Sequence[Sample], backend=None, ranks=None) -> Iterator[SamplesOnDisk]:
    """`made` as batch 0 on disk, each sample its own group."""
    with SampleFiles.open(folder) as files:
        uids = [sample.uid for sample in made]
        files.put(made, 0, {sample.group_uid: "asked" for sample in made}, dict.fromkeys(uids, 0))
        mine = [SampleGroup(s.group_uid, s.domain, [s]) for s in made]
        store = files.open_view()
        groups, rows = groups_of(store, gather_uids(mine, Ranks()))
        with SignalFiles(folder / "signals") as signals:
            yield SamplesOnDisk(groups, rows, store, signals, backend, ranks)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for i, name in enumerate(("a", "b")):
        save_checkpoint(tiny.model(seed=10 + i), tiny.tokenizer(), folder / name, {})
    return {name: LocalTeacher(name, folder / name, sequence_chunk=16) for name in ("a", "b")}


def open_schedule(teachers, cache=None) -> TeacherSchedule:
    return TeacherSchedule(teachers, Router({"a": {"a": 1.0}, "b": {"b": 1.0}}, "one_hot"), cache=cache)


def open_backend(schedule, **memory) -> TorchBackend:
    term = build_distill_term(DistillConfig(), schedule)
    assert term is not None
    return TorchBackend(tiny.model(0), tiny.training([term], 0.7, max_tokens=16, **memory))


def gradient(backend: TorchBackend) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in backend.model.module.parameters()])


def terms_of(sample: Sample) -> TokenTerms:
    terms = TokenTerms.zeros(len(sample.response_ids))
    terms.kl_weight = np.where(sample.loss_mask, 0.1, 0).astype(np.float32)
    return terms


@pytest.fixture(scope="module")
def in_memory(teachers):
    """Gradient and metrics of the step as one batch in memory."""
    schedule, made = open_schedule(teachers), samples()
    schedule.assign(made)
    schedule.score(made)
    backend = open_backend(schedule)
    batch = schedule.sort(RolloutBatch(made, [terms_of(sample) for sample in made]))
    metrics = backend.forward_backward(batch)
    return gradient(backend), metrics


def train(step: SamplesOnDisk, backend: TorchBackend, schedule: TeacherSchedule) -> dict[str, float]:
    own = step.samples
    schedule.assign(own)
    ordered = [own[place] for place in schedule.teacher_order(own)]
    for lot in step.local_batches(own, 1 << 20, by_teacher=False):
        schedule.score(lot)
        if schedule.caches_all:
            schedule.drop_samples(lot)
    assert bool(schedule._rows) != schedule.caches_all

    def read(parts):
        for part in step.read(ordered, parts):
            schedule.score(part)
            yield RolloutBatch(part, [terms_of(sample) for sample in part])
            schedule.drop_samples(part)

    metrics = backend.accumulate_gradient(ordered, read)
    schedule.release()
    return metrics


@pytest.mark.parametrize("cached", [True, False])
def test_a_stored_step_is_the_step_in_memory(teachers, in_memory, tmp_path, cached):
    cache = CachedScores(NodeCache(tmp_path / "cache", quota_bytes=1 << 22)) if cached else None
    schedule = open_schedule(teachers, cache)
    backend = open_backend(schedule, sequence_chunk=16)
    with holding(tmp_path / "store", samples(), backend) as step:
        metrics = train(step, backend, schedule)
    torch.testing.assert_close(gradient(backend), in_memory[0], rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(in_memory[1], rel=1e-4)
    counters = schedule.take_counters()
    assert counters["teacher_tokens"] == sum(r for _, r in LENGTHS)
    assert counters["head_loads"] == 2
    assert counters["resident_heads_peak"] == 1


def test_a_micro_batch_is_let_go_before_the_next_but_one_is_read(teachers, tmp_path, monkeypatch):
    schedule = open_schedule(teachers, CachedScores(NodeCache(tmp_path / "c", quota_bytes=1 << 22)))
    backend = open_backend(schedule)
    held: set[int] = set()
    peaks: list[int] = []
    load, release = SampleBatch.load, SampleBatch.release

    def loading(batch, fields):
        held.add(id(batch))
        peaks.append(len(held))
        return load(batch, fields)

    monkeypatch.setattr(SampleBatch, "load", loading)
    monkeypatch.setattr(SampleBatch, "release", lambda b: (held.discard(id(b)), release(b))[1])
    with holding(tmp_path / "store", samples(), backend) as step:
        train(step, backend, schedule)
        assert len(peaks) >= 5
        assert max(peaks) <= 2
        assert not held


TIS, ICEPOP = {"correction": {"type": "tis"}}, {"correction": {"type": "icepop"}}
LOSSES = {
    "full": {},
    "reward": {"rl_coef": 0.5, "samples_per_prompt": 2, "policy_loss": ICEPOP},
    "own advantages": {
        "rl_coef": 0.5,
        "samples_per_prompt": 2,
        "advantage": {"type": "custom", "path": "recipes:by_tokens"},
    },
    "k1": {
        "loss": {"type": "k1", "discount": 0.5, "baseline": "batch_mean", "loss": TIS},
        "rl_coef": 0.5,
        "samples_per_prompt": 2,
    },
    "k2": {"loss": {"type": "k2"}, "policy_loss": ICEPOP},
    "top-k": {"loss": {"type": "topk", "k": 4, "form": "hybrid"}, "policy_loss": TIS},
}
LONG = ("full", "own advantages", "top-k")


@pytest.fixture(scope="module")
def models(tiny_run):
    """A base, and a teacher of both domains that is another model."""
    return {"base": str(tiny_run / "base"), "teacher": str(tiny_run / "specialists" / "add3")}


def outcome(folder: Path, stage: str, recipe) -> tuple[str, list[dict[str, float]]]:
    """Digest and metrics of a stage."""
    with RunFolder.create(folder, recipe) as run:
        run_stage(recipe, run, stage)
        done = run.stage_done(stage)
    assert done is not None
    assert not (folder / "stages" / stage / "trajectories").exists()
    other = re.compile("time|memory|seconds|wait|rollout/|bytes|cached|chain")
    rows = read_metrics(folder / "stages" / stage / "metrics.jsonl")
    return done["digest"], [
        {name: value for name, value in row.items() if not other.search(name)} for row in rows
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=[pytest.mark.long] * (loss in LONG)) for loss in LOSSES]
)
def test_a_merge_on_disk_is_the_merge_in_memory(models, tmp_path, loss):
    merge = {"steps": 2, "prompts_per_domain": 6, "batch": {"max_tokens": 64}} | LOSSES[loss]
    found = [
        outcome(
            tmp_path / home,
            "merge",
            tiny_recipe(
                base=None,
                model={"path": models["base"]},
                teachers={name: {"path": models["teacher"]} for name in ("sort", "add3")},
                distill=merge,
                rollout={"max_new_tokens": 5, "max_sequence": 16, "schedule": "ahead"},
                storage={"trajectories": home},
                baselines={"methods": []},
                evaluation=NO_CURVE,
            ),
        )
        for home in ("memory", "disk")
    ]
    assert found[0][0] == found[1][0]
    for memory, disk in zip(found[0][1], found[1][1], strict=True):
        assert disk == pytest.approx(memory, rel=1e-6)


@pytest.mark.some(1)
@pytest.mark.parametrize("reference", ["loss", "advantage"])
def test_grpo_on_disk_is_grpo_in_memory(models, tmp_path, reference):
    estimator = {"loss": "k3", "advantage": "k1"}[reference]
    grpo = {
        "steps": 2,
        "prompts_per_step": 8,
        "group_size": 4,
        "minibatches": 2,
        "batch": {"max_tokens": 64},
        "policy_loss": {"correction": {"type": "tis"}, "aggregation": "sequence"},
        "reference_kl": {"coef": 0.1, "placement": reference, "estimator": estimator},
    }
    found = [
        outcome(
            tmp_path / home,
            "specialist-add3",
            tiny_recipe(
                base=None,
                model={"path": models["base"]},
                specialist=grpo,
                storage={"trajectories": home},
                evaluation=NO_CURVE,
            ),
        )
        for home in ("memory", "disk")
    ]
    assert found[0][0] == found[1][0]
    for memory, disk in zip(found[0][1], found[1][1], strict=True):
        assert disk == pytest.approx(memory, rel=1e-6)
    assert any("policy/clip_ratio" in row for row in found[0][1])


def test_what_is_learnt_leaves_the_store_and_the_rest_is_there_for_the_next_attempt(tmp_path):
    made = samples()
    with SampleFiles.open(tmp_path / "store") as files:
        for number, sample in enumerate(made[:3]):
            files.put([sample], number, {sample.group_uid: "asked"}, {sample.uid: 0})
        files.retire_before(1)
        assert [files.group_uids(s.group_uid, "asked", i) for i, s in enumerate(made[:2])] == [{}, {0: "s1"}]
    with SampleFiles.open(tmp_path / "store", keep=True) as files:
        groups = [files.group_uids(sample.group_uid, "asked", 1) for sample in made[:4]]
        assert groups == [{}, {0: "s1"}, {}, {}]  # s2 is of another batch, and goes with that
        with pytest.raises(RolloutError, match="response s1 to another prompt"):
            files.group_uids(made[1].group_uid, "asked otherwise", 1)
        assert [one.uid for one in files.open_view().records] == ["s1", "s2"]
        assert [one.uid for one in files.open_view(2).records] == ["s2"]
        files.put(made[3:4], 2, {made[3].group_uid: "asked"}, {made[3].uid: 0}, ["s2"])
        assert files.group_uids(made[2].group_uid, "asked", 2) == {}
        branch = replace(made[4], group_uid=made[3].group_uid, branch_of="s3")
        asked = {branch.group_uid: "asked"}
        files.put([branch], 2, asked, {branch.uid: 0})
        files.put([branch], 3, asked, {branch.uid: 0})
    with SampleFiles.open(tmp_path / "store", keep=True) as files:
        assert (
            files.branch_uids(made[3].group_uid, 2) == files.branch_uids(made[3].group_uid, 3) == {"s4": "s3"}
        )
        files.put([], 3, {}, {}, ["s4"])
        assert files.branch_uids(made[3].group_uid, 3) == {}
        written = [[(made[3].group_uid, ["s3", "s4"])]]
        assert groups_of(files.open_view(2), written)[0][0].branches[0].branch_of == "s3"
        with pytest.raises(StorageError, match="response s3, which rank 0 has written, is not on the disk"):
            groups_of(files.open_view(3), written)
        files.put([], 2, {}, {}, ["s4"])
    with SampleFiles.open(tmp_path / "store", keep=True) as files:
        assert [one.uid for one in files.open_view().records] == ["s1", "s3"]
        assert files.group_uids(made[2].group_uid, "asked", 2) == {}
    with SampleFiles.open(tmp_path / "store") as files:
        assert not files.open_view().records


def test_empty_responses_are_refused(teachers, tmp_path):
    backend = open_backend(open_schedule(teachers))
    with (
        holding(tmp_path / "store", tiny.samples([(3, 0), (2, 0)]), backend) as step,
        pytest.raises(TrainingError, match="all 2 responses of this step are empty"),
    ):
        backend.accumulate_gradient(step.samples, step.batch_reader(step.samples, terms_of))


class Dealt:
    """Of a back end the ranks it shares samples with."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.data = Ranks()
        self.data.rank, self.data.size = rank, size
        self.shares = Shares(self.data)
        self.mine = self.shares.local_samples


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
        sample.loss_mask = rng.random(count) < rng.choice([0.0, 0.8, 1.0])
    with tempfile.TemporaryDirectory() as root, holding(Path(root), made, Dealt()) as step:
        light = {s.uid: s.trainable_tokens for s in step.samples}
        assert light == {s.uid: s.trainable_tokens for s in made}
        before = step.store.counters.bytes_read
        several = any(len(set(s.policy_versions.tolist())) > 1 and s.loss_mask.any() for s in made)
        found = step.drop_stale(4, limit)
        assert (step.store.counters.bytes_read > before) == several
        read = [s for lot in step.local_batches(step.samples, 16, by_teacher=True) for s in lot]
        groups = [SampleGroup(s.group_uid, s.domain, [s]) for s in made]
        assert found == pytest.approx(StepSamples(groups, Dealt()).drop_stale(4, limit))  # from `made` too
        masks = {s.uid: s.loss_mask.tolist() for s in made if len(s.response_ids)}
        assert {s.uid: s.loss_mask.tolist() for s in read} == masks
        assert {s.uid: s.trainable_tokens for s in step.samples if s.uid in masks} == {
            uid: sum(mask) for uid, mask in masks.items()
        }


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
    with tempfile.TemporaryDirectory() as root:
        for rank in range(size):
            with holding(Path(root), made, Dealt(rank, size)) as step:
                ordered = sorted(step.samples, key=lambda s: s.teacher or "")
                assert step.store.counters.bytes_read == 0
                seen.append(list(step.local_batches(ordered, 16, by_teacher=True)))
                mine = {sample.uid for part in seen[-1] for sample in part}
                own = [row for uid, row in step._rows.items() if uid in mine]
                # The fields of a sample are read ahead, then handed out.
                assert step.store.counters.bytes_read == 2 * int(step.store.heavy_bytes()[own].sum())
    everyone = [sample.uid for rank in seen for part in rank for sample in part]
    assert sorted(everyone) == sorted(s.uid for s in made if len(s.response_ids))
    for together in zip(*seen, strict=True):
        assert len({sample.teacher for part in together for sample in part}) == 1


def test_rewards_are_those_in_memory_and_some_tokens_are_read_at_a_time(tmp_path, monkeypatch):
    """A function of a sample is given pieces, one of all completions all of its domain's."""
    monkeypatch.setattr(samples_on_disk, "_REWARDED", 10)
    together: list[int] = []

    def one(sample) -> float:
        return len(sample.text) + 0.5

    def many(completions, **columns) -> list[float]:
        together.append(len(completions))
        return [len(text) / max(map(len, completions)) for text in completions]

    functions = {"a": wrap_reward(one, "one"), "b": wrap_reward(many, "many")}
    rewards = RewardRunner(functions, tiny.tokenizer())
    made = samples()
    with holding(tmp_path / "store", made, Dealt()) as step:
        leased: list[list[int]] = []
        lease = SampleStore.lease
        monkeypatch.setattr(
            SampleStore, "lease", lambda u, rows: (leased.append(list(rows)), lease(u, rows))[1]
        )
        step.reward_responses(rewards)
        assert len(leased) > 2
        assert together == [TEACHERS.count("b")]
        found = [sample.reward for sample in step.samples]
    rewards.score(made)
    assert found == [sample.reward for sample in made]


def test_signals_come_back_as_they_were_put(tmp_path):
    with SignalFiles(tmp_path / "signals") as signals:
        signals.put("a", "s0", np.arange(5, dtype=np.float32))
        signals.put("b", "s0", np.arange(3, dtype=np.float32))
        signals.put("a", "s1", np.ones(2, np.float32))
        assert [signals.get(*of).tolist() for of in (("a", "s0"), ("b", "s0"), ("a", "s1"), ("b", "s1"))] == [
            [0, 1, 2, 3, 4],
            [0, 1, 2],
            [1, 1],
            [],
        ]
        assert list((tmp_path / "signals").iterdir()) == []  # whatever ends the process, nothing is left
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        try:
            with pytest.raises(StorageError, match=r"cannot be written .*; free disk space"):
                signals.put("a", "s2", np.ones(1 << 12, np.float32))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_step_and_leaves_the_store_whole(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SampleFiles.open(tmp_path / "store") as files:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
        try:
            with pytest.raises(StorageError, match=r"cannot be written \(File too large\); raise the limit"):
                files.put(tiny.samples([(10, 20_000)]), 0, {"s0": "asked", "g0": "asked"}, {"s0": 0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made = samples()
    with holding(tmp_path / "store", made, Dealt()) as step, step.with_tokens(step.groups[2]) as group:
        assert group.samples[0].response_ids.tolist() == made[2].response_ids.tolist()
