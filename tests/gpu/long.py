"""Attention of one long sequence in pieces, forward and backward, by fused tiles and by plain blocks.

    OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python -m tests.gpu.long [--tokens 16384] [--heads 4]
                                                                     [--shared 4] [--size 64] [--rounds 3]

prints processor seconds of both on this CPU, in turn, the best of the rounds, in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from opd.models.attention import ScoreForm
from opd.models.tiled_attention import kernel_for, see_keys, seen_backward
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet

WIDTHS = (32, 8, 128)
"""Heads of queries and of keys, and their size: those of a model of 8B."""
CHUNK = 16_384
TOKENS, SHORT = 131_072, 32_768
ERROR = 2e-2
"""How far 16 bits may be from float32, of the largest entry."""


@contextmanager
def ways(tiles: bool) -> Iterator[None]:
    """Attention goes by fused tiles, or by plain blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPD_KERNELS", "auto" if tiles else "chunked")
        yield


@dataclass(frozen=True)
class LongSequence:
    """Queries, keys and values of one sequence, and the gradient that arrives."""

    inputs: tuple[Tensor, Tensor, Tensor]
    upstream: Tensor
    chunk: int

    @classmethod
    def drawn(
        cls, tokens: int, widths: tuple[int, int, int], chunk: int, device: torch.device, dtype: torch.dtype
    ) -> LongSequence:
        heads, shared, size = widths
        generator = torch.Generator(device).manual_seed(0)

        def one(count: int) -> Tensor:
            return torch.randn(count, tokens, size, generator=generator, device=device).to(dtype)

        return cls((one(heads), one(shared), one(shared)), one(heads), chunk)

    @property
    def scores(self) -> ScoreForm:
        return ScoreForm(self.inputs[0].shape[-1] ** -0.5)

    @property
    def teraflop(self) -> float:
        """Of the forward: two products a pair that sees each other."""
        heads, tokens, size = self.inputs[0].shape
        return 4 * heads * size * tokens * (tokens + 1) / 2 / 1e12

    def _pieces(self) -> list[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
        query, key, value = self.inputs
        tokens = query.shape[1]
        spans = [slice(at, min(at + self.chunk, tokens)) for at in range(0, tokens, self.chunk)]
        return [(span, (query[:, span], key[:, : span.stop], value[:, : span.stop])) for span in spans]

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """Each piece's output and log-sum-exp."""
        return [see_keys(*part, self.scores) for _, part in self._pieces()]

    def backward(self, found: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Gradients in query, key and value, float32."""
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in self.inputs]
        for (span, part), (output, logsumexp) in reversed(list(zip(self._pieces(), found, strict=True))):
            until = slice(0, span.stop)
            sums = [total[:, place] for total, place in zip(gradients, (span, until, until), strict=True)]
            seen_backward(part, (output, logsumexp, self.upstream[:, span]), sums, self.scores, span.start)
        return gradients

    def results(self) -> list[Tensor]:
        """Output and gradients."""
        found = self.forward()
        return [torch.cat([output for output, _ in found], dim=1).float(), *self.backward(found)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, of the largest entry of each."""
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


@torch.no_grad()
def long_attention(sheet: Sheet, place: Place) -> None:
    """A layer's attention on all tokens before, of 8B's widths; that of plain blocks at fewer tokens."""
    on_gpu = place.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    widths, chunk = ((4, 2, 16), 40) if place.dry else (WIDTHS, CHUNK)
    for tokens, names in ((SHORT, ("tiles", "blocks")), (TOKENS, ("tiles",))):
        tokens = tokens // 256 if place.dry else tokens
        given = LongSequence.drawn(tokens, widths, chunk, place.device, dtype)
        results: dict[str, list[Tensor]] = {}
        for name in names:
            with sheet.ours(f"{tokens:,} tokens, {name}"), ways(name == "tiles"):
                results[name] = given.results()
                seconds = place.milliseconds(given.forward, rounds=3, warm_ups=1) / 1e3
                found = given.forward()
                back = place.milliseconds(lambda g=given, f=found: g.backward(f), rounds=3, warm_ups=1) / 1e3
                numbers = {"forward s": seconds, "backward s": back}
                numbers["TFLOP/s"] = 3.5 * given.teraflop / (seconds + back)
                numbers["GiB"] = place.peak_gib(given.results)
                numbers["fused"] = int(kernel_for(given.inputs, given.scores, 0) is not None)
                bounds = [Bound("fused", least=int(name == "tiles"), timed=False)]
                if name == "blocks":
                    numbers["error of tiles"] = apart(results["tiles"], results["blocks"])
                    bounds.append(Bound("error of tiles", most=ERROR, timed=False))
                sheet.row(f"{tokens:,} tokens, {name}", numbers, *bounds)


def main() -> None:
    """Measure on this CPU, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in {"tokens": 16_384, "heads": 4, "shared": 4, "size": 64, "chunk": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    widths = (asked.heads, asked.shared, asked.size)
    given = LongSequence.drawn(asked.tokens, widths, asked.chunk, torch.device("cpu"), torch.float32)
    best: dict[bool, tuple[float, float]] = {}
    results: dict[bool, list[Tensor]] = {}
    with torch.no_grad():
        for _ in range(asked.rounds):
            for tiles in (True, False):
                with ways(tiles):
                    begin = time.process_time()
                    found = given.forward()
                    middle = time.process_time()
                    gradients = given.backward(found)
                    took = (middle - begin, time.process_time() - middle)
                best[tiles] = min(took, best.get(tiles, took), key=sum)
                results[tiles] = [torch.cat([output for output, _ in found], dim=1), *gradients]
    for tiles, (forward, backward) in best.items():
        name = "tiles" if tiles else "blocks"
        print(f"{name:8} forward {forward:.2f} s, backward {backward:.2f} s, {forward + backward:.2f} in all")
    share = sum(best[True]) / sum(best[False])
    print(f"tiles / blocks {share:.2f}; apart {apart(results[True], results[False]):.1e}")


if __name__ == "__main__":
    main()
