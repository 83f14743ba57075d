"""One distillation step of a student of real size, in each precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, TrainConfig
from opd.config.train import LoRAConfig
from opd.kernels.head import Head
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.ranks import Ranks
from opd.train.backend import Backend, TrainingSettings
from opd.train.backends import open_backend
from opd.train.distill_terms import FullVocabularyTerm
from opd.train.teacher_views import TeacherView
from opd.types import MicroBatch, RolloutBatch, TokenTerms
from tests.gpu import models
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet

PROMPT, RESPONSE, SAMPLES = 128, 384, 16
PRECISIONS: dict[str, tuple[str, Literal["mixed", "pure"]]] = {
    "float32": ("float32", "mixed"),
    "bfloat16 over float32": ("bfloat16", "mixed"),
    "bfloat16": ("bfloat16", "pure"),
}
"""`model.dtype` and `train.precision`."""


def batch(vocabulary: int, place: Place, count: int = SAMPLES) -> RolloutBatch:
    """Return `count` samples of random tokens, all of one teacher."""
    prompt, response = (4, 8) if place.dry else (PROMPT, RESPONSE)
    rng = np.random.default_rng(0)
    samples, terms = [], []
    for i in range(count):
        samples.append(models.random_sample(rng, i, prompt, response, vocabulary))
        term = TokenTerms.zeros(response)
        term.kl_weight = np.full(response, 1 / (count * response), dtype=np.float32)
        terms.append(term)
    return RolloutBatch(samples, terms)


def teacher(model: CausalLM, dtype: torch.dtype) -> Any:
    """A random head, and hidden states of the student's width that are a function of the token alone: the
    same on whichever rank it is.
    """
    width = model.config.hidden_size
    generator = torch.Generator(model.device).manual_seed(1)
    weight = torch.randn(model.vocab_size, width, device=model.device, generator=generator)
    states = torch.randn(1024, width, device=model.device, generator=generator).to(dtype)
    weight = (weight * 0.02).to(dtype)

    def views(micro: MicroBatch) -> list[TeacherView]:
        return [TeacherView("t", 1.0, states[micro.targets % len(states)], Head(weight))]

    return views


@contextmanager
def opened(
    name: str,
    place: Place,
    ranks: Ranks | None = None,
    *,
    tokens: int = 4096,
    count: int = SAMPLES,
    size: str = "0.6B",
    adapters: bool = False,
) -> Iterator[tuple[Backend, RolloutBatch]]:
    """Open the back end of a student of `size` in the precision called `name`, with `count` samples for it in
    micro-batches of at most `tokens`; with `adapters` they alone are trained.
    """
    dtype, precision = PRECISIONS[name]
    compute = torch_dtype(dtype)
    whole = precision == "mixed" and not adapters
    model = models.model(size, place, torch.float32 if whole else compute)
    if adapters:
        model = AdaptedLM(model, LoRAConfig(), "base")
        model.keep_adapters_in(torch.float32 if precision == "mixed" else compute)
    terms = [FullVocabularyTerm(teacher(model, compute), "one_hot", FullVocabularyKL())]
    training = TrainingSettings(OptimConfig(), BatchConfig(max_tokens=tokens), 1.0, terms)
    config = TrainConfig(precision=precision)
    ranks = ranks or Ranks()
    with open_backend(lambda _, empty=False: model, config, training, ranks, dtype=dtype) as backend:
        yield backend, batch(model.vocab_size, place, count)


def step_of(backend: Backend, samples: RolloutBatch) -> float:
    """Learn `samples` once; the norm of the gradient."""
    backend.forward_backward(samples)
    return backend.step(1e-5)["grad_norm"]


def one(
    name: str,
    place: Place,
    tokens: int = 4096,
    count: int = SAMPLES,
    size: str = "0.6B",
    adapters: bool = False,
) -> dict[str, float]:
    """Return milliseconds a step, memory above the model's in GiB, and the first gradient's norm."""
    form: dict[str, Any] = {"tokens": tokens, "count": count, "size": size, "adapters": adapters}
    with opened(name, place, **form) as (backend, samples):
        norm = step_of(backend, samples)
        took = place.milliseconds(lambda: step_of(backend, samples), rounds=3, warm_ups=1)
        gib = place.peak_gib(lambda: step_of(backend, samples))
    return {"ms": took, "tokens/s": 1e3 * samples_tokens(samples) / took, "GiB": gib, "gradient": norm}


def samples_tokens(samples: RolloutBatch) -> int:
    """Prompt and response tokens of a batch."""
    return sum(len(s.prompt_ids) + len(s.response_ids) for s in samples.samples)


def steps(sheet: Sheet, place: Place) -> None:
    """A step in each precision; the gradient's norm in bfloat16 beside that in float32."""
    first: dict[str, float] = {}
    for name in PRECISIONS:
        with sheet.ours(name):
            numbers = one(name, place)
            first = first or numbers
            numbers["over float32"] = numbers["ms"] / first["ms"]
            numbers["gradient off"] = abs(numbers["gradient"] / first["gradient"] - 1)
            close = Bound("gradient off", most=0.05, timed=False)
            quick = () if name == "float32" else (Bound("over float32", most=1.0),)
            sheet.row(name, numbers, close, *quick)
        place.clear()


