"""Where a measurement runs, and how long it takes there."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.gpu.rows import Sheet


@dataclass(frozen=True)
class Place:
    """A device, and whether sizes are tiny because nothing is to be learned from the times."""

    device: torch.device
    dry: bool
    ranks: int = 0
    """How many devices sections of several use."""

    def milliseconds(self, call: Callable[[], object], rounds: int = 5, warm_ups: int = 2) -> float:
        """The median of `rounds` calls, by the device's events where it has them."""
        if self.dry:
            rounds = warm_ups = 1
        for _ in range(warm_ups):
            call()
        return statistics.median(self._once(call) for _ in range(rounds))

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def bandwidth(self) -> float:
        """Bytes read and written a second by a copy."""
        size = 1 << 20 if self.dry else 1 << 31
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2e3 * size / self.milliseconds(lambda: target.copy_(source))

    def peak_gib(self, call: Callable[[], object]) -> float:
        """How far the device's memory grows during `call`."""
        if self.device.type != "cuda":
            call()
            return 0.0
        self.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def clear(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def ceilings(sheet: Sheet, place: Place) -> None:
    """What the device gives at best: bytes copied there and from the host, and matrix products."""
    sheet.row("copy", {"GB/s": place.bandwidth() / 1e9})
    size = 1 << 20 if place.dry else 1 << 29
    host = torch.empty(size, dtype=torch.uint8, pin_memory=place.device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=place.device)
    for name, call in {
        "pinned host to device": lambda: there.copy_(host, non_blocking=True),
        "device to pinned host": lambda: host.copy_(there, non_blocking=True),
    }.items():
        sheet.row(name, {"GB/s": size / place.milliseconds(call) / 1e6})
    width = 64 if place.dry else 8192
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(width, width, device=place.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        took = place.milliseconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c))
        sheet.row(f"product, {dtype}".replace("torch.", ""), {"TFLOP/s": 2 * width**3 / took / 1e9})
