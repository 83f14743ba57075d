"""What a weight sync costs, verification included, against copying the weights once.

    python tests/bench/weight_sync.py [--hidden 1024] [--layers 4] [--rounds 5] [--json FILE]

Trainer and engine in one process, as a run on one machine has them. Processor seconds of the best round of
each, in turn: a copy of all weights; the digest alone, by sha256 and as a sync takes it; a whole sync, which
hashes what is sent, copies it and hashes what the engine holds then, without and with the layout that its
decoder makes anew for its products.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from opd.models.attention import ATTENTION_NAME
from opd.models.causal_lm import CausalLM
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights


def model_of(hidden: int, layers: int, seed: int) -> CausalLM:
    """Random, with a vocabulary of 32,000."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    return CausalLM(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained, held = (model_of(options.hidden, options.layers, seed) for seed in (0, 1))
    engine, plain, version = TorchEngine(held), TorchEngine(held, lean=False), [0]
    copies = [tensor.clone() for _, tensor in trained.weights()]

    def copy() -> None:
        for mine, (_, tensor) in zip(copies, trained.weights(), strict=True):
            mine.copy_(tensor)

    def sync(receiver: TorchEngine) -> None:
        version[0] += 1
        sync_weights(receiver, trained.weights(), version[0])

    cases: dict[str, Callable[[], object]] = {
        "a copy of the weights": copy,
        "sha256": trained.digest,
        "the digest of a sync": trained.quick_digest,
        "a sync without the decoder's layout": partial(sync, plain),
        "a sync": partial(sync, engine),
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(options.rounds):
        for name, run in cases.items():
            begin = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - begin)
    mib = sum(tensor.nbytes for tensor in copies) / 2**20
    unit = best["a copy of the weights"]
    print(f"{mib:.0f} MiB of weights\n| | ms | of a copy |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {1000 * seconds:.1f} | {seconds / unit:.2f} |")
    if options.json:
        kept = {"mib": mib, "seconds": best}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
