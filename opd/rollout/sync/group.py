"""A process group of its own for weights, beside whatever groups a process has already."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from opd.errors import RolloutError
from opd.rendezvous import gloo_device

TIMEOUT = 120.0
"""Seconds a member waits for another."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in a weight group."""

    name: str
    """Of the group; the same for all members."""
    rank: int
    """0 is the trainer."""
    world: int
    backend: str = "gloo"
    """`gloo`, or `nccl` where every member has CUDA (which has not been run yet)."""


def visit_store(host: str, port: int, timeout: float = TIMEOUT) -> TCPStore:
    """The store that another process made with `host_store`. Raises `RolloutError` if it is not there."""
    try:
        return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError) as error:
        raise RolloutError(
            f"the trainer's store at {host}:{port} cannot be reached ({str(error).splitlines()[0]}); check"
            " the address it gives its engines."
        ) from None


def weight_group(store: Store, seat: Seat, timeout: float = TIMEOUT, host: str = "127.0.0.1") -> Any:
    """The back end of the group at `seat`; returns once every member has come.

    This member listens on its own address `host`, and with gloo on no other.

    The members meet under the keys that `torch.distributed` uses for a group of that name, so that an engine
    which makes its group with it, as SGLang does, meets this one. Raises `RolloutError` if one stays away.
    """
    device = "cuda" if seat.backend == "nccl" else "cpu"
    for prefix in (seat.name, f"{seat.name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    waits = timedelta(seconds=timeout)
    try:
        if seat.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = waits
            return dist.ProcessGroupNCCL(store, seat.rank, seat.world, options)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices, gloo._timeout = [gloo_device(host)], waits
        return dist.ProcessGroupGloo(store, seat.rank, seat.world, gloo)
    except RuntimeError as error:
        raise RolloutError(
            f"not every member of the weight group {seat.name} has come within {timeout:g} s"
            f" ({str(error).splitlines()[0]}); look at the engine's log."
        ) from None
