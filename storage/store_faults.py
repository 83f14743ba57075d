"""What a store may do wrong and for how long it is asked again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from opd.errors import StorageError

T = TypeVar("T")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Time-outs, retries and sizes of requests. The defaults outlast a store that is away for ten seconds."""

    attempts: int = 10
    """Of one request, the first one included."""
    backoff_seconds: float = 0.1
    """Pause after the first failure; it doubles with each further one. Half of every pause is random."""
    backoff_cap_seconds: float = 5.0
    connect_seconds: float = 5.0
    stall_seconds: float = 10.0
    """A transfer that moves fewer than `least_bytes_per_second` for so long has failed."""
    least_bytes_per_second: int = 16 * 1024
    write_seconds: float = 60.0
    """Longest time an upload of one part (16 MiB) or a request about an object may take."""
    chunk_bytes: int = 16 * MIB
    """Most bytes of one ranged read."""
    threads: int = 4
    """Ranges read at the same time."""
    rereads: int = 3
    """How often a block with a wrong checksum is read again."""
    endpoint: str | None = None
    """Of an S3 server; default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the AWS configuration, else AWS."""


class TransientError(Exception):
    """A fault that may pass by itself; its text is the cause, in a few words."""


def with_retries(options: StoreOptions, what: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called again while it raises `TransientError`.

    Pauses grow exponentially, with jitter so that many readers do not come back at once. Raises
    `StorageError` ("WHAT: cause; ...") when the attempts are used up.
    """
    begin = time.monotonic()
    pause = options.backoff_seconds
    for number in range(1, options.attempts + 1):
        try:
            return attempt()
        except TransientError as error:
            if number == options.attempts:
                seconds = time.monotonic() - begin
                raise StorageError(
                    f"{what}: {error}, {number} times in {seconds:.1f} s; check that the store is reachable"
                    " and healthy, then run the same command again."
                ) from error
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, options.backoff_cap_seconds)
    raise ValueError(f"attempts is {options.attempts}; it must be at least 1.")
