"""Look into a run's logs.

`opd wal` checks, exports or repairs token logs. `opd trajectory` shows agents' commands, and replays them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.config.environments import SandboxConfig
from opd.environments.recorded import image_in, limits_in, sandbox_opener
from opd.environments.tools import limits_of
from opd.environments.trajectory import LoggedCommand, LoggedEpisode, LoggedStep, read_trajectories
from opd.errors import StorageError
from opd.pipelines.check.checks import number_of
from opd.pipelines.commands.exit_status import PREEMPTED
from opd.pipelines.records.layout import DONE, EPISODES, KEPT
from opd.redact import redact
from opd.sandbox.local import Sandboxes
from opd.sandbox.protocol import Outcome
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import KINDS, Kind, Substrate, find_substrate
from opd.storage.files import atomic_file
from opd.storage.wal import LogReport, TokenWAL, read_log
from opd.types import LoggedRequest
from opd.untrusted import convert_decode_errors, escape_controls, safe_excerpt


def wal_command(action: str, folder: Path, out: Path | None) -> int:
    """Run `inspect`, `verify`, `export` or `repair`. Raises `StorageError` without a log."""
    if not folder.exists() and (folder.parent / DONE).is_file():
        raise StorageError(
            f"there is no log in {folder} any more: a stage deletes its log when it ends, and this one has"
            " ended; look into logs while their stage runs, or after it was killed"
        )
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is no folder; give that of a stage's log, RUN/stages/STAGE/wal")
    if logs := sorted(folder.glob("stages/*/wal")):
        raise StorageError(f"there is no log in {folder} itself; give {' or '.join(map(str, logs))}")
    if action == "inspect":
        return print_summary(folder)
    if action == "verify":
        return verify_log(folder)
    if action == "export":
        return export_requests(folder, out)
    return repair_log(folder)


def print_summary(folder: Path) -> int:
    contents = read_log(folder)
    requests = contents.requests()
    tokens = sum(len(logged.token_ids) for logged in requests.values())
    versions = [logged.policy_versions for logged in requests.values() if len(logged.policy_versions)]
    report = contents.report
    print(
        f"log       {folder}: {number_of(len(report.files), 'file')}, {report.stored_bytes:,} bytes,"
        f" {number_of(report.frames, 'frame')}"
    )
    ends = Counter(logged.status.value for logged in requests.values())
    print(
        f"requests  {len(requests):,}" + "".join(f", {count:,} {end}" for end, count in sorted(ends.items()))
    )
    print(f"tokens    {tokens:,}")
    if versions:
        low, high = min(int(v.min()) for v in versions), max(int(v.max()) for v in versions)
        print(f"weights   versions {low} to {high}")
    print(f"state     {_log_state(report)}")
    return 0


def verify_log(folder: Path) -> int:
    """Check the log in `folder`, and return 2 if durable bytes are broken."""
    report = read_log(folder).report
    print(
        f"{folder}: {number_of(len(report.files), 'file')}, {number_of(report.frames, 'frame')},"
        f" {number_of(report.requests, 'request')}, {number_of(report.tokens, 'token')}; {_log_state(report)}"
    )
    return 0 if report.damage is None else 2


def export_requests(folder: Path, out: Path | None) -> int:
    """Write the requests of the log in `folder` as one line of JSON each. `out` is written atomically.
    Without it they go to standard output. A damaged log is exported up to the damage, and the status is 2.
    """
    contents = read_log(folder)
    status = 0 if contents.report.damage is None else 2
    if contents.report.damage is not None:
        print(f"opd: warning: {contents.report.damage}; what comes before is exported", file=sys.stderr)
    if out is None:
        sys.stdout.writelines(_request_lines(contents.requests()))
        return status
    if os.path.lexists(out):
        raise StorageError(f"{out} exists already; remove it or choose another name")
    try:
        with atomic_file(out) as file:
            file.writelines(line.encode() for line in _request_lines(contents.requests()))
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error.strerror}); choose another place") from error
    return status


def repair_log(folder: Path) -> int:
    """Repair the log in `folder`: retain the records before the damage."""
    report = read_log(folder).report
    if report.damage is None:
        print(f"{folder}: nothing to repair; {_log_state(report)}")
        return 0
    with TokenWAL(folder, repair=True) as log:
        recovery = log.recovery
    counts = f"{number_of(recovery.requests, 'request')} and {number_of(recovery.tokens, 'token')}"
    print(f"{folder}: kept {counts}; {report.damage}")
    return 0


def _log_state(report: LogReport) -> str:
    if report.damage is not None:
        return f"DAMAGED: {report.damage}"
    if report.cut_file is not None:
        return (
            f"whole; the last write was cut short ({report.cut_file} at byte {report.cut_offset},"
            f" {report.cut_bytes} bytes and {report.cut_frames} later frames are not used)"
        )
    return "whole, and closed by its writer" if report.clean else "whole; its writer is at work or was killed"


def _request_lines(requests: dict[str, LoggedRequest]) -> Iterator[str]:
    for logged in requests.values():
        yield json.dumps(_request_document(logged), allow_nan=False) + "\n"


def _request_document(logged: LoggedRequest) -> dict:
    request, sampling = logged.request, logged.request.sampling
    return {
        "uid": request.uid,
        "status": logged.status.value,
        "failure": logged.failure,
        "seed": request.seed,
        "sampling": {name: getattr(sampling, name) for name in sampling.__slots__},
        "metadata": logged.metadata,
        "prompt_ids": request.prompt_ids.tolist(),
        "token_ids": logged.token_ids.tolist(),
        "logprobs": [value if math.isfinite(value) else None for value in logged.logprobs.tolist()],
        "policy_versions": logged.policy_versions.tolist(),
    }


_LINES = 12
"""Maximum lines of an output that are shown."""
_WIDTH = 200


@dataclass(frozen=True, slots=True)
class ReplayPermissions:
    """Permissions of a replay. A log may be anybody's, so it gets only explicit permissions."""

    reads: tuple[str, ...] = ()
    """Paths that commands may read beside the system."""
    substrate: str | None = None
    """A weaker substrate than the strongest working one."""
    image: str | None = None
    quotas: bool = False
    """Permission for more time, memory, processes and files than a recipe's defaults."""


