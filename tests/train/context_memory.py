"""One rank of a long sequence that ranks share; run by test_context_parallel.py through `run_ranks`.

`FOLDER/RANK.json`: by how many bytes a token of the sequence the peak resident set of this rank grows between
4,096 and 12,288 tokens in pieces, and from there to 12,288 tokens with each rank's share as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from rank_processes import joined

from opd.models.context_parallel import ContextParallel, shared_hidden
from opd.models.long_sequence import LayerMemory

SHAPE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 3}
SHORT, LONG = 4096, 12288


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    """Measure and write."""
    with joined(200) as (rank, folder):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        ranks = ContextParallel(group)
        # A window keeps the time short; memory is the same without one.
        model = tiny.model(**SHAPE, model_type="mistral", sliding_window=64)
        peaks = []
        for length, chunk in ((SHORT, 512), (LONG, 512), (LONG, None)):
            ids = torch.arange(length) % model.vocab_size
            share = ranks.share(ids, torch.arange(length), [0, length])
            shared_hidden(model, share, ranks, LayerMemory(recompute=True, chunk=chunk)).sum().backward()
            peaks.append(peak_bytes())
        found = {"pieces": (peaks[1] - peaks[0]) / (LONG - SHORT), "whole": (peaks[2] - peaks[1]) / LONG}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
