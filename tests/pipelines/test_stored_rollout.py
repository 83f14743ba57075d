"""Responses on disk: they leave memory and log when they end, and a later attempt finds them."""

import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attempts import run_only
from by_calls import ByCalls
from recipes import tiny_recipe

from opd.config import Recipe
from opd.errors import RolloutError
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import samples_on_disk
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.distill import Distill
from opd.pipelines.stages.sample_source import Rollouts
from opd.pipelines.stages.samples_on_disk import DiskSampleBuffer
from opd.pipelines.stages.student import Student
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.engine_pool import EnginePool
from opd.storage import transcript
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SampleGroup, Status

TOGETHER = 8
"""Requests the engine below works on at once."""
GENERATE = {"max_new_tokens": 100_000, "max_sequence": 200_000}


class PlainEngine(ByCalls):
    """Gives request `u` the tokens `key(u), key(u) + 1, ...`, `length` of them, some requests at a time."""

    def __init__(self, length: int, most: int = 1 << 60) -> None:
        """It fails after `most` tokens."""
        super().__init__()
        self.length, self.left = length, most
        self.asked: list[str] = []

    def write(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """One token a step of every request in work."""
        self.asked += [request.uid for request in requests]
        for first in range(0, len(requests), TOGETHER):
            now = requests[first : first + TOGETHER]
            uids, keys = [r.uid for r in now], np.array([key(r.uid) for r in now], np.int32)
            start = max(len(request.prefix_ids) for request in now)
            assert all(len(request.prefix_ids) == start for request in now)
            ends = np.arange(len(now), dtype=np.int32)
            for position in range(start, self.length):
                self.left -= len(now)
                if self.left < 0:
                    raise RolloutError("the engine stops here")
                last = position == self.length - 1
                finished = dict.fromkeys(uids, Status.TRUNCATED) if last else {}
                places = np.full(len(now), position, np.int32)
                yield Chunk(uids, places, (keys + position) % 9, -1.0 - ends / 8, 0, finished)


def key(uid: str) -> int:
    """What the tokens of a request begin with."""
    return sum(map(ord, uid)) % 9


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model that has hardly learnt anything; beside it another, its teacher."""
    path = tmp_path_factory.mktemp("base") / "run"
    warmup = {"steps": 2, "batch_size": 4, "right": 0.7, "wrong_rule": 0.2, "checkpoint_every": 15}
    recipe = tiny_recipe(base=warmup)
    assert recipe.model.config is not None
    recipe.model.config["max_position_embeddings"] = GENERATE["max_sequence"]
    run_only(recipe, path, "base")
    teacher = CausalLM.from_pretrained(path / "base")
    with torch.no_grad():
        for parameter in teacher.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_checkpoint(teacher, load_tokenizer(str(path / "base")), path / "teacher", {})
    return path / "base"


def recipe_of(base: Path, **changes) -> Recipe:
    teachers = {name: {"path": str(base.with_name("teacher"))} for name in ("sort", "add3")}
    more = {"base": None, "baselines": {"methods": []}, "storage": {"trajectories": "disk"}}
    return tiny_recipe(**more, model={"path": str(base)}, teachers=teachers, **changes)


@dataclass
class Merging:
    """Who writes, and where it goes."""

    student: Student
    source: Rollouts

    @property
    def home(self) -> DiskSampleBuffer:
        assert isinstance(self.source.buffer, DiskSampleBuffer)
        return self.source.buffer


@contextmanager
def merging(folder: RunFolder, recipe: Recipe, engine: PlainEngine) -> Iterator[Merging]:
    """A merge whose responses `engine` writes."""
    quiet = lambda *words: None  # noqa: E731
    with ExitStack() as stack:
        context = StageContext.open(recipe, folder, "merge", quiet)
        stack.callback(context.metrics.close)
        run = Distill(context, Path(recipe.model.path or ""), stack)
        run.student.engine_pool = EnginePool([engine])  # type: ignore[list-item]
        yield Merging(run.student, run.open_source(stack))


def prompts(count: int) -> list[EncodedPrompt]:
    ids = np.ones(3, np.int32)
    return [EncodedPrompt(f"merge/sort/{i}", "sort", ids, "1", {"prompt": "1"}) for i in range(count)]


def write(run: Merging, count: int) -> list[SampleGroup]:
    return run.home.write(run.student.rollout_engine, prompts(count), 1, 0)


def peak(task) -> int:
    """The most memory `task` takes, in bytes."""
    tracemalloc.start()
    try:
        held = task()
        top = tracemalloc.get_traced_memory()[1]
        del held
    finally:
        tracemalloc.stop()
    return top


@pytest.mark.slow
def test_the_memory_of_a_rollout_does_not_hold_its_batch(base, tmp_path, monkeypatch):
    monkeypatch.setattr(transcript, "FOLD_AT", 1 << 10)
    monkeypatch.setattr(samples_on_disk, "_TOGETHER", 1 << 11)
    length, counts, peaks, in_memory = 800, (16, 16, 64), [], []  # the first one warms up
    for count in counts:
        out = tmp_path / f"run-{len(peaks)}"
        recipe = recipe_of(base, rollout=GENERATE)
        with RunFolder.create(out, recipe) as folder, merging(folder, recipe, PlainEngine(length)) as run:
            peaks.append(peak(lambda run=run, count=count: write(run, count)))
            log = run.student.rollouts.logs.tokens  # type: ignore[union-attr]
            assert log.uids() == []
            engine, sampling = PlainEngine(length), next(iter(run.student.ways.values())).sampling
            in_memory.append(peak(lambda e=engine, s=sampling, n=count: collect(e, prompts(n), 1, s, seed=0)))
    a_response, otherwise = ((seen[2] - seen[1]) / (counts[2] - counts[1]) for seen in (peaks, in_memory))
    assert a_response < 6 << 10  # what is known of it: uid, prompt, label, status
    assert otherwise > 13 * length  # its tokens, log-probabilities, versions and mask


def test_an_interrupted_batch_goes_on_where_it_stopped(base, tmp_path, monkeypatch):
    monkeypatch.setattr(samples_on_disk, "_TOGETHER", 1)
    recipe = recipe_of(base, rollout=GENERATE)
    length, count = 40, 20
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        engine = PlainEngine(length, most=(TOGETHER + TOGETHER // 2) * length)
        with pytest.raises(RolloutError, match="stops here"), merging(folder, recipe, engine) as run:
            write(run, count)
        with TokenWAL(folder.wal_folder("merge"), fsync="os") as log:
            in_flight = {uid: len(logged.token_ids) for uid, logged in log.requests().items()}
        assert len(in_flight) == count - TOGETHER
        assert sorted(in_flight.values()) == [0] * 4 + [length // 2] * TOGETHER
        engine = PlainEngine(length)
        with merging(folder, recipe, engine) as run:
            groups = write(run, count)
            assert set(engine.asked) == set(in_flight)
            assert run.student.rollouts is not None
            assert run.student.rollouts.engine.counters["resumed_requests"] == TOGETHER
            assert [group.uid for group in groups] == [prompt.uid for prompt in prompts(count)]
            asked = len(engine.asked)
            assert [g.samples[0].uid for g in write(run, count)] == [f"{g.uid}/0" for g in groups]
            assert len(engine.asked) == asked  # nothing is written a second time
            check_tokens(run, groups, length)
            for name, way in run.student.ways.items():
                run.student.ways[name] = replace(way, sampling=replace(way.sampling, max_new_tokens=7))
            with pytest.raises(RolloutError, match="to another prompt, or with other sampling settings"):
                write(run, count)


def check_tokens(run: Merging, groups: list[SampleGroup], length: int) -> None:
    store = run.home._files.open_view()
    with store.lease(np.arange(len(store.records))) as batch:
        found = {sample.uid: sample for sample in map(batch.get_sample, batch.rows)}
    assert set(found) == {sample.uid for group in groups for sample in group.samples}
    for uid, sample in found.items():
        assert sample.response_ids.tolist() == [(key(uid) + position) % 9 for position in range(length)]
        assert (sample.status, sample.teacher, sample.label) == (Status.TRUNCATED, "sort", "1")
        assert sample.loss_mask.all()
        assert sample.metadata == {"prompt": "1"}


@pytest.mark.slow
def test_a_stopped_merge_is_the_merge_that_was_not_stopped(base, tmp_path, monkeypatch):
    """Stopped after a checkpoint and one more step, whose batch and the next are on disk."""
    rollout = {"max_new_tokens": 5, "max_sequence": 16}
    few = {"steps": 5, "prompts_per_domain": 4, "checkpoint_every": 2, "samples_per_prompt": 2}
    recipe = recipe_of(base, rollout=rollout, distill=few | {"rl_coef": 0.5})
    digests = []
    for stop in (False, True):
        with RunFolder.create(tmp_path / f"run-{stop}", recipe) as folder:
            if stop:
                with monkeypatch.context() as patch:
                    _stop_at(patch, 3)
                    with pytest.raises(ValueError, match="stop here"):
                        run_stage(recipe, folder, "merge")
                assert list(folder.trajectories_folder("merge").glob("*.safetensors"))
            run_stage(recipe, folder, "merge")
            done = folder.stage_done("merge")
        assert done is not None
        assert not folder.trajectories_folder("merge").exists()
        digests.append(CausalLM.from_pretrained(tmp_path / f"run-{stop}" / "merged").digest())
        # 16 responses a step; what was on disk, those of two steps, is not asked for again.
        assert done["counters"]["rollout/requests"] == 16 * (3 if stop else 5)
    assert digests[0] == digests[1]
    assert digests[0] != CausalLM.from_pretrained(base).digest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rollout",
    [{"generate": "recipes:own_rollout"}, {"schedule": "async", "max_ahead": 2}],
    ids=["somebody's own", "async"],
)
def test_other_rollouts_go_to_disk_too(base, tmp_path, rollout):
    few = {"steps": 4, "prompts_per_domain": 4, "checkpoint_every": 2}
    runs = {}
    for name, changes in (("plain", {}), ("other", rollout)):
        recipe = recipe_of(base, rollout={"max_new_tokens": 5, "max_sequence": 16} | changes, distill=few)
        with RunFolder.create(tmp_path / name, recipe) as folder:
            run_stage(recipe, folder, "merge")
            runs[name] = folder.stage_done("merge")
        assert runs[name]["counters"]["rollout/requests"] >= 8 * 4
    if "generate" in rollout:
        assert runs["other"]["digest"] == runs["plain"]["digest"]
    else:
        rows = read_metrics(tmp_path / "other" / "stages" / "merge" / "metrics.jsonl")
        assert max(row.get("staleness/max", 0.0) for row in rows) <= 2


def _stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    score = Distill.score

    def score_or_stop(self, samples, step):
        if step.index == number:
            raise ValueError("stop here")
        return score(self, samples, step)

    patch.setattr(Distill, "score", score_or_stop)
