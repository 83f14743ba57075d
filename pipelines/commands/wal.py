"""`opd wal`: look into a write-ahead log, check it, write it out as JSON lines, or mend it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from opd.errors import StorageError
from opd.pipelines.doctor.checks import number_of
from opd.pipelines.records.layout import DONE
from opd.storage.files import atomic_file
from opd.storage.wal import LogReport, TokenWAL, read_log
from opd.types import LoggedRequest


def wal_command(action: str, folder: Path, out: Path | None) -> int:
    """Run `inspect`, `verify`, `export` or `repair`; returns the exit status. Raises `StorageError` if
    there is no log to read.
    """
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
        return inspect(folder)
    if action == "verify":
        return verify(folder)
    if action == "export":
        return export(folder, out)
    return repair(folder)


def inspect(folder: Path) -> int:
    """Print what the log in `folder` holds."""
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
    print(f"state     {_state(report)}")
    return 0


def verify(folder: Path) -> int:
    """Print whether the log in `folder` is whole; 2 if bytes that had been durable are broken."""
    report = read_log(folder).report
    print(
        f"{folder}: {number_of(len(report.files), 'file')}, {number_of(report.frames, 'frame')},"
        f" {number_of(report.requests, 'request')}, {number_of(report.tokens, 'token')}; {_state(report)}"
    )
    return 0 if report.damage is None else 2


def export(folder: Path, out: Path | None) -> int:
    """Write the requests of the log in `folder` to `out`, which is there whole or not at all, or to standard
    output, one line of JSON each. Of a damaged one what comes before the damage, and the status is 2.
    """
    contents = read_log(folder)
    status = 0 if contents.report.damage is None else 2
    if contents.report.damage is not None:
        print(f"opd: warning: {contents.report.damage}; what comes before is exported", file=sys.stderr)
    if out is None:
        sys.stdout.writelines(_lines(contents.requests()))
        return status
    if os.path.lexists(out):
        raise StorageError(f"{out} exists already; remove it or choose another name")
    try:
        with atomic_file(out) as file:
            file.writelines(line.encode() for line in _lines(contents.requests()))
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error.strerror}); choose another place") from error
    return status


def repair(folder: Path) -> int:
    """Keep what comes before the damage in the log in `folder`."""
    report = read_log(folder).report
    if report.damage is None:
        print(f"{folder}: nothing to repair; {_state(report)}")
        return 0
    with TokenWAL(folder, repair=True) as log:
        kept = log.recovery
    left = f"{number_of(kept.requests, 'request')} and {number_of(kept.tokens, 'token')}"
    print(f"{folder}: kept {left}; {report.damage}")
    return 0


def _state(report: LogReport) -> str:
    if report.damage is not None:
        return f"DAMAGED: {report.damage}"
    if report.cut_file is not None:
        return (
            f"whole; the last write was cut short ({report.cut_file} at byte {report.cut_offset},"
            f" {report.cut_bytes} bytes and {report.cut_frames} later frames are not used)"
        )
    return "whole, and closed by its writer" if report.clean else "whole; its writer is at work or was killed"


def _lines(requests: dict[str, LoggedRequest]) -> Iterator[str]:
    for logged in requests.values():
        yield json.dumps(_document(logged), allow_nan=False) + "\n"


def _document(logged: LoggedRequest) -> dict:
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
