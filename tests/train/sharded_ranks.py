"""One rank of a model that no rank holds whole; run by test_sharded.py, one process a rank.

    python sharded_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` says what is done, one after another; see `DOES`.
"""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import backend_ranks
import numpy as np
import torch
import torch.distributed as dist
from rank_processes import do_tasks

from opd.config.train import TrainConfig
from opd.megatron.module import model_parallel
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.sharded import compare_together, open_empty
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.stages import student as student_module
from opd.pipelines.stages.saving import save_together
from opd.pipelines.stages.student import Student
from opd.ranks import Ranks
from opd.storage.checkpoints import CheckpointStore
from opd.train.backend import Backend, Training
from opd.train.backends import open_backend
from opd.train.critic import ValueTerm, with_value_head
from opd.train.terms import CrossEntropyTerm
from opd.types import RolloutBatch, TokenTerms

MIB = 1 << 20
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)}
"""With these glibc gives freed memory back, and what a process holds is what it uses."""
BIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""130 MiB of float32."""
LR = 1e-3


def learn(backend: Backend, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of these steps."""
    return [
        backend.forward_backward(backend_ranks.batch(step)) | backend.step(LR) for step in range(first, last)
    ]


def plain_training(**batch) -> Training:
    """A cross-entropy alone, with changes of the micro-batches."""
    return Training(
        backend_ranks.OPTIM, backend_ranks.BATCH.model_copy(update=batch), 1.0, [CrossEntropyTerm()]
    )


def status(name: str) -> int:
    """Bytes of `VmHWM` (the most memory that was resident), `VmRSS` or `VmData` (what RLIMIT_DATA limits)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def limit(more: int | None) -> None:
    """Refuse this process more than `more` bytes beside those it holds; `None`: as many as it asks for."""
    size = resource.RLIM_INFINITY if more is None else status("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


class Peak:
    """How much more memory was resident at most than when this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._begin = status("VmRSS")

    def bytes(self) -> int:
        """So far."""
        return status("VmHWM") - self._begin


def opened(folder: Path, task: dict, ranks: Ranks, *, whole: bool):
    """The back end of `task`, around the model in `folder / task["model"]`."""

    def load(dtype: str | None, *, empty: bool = False) -> CausalLM:
        lora = "lora" in task
        name = task.get("dtype", "float32") if lora or dtype is None else dtype
        model = (open_empty if empty and not whole else CausalLM.from_pretrained)(
            folder / task["model"], dtype=name
        )
        assert (model.unread is None) == (whole or task.get("converted", False))
        if "peaks" in task:
            model.filled = lambda: task["peaks"].append(task["peak"].bytes()) or CausalLM.filled(model)
        limit(task.get("limit"))
        if "values" in task:
            return with_value_head(model)
        if not lora:
            return model
        adapted = AdaptedLM(model, backend_ranks.LORA, folder / task["model"])
        if dtype is not None:
            adapted.keep_adapters_in(torch.float32)
        return adapted

    training = plain_training(**task.get("batch", {}))
    if "values" in task:
        training = replace(training, terms=[ValueTerm(0.2)])
    train = TrainConfig.model_validate(task.get("train", {}))
    return open_backend(load, train, training, ranks, dtype=task.get("dtype", "float32"))


def values_of(batch: RolloutBatch) -> RolloutBatch:
    """The same samples, with values to learn."""
    terms = []
    for sample in batch.samples:
        term = TokenTerms.zeros(len(sample.response_ids))
        term.values = np.zeros(len(sample.response_ids), np.float32)
        term.returns = np.linspace(-1, 1, len(sample.response_ids), dtype=np.float32)
        term.policy_weight = np.full(len(sample.response_ids), 0.01, np.float32)
        terms.append(term)
    return RolloutBatch(batch.samples, terms)


