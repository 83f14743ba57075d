"""Where a measurement runs, and how long it takes there."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A device, and whether sizes are tiny because nothing is to be learned from the times."""

    device: torch.device
    dry: bool

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
