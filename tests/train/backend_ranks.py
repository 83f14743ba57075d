"""One rank that trains a tiny student; run by test_backends.py, one process a rank.

    python backend_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` says on which back ends, one after another; see `run_task`.
"""

import errno
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from cuda_types import CudaTypes
from rank_processes import joined, run_ranks
from safetensors.torch import save_file

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, PolicyLossConfig, TrainConfig
from opd.config.rl import CISPOLoss, GSPOLoss
from opd.config.train import LoRAConfig
from opd.errors import OpdError
from opd.models.adapters import AdaptedLM, weight_name
from opd.models.causal_lm import CausalLM, held_bytes, torch_dtype
from opd.models.peft_folder import LORA_B
from opd.ranks import Ranks
from opd.storage.tensors import Saved, State, TensorParts, write_files
from opd.train.backend import Backend, TrainingSettings
from opd.train.backends import open_backend
from opd.train.distill_terms import FullVocabularyTerm
from opd.train.offload import OffloadBuffer
from opd.train.terms import CrossEntropyTerm, PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

OPTIM = OptimConfig(lr=3e-3, max_grad_norm=0.5, weight_decay=0.01)
BATCH = BatchConfig(max_tokens=24)
LORA = LoRAConfig(rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"])
TEMPERATURE = 0.7
WIDTH = 32


def student(seed: int = 0, lora: bool | list[str] = False, dtype: str | None = None, **changes) -> CausalLM:
    """The model to train; with `lora` its adapters alone, kept in `dtype`. If `lora` names the layers that
    have some, their `B` is not zero but drawn.
    """
    model = tiny.model(seed, **{"num_attention_heads": 4, "num_key_value_heads": 2} | changes)
    for name, correction in model.module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.copy_(torch.linspace(-0.01, 0.01, len(correction)))
    if not lora:
        return model
    drawn = isinstance(lora, list)
    adapted = AdaptedLM(model, LORA.model_copy(update={"targets": lora}) if drawn else LORA, "base")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapted.adapters() if drawn else ():
        if name.endswith(LORA_B):
            tensor.normal_(std=0.1, generator=generator)
    if dtype is not None:
        adapted.keep_adapters_in(torch_dtype(dtype))
    return adapted


teacher = partial(tiny.random_teacher, width=WIDTH)


def terms():
    """A divergence, every policy gradient and a cross-entropy together."""
    return [
        FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL()),
        PolicyTerm(PolicyLossConfig(), 0.01),
        PolicyTerm(GSPOLoss(clip_low=0.5, clip_high=0.5)),
        PolicyTerm(CISPOLoss()),
        CrossEntropyTerm(),
    ]


def training(**batch) -> TrainingSettings:
    """How every task trains, with changes of `BATCH`."""
    return TrainingSettings(OPTIM, BATCH.model_copy(update=batch), TEMPERATURE, terms())


def batch(step: int) -> RolloutBatch:
    """The samples of a step; of two teachers, some without a response, some longer than a micro-batch."""
    rng = np.random.default_rng(step)
    lengths = [(int(p), int(r)) for p, r in zip(rng.integers(1, 9, 9), rng.integers(0, 20, 9), strict=True)]
    lengths[0] = (3, 4)
    return batch_of(lengths, ["a"] * 4 + ["b"] * 5, step)


def again(_: int) -> RolloutBatch:
    """The same samples at every step."""
    return batch(0)


def uneven(step: int) -> RolloutBatch:
    """One rank has most tokens in one micro-batch, the other few in several; at odd steps it has none. Some
    have sampling masks.
    """
    short = [] if step % 2 else [(1, 1), (2, 2), (1, 3), (1, 1)]
    made = batch_of([(4, 50), *short], ["a", "a", "b", "a", "b"][: 1 + len(short)], step)
    tiny.draw_masks(made.samples[::2])
    return made


def routed(step: int) -> RolloutBatch:
    """`batch`, of which most positions have experts that no router chose: 2 of 4, in two layers."""
    made, rng = batch(step), np.random.default_rng(step)
    for sample in made.samples[:-2]:
        scores = rng.random((len(sample.token_ids) - 1, 2, 4))
        sample.expert_choices = scores.argsort(-1)[..., :2].astype(np.uint8)
    return made


FILES = ("model", "optimizer")
"""What a checkpoint is made of."""

BATCHES = {"new": batch, "again": again, "uneven": uneven, "routed": routed}


def batch_of(lengths: list[tuple[int, int]], teachers: list[str], seed: int) -> RolloutBatch:
    """Samples of these lengths, whose tokens all weigh the same."""
    rng = np.random.default_rng(seed)
    samples = tiny.samples(lengths, teachers=teachers, seed=seed)
    total = sum(response for _, response in lengths)
    made = []
    for _, n in lengths:
        term = TokenTerms.zeros(n)
        term.advantages = rng.normal(size=n).astype(np.float32)
        term.old_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        term.policy_weight = term.kl_weight = term.ce_weight = np.full(n, 1 / total, dtype=np.float32)
        made.append(term)
    return RolloutBatch(samples, made)


def train(backend, first: int, last: int, batch=batch) -> list[dict[str, float]]:
    """The metrics of steps `first` to `last`, of which each learns `batch(step)`; between them what learns
    leaves the device, if it has where to.
    """
    found = []
    for step in range(first, last):
        backend.offload_state()
        found.append(backend.forward_backward(batch(step)) | backend.step(3e-3 * (0.9**step)))
    return found


