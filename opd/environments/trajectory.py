"""The log of agents' actions: every command and every environment step, in one order, written before it
counts.

It lies next to the token log, in the same framed files (`storage/framed_log.py`). A command is logged before
it starts, and its result before anyone sees it. After a kill, finished commands are read and not run again,
and the command in flight is known (`recorded.py`).

    episode   uid, settings of its environment: files that it began with, quotas
    intent    a command is about to run: turn, number, its words and input
    result    how it ended: status, outputs, files changed, the state after
    step      the environment's answer to a turn
    retire    episodes that are no longer needed

Each is an object of JSON with a number of its own, `order`, that only grows. Bytes are text if they are
UTF-8. Long contents are in the store of snapshots, under their sha256.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from opd.errors import StorageError
from opd.sandbox.protocol import KilledBy, Limits, Outcome
from opd.sandbox.snapshots import SnapshotStore
from opd.storage.framed_log import Frame, FrameReport, LogIO, read_concurrently
from opd.storage.framed_log_writer import FrameContent, LogPolicy, LogWriter, SyncPolicy
from opd.untrusted import bounded_integer, read_document, safe_excerpt

_STORE = "snapshots"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INLINE = 1 << 14
"""Bytes of an input or output. Longer ones are stored outside the log."""
_LONGEST = 1 << 26
_ANY = Limits(disk=1 << 60, files=1 << 40)
_SWEEP = 64
"""Least number of retired episodes before unreferenced snapshots are searched for."""


class RecordKind(IntEnum):
    """Kind of a frame. 5 is the framed log's own."""

    EPISODE = 1
    INTENT = 2
    RESULT = 3
    STEP = 4
    RETIRE = 6


@dataclass(frozen=True, slots=True)
class Command:
    words: Sequence[str]
    stdin: bytes = b""
    timeout: float | None = None
    repeatable: bool = False
    """If interrupted, it may be run again, from the files as they were before it."""
    deterministic: bool = False
    """The same files give the same files and output. No snapshot is taken after it, unless a quota or a
    signal ended it.
    """

    @property
    def digest(self) -> str:
        """sha256 (hex) of the words, the input and the time-out."""
        fields = [list(self.words), hashlib.sha256(self.stdin).hexdigest(), self.timeout]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """A command that was started, and its outcome if it has ended."""

    turn: int
    number: int
    """From 0, in its episode."""
    order: int
    command: Command
    attempts: int = 1
    """Number of starts."""
    outcome: Outcome | None = None
    """`None`: it was in flight."""
    state: str | None = None
    """Digest of the files after it, or None without a snapshot."""
    ended: int = -1
    """The order of its result."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """An environment's answer to a turn."""

    turn: int
    order: int
    action: str
    """sha256 (hex) of the model's text."""
    observation: Any
    reward: float
    done: bool
    info: dict[str, Any]


@dataclass(slots=True)
class LoggedEpisode:
    """The log's state of an episode that was not retired."""

    uid: str
    order: int
    settings: dict[str, Any]
    """Settings of its environment and sandbox."""
    commands: list[LoggedCommand] = field(default_factory=list)
    steps: list[LoggedStep] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """sha256 (hex) of its settings."""
        return _digest_of(self.settings)


@dataclass(slots=True)
class TrajectoryReport(FrameReport):
    """Counts and damage from reading a log of trajectories."""

    episodes: int = 0
    commands: int = 0


