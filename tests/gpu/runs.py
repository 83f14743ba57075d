"""Whole parts of the product on a GPU: its marked tests, a streamed teacher, a short quick start."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.types import Sample
from tests.gpu import models
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet

ROOT = Path(__file__).resolve().parents[2]
RAM = Path("/dev/shm")
RECIPE = ROOT / "examples/quickstart/recipe.yaml"
SHORT = [
    *("--base.steps", "500", "--specialist.steps", "6", "--distill.steps", "12"),
    *("--base.min_accuracy", "0", "--baselines.methods", "[average]"),
    *("--evaluation.prompts_per_domain", "100"),
]
"""Few steps, and every stage once. A base of fewer answers nothing right, and GRPO refuses groups of equal
rewards."""
COMPILING = (
    "tests/gpu/test_attention.py::test_flex_attention_is_trusted_here",
    "tests/gpu/test_attention.py::test_flex_attention_gives_the_same_bits_again",
)
"""Tests that compile dozens of kernels: for a call of their own."""
TINY = """
name: tiny
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 32, tie_word_embeddings: true}
domains:
  sort: {source: "procedural:sort", params: {digits: 3}, prompts: 200}
  add3: {source: "procedural:add3", params: {digits: 3}, prompts: 200}
base: {steps: 200, batch_size: 64, right: 0.7, wrong_rule: 0.2, optim: {lr: 0.01}}
rollout: {max_new_tokens: 5, max_sequence: 16}
specialist: {steps: 2, prompts_per_step: 8, group_size: 4, minibatches: 2}
distill: {steps: 2, prompts_per_domain: 8}
baselines: {methods: [average]}
evaluation: {prompts_per_domain: 20, every: 4, curve_prompts: 10}
"""
"""What `--dry` runs in place of the quick start."""


def run(*command: str) -> tuple[int, str]:
    """Exit status of a Python process and the end of what it printed, which is printed here as it comes: a
    section over its time has said how far it got. That time is the only limit.
    """
    lines = []
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return child.returncode, "".join(lines)[-6000:]


def tests(sheet: Sheet, place: Place) -> None:
    """`pytest -m gpu`: kernels, attention, engine, teachers, a training step, one rank of NCCL. Dry, one test
    of a GPU that is not there.
    """
    folders = ["tests/kernels", "tests/gpu", "tests/rollout/test_graphs.py"]
    folders += sorted(map(str, (ROOT / "tests").glob("*/test_on_cuda.py")))
    marked = ["-m", "gpu", *folders, *(word for test in COMPILING for word in ("--deselect", test))]
    if place.dry:
        marked = ["-m", "not gpu", "-k", "copied_and_proven", "tests/models/test_on_cuda.py"]
    flags = ["-q", "--maxfail=12", "--tb=short", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    if not place.dry and find_spec("xdist") is not None:  # what compiles takes a core each
        flags += ["-n", str(min(6, max(1, (os.cpu_count() or 1) // 2)))]
    status, said = run("-m", "pytest", *flags, "--no-header", *marked)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", said)}
    numbers = {"status": status, "passed": counts.get("passed", 0), "failed": counts.get("failed", 0)}
    all_right = Bound("status", most=0, timed=False), Bound("passed", least=1, timed=False)
    sheet.row("pytest -m gpu", numbers, *all_right)


def samples(tokens: int, vocabulary: int, length: int) -> list[Sample]:
    """Random sequences, all response but their first token."""
    rng = np.random.default_rng(0)
    return [models.random_sample(rng, i, 1, length - 1, vocabulary) for i in range(tokens // length)]


def loaded(folder: Path, asked: list[Sample], place: Place) -> tuple[torch.Tensor, float]:
    """The rows of a teacher that is in memory as a whole, and the milliseconds they take."""
    teacher = LocalTeacher("t", folder, dtype="bfloat16", device=str(place.device), max_tokens=8192)
    rows = teacher.score(asked).rows
    return rows, place.milliseconds(lambda: teacher.score(asked), rounds=3, warm_ups=1)


def room(place: Place) -> str:
    """A folder in memory with space for a checkpoint and what is published of it, or the system's own."""
    need = 1 << 20 if place.dry else 10 << 30
    for folder in (RAM, Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free >= need:
            return str(folder)
    raise RuntimeError(f"neither {RAM} nor {tempfile.gettempdir()} has {need >> 30} GiB free; set TMPDIR.")


def streamed_teacher(sheet: Sheet, place: Place) -> None:
    """A teacher of about 4 GB in memory-backed files: streamed, against loaded and against read alone."""
    with tempfile.TemporaryDirectory(dir=room(place)) as temporary:
        folder, url = Path(temporary) / "checkpoint", Path(temporary) / "published"
        model = models.model("2B", place)
        save_checkpoint(model, character_tokenizer("0123456789=", []), folder, {})
        vocabulary = model.vocab_size
        del model
        place.clear()
        publish_checkpoint(folder, url, shards=1)
        for tokens in (256,) if place.dry else (32768, 131072):
            asked = samples(tokens, vocabulary, 16 if place.dry else 1024)
            with sheet.ours(f"{tokens} tokens"):
                sheet.row(f"{tokens} tokens", _streamed(folder, url, asked, place), FLOOR, IN_TURN, SAME)
            place.clear()


HIDDEN = Bound("over the longer", most=1.15)
"""Reading hides behind computing, or computing behind reading."""
FLOOR = Bound("over the floor", most=1.15)
"""The same of one teacher alone, whose embedding hides behind nothing: all else waits for it."""
IN_TURN = Bound("in turn over the longer", most=1.15)
"""The same of teachers one after another, as in a merge: each is read while the one before computes."""
TURNS = 4
SAME = Bound("error", most=2e-2, timed=False)


def _streamed(folder: Path, url: Path, asked: list[Sample], place: Place) -> dict[str, Any]:
    """Milliseconds of both together, of each alone, and how far the rows are from the loaded teacher's."""
    device = str(place.device)
    expected, compute = loaded(folder, asked, place)
    place.clear()
    stream = LayerStream(prefetch_bytes=2**30, device=place.device)
    placement = Placement(dtype="bfloat16", device=device, max_tokens=8192)
    turns = [StreamedTeacher(f"t{i}", str(url), placement=placement, stream=stream) for i in range(TURNS)]
    teacher = turns[0]
    got = teacher.score(asked).rows
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    both = place.milliseconds(lambda: teacher.score(asked), rounds=3, warm_ups=0)
    memory = place.peak_gib(lambda: teacher.score(asked))
    load = place.milliseconds(lambda: teacher.score(asked[:1]), rounds=3, warm_ups=0)
    in_turn = place.milliseconds(lambda: _in_turn(turns, asked), rounds=1, warm_ups=1) / TURNS
    units = {name: unit.nbytes for name, unit in teacher.published.manifest.units.items() if name != "head"}
    nbytes = sum(units.values())
    first = load * units["embedding"] / nbytes
    staged = stream.gather.staged_bytes
    for one in turns:
        one.close()
    return {
        "GB": nbytes / 1e9,
        "load ms": load,
        "load GB/s": nbytes / load / 1e6,
        "compute ms": compute,
        "streamed ms": both,
        "over the longer": both / max(load, compute),
        "over the floor": both / (first + max(load - first, compute)),
        "in turn ms": in_turn,
        "in turn over the longer": in_turn / max(load, compute),
        "peak GiB": memory,
        "pinned GiB": staged / 2**30,
        "error": error,
    }


def _in_turn(teachers: list[StreamedTeacher], asked: list[Sample]) -> None:
    """Each over the same samples, the next one's layers queued behind its own, as `TeacherSchedule` does."""
    teachers[0].prefetch()
    for teacher, following in zip(teachers, [*teachers[1:], None], strict=True):
        if following is not None:
            following.prefetch()
        teacher.score(asked)


def quick_start(sheet: Sheet, place: Place) -> None:
    """The quick start with few steps, on the device: its seconds, and each model's accuracy."""
    with tempfile.TemporaryDirectory() as temporary:
        out, recipe = Path(temporary) / "run", RECIPE
        if place.dry:
            recipe = Path(temporary) / "tiny.yaml"
            recipe.write_text(TINY)
        options = [] if place.dry else SHORT
        begin = time.perf_counter()
        status, _ = run(
            "-m",
            "opd.pipelines.cli",
            "run",
            str(recipe),
            "--out",
            str(out),
            "--model.device",
            place.device.type,
            *options,
        )
        took = time.perf_counter() - begin
        sheet.row("opd run", {"status": status, "seconds": took}, Bound("status", most=0, timed=False))
        if status == 0:
            for model in json.loads((out / "results.json").read_text())["models"]:
                by_domain = {n: one["sampled"]["accuracy"] for n, one in model["domains"].items()}
                sheet.row(model["name"], by_domain | {"seconds": model["seconds"]})
