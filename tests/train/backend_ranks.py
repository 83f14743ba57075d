"""One rank that trains a tiny student; run by test_backends.py, one process a rank.

    python backend_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` says on which back ends, one after another; see `run_task`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tiny
import torch
import torch.distributed as dist
from rank_processes import joined
from safetensors.torch import load_file, save_file

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, PolicyLossConfig, TrainConfig
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backends import open_backend
from opd.train.distill_terms import FullVocabularyTerm, TeacherView
from opd.train.terms import CrossEntropyTerm, PolicyTerm
from opd.types import RolloutBatch, TokenTerms

OPTIM = OptimConfig(lr=3e-3, max_grad_norm=0.5, weight_decay=0.01)
BATCH = BatchConfig(max_tokens=24)
TEMPERATURE = 0.7
WIDTH = 32


def student(seed: int = 0, **changes) -> CausalLM:
    """The model to train."""
    return tiny.model(seed, num_attention_heads=4, num_key_value_heads=2, **changes)


def teacher(micro):
    """A random teacher whose hidden states are a function of the sample."""
    rows = [
        torch.randn(len(s.response_ids), WIDTH, generator=torch.Generator().manual_seed(int(s.uid[1:])))
        for s in micro.samples
    ]
    weight = torch.randn(len(tiny.tokenizer()), WIDTH, generator=torch.Generator().manual_seed(99))
    return [TeacherView(micro.samples[0].teacher, 1.0, torch.cat(rows), Head(weight))]


def terms():
    """A divergence, a policy gradient and a cross-entropy together."""
    return [
        FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL()),
        PolicyTerm(PolicyLossConfig(), 0.01),
        CrossEntropyTerm(),
    ]


def batch(step: int) -> RolloutBatch:
    """The samples of a step; of two teachers, some without a response, some longer than a micro-batch."""
    rng = np.random.default_rng(step)
    lengths = [(int(p), int(r)) for p, r in zip(rng.integers(1, 9, 9), rng.integers(0, 20, 9), strict=True)]
    lengths[0] = (3, 4)
    samples = tiny.samples(lengths, teachers=["a"] * 4 + ["b"] * 5, seed=step)
    total = sum(response for _, response in lengths)
    made = []
    for _, n in lengths:
        term = TokenTerms.zeros(n)
        term.advantages = rng.normal(size=n).astype(np.float32)
        term.old_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        term.policy_weight = term.kl_weight = term.ce_weight = np.full(n, 1 / total, dtype=np.float32)
        made.append(term)
    return RolloutBatch(samples, made)


def train(backend, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of steps `first` to `last`."""
    return [
        backend.forward_backward(batch(step)) | backend.step(3e-3 * (0.9**step))
        for step in range(first, last)
    ]


def run_task(task: dict, folder: Path, ranks: Ranks) -> None:
    """Train from `task["first"]` to `task["last"]`, from a checkpoint if `task["load"]` names one, and write
    metrics, log-probabilities, weights and a checkpoint."""
    train_config = TrainConfig.model_validate(task["train"])
    model = student(**task.get("model", {}))
    backend = open_backend(lambda _: model, train_config, OPTIM, BATCH, TEMPERATURE, terms(), ranks)
    if "load" in task:
        saved = folder / task["load"]
        backend.load_state({n: load_file(saved / f"{n}.safetensors") for n in ("model", "optimizer")})
    metrics = train(backend, task["first"], task["last"])
    logprobs = backend.logprobs(batch(0).samples)
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    digest, state = backend.digest(), backend.state()
    backend.close()
    assert bool(state) == ranks.main
    if ranks.main:
        out = folder / task["name"]
        out.mkdir()
        for name, tensors in state.items():
            save_file(tensors, out / f"{name}.safetensors")
        save_file(weights, out / "weights.safetensors")
        (out / "result.json").write_text(
            json.dumps({"metrics": metrics, "digest": digest, "logprobs": [p.tolist() for p in logprobs]})
        )


def main() -> None:
    """Every task of FOLDER/tasks.json in turn."""
    with joined(seconds=60) as (_, folder):
        for task in json.loads((folder / "tasks.json").read_text()):
            run_task(task, folder, Ranks(dist.group.WORLD))
            dist.barrier()


if __name__ == "__main__":
    main()
