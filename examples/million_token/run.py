"""One optimiser step on trajectories of a million tokens, with a plot of the memory it took.

    python examples/million_token/run.py [--tokens 1000000] [--long 1] [--short 2] [--full-attention]
                                         [--out FOLDER]

Writes synthetic trajectories to disk, plans the step from their metadata, lets two streamed teachers
read them in pieces, trains the student on the full-vocabulary reverse KL and takes a step of AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from job import VOCABULARY, MemoryLog, peak_mib, publish_teachers, tokenizer, write_trajectories

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.models.causal_lm import CausalLM
from opd.pipelines.launch.machine import configure_machine, threads_here
from opd.pipelines.stages.sample_files import SignalFiles, groups_of
from opd.pipelines.stages.samples_on_disk import SamplesOnDisk
from opd.progress import Progress
from opd.storage.node_cache import NodeCache
from opd.storage.sample_store import SampleStore
from opd.teachers.kinds import Placement
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.score_cache import CachedScores
from opd.teachers.streamed_teacher import streamed_teachers
from opd.train.backend import TrainingSettings
from opd.train.distill_terms import build_distill_term
from opd.train.loss_weights import token_weights
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

_log = logging.getLogger("opd.examples.million_token")

_MIB = 1 << 20


def main() -> None:
    """Run the job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of a long trajectory")
    parser.add_argument("--long", type=int, default=1, help="how many of them")
    parser.add_argument("--short", type=int, default=2, help="trajectories of a fiftieth of that")
    parser.add_argument(
        "--full-attention", action="store_true", help="one layer that sees all tokens: time grows as a square"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    names = ["recipe.yaml", *(["full_attention.yaml"] if options.full_attention else [])]
    recipe = load_recipe([Path(__file__).with_name(name) for name in names])
    configure_machine(threads_here(recipe), recipe.runtime.tf32)
    folder = options.out or Path(recipe.run_dir or "runs/million-token")
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [options.tokens] * options.long + [options.tokens // 50] * options.short
    with Progress() as progress, ExitStack() as stack:
        job = Job(recipe, folder, progress, stack)
        results = job.run(lengths)
    results |= {"tokens": sum(lengths), "trajectories": len(lengths), "longest": max(lengths)}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    print(f"plot: {folder / 'memory.png'}")


class Job:
    """The job, phase by phase."""

    def __init__(self, recipe: Recipe, folder: Path, progress: Progress, stack: ExitStack) -> None:
        self.recipe, self.folder, self.progress = recipe, folder, progress
        self.memory = stack.enter_context(MemoryLog())
        self.stack = stack
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def run(self, lengths: list[int]) -> dict[str, Any]:
        """Everything; returns what was measured."""
        path = self.folder / "trajectories"
        if not any(path.glob("*.safetensors")):
            self._timed("write", write_trajectories, self.recipe, path, lengths, self.progress)
        urls = publish_teachers(self.recipe, self.folder / "teachers")
        schedule, backend = self._open(urls)
        before = peak_mib()
        store = SampleStore.open([path])
        step, ordered = self._timed("plan", self._plan, store, schedule, backend)
        planned = store.counters.bytes_read
        tokens = sum(record.token_count for record in store.records)
        layers = len(backend.model.decoder.layers)
        teachers = self.teachers.values()
        with self._counting("score", [t.skeleton.layers for t in teachers], tokens * layers):
            self._timed("score", _score, step, ordered, schedule)
        with self._counting("train", [backend.model.decoder.layers], 2 * tokens * layers):
            metrics = self._timed("train", _train, step, ordered, schedule)
        metrics |= self._timed("step", backend.step, self.recipe.distill.optim.lr)
        heavy = int(store.heavy_bytes().sum())
        self.memory.draw(
            self.folder / "memory.png", f"one step on {tokens:,} tokens, the longest {max(lengths):,}"
        )
        return {
            "seconds": {name: round(took, 2) for name, took in self.seconds.items()},
            "cpu_seconds": {name: round(took, 2) for name, took in self.cpu_seconds.items()},
            "heavy_mib": round(heavy / _MIB, 1),
            "heavy_bytes_read_by_planning": planned,
            "hidden_states_mib": round(tokens * backend.model.config.hidden_size * 4 / _MIB, 1),
            "logits_would_take_mib": round(2 * tokens * VOCABULARY * 4 / _MIB),
            "peak_mib": round(peak_mib(), 1),
            "peak_mib_before_the_data": round(before, 1),
            "head_loads": schedule.take_counters()["head_loads"],
            "kl_mean": metrics["kl/mean"],
            "grad_norm": metrics["grad_norm"],
        }

    def _open(self, urls: dict[str, str]) -> tuple[TeacherSchedule, TorchBackend]:
        recipe = self.recipe
        batch, storage = recipe.distill.batch, recipe.storage
        placement = Placement(max_tokens=batch.max_tokens, sequence_chunk=batch.sequence_chunk)
        self.teachers = teachers = streamed_teachers(
            urls, placement, prefetch_bytes=storage.prefetch_mb * _MIB
        )
        for teacher in teachers.values():
            self.stack.callback(teacher.close)
        quota = storage.cache_mb * _MIB
        cache = NodeCache(self.folder / "cache", quota_bytes=quota, verify="first")
        self.stack.enter_context(cache)
        schedule = TeacherSchedule(teachers, Router.from_recipe(recipe), cache=CachedScores(cache))
        term = build_distill_term(recipe.distill, schedule)
        assert term is not None
        model = CausalLM.from_config(recipe.model.config or {}, tokenizer=tokenizer(), seed=recipe.seed)
        training = TrainingSettings(recipe.distill.optim, batch, recipe.rollout.temperature, [term])
        return schedule, TorchBackend(model, training)

    def _timed(self, name: str, act: Any, *arguments: Any) -> Any:
        begin, cpu = time.monotonic(), time.process_time()
        with self.memory.phase(name):
            found = act(*arguments)
        self.seconds[name] = time.monotonic() - begin
        self.cpu_seconds[name] = time.process_time() - cpu
        return found

    def _counting(self, name: str, stacks: Iterable[Iterable[Any]], total: int) -> ExitStack:
        """While it is open, every token that passes a layer's MLP moves the bar of `name`."""
        done = 0

        def passed(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            nonlocal done
            done += output.shape[1]
            self.progress.update_stage(name, done, total, f"peak {peak_mib():,.0f} MiB")

        hooks = ExitStack()
        for layer in (layer for layers in stacks for layer in layers):
            hooks.callback(layer.mlp.register_forward_hook(passed).remove)
        hooks.callback(lambda: self.progress.finish_stage(name, f"peak {peak_mib():,.0f} MiB"))
        return hooks

    def _plan(
        self, store: SampleStore, schedule: TeacherSchedule, backend: TorchBackend
    ) -> tuple[SamplesOnDisk, list[Sample]]:
        """The step, and its samples in the order in which they are trained."""
        written = [(record.uid, [record.uid]) for record in store.records]
        groups, rows = groups_of(store, [written])
        step = SamplesOnDisk(groups, rows, store, SignalFiles(self.folder / "signals"), backend)
        own = step.samples
        schedule.assign(own)
        ordered = [own[place] for place in schedule.teacher_order(own)]
        for part in backend.shares.in_step(ordered, backend.max_tokens):
            lengths = [len(ordered[i].prompt_ids) + len(ordered[i].response_ids) for i in part]
            names = "+".join(dict.fromkeys(ordered[i].teacher or "nobody" for i in part))
            _log.info("micro-batch of %s: %s tokens", names, lengths)
        return step, ordered


def _score(step: SamplesOnDisk, ordered: list[Sample], schedule: TeacherSchedule) -> None:
    """Each teacher leaves its hidden states in the cache."""
    for lot in step.local_batches(ordered, 1 << 20, by_teacher=True):
        schedule.score(lot)
        schedule.drop_samples(lot)


def _train(step: SamplesOnDisk, ordered: list[Sample], schedule: TeacherSchedule) -> dict[str, float]:
    """The gradient, micro-batch by micro-batch."""
    scale = 1.0 / step.tokens

    def terms(sample: Sample) -> TokenTerms:
        found = TokenTerms.zeros(len(sample.response_ids))
        found.kl_weight = token_weights(sample.loss_mask, scale)
        return found

    def read(parts: Sequence[Sequence[int]]) -> Iterator[RolloutBatch]:
        for batch in step.batch_reader(ordered, terms)(parts):
            schedule.score(batch.samples)
            yield batch
            schedule.drop_samples(batch.samples)

    metrics = step.backend.accumulate_gradient(ordered, read)
    schedule.release()
    return metrics


if __name__ == "__main__":
    main()