def trajectory_command(action: str, run: Path, uid: str | None, allowed: ReplayPermissions) -> int:
    """Run `show` or `replay`, and return the exit status. It is 1 if a replay differs and 2 for a damaged
    log. Raises `StorageError` if there is no log or no such episode, or if a replay needs more than is
    `allowed`.
    """
    logs = _trajectory_logs(run)
    if action == "show" and uid is None:
        return max(_print_episodes(folder) for folder in logs)
    if uid is None:
        raise StorageError("opd trajectory replay needs --episode UID; `opd trajectory show` lists them")
    for folder in logs:
        episodes, report = read_trajectories(folder)
        if uid in episodes:
            if action == "replay":
                status = asyncio.run(_cancel_on_sigterm(_replay_episode(episodes[uid], allowed)))
                if status is None:
                    signal.raise_signal(signal.SIGTERM)  # for the handler outside of the loop
                return PREEMPTED if status is None else status
            _print_episode(episodes[uid])
            return 0 if report.damage is None else 2
    raise StorageError(
        f"there is no episode {safe_excerpt(uid)} in {' or '.join(map(str, logs))}; `opd trajectory show"
        f" {run}` lists those that were not learnt from yet, or were kept"
    )


def _trajectory_logs(run: Path) -> list[Path]:
    """Return the logs of a run, or `run` itself if it is a log."""
    if not run.is_dir():
        raise StorageError(
            f"{run} is no folder; give that of a run, or of a log: RUN/stages/STAGE/{EPISODES}"
        )
    if any(run.glob("*.wal")) or any(run.glob("*.snapshot")):
        return [run]
    logs = sorted(path for path in run.glob(f"stages/*/{EPISODES}*") if path.is_dir())
    logs += sorted(path for path in run.glob(f"{EPISODES}*") if path.is_dir())
    if not logs:
        ended = any(run.glob(f"stages/*/{DONE}"))
        why = "no agent of it has used a tool yet"
        if ended:
            why = f"a stage that has ended leaves {KEPT}, unless rollout.log.keep is 0 or no tool was used"
        raise StorageError(f"there is no log of trajectories in {run}: {why}")
    return logs