def micro_batches(sheet: Sheet, place: Place) -> None:
    """Measure a step of 64 samples in micro-batches of 4,096, 16,384 and 32,768 tokens."""
    for name in ("bfloat16", "bfloat16 over float32"):
        small: dict[str, float] = {}
        for tokens in (4096, 16384, 32768):
            row = f"{name}, {tokens} tokens a micro-batch"
            with sheet.ours(row):
                numbers = one(name, place, tokens, 64)
                small = small or numbers
                numbers["times 4096"] = numbers["tokens/s"] / small["tokens/s"]
                numbers["gradient off"] = abs(numbers["gradient"] / small["gradient"] - 1)
                sheet.row(row, numbers, Bound("gradient off", most=0.02, timed=False))
            place.clear()


def compiled(sheet: Sheet, place: Place) -> None:
    """Measure a step of 64 samples with the layers' own code, then with compiled layers."""
    for tokens in (4096, 16384):
        row = f"bfloat16, {tokens} tokens a micro-batch, layers compiled"
        with sheet.ours(row), opened("bfloat16", place, tokens=tokens, count=64) as (backend, samples):
            form: dict[str, dict[str, float]] = {}
            for asked in (False, not place.dry):  # on a CPU a compiler takes minutes
                backend.compile_layers(asked, None)
                norm = step_of(backend, samples)
                took = place.milliseconds(partial(step_of, backend, samples), rounds=3, warm_ups=1)
                gib = place.peak_gib(partial(step_of, backend, samples))
                rate = 1e3 * samples_tokens(samples) / took
                form[str(asked)] = {"ms": took, "tokens/s": rate, "GiB": gib, "gradient": norm}
            own, numbers = form["False"], form[str(not place.dry)]
            numbers["over the layers' own code"] = numbers["ms"] / own["ms"]
            sheet.row(row, numbers, Bound("over the layers' own code", most=1.0))
        place.clear()


SIZES = (
    ("1.7B", "bfloat16 over float32", False, 16384),
    ("1.7B", "bfloat16", False, 16384),
    ("0.6B", "bfloat16 over float32", True, 16384),
    ("8B", "bfloat16 over float32", True, 4096),
    ("8B", "bfloat16", False, 4096),
)
"""Size, precision, whether adapters alone are trained, and tokens a micro-batch; the one that needs most
memory last."""


def sizes(sheet: Sheet, place: Place) -> None:
    """Measure a step of 16 samples of larger students, all weights or adapters; operations are four a weight
    and token with adapters, six without, and no others.
    """
    for size, name, adapters, tokens in SIZES:
        row = f"{size}, {name}" + ", adapters" * adapters
        with sheet.ours(row):
            form: dict[str, Any] = {"tokens": tokens, "size": size, "adapters": adapters}
            numbers = one(name, place, **form)
            a_token = (4 if adapters else 6) * models.layer_weights(models.config(size, place))
            numbers["TFLOP/s of the layers"] = a_token * numbers["tokens/s"] / 1e12
            sheet.row(row, numbers)
        place.clear()
