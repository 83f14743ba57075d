"""What `--full` means, whoever runs the tests, and what damaged records say."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import full
import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
def pytest_collection_finish():
    import full
    print("FULL", full.FULL, full.cases(100))
"""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("words", "variable", "found"),
    [(["--full"], None, "True 100"), ([], "1", "True 100"), ([], "0", "False 25"), ([], "", "False 25")],
)
def test_cases_are_all_with_full_in_one_process_too(tmp_path, words, variable, found):
    (tmp_path / "asks_full.py").write_text(PLUGIN)
    environment = {name: value for name, value in os.environ.items() if name != "OPD_FULL_TESTS"}
    environment |= {"PYTHONPATH": str(tmp_path)} | ({} if variable is None else {"OPD_FULL_TESTS": variable})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "asks_full", *words, __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"FULL {found}" in done.stdout, done.stdout + done.stderr


ROW = '{"passed": %s, "failed": 0, "skipped": 0, "seconds": 0, "commit": "%s"}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '"x"', '{"data": {}}', '{"data": {"passed": "1"}}', "[" * 100_000),
        *(f'{{"data": {ROW % row}}}' for row in ((-1, "abcdef0"), ("true", "abcdef0"), (1, "x|y"))),
        f'{{"da|ta": {ROW % (1, "abcdef0")}}}',
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path, monkeypatch, text):
    monkeypatch.setattr(full, "RECORD", tmp_path / "full.json")
    assert full.recorded() == {}
    full.RECORD.write_text(text)
    with pytest.raises(ValueError, match="is damaged: take it from git again"):
        full.table()


@pytest.mark.parametrize("text", [None, "[]", "{", '{"files": {"a.py": 1}}'])
def test_a_report_that_is_none_is_one_sentence(tmp_path, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match="is not what --cov-report=json writes"):
        full.coverage(tmp_path / "report.json")


@pytest.mark.some(1)
@pytest.mark.parametrize("option", ["-x", "-kx", "--deselect=tests/structure/test_full.py", "--ignore=x"])
def test_a_part_is_not_recorded_as_a_folder(option):
    command = [sys.executable, "-m", "pytest", "tests/structure", "--full", "--record", option]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "--record is for whole folders with --full" in done.stderr


@pytest.mark.parametrize(
    ("exitstatus", "written"), [(0, True), (1, True), (2, False), (3, False), (5, False)]
)
def test_a_run_that_ended_early_is_not_recorded(tmp_path, monkeypatch, exitstatus, written):
    monkeypatch.setattr(full, "RECORD", tmp_path / "full.json")
    monkeypatch.setattr(full, "_git", lambda *words: "abcdef0")
    recorder = full.Recorder.__new__(full.Recorder)
    recorder.counts, recorder.seconds = {"data": Counter(passed=2)}, Counter(data=1.2)
    recorder.pytest_sessionfinish(exitstatus)
    assert (full.recorded().get("data", {}).get("passed") == 2) == written


def test_outside_of_git_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(full, "RECORD", tmp_path / "full.json")
    with pytest.raises(ValueError, match="`git status` fails here"):
        full._git("status")
