"""What a store may do wrong and for how long it is asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from opd.errors import StorageError
from opd.retry import Retry

T = TypeVar("T")
MIB = 2**20
STORES = Retry(attempts=10, pause=0.1, longest=5.0)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Time-outs, retries and sizes of requests. The defaults outlast a store that is away for ten seconds."""

    retry: Retry = STORES
    """Of one request."""
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

    Raises `StorageError` ("WHAT: cause; ...") when the attempts are used up.
    """

    def used_up(error: TransientError, seconds: float) -> StorageError:
        return StorageError(
            f"{what}: {error}, {options.retry.attempts} times in {seconds:.1f} s; check that the store is"
            " reachable and healthy, then run the same command again."
        )

    return options.retry.call(attempt, TransientError, used_up)
