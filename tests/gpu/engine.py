"""The embedded engine against transformers and against the bytes that a decode step must read."""

import time
from typing import Any

import numpy as np
import torch

from opd.config.train import DecodeConfig
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.types import RolloutRequest, SamplingParams
from tests.gpu import models
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet

LOADS = {"0.6B": (64, 512), "8B": (64,)}
PROMPT, NEW = 128, 128
MEAN, LONGEST, MIXED = 1024, 4096, 32
"""Tokens that requests of mixed lengths hold, and decode steps over them."""
A_SLOT = 8
"""Requests of mixed lengths for each slot: with few the longest would be written alone."""


def requests(batch: int, vocabulary: int, new: int) -> list[RolloutRequest]:
    """Prompts of random tokens, all of one length."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, vocabulary, (batch, PROMPT)).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=new)
    return [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]


def lengths(batch: int, mixed: bool, place: Place) -> np.ndarray:
    """[batch]: tokens of prompts, all alike or exponential, of one mean; with answers at most `LONGEST`."""
    scale = 64 if place.dry else 1
    most = LONGEST // scale - MIXED
    shares = (np.random.default_rng(0).permutation(batch) + 0.5) / batch
    drawn = (-MEAN / scale * np.log(shares)).astype(np.int64).clip(1, most)
    return drawn if mixed else np.full(batch, int(drawn.mean()))


def mixed(name: str, batch: int, place: Place) -> dict[str, Any]:
    """Decode steps over requests of mixed lengths, beside as many tokens in requests of one length."""
    model = models.model(name, place)
    row: dict[str, Any] = {}
    for kind in ("equal", "mixed"):
        rng = np.random.default_rng(0)
        prompts = [
            rng.integers(1, model.vocab_size, length).astype(np.int32)
            for length in lengths(batch, kind == "mixed", place)
        ]
        sampling = SamplingParams(max_new_tokens=MIXED)
        asked = [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        engine = TorchEngine(model)
        list(engine.generate(asked))
        before = np.array(engine.position_counts)
        row[f"{kind} decode ms"] = step_milliseconds(engine, asked, place)["decode ms"]
        read, held = np.array(engine.position_counts) - before
        row[f"{kind} read over held"] = float(read / held)
        if place.device.type == "cuda":
            row[f"{kind} KV GiB"] = engine.resident()["engine_kv"] / 2**30
        del engine
        place.clear()
    row["mixed over equal"] = row["mixed decode ms"] / row["equal decode ms"]
    return row


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


def cached_bytes(name: str, batch: int, place: Place, new: int) -> int:
    """Keys and values that a decode step in the middle of the responses reads."""
    config = models.config(name, place)
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    a_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * size
    return batch * (PROMPT + new // 2) * a_token


def one(name: str, batch: int, place: Place, bandwidth: float) -> dict[str, Any]:
    """Milliseconds a decode step, over the time to read weights and cache once; tokens a second, over
    transformers'.
    """
    new = 4 if place.dry else NEW
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = models.model(name, place)
    read = models.parameter_bytes(model.module) + cached_bytes(name, batch, place, new)
    engine = TorchEngine(model)
    asked = requests(batch, model.vocab_size, new)
    list(engine.generate(asked))  # what is captured is captured
    row: dict[str, Any] = step_milliseconds(engine, asked, place)
    row["roofline ms"] = 1e3 * read / bandwidth
    row["over roofline"] = row["decode ms"] / row["roofline ms"]
    row["tokens/s"] = batch * new / row["total s"]
    if place.device.type == "cuda":
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    plain = TorchEngine(model, settings=DecodeConfig(cuda_graphs=False))
    list(plain.generate(asked[:2]))
    without = step_milliseconds(plain, asked, place)["decode ms"]
    row["decode ms without graphs"], row["over without graphs"] = without, row["decode ms"] / without
    del engine, plain, model
    place.clear()
    row["transformers tokens/s"] = batch * new / transformers_seconds(name, batch, new, place)
    row["over transformers"] = row["tokens/s"] / row["transformers tokens/s"]
    return row


def synced(name: str, place: Place) -> dict[str, Any]:
    """Seconds of a weight sync with its verification, and bytes proven a second on both sides."""
    trained, held = (models.model(name, place) for _ in range(2))
    engine, nbytes = TorchEngine(held), models.parameter_bytes(trained.module)
    sync_weights(engine, trained.weights(), 1)
    begin = wait(place)
    sync_weights(engine, trained.weights(), 2)
    took = wait(place) - begin
    return {"ms": 1e3 * took, "GB": nbytes / 1e9, "GB/s proven": 2 * nbytes / took / 1e9}


def decoding(sheet: Sheet, place: Place) -> None:
    """Decode at each size and number of requests; of the smaller model mixed lengths, and a sync."""
    bandwidth = place.bandwidth()
    place.clear()
    for name, batches in {"0.6B": (4,)}.items() if place.dry else LOADS.items():
        for batch in batches:
            with sheet.ours(f"{name}, {batch} requests"):
                numbers = one(name, batch, place, bandwidth)
                bounds = Bound("over transformers", least=1.0), Bound("over without graphs", most=1.0)
                sheet.row(f"{name}, {batch} requests", numbers, *bounds)
            place.clear()
    batch = 4 if place.dry else LOADS["0.6B"][0]
    with sheet.ours("0.6B, mixed lengths"):
        # What a dry run reads says as little as its clock: where all is small, slots are read as one.
        bounds = Bound("mixed over equal", most=1.3), Bound("mixed read over held", most=1.1)
        sheet.row("0.6B, mixed lengths", mixed("0.6B", batch, place), *bounds)
    place.clear()
    with sheet.ours("0.6B, weight sync"):
        sheet.row("0.6B, weight sync", synced("0.6B", place))


def mixed_requests(batch: int, vocabulary: int, longest: int) -> list[RolloutRequest]:
    """Requests of which most are short and few long: exponential lengths, a quarter of `longest` in the mean,
    one of `longest`.
    """
    places = (np.arange(batch) + 0.5) / batch
    lengths = np.clip(-np.log1p(-places) * longest / 4, 1, longest).astype(int)
    lengths[-1] = longest
    order = np.random.default_rng(1).permutation(batch)
    asked = requests(batch, vocabulary, longest)
    return [
        RolloutRequest(one.uid, one.prompt_ids, SamplingParams(max_new_tokens=int(lengths[place])))
        for one, place in zip(asked, order, strict=True)
    ]


def mixed_lengths(sheet: Sheet, place: Place) -> None:
    """Measure tokens a second at 0.6B where lengths are mixed, over those of as many requests that all have
    the mean length, `A_SLOT` for each slot.
    """
    longest, sizes = (8, (2,)) if place.dry else (2048, (64, 256))
    for slots in sizes:
        row = f"0.6B, {slots} slots, exponential lengths to {longest}"
        with sheet.ours(row):
            model, batch = models.model("0.6B", place), A_SLOT * slots
            engine = TorchEngine(model, max_running=slots)
            mixed = mixed_requests(batch, model.vocab_size, longest)
            count = sum(one.sampling.max_new_tokens for one in mixed)
            alike = requests(batch, model.vocab_size, round(count / batch))
            numbers: dict[str, Any] = {"mean length": count / batch}
            list(engine.generate(requests(slots, model.vocab_size, 4)))
            for name, asked in {"alike": alike, "mixed": mixed}.items():
                took = step_milliseconds(engine, asked, place)
                written = sum(one.sampling.max_new_tokens for one in asked)
                numbers[f"{name} tokens/s"] = written / took["total s"]
                numbers[f"{name} decode ms"] = took["decode ms"]
            numbers["alike over mixed"] = numbers["alike tokens/s"] / numbers["mixed tokens/s"]
            sheet.row(row, numbers)
            del engine, model
        place.clear()
