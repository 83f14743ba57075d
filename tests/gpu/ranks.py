"""What needs several GPUs: FSDP2's step, streamed teachers, the KL over a cut vocabulary, a weight sync.

Each section starts as many processes as there are ranks, which meet as those of a run do (NCCL on GPUs, gloo
dry), and holds what they found to what one process finds alone.

    python -m tests.gpu.ranks TASK FOLDER [--dry]      one rank, by torchrun's variables
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opd.kernels import ops
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.ranks import Ranks, join_ranks
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.teachers.kinds import Placement
from opd.teachers.streamed_teacher import streamed_teachers
from tests.gpu import kernels, models, runs, training
from tests.gpu.clock import Place
from tests.gpu.engine import wait
from tests.gpu.rows import Bound, Sheet

PATIENCE = 120.0
"""Seconds a rank waits for another."""


def together(task: str, ranks: int, place: Place, folder: Path) -> list[dict[str, Any]]:
    """What every rank of `task` found. The first that fails ends the others, and its words are raised."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.gpu.ranks", task, str(folder), *(["--dry"] if place.dry else [])]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"{task}-{rank}.log" for rank in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            own = os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as said:
                started.append(subprocess.Popen(command, env=own, stdout=said, stderr=said))
        while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
            time.sleep(0.05)
        codes = [one.poll() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    wrong = [log for log, code in zip(logs, codes, strict=True) if code]
    if any(codes) or None in codes:
        raise RuntimeError("\n".join(log.read_text("utf-8", "replace")[-1500:] for log in wrong or logs))
    return [json.loads((folder / f"{task}-{rank}.json").read_text()) for rank in range(ranks)]


def distill_rank(ranks: Ranks, place: Place, folder: Path) -> dict[str, Any]:
    """A distillation step of a 0.6B student, in bfloat16 over float32 on GPUs, shared by all ranks."""
    del folder
    name = "float32" if place.dry else "bfloat16 over float32"
    with training.opened(name, place, ranks) as (backend, samples):
        norms = [training.step_of(backend, samples) for _ in range(2)]
        took = place.milliseconds(lambda: training.step_of(backend, samples), rounds=3, warm_ups=1)
        tokens = training.samples_tokens(samples)
    return {"norms": norms, "ms": took, "tokens/s": 1e3 * tokens / took}


def distill(sheet: Sheet, place: Place) -> None:
    """The step of all ranks against that of one."""
    with tempfile.TemporaryDirectory() as folder:
        alone = together("distill_rank", 1, place, Path(folder))[0]
        found = together("distill_rank", place.ranks, place, Path(folder))
    off = max(abs(a / b - 1) for one in found for a, b in zip(one["norms"], alone["norms"], strict=True))
    numbers = {"ms": max(one["ms"] for one in found), "ms alone": alone["ms"], "gradient off": off}
    numbers["over alone"] = numbers["ms"] / alone["ms"]
    right = Bound("gradient off", most=1e-4 if place.dry else 2e-2, timed=False)
    sheet.row(f"FSDP2 on {place.ranks} ranks", numbers, right, Bound("over alone", most=1.0))


def teachers_rank(ranks: Ranks, place: Place, folder: Path) -> dict[str, Any]:
    """One teacher read by all ranks together, against the same one loaded."""
    checkpoint, url = folder / "checkpoint", folder / "published"
    if ranks.is_main:
        model = models.model("0.6B", place)
        save_checkpoint(model, character_tokenizer("0123456789=", []), checkpoint, {})
        publish_checkpoint(checkpoint, url, shards=ranks.size)
        del model
        place.clear()
    ranks.barrier("the published teacher")
    device = f"cuda:{torch.cuda.current_device()}" if place.device.type == "cuda" else "cpu"
    vocabulary = models.config("0.6B", place).vocab_size
    asked = runs.samples(256 if place.dry else 32768, vocabulary, 16 if place.dry else 1024)
    expected, compute = runs.loaded(checkpoint, asked, place)
    place.clear()
    placement = Placement(dtype="bfloat16", device=device, max_tokens=8192)
    group = ranks.new_group("teachers").group
    teacher = streamed_teachers({"t": str(url)}, placement, group=group)["t"]
    rows = teacher.score(asked).rows
    before = teacher.bytes_read
    teacher.score(asked)
    read, units = teacher.bytes_read - before, teacher.published.manifest.units
    body = sum(unit.nbytes for name, unit in units.items() if name != "head")
    both = place.milliseconds(lambda: teacher.score(asked), rounds=3, warm_ups=0)
    load = place.milliseconds(lambda: teacher.score(asked[:1]), rounds=3, warm_ups=0)
    teacher.close()
    error = float((rows.float() - expected.float()).norm() / expected.float().norm())
    share = read * ranks.size / body
    return {"ms": both, "load": load, "compute": compute, "share of bytes": share, "error": error}


def teachers(sheet: Sheet, place: Place) -> None:
    """Each rank's rows, bytes and times."""
    with tempfile.TemporaryDirectory(dir=runs.room(place)) as folder:
        found = together("teachers_rank", place.ranks, place, Path(folder))
    for rank, one in enumerate(found):
        one["over the longer"] = one["ms"] / max(one["load"], one["compute"])
        fair = Bound("share of bytes", most=1.1, timed=False)
        sheet.row(f"streamed, rank {rank}", one, runs.SAME, fair, runs.HIDDEN)


def vocabulary_rank(ranks: Ranks, place: Place, folder: Path) -> dict[str, Any]:
    """The KL with its gradients on parts of both heads, against the whole heads on this rank alone."""
    del folder
    size = (64, 16, 256) if place.dry else (8192, 4096, 128256)
    inputs = kernels.Inputs.make(size, place)
    assert ranks.group is not None
    student, teacher = Head(inputs.weight), Head(inputs.teacher_weight)
    shards = [HeadShard.split_head(head, ranks.group) for head in (student, teacher)]

    def whole() -> torch.Tensor:
        inputs.clear()
        values = ops.linear_kl(
            inputs.hidden, student, inputs.teacher_hidden, teacher, weight=inputs.token_weight
        )
        (values @ inputs.token_weight).backward()
        return values.detach()

    def cut() -> torch.Tensor:
        inputs.clear()
        values = ops.linear_kl(
            inputs.hidden, shards[0], inputs.teacher_hidden, shards[1], weight=inputs.token_weight
        )
        (values @ inputs.token_weight).backward()
        return values.detach()

    expected, gradient = whole(), inputs.hidden.grad
    found, own = cut(), inputs.hidden.grad
    assert gradient is not None
    assert own is not None
    return {
        "ms": place.milliseconds(cut, rounds=3),
        "ms whole": place.milliseconds(whole, rounds=3),
        "error": float((found - expected).abs().max() / expected.max()),
        "gradient off": float((own.float() - gradient.float()).norm() / gradient.float().norm()),
    }


def vocabulary(sheet: Sheet, place: Place) -> None:
    """Values and gradient on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = together("vocabulary_rank", place.ranks, place, Path(folder))
    for rank, one in enumerate(found):
        one["over whole"] = one["ms"] / one["ms whole"]
        right = Bound("error", most=1e-3, timed=False), Bound("gradient off", most=2e-2, timed=False)
        sheet.row(
            f"vocabulary in {place.ranks} parts, rank {rank}", one, *right, Bound("over whole", most=1.0)
        )


def sync_rank(ranks: Ranks, place: Place, folder: Path) -> dict[str, Any]:
    """Weights of FSDP2's shards gathered, pushed into an engine of this rank and proven, twice."""
    del folder
    with training.opened("bfloat16 over float32", place, ranks) as (backend, samples):
        training.step_of(backend, samples)
        engine = TorchEngine(models.model("0.6B", place))
        sync_weights(engine, backend.weights(), 1)
        training.step_of(backend, samples)
        begin = wait(place)
        digest = sync_weights(engine, backend.weights(), 2)
        took = wait(place) - begin
    nbytes = models.parameter_bytes(engine.model.module)
    return {"ms": 1e3 * took, "GB/s proven": 2 * nbytes / took / 1e9, "digest": digest}


def sync(sheet: Sheet, place: Place) -> None:
    """Every rank's engine holds the same weights, as a digest of each says."""
    with tempfile.TemporaryDirectory() as folder:
        found = together("sync_rank", place.ranks, place, Path(folder))
    alike = len({one.pop("digest") for one in found})
    for rank, one in enumerate(found):
        one["different digests"] = alike
        sheet.row(f"weight sync, rank {rank}", one, Bound("different digests", most=1, timed=False))


TASKS: dict[str, Callable[[Ranks, Place, Path], dict[str, Any]]] = {
    "distill_rank": distill_rank,
    "teachers_rank": teachers_rank,
    "vocabulary_rank": vocabulary_rank,
    "sync_rank": sync_rank,
}


def main() -> None:
    """One rank of a task."""
    task, folder, dry = sys.argv[1], Path(sys.argv[2]), "--dry" in sys.argv
    with join_ranks("cpu" if dry else "cuda", PATIENCE) as ranks:
        device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        found = TASKS[task](ranks, Place(device, dry, ranks.size), folder)
        ranks.barrier("the end of a task")
        (folder / f"{task}-{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
