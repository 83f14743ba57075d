"""One log of frames, for whoever must not lose what it acknowledged: the token log, the trajectories' table.

    000000000007.wal         frames, appended; opening the log begins a new one
    000000000007.snapshot    in the place of every file up to that number

A frame is a kind, a number and a payload of the owner's, checked (`frames.py`). What a crash leaves of a
write is dropped; what had been durable and is broken is damage, named with file and byte (`frames.py`). One
process writes, by one of three policies of waiting for the disk (`writer.py`).
"""

from opd.storage.framed_log.frames import (
    MAX_PAYLOAD,
    Frame,
    FrameReport,
    LogIO,
    Recovered,
    read_beside_writer,
    recover,
)
from opd.storage.framed_log.writer import Content, FramedLog, LogPolicy, SyncPolicy, WriteGuard

__all__ = [
    "MAX_PAYLOAD",
    "Content",
    "Frame",
    "FrameReport",
    "FramedLog",
    "LogIO",
    "LogPolicy",
    "Recovered",
    "SyncPolicy",
    "WriteGuard",
    "read_beside_writer",
    "recover",
]