def alike(folder: Path, task: dict, ranks: Ranks) -> dict:
    """A model that is read in parts, and the same one read whole and then cut: which tensors differ, and the
    metrics of two steps of each.
    """
    found: list[dict[str, torch.Tensor]] = []
    metrics, digests = [], []
    for whole in (True, False):
        with opened(folder, task, ranks, whole=whole) as backend:
            found.append({name: tensor.clone() for name, tensor in backend.weights()})
            digests.append(backend.digest())
            if "values" in task:
                batch = values_of(backend_ranks.batch(0))
                metrics.append([backend.forward_backward(batch) | backend.step(LR)])
            else:
                metrics.append(learn(backend, 0, 2))
    first, second = found
    assert first.keys() == second.keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    return {"differing": differing, "metrics": metrics, "digests": digests, "tensors": len(first)}


def at_once(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Load all of the model."""
    peak = Peak()
    return {
        "parameters": CausalLM.from_pretrained(folder / task["model"]).parameter_count,
        "peak": peak.bytes(),
    }


def limited(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Load within `task["limit"]` bytes, then take three steps, and write the model within
    `task["export"]`.
    """
    task |= {"peaks": []}
    width = task.get("train", {}).get("tensor_parallel")
    try:
        with nullcontext() if width is None else model_parallel(width):  # whose groups' threads take memory
            task["peak"] = Peak()
            return within_limit(folder, task, ranks)
    finally:
        limit(None)


def within_limit(folder: Path, task: dict, ranks: Ranks) -> dict:
    """`limited`, of which `task` says what is measured."""
    with opened(folder, task, ranks, whole=False) as backend:
        limit(None)
        peaks = [*task["peaks"], task["peak"].bytes()]
        metrics = learn(backend, 0, 3)
        if "export" not in task:
            return {"metrics": metrics, "peaks": peaks}
        digest, empty = backend.digest(), open_empty(folder / task["model"])
        limit(task["export"])
        student_module.EXPORTED_BYTES = 8 * MIB
        tokenizer = load_tokenizer(folder / task["model"])
        student = SimpleNamespace(
            backend=backend, ranks=ranks, load=lambda *_, **__: empty, tokenizer=tokenizer
        )
        exported = Student.export(student, folder / f"{task['name']} exported", {})
        return {"metrics": metrics, "peaks": peaks, "digests": [digest, exported]}


def saves(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Take three steps, leave a checkpoint in `task["into"]`, and take two more; what memory it took beside
    the weights and moments.
    """
    with opened(folder, task, ranks, whole=False) as backend:
        learn(backend, 0, 3)
        peak = Peak()
        save_together(CheckpointStore(folder / task["into"]), ranks, 3, backend.state(), {"step": 3})
        return {"peaks": [peak.bytes()], "digest": backend.digest(), "metrics": learn(backend, 3, 5)}


def resumes(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Go on from the newest checkpoint in `task["from"]` with two steps."""
    with opened(folder, task, ranks, whole=False) as backend:
        learn(backend, 0, 1)  # so that there is something to replace
        peak = Peak()
        checkpoint = CheckpointStore(folder / task["from"]).latest(partial(compare_together, ranks))
        if checkpoint is None:
            return {"error": "nothing"}
        backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
        took, digest = peak.bytes(), backend.digest()
        return {"peaks": [took], "digest": digest, "metrics": learn(backend, checkpoint.step, 5)}


def for_ever(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Train, and write checkpoint after checkpoint meanwhile, until this process is killed."""
    store = CheckpointStore(folder / task["into"])
    with opened(folder, task, ranks, whole=False) as backend, ThreadPoolExecutor(1) as thread:
        writers = ranks.new_group("checkpoints")
        for step in count(1):
            written = thread.submit(
                save_together, store, writers, step, backend.state(), {"digest": backend.digest()}
            )
            learn(backend, step, step + 1)
            written.result()
    return {}


DOES = {
    "saves": saves,
    "resumes": resumes,
    "for ever": for_ever,
    "alike": alike,
    "at once": at_once,
    "limited": limited,
}


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What became of a task."""
    return DOES[task["does"]](folder, task, Ranks(dist.group.WORLD))


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
