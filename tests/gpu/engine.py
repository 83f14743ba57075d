"""The embedded engine against transformers and against the bytes that a decode step must read."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams
from tests.gpu import models
from tests.gpu.clock import Place

LOADS = {"0.6B": (64, 512), "8B": (64,)}
PROMPT, NEW = 128, 128


def requests(batch: int, vocabulary: int, new: int) -> list[RolloutRequest]:
    """Prompts of random tokens, all of one length."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, vocabulary, (batch, PROMPT)).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=new)
    return [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]


def wait(place: Place) -> float:
    """Now, when the device has done what it was given."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_milliseconds(engine: TorchEngine, asked: list[RolloutRequest], place: Place) -> dict[str, float]:
    """Of one whole call: the prefill's, and the median of the decode steps behind it."""
    times = [wait(place)]
    for _ in engine.generate(asked):
        times.append(wait(place))
    steps = np.diff(times) * 1e3
    return {
        "prefill ms": float(steps[0]),
        "decode ms": float(np.median(steps[1:])),
        "total s": times[-1] - times[0],
    }


def transformers_seconds(name: str, batch: int, new: int, place: Place) -> float:
    """The same load through `generate`."""
    plain = models.module(name, place, torch.bfloat16, "sdpa").eval()
    ids = torch.randint(1, plain.config.vocab_size, (batch, PROMPT), device=place.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
    with torch.inference_mode():
        plain.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        begin = wait(place)
        plain.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
    return wait(place) - begin


def decoding(place: Place) -> dict[str, Any]:
    """Milliseconds a decode step, tokens a second, and the same by transformers and by bandwidth alone."""
    found: dict[str, Any] = {}
    new = 4 if place.dry else NEW
    for name, batches in {"0.6B": (4,)}.items() if place.dry else LOADS.items():
        for batch in batches:
            model = models.model(name, place)
            read = models.parameter_bytes(model.module)
            engine = TorchEngine(model)
            asked = requests(batch, model.vocab_size, new)
            list(engine.generate(asked[:2]))
            row: dict[str, Any] = step_milliseconds(engine, asked, place)
            row["tokens/s"] = batch * new / row["total s"]
            row["ms to read the weights at 4.3 TB/s"] = read / 4.3e9
            if place.device.type == "cuda":
                row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
            del engine, model
            place.clear()
            row["transformers tokens/s"] = batch * new / transformers_seconds(name, batch, new, place)
            place.clear()
            found[f"{name}, {batch} requests"] = row
    return found
