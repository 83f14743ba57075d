"""One optimiser step on a tiny model, the same for one rank and for ranks that share sequences."""

from collections.abc import Callable
from functools import partial

import numpy as np
import tiny
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, PolicyLossConfig
from opd.config.rl import CISPOLoss, GSPOLoss
from opd.train.backend import TrainingSettings
from opd.train.distill_terms import FullVocabularyTerm
from opd.train.terms import CrossEntropyTerm, PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

SHAPE = {"initializer_range": 0.3, "num_hidden_layers": 2}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CASES: dict[str, tuple[dict, dict, list[tuple[int, int]]]] = {
    "llama": ({}, {}, [(3, 14), (5, 1), (2, 23), (6, 3), (1, 5)]),
    "one": ({}, {"recompute_layers": True}, [(4, 60)]),
    "mistral": ({"model_type": "mistral", "sliding_window": 5}, {}, [(3, 30), (2, 7)]),
    "gemma2": (
        {"model_type": "gemma2", "sliding_window": 6, "attn_logit_softcapping": 5.0, "head_dim": 8},
        {"recompute_layers": True},
        [(3, 21), (4, 8)],
    ),
    # Fewer response tokens than ranks: some train on none.
    "short": ({}, {}, [(1, 1), (2, 1)]),
    # Each rank's share in pieces of an odd size, that begin and end within sequences.
    "llama in pieces": ({}, {"sequence_chunk": 5}, [(3, 14), (5, 1), (2, 23), (6, 3), (1, 5)]),
    "one in pieces": ({}, {"sequence_chunk": 7}, [(4, 60)]),
    "mistral in pieces": (
        {"model_type": "mistral", "sliding_window": 5},
        {"sequence_chunk": 3},
        [(3, 30), (2, 7)],
    ),
    "gemma2 in pieces": (
        {"model_type": "gemma2", "sliding_window": 6, "attn_logit_softcapping": 5.0, "head_dim": 8},
        {"sequence_chunk": 4},
        [(3, 21), (4, 8)],
    ),
    # Alternating windows, sinks in each head, experts.
    "gpt_oss": (GPT_OSS, {"recompute_layers": True}, [(3, 21), (4, 8)]),
    "gpt_oss in pieces": (GPT_OSS, {"sequence_chunk": 4}, [(3, 21), (4, 8)]),
    "short in pieces": ({"tie_word_embeddings": False}, {"sequence_chunk": 1}, [(1, 1), (2, 1)]),
}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES |= {
    "mixture": (MIXTURE, {"recompute_layers": True}, [(3, 14), (5, 1), (2, 23), (6, 3), (1, 5)]),
    "mixture in pieces": (MIXTURE, {"sequence_chunk": 5}, [(3, 14), (5, 1), (2, 23), (6, 3), (1, 5)]),
}
"""Tokens go to experts that no router chose."""
SHARDED = {
    "sharded mixture": (MIXTURE, {"recompute_layers": True}, [(3, 14), (5, 1), (2, 23), (6, 3)]),
    "again": ({}, {"recompute_layers": True}, [(3, 14), (5, 1), (2, 23), (6, 3)]),
    "pieces": ({}, {"sequence_chunk": 9}, [(3, 14), (5, 1), (2, 23), (6, 3)]),
}
"""Steps for FSDP, whose ranks share samples and not sequences."""
MESH = {
    "llama on a mesh": CASES["llama"],
    "gemma2 in pieces on a mesh": CASES["gemma2 in pieces"],
    # Fewer samples than rows of ranks: one row trains on none.
    "one on a mesh": CASES["one"],
}
"""Steps for two rows of ranks, which share samples, each of two ranks that share sequences."""


CHOSEN = {"llama chosen": (CASES["llama"], 1), "one chosen": (CASES["one"], 2)}
"""Steps of ranks that choose how many share each sequence, and what two choose: so many that no rank has more
than 40 tokens of one.
"""

teacher = partial(tiny.random_teacher, width=16)


def make_batch(lengths: list[tuple[int, int]]) -> RolloutBatch:
    half = len(lengths) // 2
    samples = tiny.samples(lengths, teachers=["s"] * half + ["t"] * (len(lengths) - half))
    rng = np.random.default_rng(1)
    terms = []
    for sample in samples:
        n = len(sample.response_ids)
        term = TokenTerms.zeros(n)
        term.advantages = rng.normal(size=n).astype(np.float32)
        term.old_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        weights = (rng.random(n) * (rng.random(n) < 0.8)).astype(np.float32)
        term.policy_weight = term.kl_weight = term.ce_weight = weights
        terms.append(term)
    return RolloutBatch(samples, terms)


def step(
    name: str, make: Callable[..., TorchBackend], *, whole: bool = False
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient by parameter, the log-probabilities, the weights after the step; and the metrics.

    `whole`: without the case's settings of memory.
    """
    chosen = {case: settings for case, (settings, _) in CHOSEN.items()}
    changes, memory, lengths = (CASES | SHARDED | MESH | chosen)[name]
    if whole:
        memory = {}
    terms = [
        FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL()),
        PolicyTerm(PolicyLossConfig(), 0.01),
        PolicyTerm(GSPOLoss(clip_low=0.5, clip_high=0.5)),
        PolicyTerm(CISPOLoss()),
        CrossEntropyTerm(),
    ]
    config = BatchConfig(max_tokens=40, kl_chunk=7, **memory)
    # AdamW divides by the gradient's size: a small eps would make a step of what is rounding alone.
    training = TrainingSettings(OptimConfig(eps=1e-3), config, 0.7, terms)
    back = make(tiny.model(0, **SHAPE | changes), training)
    batch = make_batch(lengths)
    if name.startswith("llama"):
        tiny.draw_masks(batch.samples[1:])
    if back.replay_experts("auto"):
        tiny.draw_choices(back.routing, [batch.samples[0], *batch.samples[2:]], seed=5)
    back.assign_samples(batch.samples)
    found = {"logprobs": torch.from_numpy(np.concatenate(back.recompute_logprobs(batch.samples)))}
    metrics = back.forward_backward(batch)
    parameters = back.model.module.named_parameters()
    gradients = {f"grad/{n}": p.grad for n, p in parameters if p.grad is not None}
    found |= {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()}
    metrics |= back.step(1e-3)
    return found | {f"new/{n}": t.clone() for n, t in back.weights()}, metrics
