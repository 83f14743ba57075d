"""A run of tests leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import left_over
import pytest
from watched import is_alive

RUN = """
import os, signal, subprocess, sys, time
import left_over
left_over.end_with_this_process()
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
start = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", start], check=True)
end = sys.argv[1]
if end != "end":
    os.kill(os.getpid(), getattr(signal, end))
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "end"])
def test_what_tests_have_started_ends_with_them(end):
    """Here a process of another session, whose parent is gone."""
    environment = {key: value for key, value in os.environ.items() if key != left_over.MARK}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(left_over.__file__).parent), *sys.path])
    run = subprocess.run([sys.executable, "-c", RUN, end], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout)
    until = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    left = is_alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_run_within_a_run_ends_nothing_of_the_other():
    assert os.environ[left_over.MARK]
    before = os.environ[left_over.MARK]
    left_over.end_with_this_process()
    assert os.environ[left_over.MARK] == before


def test_a_mark_that_is_left_from_another_run_counts_as_none(monkeypatch):
    assert left_over.within_a_run()
    no_process = 2**22 + 1
    numbers = ("1x-2", f"{no_process}-1", "1", f"{os.getpid()}-1", "²-1", "9" * 5000 + "-1")
    for stray in ("", "x", *(f"{number}-abc" for number in numbers)):
        monkeypatch.setenv(left_over.MARK, stray)
        assert not left_over.within_a_run()
