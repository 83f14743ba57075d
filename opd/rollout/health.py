"""How long a failing engine is trusted: retries, backoff, quarantine and return."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is tried before a request, or an engine, is given up. Times in seconds."""

    attempts: int = 3
    """Times in a row a request may fail on its own without a new token."""
    backoff: float = 0.2
    """Rest of an engine after its first failure; doubled with each further one in a row, plus up to 25 %
    jitter, so that engines do not come back together."""
    backoff_limit: float = 30.0
    quarantine_after: int = 3
    """Failures in a row after which the rest counts as quarantine."""
    step_timeout: float | None = None
    """An engine that gives no decode step for so long is left alone until it answers again."""
    silence_limit: float = 600.0
    """When every engine is in a step that does not end: time until the requests are given up."""
    deadline: float | None = None
    """Time a request may take, from the call of `generate`. It ends long responses more often than short
    ones: a safety net, not a way to save time."""
    hedge_after: float | None = None
    """Requests of an engine that has been silent for so long are also given to an idle one. The noise is a
    function of (seed, uid, position), so both write the same tokens, and the faster one is heard."""
    exhausted: Literal["raise", "fail"] = "raise"
    """When nothing is left to try: raise and leave the request open in the log, so that a restart goes on
    with it, or close it as failed with the reason and go on with the others."""


@dataclass(slots=True)
class EngineHealth:
    """What one engine has done so far."""

    tokens: int = 0
    failures: int = 0
    in_a_row: int = 0
    """Failures since its last token."""
    quarantines: int = 0
    resting_until: float = 0.0
    """Monotonic seconds."""
    last_heard: float | None = None
    """Monotonic seconds of its last decode step: steps are its heartbeat."""
    stale: bool = False
    """It missed a weight update, and serves again only with weights of the current version."""
    last_error: str | None = None

    def heard(self, now: float, tokens: int) -> None:
        """It gave a step of `tokens` tokens at `now`."""
        self.last_heard = now
        if tokens:
            self.tokens += tokens
            self.in_a_row = 0

    def failed(self, now: float, error: BaseException, policy: RetryPolicy, rng: random.Random) -> None:
        """It failed at `now`: give it a rest that doubles with every failure in a row."""
        self.failures += 1
        self.in_a_row += 1
        self.last_error = f"{type(error).__name__}: {error}"
        if self.in_a_row == policy.quarantine_after:
            self.quarantines += 1
        rest = min(policy.backoff * 2.0 ** min(self.in_a_row - 1, 60), policy.backoff_limit)
        self.resting_until = now + rest * (1.0 + 0.25 * rng.random())

    def rests(self, now: float) -> bool:
        """Whether it is to be left alone at `now`."""
        return now < self.resting_until