def gradients_of(backend) -> dict[str, torch.Tensor]:
    """Of the loss of `batch(0)`, by Hugging Face's names, of all that learns; nothing is learnt from it."""
    backend.forward_backward(batch(0))
    if isinstance(backend, TorchBackend):
        learn = {name: p for name, p in backend.model.module.named_parameters() if p.requires_grad}
        found = {weight_name(name): p.grad.clone() for name, p in learn.items()}
    else:  # gathered as weights are
        learn = {name: p for name, p in backend._parameters.items() if p.requires_grad}
        held = {name: (p, p.detach().clone()) for name, p in learn.items()}
        for parameter, _ in held.values():
            parameter.data.copy_(parameter.main_grad)
        found = {name: tensor.clone() for name, tensor in backend.weights() if name in backend._plan.learnt}
        for parameter, weight in held.values():
            parameter.data.copy_(weight)
    backend.zero_grad()
    return found


def save_state(out: Path, state: State, ranks: Ranks | None = None) -> None:
    """Write what this rank has of a back end's state into the folder `out`."""
    ranks = ranks or Ranks()
    write_files(out, state, ranks.rank, ranks.size)


def read_state(out: Path) -> Saved:
    """What `save_state` wrote, on all ranks."""
    return {name: TensorParts(out.glob(f"{name}*.safetensors")) for name in FILES}


def on_two_ranks(folder: Path, half: State, tasks: list[dict]) -> Path:
    """`folder`, in which two ranks have left what every task gave; tasks may load the state `half`."""
    (folder / "half").mkdir()
    save_state(folder / "half", half)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(__file__, 2, folder, seconds=60 + 40 * len(tasks))
    return folder


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """The metrics of two runs agree."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert math.isclose(value, theirs[name], rel_tol=2e-5, abs_tol=2e-5), name


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Those of two runs agree, tensor by tensor."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def no_room(*_: object, **__: object) -> None:
    """A shelf on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_away(backend: Backend, ranks: Ranks) -> None:
    """What learns is in memory, and not when it rests, though nobody has to ask for it to come back. If one
    rank has no room for it, all of them say so.
    """
    assert backend._shelf is not None
    if not ranks.is_main:
        backend._shelf.put = no_room  # type: ignore[method-assign]
    where = "on rank 1: " if ranks.is_main else ""
    with pytest.raises(OpdError, match=f"^{where}.*the disk is full; free some space"):
        backend.offload_state()
    vars(backend._shelf).pop("put", None)
    backend.offload_state()
    backend.measured = lambda: seen.append(backend.resident())
    seen: list[dict[str, int]] = []
    backend.forward_backward(batch(0))
    backend.zero_grad()
    there = backend.resident()
    backend.offload_state()
    stays = held_bytes(backend.local_tensors().stays)
    left = backend.resident()
    assert left == {"trainer_weights": stays, "trainer_gradients": 0, "trainer_moments": 0}, left
    assert seen[0]["trainer_weights"] == there["trainer_weights"] > stays
    assert seen[0]["trainer_gradients"] > 0 == seen[0]["trainer_moments"]


def run_task(task: dict, folder: Path, ranks: Ranks) -> None:
    """Train from `task["first"]` to `task["last"]`, from a checkpoint if `task["load"]` names one, on
    `BATCHES[task["batches"]]`; write metrics, log-probabilities, weights and a
    checkpoint, and, if asked for `gradients`, those of the first batch. If told that it is `away`, nothing is
    in memory whenever it has nothing to do.
    """
    settings = {"quantize": task.get("quantize"), "balance_rate": task.get("balance_rate", 0.0)}
    settings |= task.get("losses", {})
    own = replace(training(**task.get("batch", {})), **settings)
    opened = open_backend(
        lambda dtype, empty=False: student(dtype=dtype, **task.get("model", {})),
        TrainConfig.model_validate(task["train"]),
        replace(own, shelf=OffloadBuffer(folder)) if task.get("away") else own,
        ranks,
        dtype=task.get("dtype", "float32"),
    )
    batches = BATCHES[task.get("batches", "new")]
    with opened as backend:
        backend.replay_experts(batches is routed)
        if "load" in task:
            backend.load_state(read_state(folder / task["load"]))
        gradients = gradients_of(backend) if task.get("gradients") else {}
        metrics = train(backend, task["first"], task["last"], batches)
        if task.get("away"):
            assert_away(backend, ranks)
        asked = routed if batches is routed else batch
        logprobs = backend.recompute_logprobs(asked(0).samples)
        weights = {name: tensor.clone() for name, tensor in backend.weights()}
        plain = (
            {n: t.clone() for n, t in backend.plain_weights()} if "lora" in task.get("model", {}) else None
        )
        backend.offload_state()
        digest = backend.digest()
        backend.offload_state()
        state = backend.state()
        backend.offload_state()  # it may end like that
    out = folder / task["name"]
    out.mkdir(exist_ok=True)
    save_state(out, state, ranks)
    if ranks.is_main:
        save_file(weights, out / "weights.safetensors")
        save_file(gradients, out / "gradients.safetensors")
        if plain is not None:
            save_file(plain, out / "plain.safetensors")
        (out / "result.json").write_text(
            json.dumps({"metrics": metrics, "digest": digest, "logprobs": [p.tolist() for p in logprobs]})
        )


def main() -> None:
    """Every task of FOLDER/tasks.json in turn."""
    with joined(seconds=240) as (_, folder):
        for task in json.loads((folder / "tasks.json").read_text()):
            with CudaTypes() if task["train"].get("distributed_optimizer") else nullcontext():
                run_task(task, folder, Ranks(dist.group.WORLD))
            dist.barrier()


if __name__ == "__main__":
    main()
