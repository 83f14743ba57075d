"""Whole parts of the product on a GPU: its marked tests, a streamed teacher, a short quick start."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.commands.publish import publish_checkpoint
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.types import Sample, Status
from tests.gpu import models
from tests.gpu.clock import Place

ROOT = Path(__file__).resolve().parents[2]
RAM = Path("/dev/shm")
RECIPE = ROOT / "examples/quickstart/recipe.yaml"
SHORT = ["--specialist.steps", "15", "--distill.steps", "30", "--baselines.methods", "[average]"]
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


def run(*command: str, seconds: float) -> tuple[int, str]:
    """Exit status of a Python process and the end of what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=seconds,
    )
    return done.returncode, done.stdout[-6000:]


def tests(place: Place) -> dict[str, Any]:
    """`pytest -m gpu`: of kernels, attention, engine, teachers, a training step, and one rank of NCCL."""
    folders = ("tests/kernels", "tests/gpu", *sorted(map(str, (ROOT / "tests").glob("*/test_on_cuda.py"))))
    flags = (
        "-q",
        "--maxfail=12",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
        "--no-header",
    )
    status, said = run("-m", "pytest", "-m", "gpu", *flags, *folders, seconds=300)
    print(said)
    if status not in (0, 5) or (status == 5 and not place.dry):
        raise RuntimeError(f"pytest -m gpu ended with {status}")
    return {"summary": said.strip().splitlines()[-1]}


def samples(tokens: int, vocabulary: int, length: int) -> list[Sample]:
    """Random sequences, all response but their first token."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(tokens // length):
        response = length - 1
        made.append(
            Sample(
                uid=f"s{i}",
                group_uid=f"g{i}",
                domain="a",
                prompt_ids=rng.integers(1, vocabulary, 1).astype(np.int32),
                response_ids=rng.integers(1, vocabulary, response).astype(np.int32),
                rollout_logprobs=np.zeros(response, dtype=np.float32),
                policy_versions=np.zeros(response, dtype=np.int32),
                loss_mask=np.ones(response, dtype=bool),
                teacher="t",
                status=Status.COMPLETED,
            )
        )
    return made


def _loaded(folder: Path, asked: list[Sample], place: Place) -> tuple[torch.Tensor, float]:
    """The rows of a teacher that is in memory as a whole, and the milliseconds they take."""
    teacher = LocalTeacher("t", folder, dtype="bfloat16", device=str(place.device), max_tokens=8192)
    rows = teacher.score(asked).rows
    return rows, place.milliseconds(lambda: teacher.score(asked), rounds=3, warm_ups=1)


def streamed_teacher(place: Place) -> dict[str, Any]:
    """A teacher of about 4 GB in memory-backed files: streamed, against loaded and against read alone."""
    room = RAM if RAM.is_dir() else None
    with tempfile.TemporaryDirectory(dir=room) as temporary:
        folder, url = Path(temporary) / "checkpoint", Path(temporary) / "published"
        model = models.model("2B", place)
        save_checkpoint(model, character_tokenizer("0123456789=", []), folder, {})
        vocabulary = model.vocab_size
        del model
        place.clear()
        publish_checkpoint(folder, url, shards=1)
        asked = samples(256 if place.dry else 32768, vocabulary, 16 if place.dry else 1024)
        device, budget = str(place.device), 2**30
        expected, compute = _loaded(folder, asked, place)
        place.clear()
        stream = LayerStream(prefetch_bytes=budget, device=place.device)
        teacher = StreamedTeacher(
            "t",
            str(url),
            placement=Placement(dtype="bfloat16", device=device, max_tokens=8192),
            stream=stream,
        )
        got = teacher.score(asked).rows
        same = bool(torch.equal(got.cpu(), expected.cpu()))
        both = place.milliseconds(lambda: teacher.score(asked), rounds=3, warm_ups=0)
        memory = place.peak_gib(lambda: teacher.score(asked))
        few = asked[:1]
        load = place.milliseconds(lambda: teacher.score(few), rounds=3, warm_ups=0)
        nbytes = teacher.published.manifest.nbytes
        teacher.close()
        stream.close()
    return {
        "GB": nbytes / 1e9,
        "load ms": load,
        "load GB/s": nbytes / load / 1e6,
        "compute ms": compute,
        "streamed ms": both,
        "streamed over the longer": both / max(load, compute),
        "peak GiB": memory,
        "same rows": same,
    }


def quick_start(place: Place) -> dict[str, Any]:
    """The quick start with few steps, on the device: its seconds, and each model's accuracy by domain."""
    with tempfile.TemporaryDirectory() as temporary:
        out, recipe = Path(temporary) / "run", RECIPE
        if place.dry:
            recipe = Path(temporary) / "tiny.yaml"
            recipe.write_text(TINY)
        options = [] if place.dry else SHORT
        begin = time.perf_counter()
        device = ("--model.device", place.device.type)
        status, said = run(
            "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out), *device, *options, seconds=400
        )
        took = time.perf_counter() - begin
        print(said[-3000:])
        if status:
            raise RuntimeError(f"opd run ended with {status}")
        results = json.loads((out / "results.json").read_text())
    return {"seconds": took, "models": results["models"]}
