"""A write-ahead log of tokens. See `storage/wal/README.md` for what it promises."""

from opd.storage.wal.frames import LogIO
from opd.storage.wal.recovery import LogContents, LogReport, read_log
from opd.storage.wal.writer import TokenWAL

__all__ = ["LogContents", "LogIO", "LogReport", "TokenWAL", "read_log"]
