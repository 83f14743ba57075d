"""How far a process grows while a model reads, or learns from, long sequences; see test_long_sequence.py.

    python sequence_memory.py CHUNK READ|LEARN

A chunk of 0 runs a sequence as a whole. Prints by how many bytes a token the peak resident set grows between
a sequence of 2,048 tokens and one of 6,144.
"""

import sys

import tiny
import torch
from watched import own_bytes

from opd.models.long_sequence import LayerMemory

SHAPE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 3}
SHORT, LONG = 2048, 6144


def main() -> None:
    """Measure and print."""
    chunk, learn = int(sys.argv[1]), sys.argv[2] == "LEARN"
    torch.set_num_threads(1)
    # A window keeps the time short; memory is the same without one.
    model = tiny.model(**SHAPE, model_type="mistral", sliding_window=64)
    torch.set_grad_enabled(learn)
    peaks = []
    for length in (SHORT, LONG):
        ids = torch.arange(length) % model.vocab_size
        memory = LayerMemory(chunk=chunk or None)
        hidden = model.hidden(ids, torch.arange(length), [0, length], memory)
        if learn:
            hidden.sum().backward()
        del hidden
        peaks.append(own_bytes())
    print((peaks[1] - peaks[0]) / (LONG - SHORT))


if __name__ == "__main__":
    main()
