"""One rank of a long sequence that ranks share; run by test_context_parallel.py through `run_ranks`.

`FOLDER/RANK.json`: by how many bytes a token of the sequence the peak resident set of this rank grows between
4,096 and 12,288 tokens in pieces, and from there to 12,288 tokens with each rank's share as a whole. With a
file `FOLDER/megatron` between 4,096 and 12,288 tokens as a whole, on Megatron-Core.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack

import tiny
import torch
import torch.distributed as dist
from rank_processes import joined
from watched import own_bytes

from opd.megatron.form import MegatronForm
from opd.megatron.module import MegatronModule, model_parallel
from opd.models.context_parallel import ContextAttention, ContextParallel, shared_hidden
from opd.models.long_sequence import LayerMemory

SHAPE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 3}
WINDOW = {"model_type": "mistral", "sliding_window": 64}
SHORT, LONG = 4096, 12288


def on_megatron(ranks: ContextParallel) -> Callable[[int], None]:
    """The passes of a rank's share, as a whole, on Megatron-Core."""
    form = MegatronForm.from_config(tiny.model(**SHAPE, **WINDOW).config)
    stack = ExitStack()
    layers = MegatronModule(
        form, stack.enter_context(model_parallel(1)), torch.float32, torch.device("cpu"), trained=True
    )
    layers.recompute = True
    for _, parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def passes(length: int) -> None:
        share = ranks.local_share(torch.arange(length) % form.vocabulary, torch.arange(length), [0, length])
        bounds = torch.tensor([0, len(share.input_ids)], dtype=torch.int32)
        attend = ContextAttention(ranks, share.segments)
        layers.run(share.input_ids, share.position_ids, bounds, attend).sum().backward()

    return passes


def main() -> None:
    """Measure and write."""
    with joined(200) as (rank, folder):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        ranks = ContextParallel(group)
        peaks = []
        if (folder / "megatron").exists():
            passes = on_megatron(ranks)
            for length in (SHORT, LONG):
                passes(length)
                peaks.append(own_bytes())
            found = {"whole": (peaks[1] - peaks[0]) / (LONG - SHORT)}
        else:
            # A window keeps the time short; memory is the same without one.
            model = tiny.model(**SHAPE, **WINDOW)
            for length, chunk in ((SHORT, 512), (LONG, 512), (LONG, None)):
                ids = torch.arange(length) % model.vocab_size
                share = ranks.local_share(ids, torch.arange(length), [0, length])
                shared_hidden(model, share, ranks, LayerMemory(recompute=True, chunk=chunk)).sum().backward()
                peaks.append(own_bytes())
            found = {"pieces": (peaks[1] - peaks[0]) / (LONG - SHORT), "whole": (peaks[2] - peaks[1]) / LONG}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
