"""`TokenWAL`, a write-ahead log of tokens, and `read_log`. See `storage/WAL.md` for its guarantees."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.errors import StorageError
from opd.storage.framed_log import MAX_PAYLOAD, Frame, FrameReport, LogIO, read_concurrently
from opd.storage.framed_log_writer import FrameContent, LogPolicy, LogWriter, SyncPolicy
from opd.storage.logged_choices import (
    LoggedChoices,
    LoggedMasks,
    decode_choices,
    decode_masks,
    encode_choices,
    encode_masks,
    join_logged,
    payload_digest,
)
from opd.storage.transcript import form_of
from opd.storage.wal_table import (
    END_OF_REQUEST,
    MAX_NUMBER,
    STATUSES,
    TOKEN,
    ChunkEncoder,
    ClosePayload,
    FrameKind,
    OpenPayload,
    RequestTable,
    decode_close,
    decode_open,
    decode_retire,
    encode_chunk,
    encode_close,
    encode_open,
    encode_retire,
)
from opd.types import Chunk, LoggedRequest, RolloutRequest, Status

_TOKENS_AT_ONCE = 1 << 18
"""Tokens that wait, as views of the file, to be sorted in one batch."""


@dataclass(slots=True)
class LogReport(FrameReport):
    """Results of reading a log of tokens."""

    requests: int = 0
    tokens: int = 0
    """Tokens of the requests that have not been retired."""


class LogReplay:
    """Restores the table to the state at which the frames were written, one frame after another."""

    def __init__(self, folder: Path) -> None:
        self.table = RequestTable()
        self.report = LogReport(str(folder))
        self._tokens: list[memoryview] = []
        self._waiting = 0
        self._choices: list[np.ndarray] = []
        """The expert choices of all these tokens, or of none."""
        self._before: list[LoggedChoices] = []
        """Expert choices that count if the next frame is that of their tokens."""
        self._masks: list[tuple[int, np.ndarray]] = []
        """Sampling masks of all these tokens that have any, with the index of the first token."""
        self._masks_before: list[LoggedMasks] = []
        """Masks that count if the next frame is that of their tokens."""

    def apply_frame(self, frame: Frame, payload: memoryview) -> None:
        """See `framed_log.Replay`."""
        table = self.table
        if frame.kind == FrameKind.CHOICES:
            self._before.append(decode_choices(payload))
            return
        if frame.kind == FrameKind.MASKS:
            self._masks_before.append(decode_masks(payload))
            return
        before, self._before = self._before, []
        masks_before, self._masks_before = self._masks_before, []
        if frame.kind == FrameKind.CHUNK:
            self._note_choices(frame, before, payload)
            split = frame.count * TOKEN.itemsize
            if split > len(payload):
                raise ValueError(f"{frame.count} tokens in {len(payload)} bytes")
            masks = join_logged(masks_before, payload, np.frombuffer(payload[:split], TOKEN)["kept"])
            if masks is not None:
                self._masks.append((self._waiting, masks))
            self._tokens.append(payload[:split])
            self._waiting += frame.count
            if self._waiting >= _TOKENS_AT_ONCE:
                self._sort_tokens()
            if split < len(payload):
                for number, code in np.frombuffer(payload[split:], END_OF_REQUEST).tolist():
                    table.close(ClosePayload(number, STATUSES[code], None))
        elif frame.kind == FrameKind.OPEN:
            table.open([decode_open(payload)])
        elif frame.kind == FrameKind.CLOSE:
            table.close(decode_close(payload))
        elif frame.kind == FrameKind.RETIRE:
            self._sort_tokens()
            table.retire(decode_retire(payload))

    def _note_choices(self, frame: Frame, before: list[LoggedChoices], payload: memoryview) -> None:
        """Note the expert choices of a frame of tokens, which is added next."""
        digest = payload_digest(payload) if before else 0
        due = [choices for choices in before if choices.digest == digest]
        rows = next((choices.rows for choices in due if choices.rows is not None), None)
        if rows is not None and len(rows) != frame.count:
            raise ValueError(f"expert choices of {len(rows)} tokens before {frame.count} tokens")
        if self._tokens and form_of(rows) != form_of(self._choices[-1] if self._choices else None):
            self._sort_tokens()
        if rows is not None:
            self._choices.append(rows)
        for choices in due:
            self.table.add_spans(choices.spans)

    def end_file(self) -> None:
        """See `framed_log.Replay`."""
        self._sort_tokens()
        self.report.requests = len(self.table.by_uid)
        self.report.tokens = self.table.transcript.token_count()

    def _sort_tokens(self) -> None:
        """Give the waiting tokens to their requests."""
        if self._tokens:
            records = np.frombuffer(b"".join(self._tokens), dtype=TOKEN)
            choices = np.concatenate(self._choices) if self._choices else None
            masks = np.full(len(records) if self._masks else 0, None)
            for first, rows in self._masks:
                masks[first : first + len(rows)] = rows
            self.table.add_read(records, choices, masks if self._masks else None)
            self._tokens, self._choices, self._masks, self._waiting = [], [], [], 0


class LogContents:
    """The content of a log at one moment: a prefix of the writes acknowledged or about to be."""

    def __init__(self, table: RequestTable, report: LogReport) -> None:
        self._table = table
        self.report = report

    def uids(self) -> list[str]:
        """Return the requests that have not been retired, in the order in which they were opened."""
        return list(self._table.by_uid)

    def find(self, uid: str) -> LoggedRequest | None:
        """Return the logged state of a request, or `None` if it is not in the log."""
        return self._table.find(uid)

    def requests(self) -> dict[str, LoggedRequest]:
        """Return every request that has not been retired, by uid."""
        return self._table.requests()


def read_log(folder: str | os.PathLike[str], *, io: LogIO | None = None) -> LogContents:
    """Read the log in `folder`, without a lock: any process may, at any time, also while another one writes.
    Damage is in the report, not an error. Raises `StorageError` if there is no log, it is of a newer format,
    or its files cannot be read.
    """
    replay, _ = read_concurrently(folder, io or LogIO(), lambda: LogReplay(Path(folder)))
    return LogContents(replay.table, replay.report)


_TOKENS_PER_FRAME = 1 << 20
"""Limit of a snapshot's frame."""


