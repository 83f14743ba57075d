"""One rank of a model that no rank holds whole; run by test_sharded.py, one process a rank.

    python sharded_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` says what is done, one after another; see `DOES`.
"""

import gc
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from watched import own_bytes

from opd.config.train import TrainConfig
from opd.megatron.module import model_parallel
from opd.models import adapters as adapters_module
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.sharded import ForwardRoot, compare_together, open_empty, shard_model
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.stages import student as student_module
from opd.pipelines.stages.checkpoint_saver import save_collectively
from opd.pipelines.stages.student import Student
from opd.ranks import Ranks
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.sharded import ModelSharing
from opd.rollout.shared_groups import write_shared
from opd.rollout.torch_engine import TorchEngine
from opd.storage.checkpoints import CheckpointStore
from opd.train.backend import Backend, TrainingSettings
from opd.train.backends import open_backend
from opd.train.critic import ValueTerm, with_value_head
from opd.train.fsdp_backend import FSDPBackend
from opd.train.terms import CrossEntropyTerm
from opd.types import RolloutBatch, SamplingParams, TokenTerms

MIB = 1 << 20
RETURNED = {
    **{"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)},
    **{"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""With these glibc gives freed memory back, and matrix products need as much on every processor: what a
process holds is what it uses.
"""
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


def plain_training(**batch) -> TrainingSettings:
    """A cross-entropy alone, with changes of the micro-batches."""
    return TrainingSettings(
        backend_ranks.OPTIM, backend_ranks.BATCH.model_copy(update=batch), 1.0, [CrossEntropyTerm()]
    )


def limit(more: int | None) -> None:
    """Refuse this process more than `more` bytes beside those it holds; `None`: as many as it asks for."""
    size = resource.RLIM_INFINITY if more is None else own_bytes("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


@contextmanager
def mapped_for_nothing() -> Iterator[None]:
    """Around the opening of a folder. transformers maps its files to look at their headers, and RLIMIT_DATA
    counts all of a private mapping, of which nothing else is read.
    """
    size, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limit(None)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def open_mapped(*given, **more) -> CausalLM:
    """`open_empty`, whatever is mapped."""
    with mapped_for_nothing():
        return open_empty(*given, **more)


class Peak:
    """How much more memory was resident at most than when this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._begin = own_bytes("VmRSS")

    def bytes(self) -> int:
        """So far."""
        return own_bytes("VmHWM") - self._begin


def opened(folder: Path, task: dict, ranks: Ranks, *, whole: bool):
    """The back end of `task`, around the model in `folder / task["model"]`."""

    def load(dtype: str | None, *, empty: bool = False) -> CausalLM:
        lora = "lora" in task
        name = task.get("dtype", "float32") if lora or dtype is None else dtype
        with mapped_for_nothing():
            model = (open_empty if empty and not whole else CausalLM.from_pretrained)(
                folder / task["model"], dtype=name
            )
        assert (model.unread is None) == whole
        if "peaks" in task:
            model.mark_filled = lambda: (
                task["peaks"].append(task["peak"].bytes()) or CausalLM.mark_filled(model)
            )
        if "limit" in task:
            limit(task["limit"])
        if "values" in task:
            return with_value_head(model)
        if not lora:
            return model
        adapted = AdaptedLM(model, backend_ranks.LORA, folder / task["model"])
        if dtype is not None:
            adapted.keep_adapters_in(torch.float32)
        return adapted

    training = replace(plain_training(**task.get("batch", {})), **task.get("losses", {}))
    training = replace(training, quantize=task.get("quantize"))
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
    metrics, digests, before = [], [], held()
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
    said = {"differing": differing, "metrics": metrics, "digests": digests, "tensors": len(first)}
    nbytes = sum(tensor.nbytes for tensor in first.values())
    del found, first, second, backend
    return said | {"kept": (held() - before) / nbytes}


def held() -> int:
    """Bytes of the tensors that Python knows of."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


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
    try:
        with groups(task):
            task["peak"] = Peak()
            return within_limit(folder, task, ranks)
    finally:
        limit(None)


def groups(task: dict) -> AbstractContextManager:
    """Around what is limited: the groups of Megatron-Core, whose threads take memory."""
    width = task.get("train", {}).get("tensor_parallel")
    return nullcontext() if width is None else model_parallel(width)


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
        exported = exports(backend, empty, folder, task, ranks)
        return {"metrics": metrics, "peaks": peaks, "digests": [digest, exported]}


def exports(backend: Backend, empty: CausalLM, folder: Path, task: dict, ranks: Ranks) -> str:
    """The digest of the model that a stage leaves, of which `empty` is the form."""
    student_module.EXPORTED_BYTES = 8 * MIB
    adapters_module.open_empty = open_mapped  # of the base, with which adapters are merged
    tokenizer = load_tokenizer(folder / task["model"])
    student = SimpleNamespace(
        backend=backend, ranks=ranks, load_untrained=lambda *_, **__: empty, tokenizer=tokenizer
    )
    return Student.export_model(student, folder / f"{task['name']} exported", {})


def life(folder: Path, task: dict, ranks: Ranks) -> dict:
    """All that a model lives through, within `task["life"]` bytes: loaded, trained for three steps, saved;
    loaded again, resumed, trained for two, exported. Then what was exported is asked within
    `task["evaluate"]`. Where `task["writes"]`, the model that learns is asked after three steps, too.
    """
    store = CheckpointStore(folder / f"{task['name']} checkpoints")
    said: list[list[int]] = []
    try:
        with groups(task):
            limit(task["life"])
            with opened(folder, task, ranks, whole=False) as backend:
                metrics = learn(backend, 0, 3)
                if task.get("writes"):
                    assert isinstance(backend, FSDPBackend)
                    said = speaks(engine_of(backend.model, backend.root, ranks), ranks)
                save_collectively(store, ranks, 3, backend.state(), {"step": 3})
                saved = backend.digest()
            del backend
            gc.collect()
            with opened(folder, task, ranks, whole=False) as backend:
                checkpoint = store.latest(partial(compare_together, ranks))
                assert checkpoint is not None
                backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
                resumed = backend.digest()
                metrics += learn(backend, 3, 5)
                exported = exports(backend, formed(folder, task), folder, task, ranks)
            del backend
            gc.collect()
        ranks.barrier("the exported model")
        limit(task["evaluate"])
        model = open_mapped(folder / f"{task['name']} exported")
        evaluated = speaks(engine_of(model, shard_model(model, ranks), ranks), ranks)
    finally:
        limit(None)
    digests = [saved, resumed, exported]
    return {"metrics": metrics, "said": said, "evaluated": evaluated, "digests": digests}


def whole_model(folder: Path, task: dict) -> CausalLM:
    """The model of a task as one process trains it."""
    model = CausalLM.from_pretrained(folder / task["model"])
    return AdaptedLM(model, backend_ranks.LORA, folder / task["model"]) if "lora" in task else model


def formed(folder: Path, task: dict) -> CausalLM:
    """The model of a task as it is trained, without weights."""
    model = open_mapped(folder / task["model"])
    return AdaptedLM(model, backend_ranks.LORA, folder / task["model"]) if "lora" in task else model


def engine_of(model: CausalLM, root: ForwardRoot | None, ranks: Ranks) -> TorchEngine:
    """An engine around a model, which `ranks` share as `root`."""
    sharing = None if root is None else ModelSharing(root, ranks)
    return TorchEngine(model, max_running=2, max_sequence=32, sharing=sharing)


def speaks(engine: TorchEngine, ranks: Ranks) -> list[list[int]]:
    """The most likely answers to a few prompts: fewer than ranks, so that some only help."""
    asked = [
        EncodedPrompt(f"p{number}", "a", np.arange(2 + number, dtype=np.int32), None) for number in range(3)
    ]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    groups = write_shared(ranks, asked, lambda mine: collect(engine, mine, 1, greedy, 0), engine=engine)
    return [sample.response_ids.tolist() for group in groups for sample in group.samples]


def saves(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Take three steps, leave a checkpoint in `task["into"]`, and take two more; what memory it took beside
    the weights and moments.
    """
    with opened(folder, task, ranks, whole=False) as backend:
        learn(backend, 0, 3)
        peak = Peak()
        save_collectively(CheckpointStore(folder / task["into"]), ranks, 3, backend.state(), {"step": 3})
        return {"peaks": [peak.bytes()], "digest": backend.digest(), "metrics": learn(backend, 3, 5)}


def resumes(folder: Path, task: dict, ranks: Ranks) -> dict:
    """Go on from the newest checkpoint in `task["from"]` with two steps, perhaps within `task["within"]`."""
    try:
        with groups(task) if "within" in task else nullcontext():
            if "within" in task:
                limit(task["within"])
            return gone_on(folder, task, ranks)
    finally:
        limit(None)


def gone_on(folder: Path, task: dict, ranks: Ranks) -> dict:
    """`resumes`, within whatever limit there is."""
    with opened(folder, task, ranks, whole=False) as backend:
        if "within" not in task:
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
                save_collectively, store, writers, step, backend.state(), {"digest": backend.digest()}
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
    "life": life,
}


def one_task(rank: int, task: dict, folder: Path) -> dict:
    """What became of a task."""
    return DOES[task["does"]](folder, task, Ranks(dist.group.WORLD))


if __name__ == "__main__":
    do_tasks(one_task, seconds=240)
