"""One distillation step of a student of real size, in each precision."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, TrainConfig
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.ranks import Ranks
from opd.train.backend import Training
from opd.train.backends import open_backend
from opd.train.distill_terms import FullVocabularyTerm, TeacherView
from opd.types import MicroBatch, RolloutBatch, Sample, Status, TokenTerms
from tests.gpu import models
from tests.gpu.clock import Place

PROMPT, RESPONSE, SAMPLES = 128, 384, 16
PRECISIONS: dict[str, tuple[str, Literal["mixed", "pure"]]] = {
    "float32": ("float32", "mixed"),
    "bfloat16 over float32": ("bfloat16", "mixed"),
    "bfloat16": ("bfloat16", "pure"),
}
"""`model.dtype` and `train.precision`."""


def batch(vocabulary: int, place: Place) -> RolloutBatch:
    """Samples of random tokens, all of one teacher."""
    prompt, response = (4, 8) if place.dry else (PROMPT, RESPONSE)
    rng = np.random.default_rng(0)
    samples, terms = [], []
    for i in range(SAMPLES):
        samples.append(
            Sample(
                uid=f"s{i}",
                group_uid=f"g{i}",
                domain="a",
                prompt_ids=rng.integers(1, vocabulary, prompt).astype(np.int32),
                response_ids=rng.integers(1, vocabulary, response).astype(np.int32),
                rollout_logprobs=np.zeros(response, dtype=np.float32),
                policy_versions=np.zeros(response, dtype=np.int32),
                loss_mask=np.ones(response, dtype=bool),
                teacher="t",
                status=Status.COMPLETED,
            )
        )
        term = TokenTerms.zeros(response)
        term.kl_weight = np.full(response, 1 / (SAMPLES * response), dtype=np.float32)
        terms.append(term)
    return RolloutBatch(samples, terms)


def teacher(model: CausalLM, dtype: torch.dtype) -> Any:
    """A random head and hidden states of the student's width."""
    width = model.config.hidden_size
    weight = (torch.randn(model.vocab_size, width, device=model.device) * 0.02).to(dtype)

    def views(micro: MicroBatch) -> list[TeacherView]:
        rows = torch.randn(len(micro.targets), width, device=model.device).to(dtype)
        return [TeacherView("t", 1.0, rows, Head(weight))]

    return views


def one(name: str, place: Place) -> dict[str, float]:
    """Milliseconds a step and memory above the model's."""
    dtype, precision = PRECISIONS[name]
    compute = torch_dtype(dtype)
    model = models.model("0.6B", place, torch.float32 if precision == "mixed" else compute)
    terms = [FullVocabularyTerm(teacher(model, compute), "one_hot", FullVocabularyKL())]
    training = Training(OptimConfig(), BatchConfig(max_tokens=4096), 1.0, terms)
    samples = batch(model.vocab_size, place)
    with open_backend(
        lambda _: model, TrainConfig(precision=precision), training, Ranks(), dtype=dtype
    ) as backend:

        def step() -> None:
            backend.forward_backward(samples)
            backend.step(1e-5)

        took = place.milliseconds(step, rounds=3, warm_ups=1)
        return {"ms": took, "tokens/s": 1e3 * samples_tokens(samples) / took, "GiB": place.peak_gib(step)}


def samples_tokens(samples: RolloutBatch) -> int:
    """Prompt and response tokens of a batch."""
    return sum(len(s.prompt_ids) + len(s.response_ids) for s in samples.samples)


def steps(place: Place) -> dict[str, Any]:
    """A step in each precision."""
    found: dict[str, Any] = {}
    for name in PRECISIONS:
        found[name] = one(name, place)
        place.clear()
    return found
