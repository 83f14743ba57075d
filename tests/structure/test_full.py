"""What `--full` means, whoever runs the tests, and what damaged records say."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', '{"data": {}}', '{"data": {"passed": "1"}}'])
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
