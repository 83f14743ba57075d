"""Batches of trajectories one after another, the next one read while this one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

Rows = Sequence[int] | np.ndarray


class Batch(Protocol):
    """Some trajectories in use."""

    def load(self, fields: Sequence[str]) -> Self: ...

    def release(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


B = TypeVar("B", bound=Batch)


def batches(
    lease: Callable[[Rows], B], plan: Iterable[Rows], fields: Sequence[str], *, ahead: bool
) -> Iterator[B]:
    """`lease` the rows of `plan` one after another; each batch is released when the next is asked for.

    With `ahead` the `fields` of the next one are read and checked by a thread while this one is used: two
    are in memory, else one.
    """
    if not ahead:
        for rows in plan:
            with lease(rows) as batch:
                yield batch
        return

    def loaded(rows: Rows) -> B:
        batch = lease(rows)
        try:
            return batch.load(fields)
        except BaseException:
            batch.release()
            raise

    waiting: Future[B] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="opd-trajectories") as pool:
        try:
            for rows in plan:
                coming = pool.submit(loaded, rows)
                if waiting is not None:
                    current, waiting = waiting, coming
                    yield from _used(current)
                waiting = coming
            if waiting is not None:
                current, waiting = waiting, None
                yield from _used(current)
        finally:
            if waiting is not None and waiting.exception() is None:
                waiting.result().release()


def _used(future: Future[B]) -> Iterator[B]:
    with future.result() as batch:
        yield batch
