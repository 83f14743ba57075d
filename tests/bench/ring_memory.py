"""Memory of each rank that shares a sequence by ring attention, by the number of ranks.

    .venv/bin/python tests/bench/ring_memory.py [--ranks 1 2 4] [--tokens 8192 16384] [--json FILE]
                                                [--plot FILE]

Forward and backward of a decoder of three layers that see all tokens before them, in pieces of 512 tokens a
rank: by how much the peak resident set of a rank grows from the shorter to the longer sequence, in bytes per
token of the whole sequence. What is there before, the libraries and the model, does not grow.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

CHUNK = 512
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20,
}


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def one_rank(rank: int, world: int, lengths: list[int], folder: Path) -> None:
    """Measure, and write the growth."""
    import torch
    import torch.distributed as dist

    from opd.models.causal_lm import CausalLM
    from opd.models.context_parallel import ContextParallel, shared_hidden
    from opd.models.long_sequence import LayerMemory
    from opd.models.tokenizers import character_tokenizer

    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous-{world}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=3000)
    )
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    ranks = ContextParallel(group)
    model = CausalLM.from_config(SHAPE, tokenizer=character_tokenizer("0123456789"))
    peaks = []
    for length in [CHUNK * 4, *lengths]:  # what the first time costs is not growth
        ids = torch.arange(length) % model.vocab_size
        share = ranks.local_share(ids, torch.arange(length), [0, length])
        shared_hidden(model, share, ranks, LayerMemory(recompute=True, chunk=CHUNK)).sum().backward()
        peaks.append(peak_bytes())
    (folder / f"{world}-{rank}.json").write_text(
        json.dumps((peaks[2] - peaks[1]) / (lengths[1] - lengths[0]))
    )
    dist.destroy_process_group()


def ranks_of(world: int, lengths: list[int], folder: Path) -> list[float]:
    """Bytes a token of each of `world` ranks, which one process becomes after it has imported everything."""
    import opd.models.context_parallel  # noqa: F401

    fork = multiprocessing.get_context("fork")
    given = [(rank, world, lengths, folder) for rank in range(world)]
    ranks = [fork.Process(target=one_rank, args=one) for one in given]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of each rank's memory, with what 1/N of one rank's would be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    worlds = [int(world) for world in results["bytes_a_token"]]
    for place, (world, each) in enumerate(results["bytes_a_token"].items()):
        width = 0.8 / len(each)
        for rank, value in enumerate(each):
            axes.bar(place + (rank - (len(each) - 1) / 2) * width, value / 1024, width * 0.9, color="#2f6fc8")
        share = results["bytes_a_token"][str(worlds[0])][0] * worlds[0] / int(world) / 1024
        axes.hlines(share, place - 0.45, place + 0.45, color="#c0392b", linestyle="--", linewidth=1.2)
    axes.plot([], [], "--", color="#c0392b", label="1/N of one rank's")
    axes.set_xticks(range(len(worlds)), [f"{world} rank" + "s" * (world > 1) for world in worlds])
    axes.set_ylabel("KiB a token of the sequence,\nof each rank")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs=2, default=[8192, 16384])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(ranks_of(options.one, options.tokens, Path(folder))))
        return
    # Freed blocks go back to the system at once, so that the peak is that of what is in use.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    results: dict[str, Any] = {"tokens": options.tokens, "chunk": CHUNK, "shape": SHAPE, "bytes_a_token": {}}
    for world in options.ranks:
        command = [sys.executable, __file__, "--one", str(world), "--tokens", *map(str, options.tokens)]
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results["bytes_a_token"][str(world)] = each = json.loads(said.splitlines()[-1])
        print(f"{world} ranks: {[round(value) for value in each]} bytes a token", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
