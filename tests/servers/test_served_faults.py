"""Random faults of real servers while a teacher scores on them: right rows or one sentence, nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served_loop import CHEAP, Rounds, Target, zeroed
from served_models import recipe_tokenizer

from opd.pipelines.launch import started_server
from opd.pipelines.stages.publishing import publish_checkpoint

LOOP = Path(__file__).resolve().parents[1] / "crash" / "served_loop.py"


@pytest.mark.slow
def test_cheap_faults_in_a_row(sglang, served_models, tmp_path):
    """One server behind two proxies, each fault once: of answers, the scheduler, its disk, its weights."""
    publish_checkpoint(served_models["a"], tmp_path / "published")
    models = served_models | {"zero": zeroed(served_models["a"], tmp_path / "zero")}
    servers = [sglang._server] * 2
    target = Target(servers, models, str(tmp_path / "published"), len(recipe_tokenizer()))
    kinds = [kind for kind in CHEAP if kind != "stall"]  # which takes a time-out
    with target.reached():
        rounds = Rounds(target, seed=1)
        for kind in kinds:
            rounds.run(1, {kind: 1})
    assert rounds.wrong == []
    assert set(rounds.drawn) == set(kinds)
    assert rounds.right >= len(kinds)  # the round after each, when all was well again, at least
    assert rounds.retries > 0


def test_a_stopped_scheduler_is_silent_while_its_server_says_that_it_is_ready(sglang, monkeypatch):
    monkeypatch.setattr(started_server, "ASKED", 3000)
    server = sglang._server
    schedulers = [pid for pid, name in sglang.processes().items() if "scheduler" in name]
    assert schedulers

    def until(condition) -> None:
        end = time.monotonic() + 120
        while not condition(server.silent_seconds()):
            assert time.monotonic() < end
            assert server.check_ready()
            time.sleep(0.05)

    until(lambda seconds: seconds < 1.0)
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda seconds: seconds > 3.0)
    finally:
        for pid in schedulers:
            os.kill(pid, signal.SIGCONT)
    until(lambda seconds: seconds < 1.0)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_random_faults_in_a_row(sglang):
    """Two servers in a group that starts again what ends."""
    done = subprocess.run(
        [sys.executable, str(LOOP), "--faults", "100"], capture_output=True, text=True, timeout=7000
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["faults"].values()) == 100
    assert (found["wrong"], found["left"]) == ([], [])
