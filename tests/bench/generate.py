"""Decode speed of the embedded engine against `transformers` generate: same model, prompts and lengths.

    python tests/bench/generate.py [--batch 64 192 512] [--prompt 12] [--new 32] [--samples 8] [--stop]
                                   [--json FILE]

Both sample every token at temperature 1. Rounds alternate between the two, so that a busy machine slows both;
the best round of each counts. Times are of the whole call, prefill included, per 1000 tokens made. "products"
is the part no engine can avoid: the model's matrix products with its weights, and with the keys and values of
the mean length, alone and without anything between them.

Without `--stop` every response has `--new` tokens. With it one token id of the vocabulary ends a response, so
that lengths are as uneven as a policy's are: about geometric with the vocabulary's size as mean, cut at
`--new`.
"""

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
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
STOP = 1
"""The token id that ends a response with `--stop`."""


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


@dataclass(frozen=True)
class Load:
    """What both are asked for."""

    prompts: np.ndarray
    """[P, C] int32."""
    samples: int
    new: int
    stop: bool

    @property
    def requests(self) -> int:
        return len(self.prompts) * self.samples


def engine_round(engine: TorchEngine, load: Load) -> Callable[[], int]:
    """A call that generates the responses and returns how many tokens it made."""
    sampling = SamplingParams(max_new_tokens=load.new, stop_ids=(STOP,) if load.stop else ())

    def run() -> int:
        requests = [
            RolloutRequest(f"{i}/{j}", prompt, sampling)
            for i, prompt in enumerate(load.prompts)
            for j in range(load.samples)
        ]
        return sum(len(step.uids) for step in engine.generate(requests))

    return run


def transformers_round(model: Any, load: Load) -> Callable[[], int]:
    """The same through `transformers` generate. Padding behind a stop id does not count as made."""
    ids = torch.from_numpy(load.prompts.astype(np.int64))
    ending = {"eos_token_id": STOP} if load.stop else {"min_new_tokens": load.new}

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=load.new,
                num_return_sequences=load.samples,
                **ending,
            )
        made = out[:, ids.shape[1] :]
        if not load.stop:
            return made.numel()
        return int(((made == STOP).cumsum(1) - (made == STOP).int() == 0).sum())

    return run


def products_round(model: Any, load: Load) -> Callable[[], int]:
    """Only the matrix products of `new` steps of the full batch, written to memory that is there already."""
    requests, prompt, new = load.requests, load.prompts.shape[1], load.new
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
    calls: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds per 1000 tokens of the best of `rounds` alternating rounds, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            made = call()
            times[name].append(1e6 * (clock() - start) / made)
    return {name: min(values[1:]) for name, values in times.items()}


def measure(
    models: tuple[CausalLM, Any], load: Load, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """One row of the table, printed and returned."""
    model, plain = models
    calls = {
        "transformers": transformers_round(plain, load),
        "engine": engine_round(TorchEngine(model), load),
        "products": products_round(plain, load),
    }
    times = best_times(calls, rounds, clock)
    ratio = times["transformers"] / times["engine"]
    bound = times["transformers"] / times["products"]
    columns = f"{times['transformers']:13.1f} {times['engine']:8.1f} {times['products']:9.1f}"
    print(f"{load.requests:6d} {load.samples:8d} {columns} {ratio:8.2f}x {bound:9.2f}x", flush=True)
    return {
        "batch": load.requests,
        "samples_per_prompt": load.samples,
        "ms_per_1000_tokens": times,
        "speed_up": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 192, 512])
    parser.add_argument("--prompt", type=int, default=12, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="new tokens per request")
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 1], help="responses per prompt")
    parser.add_argument("--stop", action="store_true", help="one token id ends a response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    rows = []
    print("milliseconds per 1000 tokens")
    titles = f"{'transformers':>13} {'engine':>8} {'products':>9} {'speed-up':>9}"
    print(f"{'batch':>6} {'samples':>8} {titles} {'its bound':>10}")
    both = models()
    for samples in options.samples:
        for batch in options.batch:
            prompts = np.random.default_rng(0).integers(0, VOCABULARY, (batch // samples, options.prompt))
            load = Load(prompts.astype(np.int32), samples, options.new, options.stop)
            rows.append(measure(both, load, options.rounds, clock))
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
            "stop": options.stop,
            "threads": options.threads,
            "clock": options.clock,
        }
        options.json.write_text(
            json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