class TokenWAL(LogWriter):
    """A write-ahead log of tokens, in a folder of its own (`opd.protocols.TokenLog`).

    Guarantees of a returned call, by `fsync`:

    - `"always"`: the bytes are on the disk. Neither the death of the process nor a power cut removes them.
    - `"interval"`: the bytes are with the operating system and survive any death of the process. A thread
      syncs them within `interval_seconds` and the time a sync takes. A power cut removes at most
      the writes since then, and always the newest: the rest is a prefix.
    - `"os"`: as `"interval"`, but synced only when a segment is full, on `retire` that compacts, on
      `sync()` and on `shutdown()`. A power cut may remove everything since.

    One process writes. Any number may read (`read_log`). A call that raises because the disk failed has
    acknowledged nothing, and every later write raises too: open the log again. Misuse (an unknown request, a
    position that does not follow on) raises `StorageError` as well, writes nothing and leaves the log usable.

    Requests that have not been retired are held in memory, 12 to 24 bytes a token.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fsync: SyncPolicy = "interval",
        interval_seconds: float = 0.2,
        segment_bytes: int = 64 << 20,
        repair: bool = False,
        io: LogIO | None = None,
    ) -> None:
        """Replay the existing log, drop a write cut short, and go on in a new segment of at most about
        `segment_bytes`.

        Raises `StorageError` if another process writes, the folder cannot be written, or durable bytes are
        damaged. With `repair` the complete requests and tokens before the damage are kept, and the rest is
        given up.
        """
        policy = LogPolicy(fsync, interval_seconds, segment_bytes, reserve=fsync == "always")
        path = Path(folder)
        replay = LogReplay(path)
        self._table, self.recovery = replay.table, replay.report
        self._encoder = ChunkEncoder(self._table)
        mend = None if repair else f"give up what comes after that place with `opd wal repair {path}`"
        super().__init__(path, "the log", replay, policy, io or LogIO(), mend)

    def _contents(self) -> Iterator[FrameContent]:
        """Yield a snapshot of the requests that have not been retired."""
        for uid, entry in self._table.by_uid.items():
            yield FrameContent(FrameKind.OPEN, [encode_open(entry.number, entry.request, entry.metadata)])
            records, tokens = self._table.token_records(uid), self._table.transcript.request_tokens(uid)
            spans = [(entry.number, span) for span in tokens.expert_spans]
            for first in range(0, max(len(records), bool(spans)), _TOKENS_PER_FRAME):
                rows = slice(first, first + _TOKENS_PER_FRAME)
                part, chosen = records[rows], tokens.select_rows(rows)
                data = part.view(np.uint8).data
                for payload in encode_choices(data, chosen.expert_choices, spans):
                    yield FrameContent(FrameKind.CHOICES, [payload])
                if chosen.sampling_masks is not None:
                    for payload in encode_masks(data, chosen.sampling_masks):
                        yield FrameContent(FrameKind.MASKS, [payload])
                yield FrameContent(FrameKind.CHUNK, [part.view(np.uint8)], len(part))
                spans = []
            if entry.status is not Status.PENDING:
                yield FrameContent(FrameKind.CLOSE, [encode_close(entry.number, entry.status, entry.failure)])

    def open(self, request: RolloutRequest, metadata: Mapping[str, object]) -> None:
        """Log a new request. Raises `StorageError` if its uid is in the log already or it has a prefix."""
        self.open_many([(request, metadata)])

    def open_many(self, requests: Iterable[tuple[RolloutRequest, Mapping[str, Any]]]) -> None:
        """Log several new requests as one commit: with `always`, one wait for the disk instead of many."""
        with self._mutex:
            self._guard.check()
            openings: list[OpenPayload] = []
            uids: set[str] = set()
            for number, (request, metadata) in enumerate(requests, start=self._table.next_number):
                uid = request.uid
                if uid in self._table.by_uid or uid in uids:
                    raise StorageError(
                        f"request {uid} is in the log already; continue it, or retire it first"
                    )
                if len(request.prefix_ids):
                    raise StorageError(f"request {uid} is opened with tokens; open it without, then log them")
                if number > MAX_NUMBER:
                    raise StorageError(
                        f"the log in {self.folder} has no numbers left; begin one in another folder"
                    )
                uids.add(uid)
                prompt_ids = np.array(request.prompt_ids, np.int32)  # a copy, which nobody else changes
                opened = RolloutRequest(uid, prompt_ids, request.sampling, request.seed)
                openings.append(OpenPayload(number, opened, dict(metadata)))
            payloads = [encode_open(*opening) for opening in openings]
            with self._guard:
                self._files.append_all(FrameKind.OPEN, payloads)
                self._files.commit()
                self._encoder.reset_template()
                self._table.open(openings)

    def append(self, chunk: Chunk) -> None:
        """Log one chunk, the tokens and the requests it ended, as one frame and one commit. Expert choices
        and sampling masks are in frames before that one.
        """
        with self._mutex:
            self._guard.check()
            records, closings = self._encoder.chunk_records(chunk), self._encoder.chunk_closings(chunk)
            payload = encode_chunk(records, closings)
            if len(payload) > MAX_PAYLOAD:
                raise StorageError(f"{len(records)} tokens do not fit into one commit; log them in several")
            if not payload:
                return
            routed = chunk.expert_choices is not None or chunk.expert_spans
            choices = self._encoder.chunk_choices(chunk, payload) if routed else []
            with self._guard:
                for before in choices:
                    self._files.append(FrameKind.CHOICES, before)
                if chunk.sampling_masks is not None:
                    for before in encode_masks(payload, chunk.sampling_masks):
                        self._files.append(FrameKind.MASKS, before)
                self._files.append(FrameKind.CHUNK, payload, len(records))
                self._files.commit()
                self._table.transcript.add_verified(chunk)
                for closing in closings:
                    self._encoder.reset_template()
                    self._table.close(closing)

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        """End a request outside a chunk. The log itself is closed by `shutdown`."""
        with self._mutex:
            self._guard.check()
            if Status(status) is Status.PENDING:
                raise StorageError(f"request {uid} cannot end as pending; say how it ended")
            closing = ClosePayload(self._encoder.open_number(uid), Status(status), reason)
            payload = encode_close(*closing)
            with self._guard:
                self._files.append(FrameKind.CLOSE, payload)
                self._files.commit()
                self._encoder.reset_template()
                self._table.close(closing)

    def find(self, uid: str) -> LoggedRequest | None:
        """Return the logged state of a request, or `None` if it is not in the log."""
        with self._mutex:
            return self._table.find(uid)

    def uids(self) -> list[str]:
        """Return the requests that have not been retired, in the order in which they were opened."""
        with self._mutex:
            return list(self._table.by_uid)

    def requests(self) -> dict[str, LoggedRequest]:
        """Return every request that has not been retired, by uid."""
        with self._mutex:
            return self._table.requests()

    def retire(self, uids: Iterable[str]) -> None:
        """Forget requests, ignoring unknown ones. Frees files if half of the log is forgotten and that is at
        least one segment's size.
        """
        with self._mutex:
            self._guard.check()
            entries = self._table.by_uid
            numbers = [entries[uid].number for uid in dict.fromkeys(uids) if uid in entries]
            if not numbers:
                return
            payload = encode_retire(numbers)
            with self._guard:
                self._files.append(FrameKind.RETIRE, payload)
                self._files.commit()
                self._encoder.reset_template()
                self._table.retire(numbers)
                if self._files.is_wasteful(self._table.live_bytes):
                    self._files.compact_segments()
