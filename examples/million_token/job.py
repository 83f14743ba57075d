"""The parts of the job: random models, synthetic trajectories, and what memory did meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.config import Recipe
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.progress import Progress
from opd.storage.sample_lot import record_of
from opd.storage.sample_store import SampleWriter, fields_of
from opd.types import Sample, Status

VOCABULARY = 512
_MIB = 1 << 20


def tokenizer() -> PreTrainedTokenizerBase:
    """Characters, so many that logits of all positions would be gigabytes."""
    return character_tokenizer("".join(chr(0x4E00 + i) for i in range(VOCABULARY - 2)))


def publish_teachers(recipe: Recipe, folder: Path) -> dict[str, str]:
    """A random teacher for each domain of the recipe; their URLs."""
    urls = {}
    for seed, name in enumerate(recipe.domains, start=1):
        urls[name] = str(folder / name / "published")
        if not Path(urls[name]).exists():
            model = CausalLM.from_config(recipe.model.config or {}, tokenizer=tokenizer(), seed=seed)
            checkpoint = save_checkpoint(model, tokenizer(), folder / name / "checkpoint", {})
            publish_checkpoint(checkpoint, urls[name])
    return urls


def write_trajectories(recipe: Recipe, folder: Path, lengths: list[int], progress: Progress) -> None:
    """Write random trajectories of `lengths` tokens, one after another, as a rollout leaves them.

    Tokens are drawn at random, so that nobody waits for a model to write them; all else is as it would be.
    """
    rng = np.random.default_rng(recipe.seed)
    domains = list(recipe.domains)
    done, total = 0, sum(lengths)
    with SampleWriter(folder) as writer:
        for number, length in enumerate(lengths):
            domain, prompt = domains[number % len(domains)], min(1024, length // 2)
            uid, count = f"{domain}/{number}", length - prompt
            tokens = rng.integers(2, VOCABULARY, length, np.int32)
            sample = Sample(
                uid,
                uid,
                domain,
                prompt_ids=tokens[:prompt],
                teacher=domain,
                response_ids=tokens[prompt:],
                rollout_logprobs=np.full(count, -np.log(VOCABULARY), np.float32),
                policy_versions=np.zeros(count, np.int32),
                loss_mask=np.ones(count, bool),
                status=Status.COMPLETED,
            )
            writer.put([(record_of(sample), fields_of(sample))])
            done += length
            progress.update_stage("write", done, total)
    progress.finish_stage("write", f"{total:,} tokens in {len(lengths)} trajectories")


class MemoryLog:
    """This process's resident memory every so many seconds, its own and mapped files apart, with the
    phases.
    """

    def __init__(self, every: float = 0.5) -> None:
        self._every = every
        self.readings: list[tuple[float, float, float]] = []
        """Seconds since the beginning, MiB of its own, MiB of mapped files."""
        self.phases: list[tuple[str, float, float]] = []
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryLog:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note when `name` began and ended."""
        begin = time.monotonic() - self._began
        yield
        self.phases.append((name, begin, time.monotonic() - self._began))

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._read()

    def _read(self) -> None:
        status = Path("/proc/self/status").read_text()
        own, mapped = (int(status.split(f"{name}:")[1].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
        self.readings.append((time.monotonic() - self._began, own, mapped))

    def draw(self, path: Path, title: str) -> None:
        """The plot."""
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt

        seconds, own, mapped = zip(*list(self.readings), strict=True)  # the thread goes on reading
        figure, axes = plt.subplots(figsize=(8, 3.6))
        axes.stackplot(seconds, own, mapped, labels=["own", "mapped files"], colors=["#2f6fc8", "#b9cdea"])
        top = max(map(sum, zip(own, mapped, strict=True)))
        for name, begin, end in self.phases:
            axes.axvline(begin, color="#888888", linewidth=0.6, linestyle=":")
            if end - begin > 0.02 * seconds[-1]:
                axes.text((begin + end) / 2, top * 1.04, name, ha="center", fontsize=8)
        axes.set(xlabel="seconds", ylabel="resident memory (MiB)", ylim=(0, top * 1.12), title=title)
        axes.legend(loc="lower right", fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def peak_mib() -> float:
    """The most memory this process has had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / _MIB
