"""`opd wal` on whole, cut and damaged logs."""

import json
import os
import signal

import numpy as np
import pytest

from opd.pipelines.cli import main
from opd.pipelines.commands import logs as wal_commands
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SamplingParams, Status


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "wal"
    with TokenWAL(folder, fsync="os") as wal:
        for uid in ("a", "b"):
            wal.open(
                RolloutRequest(uid, np.array([1, 2], np.int32), SamplingParams(stop_ids=(9,)), 3), {"k": 1}
            )
        for position in range(3):
            ended = {"b": Status.COMPLETED} if position == 2 else {}
            logprobs = np.array([-0.5, -np.inf], np.float32)
            at = np.full(2, position, np.int32)
            wal.append(Chunk(["a", "b"], at, at + 5, logprobs, 4 + position, ended))
        one = np.ones(1, np.int32)
        wal.append(Chunk(["a"], 3 * one, 8 * one, np.array([-0.5], np.float32), 6, {}))
    return folder


def test_inspect_and_verify_a_whole_log(log, ends):
    printed = ends(0, ["wal", "inspect", str(log)]).out
    for part in ("2, 1 completed, 1 pending", "tokens    7", "versions 4 to 6", "closed by"):
        assert part in printed
    assert "2 requests, 7 tokens; whole, and closed by its writer" in ends(0, ["wal", "verify", str(log)]).out


def test_tokens_of_retired_requests_are_not_counted(log, ends):
    with TokenWAL(log, fsync="os") as wal:
        wal.retire(["b"])
        wal.append(Chunk(["a"], np.array([4]), np.array([6]), np.array([-0.5], np.float32), 6, {}))
    for action, said in (("inspect", "tokens    5\n"), ("verify", "1 request, 5 tokens; whole")):
        assert said in ends(0, ["wal", action, str(log)]).out


def test_the_folder_of_a_run_is_answered_with_its_logs(log, tmp_path, capsys, ends):
    stage = tmp_path / "run" / "stages" / "merge"
    stage.mkdir(parents=True)
    log.rename(stage / "wal")
    assert f"give {stage / 'wal'}" in ends(2, ["wal", "inspect", str(tmp_path / "run")]).err
    (tmp_path / "file").write_text("")
    assert main(["wal", "inspect", str(tmp_path / "file")]) == 2
    assert "file is no folder; give that of a stage's log" in capsys.readouterr().err


def test_export_writes_one_line_a_request(log, tmp_path, ends):
    out = tmp_path / "tokens.jsonl"
    assert main(["wal", "export", str(log), "--out", str(out)]) == 0
    first, second = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["token_ids"] == [5, 6, 7, 8]
    assert first["policy_versions"] == [4, 5, 6, 6]
    assert first["status"] == "pending"
    assert second["logprobs"] == [None, None, None]
    assert second["status"] == "completed"
    assert second["sampling"]["stop_ids"] == [9]
    assert "exists already" in ends(2, ["wal", "export", str(log), "--out", str(out)]).err
    assert ends(0, ["wal", "export", str(log)]).out == out.read_text()


def test_an_export_that_does_not_end_leaves_nothing(log, tmp_path, monkeypatch, capsys):
    """Killed, out of disk: the next one would refuse the half, and a reader take it for the whole."""
    out = tmp_path / "tokens.jsonl"

    def document(logged):
        if logged.request.uid == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    child = os.fork()
    if not child:
        monkeypatch.setattr(wal_commands, "_request_document", document)
        main(["wal", "export", str(log), "--out", str(out)])
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    assert main(["wal", "export", str(log), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 2
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_log_is_named_and_mended(log, tmp_path, capsys, ends):
    file = log / "000000000001.wal"
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)
    assert "DAMAGED" in ends(2, ["wal", "verify", str(log)]).out
    printed = ends(2, ["wal", "export", str(log)])
    assert "what comes before is exported" in printed.err
    assert len(printed.out.splitlines()) == 2
    assert main(["wal", "export", str(log), "--out", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out").read_text() == printed.out
    capsys.readouterr()
    assert "kept 2 requests" in ends(0, ["wal", "repair", str(log)]).out
    assert main(["wal", "verify", str(log)]) == 0
    assert "nothing to repair" in ends(0, ["wal", "repair", str(log)]).out


def test_a_log_cut_short_is_whole(log, ends):
    file = log / "000000000001.wal"
    file.write_bytes(file.read_bytes()[:-45])
    assert "the last write was cut short" in ends(0, ["wal", "verify", str(log)]).out


@pytest.mark.parametrize("action", ["inspect", "verify", "export", "repair"])
def test_no_log_is_one_sentence(action, tmp_path, ends):
    assert main(["wal", action, str(tmp_path / "none")]) == 2
    errors = ends(2, ["wal", action, str(tmp_path)]).err
    assert errors.count("there is no log in") == errors.count("\n") == 2


def test_a_log_that_its_stage_has_deleted_is_told_from_a_wrong_path(tmp_path, capsys, ends):
    assert "check the path" in ends(2, ["wal", "inspect", str(tmp_path / "wal")]).err
    (tmp_path / "done.json").touch()
    for name in ("wal", "wal-rank-1"):
        assert main(["wal", "inspect", str(tmp_path / name)]) == 2
        assert "a stage deletes its log when it ends, and this one has ended" in capsys.readouterr().err
