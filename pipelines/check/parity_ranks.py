"""Megatron-Core with tensor parallel size 2 for the parity check: two processes that meet over a file.

    python -m opd.pipelines.check.parity_ranks FOLDER RANK

The folder holds the ranks' input. Rank 0 writes the scores beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd.errors import OpdError, TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_logprobs
from opd.pipelines.check.parity import TEMPERATURES, ParityProblem, ParityScores
from opd.pipelines.launch.supervisor import MemberFailedError, Supervisor, parent, start_command
from opd.rollout.preemption import Preemption
from opd.teachers.kinds import Placement
from opd.teachers.megatron_teacher import MegatronTeacher, megatron_teachers
from opd.types import Sample

RANKS = 2
TIMEOUT = 600.0
"""Seconds for both ranks."""


def by_two_ranks(problem: ParityProblem, sources: Mapping[str, str]) -> dict[str, ParityScores]:
    """Score with Megatron-Core in two processes on this machine.

    Heads and KL are sharded over the vocabulary. Raises `TeacherError` with a rank's message if one fails or
    both take longer than `TIMEOUT`.
    """
    with TemporaryDirectory(prefix="opd-parity-") as name:
        folder = Path(name)
        head = problem.student_head
        tensors = {"hidden": problem.student_hidden, "targets": problem.targets}
        tensors["weight"] = head.weight.detach()[: head.vocabulary]
        if head.bias is not None:
            tensors["bias"] = head.bias.detach()[: head.vocabulary]
        tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / "in.safetensors")
        described = {
            "sources": {
                teacher: str(Path(source).absolute()) if "://" not in source else source
                for teacher, source in sources.items()
            },
            "placement": asdict(problem.placement),
            "head": {"scale": head.scale, "softcap": head.softcap},
            "samples": [
                [s.uid, s.domain, s.prompt_ids.tolist(), s.response_ids.tolist()] for s in problem.samples
            ],
        }
        (folder / "in.json").write_text(json.dumps(described), "utf-8")
        _run_ranks(folder)
        scores = load_file(folder / "scores.safetensors")
    return {
        teacher: ParityScores(
            {t: scores[f"{teacher}/logprobs/{t}"] for t in TEMPERATURES},
            {t: scores[f"{teacher}/kl/{t}"] for t in TEMPERATURES},
        )
        for teacher in sources
    }


def _run_ranks(folder: Path) -> None:
    command = [sys.executable, "-m", "opd.pipelines.check.parity_ranks", str(folder)]
    one_thread = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # two ranks share this machine
    deadline = time.monotonic() + TIMEOUT
    try:
        with Supervisor(Preemption(grace=0.0)) as ranks:
            for rank in range(RANKS):
                name = f"rank {rank}"
                ranks.add_member(start_command(name, [*command, str(rank)], one_thread, folder / name))
            while ranks.running:
                ranks.check_members()
                if time.monotonic() > deadline:
                    raise TeacherError(
                        f"two Megatron-Core ranks have not answered within {TIMEOUT:g} s; try a smaller"
                        " model."
                    )
    except MemberFailedError as failed:
        rank = failed.member
        lines = rank.log.read_text("utf-8", "replace").strip().splitlines() or [rank.child.status()]
        raise TeacherError(f"Megatron-Core {rank.name} failed: {lines[-1]}") from None


def _score_rank(folder: Path, rank: int) -> None:
    described = json.loads((folder / "in.json").read_text("utf-8"))
    tensors = load_file(folder / "in.safetensors")
    placement = Placement(**described["placement"])
    on_gpu = placement.device != "cpu" and torch.cuda.device_count() >= RANKS
    placement = Placement(
        placement.dtype, f"cuda:{rank}" if on_gpu else "cpu", placement.max_tokens, placement.vocabulary
    )
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT),
    )
    problem = ParityProblem(
        [
            Sample(uid, uid, domain, np.array(prompt, np.int32), response_ids=np.array(response, np.int32))
            for uid, domain, prompt, response in described["samples"]
        ],
        tensors["targets"],
        tensors["hidden"],
        Head(tensors["weight"], bias=tensors.get("bias"), **described["head"]),
        placement,
    )
    scores: dict[str, Tensor] = {}
    with megatron_teachers(described["sources"], placement, tensor_parallel=RANKS) as teachers:
        for name, teacher in teachers.items():
            scores |= {f"{name}/{key}": value for key, value in _rank_scores(problem, teacher).items()}
    if rank == 0:
        save_file(scores, folder / "scores.safetensors")
    dist.destroy_process_group()


@torch.no_grad()
def _rank_scores(problem: ParityProblem, teacher: MegatronTeacher) -> dict[str, Tensor]:
    """Return `logprobs/T` and `kl/T` of both temperatures, from this rank's rows of both heads."""
    rows, shard = teacher.score(problem.samples).rows, teacher.load_head_shard()
    device = rows.device
    head = problem.student_head
    bias = None if head.bias is None else head.bias.to(device)
    full = Head(head.weight.to(device), bias=bias, scale=head.scale, softcap=head.softcap)
    student = shard.shard_like(full)
    hidden, targets = problem.student_hidden.to(device), problem.targets.to(device)
    scores = {}
    for t in TEMPERATURES:
        scores[f"logprobs/{t}"] = linear_logprobs(rows, shard, targets, temperature=t)
        scores[f"kl/{t}"] = linear_kl(hidden, student, rows, shard, temperature=t)
    return {key: value.cpu().contiguous() for key, value in scores.items()}


def main() -> int:
    """Score as one rank. An error becomes one sentence on the error stream."""
    parent()  # this process ends with its parent
    torch.set_num_threads(1)
    try:
        _score_rank(Path(sys.argv[1]), int(sys.argv[2]))
    except OpdError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
