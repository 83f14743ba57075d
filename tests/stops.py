"""A reward's module that stops a rank, with SIGSTOP, where it first comes to a collective. A variable of the
environment says which.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from opd.ranks import Ranks

VARIABLE = "OPD_TEST_STOPS"
"""`RANK:label`."""


def stop(ranks: Ranks, label: str) -> None:
    if os.environ.get(VARIABLE) == f"{ranks.rank}:{label}":
        os.kill(os.getpid(), signal.SIGSTOP)


def _watch() -> None:
    named, first = Ranks.name_missing_ranks, Ranks.main_first

    @contextlib.contextmanager
    def name_missing_ranks(self: Ranks, label: str) -> Iterator[None]:
        with named(self, label):
            stop(self, label)
            yield

    def main_first(self: Ranks, work: Callable[[], object], label: str) -> None:
        stop(self, label)
        first(self, work, label)

    Ranks.name_missing_ranks, Ranks.main_first = name_missing_ranks, main_first


if os.environ.get("RANK") is not None:
    _watch()


def reward(sample: Any) -> float:
    return len(sample.text) % 3 / 2