class EpisodeTable:
    """Episodes built from records, whether written now or read."""

    def __init__(self, store: SnapshotStore) -> None:
        self.episodes: dict[str, LoggedEpisode] = {}
        self.order = 0
        """Order of the next record."""
        self._store = store

    def apply_record(self, kind: int, record: Mapping[str, Any]) -> None:
        """Apply a record. Raises `ValueError` for one that does not follow on the earlier ones."""
        if kind == RecordKind.RETIRE:
            for uid in _check_texts(record["uids"]):
                self.episodes.pop(uid, None)
        elif kind == RecordKind.EPISODE:
            episode = LoggedEpisode(
                _check_text(record["uid"]), self._next_order(record), dict(record["settings"])
            )
            if episode.uid in self.episodes:
                raise ValueError(f"episode {safe_excerpt(episode.uid)} begins twice")
            self.episodes[episode.uid] = episode
        elif kind in (RecordKind.INTENT, RecordKind.RESULT, RecordKind.STEP):
            episode = self.episodes[_check_text(record["uid"])]
            if kind == RecordKind.INTENT:
                self._apply_intent(episode, record)
            elif kind == RecordKind.RESULT:
                self._apply_result(episode, record)
            else:
                turn = bounded_integer(
                    record["turn"], len(episode.steps), len(episode.steps), "a step's turn"
                )
                episode.steps.append(
                    LoggedStep(
                        turn,
                        self._next_order(record),
                        _check_text(record["action"]),
                        record["observation"],
                        float(record["reward"]),
                        record["done"] is True,
                        dict(record["info"]),
                    )
                )
        else:
            raise ValueError(f"a record of kind {kind}")

    def _next_order(self, record: Mapping[str, object]) -> int:
        order = bounded_integer(record["order"], self.order, 1 << 62, "a record's order")
        self.order = order + 1
        return order

    def _apply_intent(self, episode: LoggedEpisode, record: Mapping[str, Any]) -> None:
        number = bounded_integer(record["number"], 0, len(episode.commands), "a command's number")
        timeout = record["timeout"]
        if timeout is not None and (type(timeout) not in (int, float) or timeout < 0):
            raise ValueError(f"{safe_excerpt(timeout)} are no seconds")
        command = Command(
            tuple(_check_texts(record["words"])),
            self._decode_bytes(record["stdin"]),
            timeout,
            record["repeatable"] is True,
            record["deterministic"] is True,
        )
        if record["digest"] != command.digest:
            raise ValueError(f"command {number} of {safe_excerpt(episode.uid)} is not what its digest says")
        turn, order = bounded_integer(record["turn"], 0, 1 << 31, "a turn"), self._next_order(record)
        attempts = bounded_integer(record["attempts"], 1, 1 << 31, "attempts")
        logged = LoggedCommand(turn, number, order, command, attempts)
        if number < len(episode.commands):
            previous = episode.commands[number]
            if previous.outcome is not None or previous.command.digest != command.digest:
                raise ValueError(f"command {number} of {safe_excerpt(episode.uid)} is begun again")
            episode.commands[number] = logged
        else:
            if episode.commands and episode.commands[-1].outcome is None:
                raise ValueError(f"command {number} of {safe_excerpt(episode.uid)} begins within another")
            episode.commands.append(logged)

    def _apply_result(self, episode: LoggedEpisode, record: Mapping[str, Any]) -> None:
        number = bounded_integer(record["number"], 0, len(episode.commands) - 1, "a command's number")
        logged = episode.commands[number]
        if logged.outcome is not None:
            raise ValueError(f"command {number} of {safe_excerpt(episode.uid)} ends twice")
        status, killed_by, state = record["exit"], record["killed_by"], record["state"]
        if killed_by is not None and killed_by not in get_args(KilledBy):
            raise ValueError(f"{safe_excerpt(killed_by)} is no quota")
        if state is not None and not _DIGEST.fullmatch(_check_text(state)):
            raise ValueError(f"{safe_excerpt(state)} is no digest of a state")
        outcome = Outcome(
            None if status is None else bounded_integer(status, -255, 255, "an exit status"),
            self._decode_bytes(record["stdout"]),
            self._decode_bytes(record["stderr"]),
            killed_by,
            tuple(_check_texts(record["files_changed"])),
            bounded_integer(record["cut"], 0, 1 << 62, "what was cut"),
            record["interrupted"] is True,
        )
        ended = self._next_order(record)
        episode.commands[number] = replace(logged, outcome=outcome, state=state, ended=ended)

    def _decode_bytes(self, packed: Mapping[str, Any]) -> bytes:
        if "text" in packed:
            return _check_text(packed["text"]).encode()
        if "base64" in packed:
            return base64.b64decode(packed["base64"], validate=True)
        return self._store.get_bytes(_check_text(packed["sha256"]), _LONGEST)


class TrajectoryReplay:
    """Rebuilds a table from written frames."""

    def __init__(self, folder: Path, store: SnapshotStore) -> None:
        self.report = TrajectoryReport(str(folder))
        self.table = EpisodeTable(store)

    def apply_frame(self, frame: Frame, payload: memoryview) -> None:
        """See `framed_log.Replay`."""
        record = read_document(bytes(payload), _LONGEST)
        if not isinstance(record, dict):
            raise ValueError("a record that is no object")
        self.table.apply_record(frame.kind, record)

    def end_file(self) -> None:
        """See `framed_log.Replay`."""
        self.report.episodes = len(self.table.episodes)
        self.report.commands = sum(len(episode.commands) for episode in self.table.episodes.values())


