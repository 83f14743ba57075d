"""Decode speed of the embedded engine against `transformers` generate: same model, prompts and lengths.

    python tests/bench/generate.py [--batch 64 192 512] [--prompt 12] [--new 32] [--samples 8] [--json FILE]

Both sample every token at temperature 1 with no stop id. Rounds alternate between the two, so that a busy
machine slows both; the best round of each counts. A step is one new token for every request: wall time of the
whole call, prefill included, divided by the new tokens per request. "products" is the part of a step no
engine can avoid: the model's matrix products with its weights, and with the keys and values of the mean
length, alone and without anything between them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from opd.models.causal_lm import CausalLM
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

VOCABULARY = 24


def models() -> tuple[CausalLM, Any]:
    """The engine's model and a plain `transformers` one with the same weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="opd")
    packed.load_state_dict(plain.state_dict())
    return CausalLM(packed), plain


def engine_round(engine: TorchEngine, prompts: np.ndarray, samples: int, new: int) -> Callable[[], int]:
    """A call that generates `samples` responses to each prompt and returns how many tokens it made."""
    sampling = SamplingParams(max_new_tokens=new)

    def run() -> int:
        requests = [
            RolloutRequest(f"{i}/{j}", prompt, sampling)
            for i, prompt in enumerate(prompts)
            for j in range(samples)
        ]
        return sum(len(step.uids) for step in engine.generate(requests))

    return run


def transformers_round(model: Any, prompts: np.ndarray, samples: int, new: int) -> Callable[[], int]:
    """The same through `transformers` generate."""
    ids = torch.from_numpy(prompts.astype(np.int64))

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                num_return_sequences=samples,
            )
        return out.shape[0] * (out.shape[1] - ids.shape[1])

    return run


def products_round(model: Any, requests: int, prompt: int, new: int) -> Callable[[], int]:
    """Only the matrix products of `new` decode steps, each written to memory that is there already."""
    weights = [w.detach().t() for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    weights.append(model.get_output_embeddings().weight.detach().t())
    products = [(torch.randn(requests, len(w)), w, torch.empty(requests, w.shape[1])) for w in weights]
    config = model.config
    heads, size, length = config.num_attention_heads, config.head_dim, prompt + new // 2
    query = torch.randn(requests * heads, 1, size)
    caches = [torch.randn(2, requests * heads, length, size) for _ in range(config.num_hidden_layers)]

    def run() -> int:
        with torch.inference_mode():
            for _ in range(new):
                for x, w, out in products:
                    torch.mm(x, w, out=out)
                for keys, values in caches:
                    torch.bmm(torch.bmm(query, keys.transpose(1, 2)), values)
        return requests * new

    return run


def best_times(
    calls: dict[str, Callable[[], int]], rounds: int, expected: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of the best of `rounds` alternating rounds, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            made = call()
            times[name].append(clock() - start)
            if made != expected:
                raise RuntimeError(f"{name} made {made} tokens instead of {expected}")
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 192, 512])
    parser.add_argument("--prompt", type=int, default=12, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="new tokens per request")
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 1], help="responses per prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    model, plain = models()
    rows = []
    titles = f"{'transformers ms/step':>21} {'engine ms/step':>15} {'products ms/step':>17} {'speed-up':>9}"
    print(f"{'batch':>6} {'samples':>8} {titles} {'its bound':>10}")
    for samples in options.samples:
        for batch in options.batch:
            prompts = np.random.default_rng(0).integers(0, VOCABULARY, (batch // samples, options.prompt))
            calls = {
                "transformers": transformers_round(plain, prompts, samples, options.new),
                "engine": engine_round(TorchEngine(model), prompts.astype(np.int32), samples, options.new),
            }
            requests = len(prompts) * samples
            calls["products"] = products_round(plain, requests, options.prompt, options.new)
            seconds = best_times(calls, options.rounds, requests * options.new, clock)
            step = {name: 1e3 * value / options.new for name, value in seconds.items()}
            ratio = step["transformers"] / step["engine"]
            bound = step["transformers"] / step["products"]
            times = f"{step['transformers']:21.2f} {step['engine']:15.2f} {step['products']:17.2f}"
            print(f"{requests:6d} {samples:8d} {times} {ratio:8.2f}x {bound:9.2f}x", flush=True)
            rows.append(
                {"batch": requests, "samples_per_prompt": samples, "ms_per_step": step, "speed_up": ratio}
            )
    if options.json:
        machine = {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        settings = {
            "prompt": options.prompt,
            "new": options.new,
            "threads": options.threads,
            "clock": options.clock,
        }
        options.json.write_text(
            json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
