"""A write-ahead log of tokens. See `storage/wal/README.md` for what it promises."""

from opd.storage.framed_log import LogIO
from opd.storage.wal.reader import LogContents, LogReport, read_log
from opd.storage.wal.writer import TokenWAL

__all__ = ["LogContents", "LogIO", "LogReport", "TokenWAL", "read_log"]
