"""Metrics files: order, refusals, resume, and files a killed writer left behind."""

import json
import math
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.errors import DataError, MissingExtraError, TrainingError, from_system
from opd.metrics import MetricsWriter, read_metrics


def test_a_line_for_which_there_is_no_room_names_the_file_and_is_written_again(tmp_path: Path) -> None:
    whole = MetricsWriter(tmp_path / "whole")
    writer = MetricsWriter(tmp_path / "full")
    for each in (whole, writer):
        each.write(1, {"a": 0.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            writer.write(2, {"a": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(from_system(caught.value)).startswith(f"{writer.path}: ")
    for each in (whole, MetricsWriter(tmp_path / "full")):
        each.write(2, {"a": 0.25})
    assert writer.path.read_bytes() == whole.path.read_bytes()


def test_rows_have_a_stable_order_and_plain_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"b": 2, "a": np.float32(0.5), "c": torch.tensor(3)}, 1.5)
    writer.write(2, {"c": np.int64(7), "a": True})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0].startswith('{"step": 1, "time": 1.5, "a": 0.5, "b": 2, "c": 3, "chain": "')
    assert lines[1].startswith('{"step": 2, "a": 1, "c": 7, "chain": "')
    rows = [json.loads(line) for line in lines]
    assert rows[-1].pop("chain") == writer.last_chain != rows[0].pop("chain")
    assert read_metrics(writer.path) == rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(TrainingError, match=r"metric kl/mean is (nan|-?inf) at step 3"):
        writer.write(3, {"reward/mean": 1.0, "kl/mean": value})
    with pytest.raises(TrainingError, match="metric name at step 3 is a str"):
        writer.write(3, {"name": "x"})
    assert read_metrics(writer.path) == []


def test_truncate_drops_what_a_resumed_stage_writes_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"a": step})
    resumed = MetricsWriter(tmp_path)
    resumed.truncate(3)
    resumed.write(4, {"a": 40})
    assert [(row["step"], row["a"]) for row in read_metrics(writer.path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    resumed.truncate(0)
    assert read_metrics(writer.path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_by_a_kill_is_ignored_and_never_joined_to_the_next(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": 1})
    writer.write(2, {"a": 2})
    whole = writer.path.read_bytes()
    for kept in range(len(whole) + 1):
        writer.path.write_bytes(whole[:kept])
        before = read_metrics(writer.path)
        assert len(before) == whole[:kept].count(b"\n")
        MetricsWriter(tmp_path).write(9, {"a": 9})
        assert read_metrics(writer.path) == [*before, {"step": 9, "a": 9}]


def _damaged(lines: list[bytes]) -> list[list[bytes]]:
    """Whole lines, of which one before the last is not what or where it was."""
    *head, last = lines
    swapped = [lines[1], lines[0], *lines[2:]]
    found = [swapped, lines[1:], [lines[0], *lines], [*head[:-1], last], [lines[0], b"", *lines[1:]]]
    for row, line in enumerate(head):
        for at in range(0, len(line), 3):
            changed = bytes([line[at] ^ 1])
            found.append([*lines[:row], line[:at] + changed + line[at + 1 :], *lines[row + 1 :]])
        found.append([*lines[:row], line.replace(b": ", b":", 1), *lines[row + 1 :]])
        unchained = json.dumps({k: v for k, v in json.loads(line).items() if k != "chain"}).encode()
        found.append([*lines[:row], unchained, *lines[row + 1 :]])
    return [damaged for damaged in found if b"\n" not in b"".join(damaged)]


def test_every_change_before_the_last_line_is_found(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 5):
            writer.write(step, {"kl/mean": 1 / step})
    lines = writer.path.read_bytes().splitlines()
    damages = _damaged(lines)
    assert len(damages) > 60
    for damaged in damages:
        writer.path.write_bytes(b"".join(line + b"\n" for line in damaged))
        with pytest.raises(DataError, match=r"metrics\.jsonl"):
            read_metrics(writer.path, chained=True)
        with pytest.raises(DataError, match=r"metrics\.jsonl"):
            MetricsWriter(tmp_path).truncate(4, writer.last_chain)


def test_a_resumed_stage_keeps_exactly_what_its_checkpoint_knew(tmp_path: Path) -> None:
    """What comes after it may hold anything; what it knew must all be there."""
    writer, tails = MetricsWriter(tmp_path), [""]
    for step in range(1, 5):
        writer.write(step, {"a": step})
        tails.append(writer.last_chain)
    whole = writer.path.read_bytes()
    for kept in range(5):
        writer.path.write_bytes(whole.replace(b'"a": 4', b'"a": oops') + b"garbage\n")
        resumed = MetricsWriter(tmp_path)
        if kept == 4:
            with pytest.raises(DataError, match=r"metrics\.jsonl:4"):
                resumed.truncate(kept, tails[kept])
            continue
        resumed.truncate(kept, tails[kept])
        assert [row["step"] for row in read_metrics(writer.path)] == list(range(1, kept + 1))
        resumed.write(9, {"a": 9})
        assert len(read_metrics(writer.path, chained=True)) == kept + 1
    for lost in (b"", whole[: whole.index(b"\n") + 1]):
        writer.path.write_bytes(lost)
        with pytest.raises(DataError, match="has lost what was written up to step 3"):
            MetricsWriter(tmp_path).truncate(3, tails[3])
    writer.path.unlink()
    with pytest.raises(DataError, match="has lost"):
        MetricsWriter(tmp_path).truncate(3, tails[3])


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for bad, told in [("{oops", "not a line of JSON"), ("[1]", "not a row"), ('{"a": 1}', "not a row")]:
        path.write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
        with pytest.raises(DataError, match=rf"metrics\.jsonl:2: {told}"):
            read_metrics(path)
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_gets_the_same_numbers_and_forgets_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"kl/mean": step / 4})
    with MetricsWriter(tmp_path, tensorboard=True) as resumed:
        resumed.truncate(1)
        resumed.write(2, {"kl/mean": 8.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("kl/mean")] == [(1, 0.25), (2, 8.0)]


def test_tensorboard_that_is_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"opd\[tensorboard\]"):
        MetricsWriter(tmp_path, tensorboard=True)
