"""A write-ahead log of tokens. See `storage/wal/README.md` for what it promises."""

from opd.storage.wal.io import LogIO
from opd.storage.wal.reader import LogContents, read_log
from opd.storage.wal.recovery import LogReport
from opd.storage.wal.writer import TokenWAL

__all__ = ["LogContents", "LogIO", "LogReport", "TokenWAL", "read_log"]
