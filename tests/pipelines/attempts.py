"""A base to begin from; attempts at a stage that end early, in this process, or in ones that are killed."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from opd.config import Recipe
from opd.metrics import MetricsWriter, read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.checkpoint_saver import CheckpointSaver


def run_only(recipe: Recipe, out: Path, stage: str) -> None:
    """A run in `out`, of one stage."""
    with RunFolder.create(out, recipe) as folder:
        run_stage(recipe, folder, stage)


def merged(
    recipe: Recipe, out: Path, how=RunFolder.create, weights: str = "model.safetensors"
) -> tuple[dict[str, Tensor], list[dict]]:
    """The merged weights of a run in `out`, in a file, and the metrics of each of the merge's steps."""
    with how(out, recipe) as folder:
        run_stage(recipe, folder, "merge")
    tensors = load_file(out / "merged" / weights)
    return tensors, read_metrics(out / "stages" / "merge" / "metrics.jsonl")


def interrupted_merge(recipe: Recipe, out: Path) -> dict[str, Tensor]:
    """The merged weights of a run in `out` that is interrupted at its first checkpoint, and goes on."""
    save = CheckpointSaver.save

    def stopping(saver: CheckpointSaver, *given: Any) -> None:
        save(saver, *given)
        saver.wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            merged(recipe, out)
    return merged(recipe, out, RunFolder.resume)[0]


class StoppedError(Exception):
    """What ends an attempt."""


def made_base(path: Path, recipe: Recipe) -> Path:
    """The folder of the base of a run at `path`: warmed up as `recipe` says, or made from noise."""
    run_only(recipe, path, "base")
    return path / "base"


def stop(recipe: Recipe, folder: RunFolder, stage: str, after: int) -> None:
    """An attempt that ends before the line of the step beyond `after` is written."""
    write = MetricsWriter.write

    def stopping(writer: MetricsWriter, step: int, *given: Any) -> None:
        if step > after:
            raise StoppedError
        write(writer, step, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", stopping)
        with pytest.raises(StoppedError):
            run_stage(recipe, folder, stage)


def specialist_weights(recipe: Recipe, out: Path, stop_after: int | None = None) -> dict[str, Tensor]:
    """The weights of the specialist of `sort` of a run in `out`, which may stop beyond a step and go on."""
    with RunFolder.create(out, recipe) as folder:
        if stop_after is not None:
            stop(recipe, folder, "specialist-sort", stop_after)
    with RunFolder.resume(out, recipe) as folder:
        run_stage(recipe, folder, "specialist-sort")
    return load_file(out / "specialists" / "sort" / "model.safetensors")


def killed_run(recipe: Path, out: Path, *sizes: int) -> None:
    """Run the file `recipe` in processes of its own, each killed when the specialist's log of tokens has so
    many bytes, and then to its end.
    """
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out)]
    log = out / "stages" / "specialist-sort" / "wal"

    def written() -> int:
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in log.rglob("*") if path.is_file())
        return 0

    for size in sizes:
        options = ["--resume"] if (out / "config.json").exists() else []
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and written() < size:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    finish = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert finish.returncode == 0, finish.stderr


def run_distill(path: Path, out: Path, *options: str) -> None:
    """Run the merge of the recipe in the file `path` to its end, in a process of its own."""
    command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(path), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def write_recipe_of(recipe: Recipe, path: Path) -> Path:
    """The file `path` with `recipe`."""
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True), sort_keys=False))
    return path


def killed_merge(recipe: Recipe, place: Path) -> tuple[Path, Path]:
    """The run folders of a merge below `place`: killed at three steps and gone on, and undisturbed."""
    path, out, whole = write_recipe_of(recipe, place / "recipe.yaml"), place / "killed", place / "whole"
    run_distill(path, whole)
    command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(path), "--out", str(out)]
    metrics, kills = out / "stages" / "merge" / "metrics.jsonl", 0
    for lines in (4, 13, 22):
        options = ["--resume"] if out.exists() else []
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until = time.monotonic() + 200
        while process.poll() is None and not (
            metrics.exists() and metrics.read_bytes().count(b"\n") >= lines
        ):
            assert time.monotonic() < until
            time.sleep(0.01)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert kills >= 2, "a run that ends before the kill is allowed once"
    run_distill(path, out, "--resume")
    return out, whole


def digests(out: Path) -> dict[str, str]:
    """The digests of the models that a run has made, by their folders."""
    return {name: CausalLM.from_pretrained(out / name).digest() for name in ("merged", "specialists/sort")}
