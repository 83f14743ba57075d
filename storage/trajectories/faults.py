"""The system's errors as one sentence that names the store, and a writer that stops at the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from opd.errors import StorageError


@contextlib.contextmanager
def reporting(store: str | Path, action: str) -> Iterator[None]:
    """Any `OSError` of the block as a `StorageError`: "STORE cannot be ACTION (cause); ..."."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the trajectory store {store} cannot be {action} ({error.strerror or error}); check its disk and"
            " permissions, or use another folder"
        ) from error


class FailureLatch:
    """Remembers why a writer takes nothing more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reason: str | None = None

    def check(self) -> None:
        """Raise `StorageError` if something failed before."""
        if self.reason is not None:
            raise StorageError(self.reason)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What breaks off in here may have left half a frame: nothing is written after it."""
        try:
            yield
        except BaseException as error:
            cause = getattr(error, "strerror", None) or type(error).__name__
            self.reason = (
                f"the trajectory store {self._folder} could not be written ({cause}) and takes nothing more;"
                " mend that and open it again: what was sealed is kept"
            )
            if isinstance(error, OSError):
                raise StorageError(self.reason) from error
            raise