def _print_episodes(folder: Path) -> int:
    episodes, report = read_trajectories(folder)
    stored = f"{number_of(len(report.files), 'file')}, {report.stored_bytes:,} bytes"
    print(f"log       {escape_controls(str(folder), '')}: {stored}")
    commands = [one for episode in episodes.values() for one in episode.commands]
    print(f"episodes  {len(episodes):,}, {number_of(len(commands), 'command')}")
    for episode in episodes.values():
        outcomes = [one.outcome for one in episode.commands]
        counts = {
            "in flight": outcomes.count(None),
            "interrupted": sum(outcome is not None and outcome.interrupted for outcome in outcomes),
            "run again": sum(one.attempts > 1 for one in episode.commands),
        }
        parts = [
            number_of(len(episode.steps), "step"),
            number_of(len(episode.commands), "command"),
            *(f"{count} {state}" for state, count in counts.items() if count),
            f"reward {sum(step.reward for step in episode.steps):g}",
        ]
        if episode.steps and episode.steps[-1].done:
            parts.append("done")
        print(f"  {safe_excerpt(episode.uid)}: {', '.join(parts)}")
    if report.damage is not None:
        print(f"state     DAMAGED: {redact(report.damage)}")
        return 2
    print(
        f"state     {'whole, and closed' if report.clean else 'whole; its writer is at work or was killed'}"
    )
    return 0


def _print_episode(episode: LoggedEpisode) -> None:
    print(f"episode {safe_excerpt(episode.uid)}, settings {episode.digest[:12]}")
    records: list[tuple[int, LoggedCommand | LoggedStep]] = []
    records += [(one.order, one) for one in episode.commands]
    records += [(step.order, step) for step in episode.steps]
    for _, record in sorted(records, key=lambda pair: pair[0]):
        if isinstance(record, LoggedStep):
            print(f"[{record.order}] turn {record.turn}: reward {record.reward:g}{', done' * record.done}")
            continue
        again = f" (attempt {record.attempts})" if record.attempts > 1 else ""
        print(f"[{record.order}] turn {record.turn}, command {record.number}{again}: {_command_text(record)}")
        outcome = record.outcome
        if outcome is None:
            print("    in flight: it was begun, and nothing says that it ended")
            continue
        text = "interrupted, and not run again"
        if not outcome.interrupted:
            text = f"killed: {outcome.killed_by}" if outcome.killed_by else f"exit {outcome.exit}"
            changed = [safe_excerpt(name) for name in outcome.files_changed[:8]]
            text += f"; changed {', '.join(changed) or 'nothing'}"
            if len(outcome.files_changed) > 8:
                text += f" and {len(outcome.files_changed) - 8} more"
        print(f"    [{record.ended}] {text}; state {(record.state or 'not kept')[:12]}")
        _print_output("out", outcome.stdout)
        _print_output("err", outcome.stderr)


def _command_text(one: LoggedCommand) -> str:
    text = escape_controls(redact(" ".join(one.command.words)), "")
    half = _WIDTH // 2  # a tool's request is at the end of its program
    return text if len(text) <= _WIDTH else f"{text[:half]} ... {text[-half:]}"


def _print_output(name: str, data: bytes) -> None:
    lines = escape_controls(redact(data.decode(errors="replace")), "\n").splitlines()
    for line in lines[:_LINES]:
        print(f"    {name}| {line[:_WIDTH]}")
    if len(lines) > _LINES:
        print(f"    {name}| ... {len(lines) - _LINES} lines more")


async def _cancel_on_sigterm(replay: Coroutine[Any, Any, int]) -> int | None:
    """Return the result of `replay`, or `None` after SIGTERM. However often the signal comes, the replay is
    cancelled once and its sandbox closed. An exception in the middle of the loop would leave tasks that
    nothing waits for.
    """
    if threading.current_thread() is not threading.main_thread():
        return await replay
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(replay)
    stopped: list[bool] = []  # no `Event`, because a second signal may find its lock taken by the first

    def stop(*_: object) -> None:
        stopped.append(True)
        if len(stopped) == 1:
            loop.call_soon_threadsafe(task.cancel)

    handler = signal.signal(signal.SIGTERM, stop)
    try:
        await asyncio.wait([task])
    finally:
        signal.signal(signal.SIGTERM, handler)
    if not stopped:
        return task.result()
    if not task.cancelled():
        task.exception()  # else asyncio logs it as never retrieved
    return None