def read_trajectories(folder: Path) -> tuple[dict[str, LoggedEpisode], TrajectoryReport]:
    """Read the episodes of the log in `folder`, by uid. Any process may read at any time. Damage is in the
    report. Raises `StorageError` if there is no log or it cannot be read.
    """
    store = SnapshotStore(folder / _STORE)
    replay, _ = read_concurrently(folder, LogIO(), lambda: TrajectoryReplay(folder, store))
    return replay.table.episodes, replay.report


class TrajectoryLog(LogWriter):
    """The writer, in a folder of its own. `fsync` has the meaning it has in `TokenWAL`. With any value, no
    death of a process loses a record whose call has returned. Methods may be called from several threads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fsync: SyncPolicy = "interval",
        interval_seconds: float = 0.2,
        segment_bytes: int = 64 << 20,
        io: LogIO | None = None,
    ) -> None:
        """Read the existing log and continue it. Raises `StorageError` if another process writes, the folder
        cannot be written, or acknowledged records are damaged.
        """
        self.store = SnapshotStore(folder / _STORE, durable=fsync == "always")
        self._gone = 0
        replay = TrajectoryReplay(folder, self.store)
        self._table, self.recovery = replay.table, replay.report
        policy = LogPolicy(fsync, interval_seconds, segment_bytes)
        mend = f"remove {folder}: its episodes then begin again"
        super().__init__(folder, "the log of trajectories", replay, policy, io or LogIO(), mend)

    def find(self, uid: str) -> LoggedEpisode | None:
        """Return the log's state of an episode. It grows as more is logged."""
        with self._mutex:
            return self._table.episodes.get(uid)

    def uids(self) -> list[str]:
        """Episodes that have not been retired, in the order in which they began."""
        with self._mutex:
            return list(self._table.episodes)

    def begin_episode(self, uid: str, settings: Mapping[str, object]) -> LoggedEpisode:
        """Begin or continue an episode. Raises `StorageError` if it has other settings in the log."""
        with self._mutex:
            episode = self._table.episodes.get(uid)
            if episode is None:
                self._log_record(RecordKind.EPISODE, {"uid": uid, "settings": dict(settings)}, [])
                return self._table.episodes[uid]
            if episode.digest != _digest_of(settings):
                raise StorageError(
                    f"episode {safe_excerpt(uid)} was begun with other settings of its environment; go on"
                    f" with those, or remove {self.folder}"
                )
            return episode

    def log_intent(self, uid: str, turn: int, command: Command) -> LoggedCommand:
        """Log that a command is about to run: the next one, or again the one that was in flight."""
        with self._mutex:
            episode = self._get_episode(uid)
            last = episode.commands[-1] if episode.commands else None
            again = last is not None and last.outcome is None
            number = len(episode.commands) - again
            attempts = last.attempts + 1 if again and last else 1
            record = self._intent_record(uid, LoggedCommand(turn, number, 0, command, attempts))
            self._log_record(RecordKind.INTENT, record, [record["stdin"].get("sha256")])
            return episode.commands[number]

    def log_result(self, uid: str, number: int, outcome: Outcome, state: str | None) -> None:
        """Log a command's outcome and the snapshot of its files."""
        with self._mutex:
            self._get_episode(uid)
            record = self._result_record(uid, number, outcome, state)
            digests = [state, record["stdout"].get("sha256"), record["stderr"].get("sha256")]
            self._log_record(RecordKind.RESULT, record, digests)

    def log_step(self, uid: str, step: LoggedStep) -> None:
        """Log the environment's answer to the next turn."""
        with self._mutex:
            self._get_episode(uid)
            self._log_record(RecordKind.STEP, {"uid": uid, **asdict(step)}, [])

    def retire(self, uids: Iterable[str]) -> None:
        """Drop episodes, and the snapshots that no other names. Unknown ones are ignored."""
        with self._mutex:
            live_uids = [uid for uid in dict.fromkeys(uids) if uid in self._table.episodes]
            if not live_uids:
                return
            self._log_record(RecordKind.RETIRE, {"uids": live_uids}, [])
            self._gone += len(live_uids)
            live = len(self._table.episodes)
            if self._gone >= max(_SWEEP, live) or not live:
                self._gone = 0
                with self._guard:
                    self._files.compact_segments()
                states, others = set[str](), set[str]()
                for episode in self._table.episodes.values():
                    states.update(one.state for one in episode.commands if one.state)
                    for one in episode.commands:
                        parts = [
                            one.command.stdin,
                            *((one.outcome.stdout, one.outcome.stderr) if one.outcome else ()),
                        ]
                        others.update(hashlib.sha256(p).hexdigest() for p in parts if len(p) > _INLINE)

                self.store.release_digests(others)
                self.store.remove_unreferenced(states, others, _ANY)

    def adopt_episode(self, episode: LoggedEpisode) -> None:
        """Replace an episode by another log's state of it. The snapshots stay in that log, and only their
        digests are copied.
        """
        with self._mutex:
            self.retire([episode.uid])
            for _, kind, record in sorted(self._episode_records(episode), key=itemgetter(0)):
                packed = (record.get(name) for name in ("stdin", "stdout", "stderr"))
                self._log_record(kind, record, [one.get("sha256") for one in packed if one])

    def retire_requests(self, uids: Iterable[str]) -> None:
        """Drop episodes by their uids, or by those of their turns in the token log (`EPISODE/TURN`)."""
        self.retire(name for uid in uids for name in (uid, uid.rpartition("/")[0]))

    def _get_episode(self, uid: str) -> LoggedEpisode:
        if uid not in self._table.episodes:
            raise StorageError(
                f"episode {safe_excerpt(uid)} is not in the log of trajectories; begin it first"
            )
        return self._table.episodes[uid]

    def _log_record(self, kind: RecordKind, record: dict[str, Any], digests: Sequence[str | None]) -> None:
        """Log a record and apply it. The store then keeps the contents that it names."""
        self._guard.check()
        numbered = {**record, "order": self._table.order}
        payload = _encode_record(numbered)
        with self._guard:
            self._files.append(kind, payload)
            self._files.commit()
            self._table.apply_record(kind, numbered)
        self.store.release_digests(digest for digest in digests if digest)

    def _pack_bytes(self, data: bytes) -> dict[str, str]:
        if len(data) > _INLINE:
            return {"sha256": self.store.put_bytes(data)}
        with contextlib.suppress(UnicodeDecodeError):
            return {"text": data.decode()}
        return {"base64": base64.b64encode(data).decode()}

    def _contents(self) -> Iterator[FrameContent]:
        """Yield the records of all episodes that were not retired, in their order."""
        records: list[tuple[int, RecordKind, dict[str, Any]]] = []
        for episode in self._table.episodes.values():
            records += self._episode_records(episode)
        for order, kind, record in sorted(records, key=itemgetter(0)):
            yield FrameContent(kind, [_encode_record({**record, "order": order})])

    def _intent_record(self, uid: str, logged: LoggedCommand) -> dict[str, Any]:
        """Return the record of a command's start, its input packed."""
        command = logged.command
        return {
            "uid": uid,
            "turn": logged.turn,
            "number": logged.number,
            "attempts": logged.attempts,
            "digest": command.digest,
            "words": list(command.words),
            "timeout": command.timeout,
            "repeatable": command.repeatable,
            "deterministic": command.deterministic,
            "stdin": self._pack_bytes(command.stdin),
        }

    def _result_record(self, uid: str, number: int, outcome: Outcome, state: str | None) -> dict[str, Any]:
        """Return the record of a command's end, its outputs packed."""
        return {
            "uid": uid,
            "number": number,
            "exit": outcome.exit,
            "killed_by": outcome.killed_by,
            "files_changed": list(outcome.files_changed),
            "cut": outcome.cut,
            "interrupted": outcome.interrupted,
            "state": state,
            "stdout": self._pack_bytes(outcome.stdout),
            "stderr": self._pack_bytes(outcome.stderr),
        }

    def _episode_records(self, episode: LoggedEpisode) -> Iterator[tuple[int, RecordKind, dict[str, Any]]]:
        """Yield order, kind and content of each record of an episode."""
        uid = episode.uid
        yield episode.order, RecordKind.EPISODE, {"uid": uid, "settings": episode.settings}
        for one in episode.commands:
            yield one.order, RecordKind.INTENT, self._intent_record(uid, one)
            if one.outcome is not None:
                result = self._result_record(uid, one.number, one.outcome, one.state)
                yield one.ended, RecordKind.RESULT, result
        for step in episode.steps:
            yield step.order, RecordKind.STEP, {"uid": uid, **asdict(step)}


def _encode_record(record: Mapping[str, object]) -> bytes:
    try:
        data = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"what an episode says cannot be logged ({safe_excerpt(error)}); keep observations and info"
            " to JSON"
        ) from error
    if len(data) > _LONGEST:
        raise StorageError(f"a record of {len(data)} bytes is too long for the log of trajectories")
    return data + b" " * (-len(data) % 8)


def _digest_of(settings: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{safe_excerpt(value)} is no text")
    return value


def _check_texts(values: object) -> list[str]:
    if not isinstance(values, list):
        raise ValueError(f"{safe_excerpt(values)} is no list")
    return [_check_text(one) for one in values]
