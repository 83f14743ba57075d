"""What can go wrong between a client and a server, before it becomes a sentence for the user."""

from __future__ import annotations

import random
from dataclasses import dataclass


class UnavailableError(Exception):
    """No usable answer this time: another attempt, or another server, may give one."""

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered
        """Whether the server was there and answered something: it is asked only so often."""


class RefusedError(Exception):
    """The server understood and declined: asking again changes nothing."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried."""

    timeout: float = 300.0
    """Seconds one attempt may take, from the first byte sent to the last received."""
    connect_timeout: float = 5.0
    unreachable: float = 180.0
    """Seconds without any answer after which a request is given up: a server that is restarted needs a
    minute or more."""
    attempts: int = 5
    """Bad answers (status 5xx, not JSON, incomplete) to one request before it is given up."""
    hedge_after: float | None = None
    """Seconds without an answer after which a copy goes to another server; the first answer counts."""


def pause(failures: int, rng: random.Random) -> float:
    """Seconds to leave a server alone after `failures` in a row: 0.25 doubling to 8, times 0.5 to 1.5."""
    return min(8.0, 0.25 * 2.0 ** min(failures - 1, 8)) * rng.uniform(0.5, 1.5)