def _replay_substrate(
    kind: Kind, image: tuple[str, str] | None, reads: Sequence[str], allowed: ReplayPermissions
) -> Substrate:
    """Return the substrate for the commands. Raises `StorageError` for more than is `allowed` and for a
    changed image, `SandboxError` if it does not work.
    """
    if refused := [path for path in reads if path not in allowed.reads]:
        raise StorageError(
            f"the log lets commands read {safe_excerpt(refused[0])}; if that is meant, give --reads for each"
            f" of {number_of(len(reads), 'path')}"
        )
    if image is not None:
        name, digest = image
        if allowed.image != name:
            raise StorageError(
                f"the log says that its commands ran in the image {safe_excerpt(name)}; if they are to run in"
                f" what this machine has of that name, give --image {safe_excerpt(name)}"
            )
        substrate = find_substrate("container", name)
        assert substrate.container is not None
        if substrate.container.digest != digest:
            raise StorageError(
                f"the image {safe_excerpt(name)} is {substrate.container.digest[:19]} here, and the log's"
                f" commands ran in {safe_excerpt(digest, 19)}; give that one its name back"
            )
        return substrate
    strongest = find_substrate()
    if kind == strongest.kind:
        return strongest
    if kind == "process" and allowed.substrate != kind:
        raise StorageError(
            "the log says that its commands ran without bubblewrap, which works here; if they are to run as"
            " processes of this machine again, give --substrate process"
        )
    return find_substrate(kind)


async def _replay_episode(episode: LoggedEpisode, allowed: ReplayPermissions) -> int:
    """Run an episode's commands in a fresh sandbox, and print the first difference."""
    with tempfile.TemporaryDirectory(prefix="opd-replay-") as folder:
        with convert_decode_errors(
            lambda cause: StorageError(
                f"the settings of {safe_excerpt(episode.uid)} make no sense ({cause}); replay what a run"
                " has logged"
            )
        ):
            settings, path = episode.settings, Path(folder)
            limits, usual = limits_in(settings), limits_of(SandboxConfig())
            larger = [name for name, most in asdict(usual).items() if getattr(limits, name) > most]
            if larger and not allowed.quotas:
                quotas = " and ".join(f"{name} {getattr(limits, name):,}" for name in larger)
                raise StorageError(
                    f"the log gives its commands {quotas}, which is more than a recipe's default; if that is"
                    " meant, give --quotas"
                )
            image = image_in(settings)
            kind = KINDS[KINDS.index(settings["substrate"])]
            files = {str(path): str(text) for path, text in settings["files"].items()}
            reads = [str(path) for path in settings["reads"]]
        store, substrate = SnapshotStore(path / "store"), _replay_substrate(kind, image, reads, allowed)
        boxes = Sandboxes(path / "boxes", store, limits, substrate=substrate, reads=reads)
        sandbox = await sandbox_opener(boxes, "replay", files)(None)
        done = 0
        try:
            for one in episode.commands:
                if one.outcome is None or one.outcome.interrupted:
                    continue  # it left the files unchanged
                outcome = await sandbox.exec(one.command.words, one.command.stdin, one.command.timeout)
                has_state = sandbox.spent is None and one.state is not None
                state = await sandbox.snapshot() if has_state else one.state
                difference = _outcome_difference(one, outcome, state)
                done += 1
                if difference is not None:
                    command = f"command {one.number} ({_command_text(one)})"
                    print(f"{safe_excerpt(episode.uid)}: {command} came out otherwise: {difference}")
                    return 1
                if sandbox.spent is not None:
                    break
        finally:
            await sandbox.close()
            boxes.close()
    print(f"{safe_excerpt(episode.uid)}: {number_of(done, 'command')} run again, all as before")
    return 0


def _outcome_difference(one: LoggedCommand, outcome: Outcome, state: str | None) -> str | None:
    logged = one.outcome
    assert logged is not None
    for name in ("exit", "killed_by", "stdout", "stderr", "cut", "files_changed"):
        was, now = getattr(logged, name), getattr(outcome, name)
        if was != now:
            if isinstance(was, bytes):
                at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)
                at = min(len(was), len(now)) if at is None else at
                return f"{name} at byte {at}: {_bytes_around(was, at)} before, {_bytes_around(now, at)} now"
            return f"{name} was {safe_excerpt(was)}, is {safe_excerpt(now)}"
    return (
        None if state == one.state else f"files: {safe_excerpt(one.state)} before, {safe_excerpt(state)} now"
    )


def _bytes_around(data: bytes, at: int) -> str:
    return repr(redact(data[at : at + 40].decode(errors="replace")))
