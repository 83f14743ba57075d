"""How many weights in bfloat16 an optimiser step changes, and the bytes that say which and what to.

    python tests/bench/weight_changes.py [--hidden 256] [--layers 4] [--warm 300] [--steps 20] [--json FILE]

A Llama learns the bytes of Python's standard library, first for `--warm` steps at 1e-3, so that its weights
are no random ones. From there, for each learning rate: `--steps` steps of AdamW as a run has it (betas 0.9
and 0.99, no decay, a gradient's norm of 1 at most), weights and moments in float32. After each the weights in
bfloat16 are compared with those before, as a push does. What is told is of the second half of the steps.
"""

import argparse
import copy
import json
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from opd.rollout.weight_delta import all_blocks, bits_of, changed_blocks, group_blocks, pack_blocks

RATES = (1e-6, 1e-5, 1e-4)
PART_BYTES = 256 << 20


def text() -> Tensor:
    """[N] int64: bytes of Python's own modules."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)


def learn(module: nn.Module, rows: Tensor, optimiser: torch.optim.Optimizer) -> float:
    """One step on [B, T] tokens; returns the loss in nats a byte."""
    loss = module(input_ids=rows, labels=rows).loss
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


def adamw(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def halved(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a push sends."""
    return [(name, own.detach().bfloat16()) for name, own in module.named_parameters()]


def bytes_of_parts(blocks) -> int:
    return sum(len(pack_blocks(own)) for own in group_blocks(blocks, PART_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--warm", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="of 128 bytes, a step")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        tie_word_embeddings=True,
    )
    base, content = AutoModelForCausalLM.from_config(config), text()
    generator = torch.Generator().manual_seed(0)

    def batch() -> Tensor:
        starts = torch.randint(0, len(content) - 128, (options.rows,), generator=generator)
        return torch.stack([content[start : start + 128] for start in starts.tolist()])

    optimiser = adamw(base, 1e-3)
    losses = [learn(base, batch(), optimiser) for _ in range(options.warm)]
    whole = bytes_of_parts(all_blocks(halved(base)))
    numbers = sum(own.numel() for own in base.parameters())
    loss = statistics.mean(losses[-20:]) if losses else float("nan")
    print(f"{numbers:,} weights, {whole:,} bytes whole, {loss:.2f} nats a byte after {options.warm} steps")
    print("| learning rate | weights that change a step | bytes of the change, of all |\n|---|---|---|")
    found = {}
    for rate in RATES:
        module = copy.deepcopy(base)
        optimiser, shares, sizes = adamw(module, rate), [], []
        for _ in range(options.steps):
            before = halved(module)
            learn(module, batch(), optimiser)
            after = halved(module)
            pairs = zip(before, after, strict=True)
            changed = sum(int((bits_of(old) != bits_of(new)).sum()) for (_, old), (_, new) in pairs)
            shares.append(changed / numbers)
            sizes.append(bytes_of_parts(changed_blocks(before, after)) / whole)
        half = options.steps // 2
        found[f"{rate:g}"] = {"share": shares, "bytes": sizes}
        print(
            f"| {rate:g} | {statistics.mean(shares[half:]):.1%} | {statistics.mean(sizes[half:]):.1%} |",
            flush=True,
        )
    if options.json:
        kept = {"weights": numbers, "whole_bytes": whole, "nats": loss, "by_rate": found}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
