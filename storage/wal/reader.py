"""Reading a log without disturbing it: any process may, at any time, also while another one writes."""

from __future__ import annotations

import os
from pathlib import Path

from opd.errors import StorageError
from opd.storage.wal.io import LogIO
from opd.storage.wal.recovery import LogReport, recover
from opd.storage.wal.table import RequestTable
from opd.types import LoggedRequest

_ATTEMPTS = 20


class LogContents:
    """What a log held at one moment: a prefix of what its writer had acknowledged or was about to."""

    def __init__(self, table: RequestTable, report: LogReport) -> None:
        self._table = table
        self.report = report

    def uids(self) -> list[str]:
        """The requests that have not been retired, in the order in which they were opened."""
        return list(self._table)

    def find(self, uid: str) -> LoggedRequest | None:
        """What is known of a request; `None` if it is not in the log."""
        return self._table.find(uid)

    def requests(self) -> dict[str, LoggedRequest]:
        """Every request that has not been retired, by uid."""
        return {uid: logged for uid in self._table if (logged := self._table.find(uid)) is not None}


def read_log(folder: str | os.PathLike[str], *, io: LogIO | None = None) -> LogContents:
    """Read the log in `folder`. Damage is in the report, not an error. Raises `StorageError` if there is no
    log, it is of a newer format, or its files cannot be read.
    """
    place, io = Path(folder), io or LogIO()
    told = None
    for attempt in range(_ATTEMPTS):
        last = attempt == _ATTEMPTS - 1
        try:
            before = sorted(io.names(place))
            found = recover(place, io)
        except StorageError:
            raise
        except FileNotFoundError as error:  # its writer has just put a snapshot in the place of this file
            if last or not place.is_dir():
                raise StorageError(
                    f"there is no log in {place} ({error.strerror}); check the path"
                ) from error
            continue
        except OSError as error:
            raise StorageError(f"the log in {place} cannot be read ({error.strerror or error})") from error
        # A frame may become whole while the bytes after it are looked at: damage is what stays.
        damage = found.report.damage
        if damage is None or (damage == told and before == sorted(io.names(place))):
            break
        told = damage
    if not found.report.files and found.report.damage is None:
        raise StorageError(f"there is no log in {place}; check the path")
    return LogContents(found.table, found.report)
