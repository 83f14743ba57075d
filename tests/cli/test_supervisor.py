"""Processes that are watched together: whose error is told, what is passed on, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from opd.errors import ConfigError, PreemptedError
from opd.pipelines.launch.supervisor import (
    Cause,
    MemberFailedError,
    Message,
    Supervisor,
    final_message,
    start_command,
)
from opd.rollout.preemption import Preemption

MEMBER = """
import json, os, signal, sys, time
def say(*words):
    os.write(int(os.environ["OPD_PARENT"]), json.dumps(words).encode() + b"\\n")
def ends(number):
    os.kill(os.getpid(), number)
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""
LISTENS = "from opd.pipelines.launch.supervisor import parent; parent(); open('there', 'w').close(); "


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.chdir(tmp_path)


def member(number: int, code: str):
    return start_command(f"m{number}", [sys.executable, "-c", MEMBER + code], {}, Path(f"log-{number}"))


def watch(*codes: str, asked: Preemption | None = None, **options: float | None) -> list[tuple]:
    """What the members said, in order; none of them is left. A log record asks this process for it."""
    asked = asked or Preemption(20.0)
    heard, members = [], [member(number, code) for number, code in enumerate(codes)]

    def hear(who, message):
        heard.append((who.name, message.kind, *message.words))
        if message.kind == "log":
            {"stop": asked.stop, "suspend": asked.suspend, "interrupt": interrupt}.get(
                message.words[0], lambda: None
            )()

    try:
        with Supervisor(asked, hear, **options) as group:
            for each in members:
                group.add_member(each)
            while group.running:
                group.check_members()
    finally:
        assert all(each.child.status() is not None for each in members)
    return heard


def interrupt():
    raise KeyboardInterrupt


FAULT = "say('error', 'ConfigError', 'no such key'); sys.exit(2)"
LOST = "say('error', 'RanksError', 'm1 was lost'); sys.exit(2)"
STOPPED = "sys.exit(143)"
SILENT = "sys.exit(2)"
CRASHED = "sys.exit(1)"
KILLED = "ends(signal.SIGKILL)"
LATER = "time.sleep(0.3); "
HANGS = "time.sleep(600)"
ASKS = "say('log', 'stop'); "
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ((FAULT, HANGS), ("m0", "error", "ConfigError", "no such key")),
        ((LOST, LATER + FAULT), ("m1", "error", "ConfigError", "no such key")),
        ((CRASHED, LATER + FAULT), ("m1", "error", "ConfigError", "no such key")),
        ((KILLED, LATER + FAULT), ("m1", "error", "ConfigError", "no such key")),
        ((LOST, LATER + SILENT), ("m1", "left", 2)),
        ((LOST, LATER + KILLED), ("m1", "left", -9)),
        ((CRASHED, LATER + KILLED), ("m1", "left", -9)),
        ((LOST.replace("Ranks", "TeacherRanks"), LATER + KILLED), ("m1", "left", -9)),
        ((LOST, LATER + CRASHED), ("m1", "left", 1)),
        ((STOPPED, LATER + LOST), ("m1", "error", "RanksError", "m1 was lost")),
        ((STOPPED, ""), ("m0", "left", 143)),
        ((LATER + FAULT, FAULT), ("m0", "error", "ConfigError", "no such key")),
    ],
)
def test_the_error_is_of_whoever_failed_by_itself(codes, told):
    patience = 2.0 if HANGS in codes else 120.0  # else all of them end by themselves, however late
    with pytest.raises(MemberFailedError) as failed:
        watch(*codes, last_words=patience)
    assert (failed.value.member.name, failed.value.message.kind, *failed.value.message.words) == told


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (("error", "ConfigError", "no such key"), Cause.FAULT),
        (("error", "RanksError", "m1 was lost"), Cause.LOST),
        (("error", "TeacherRanksError", "m1 was lost"), Cause.LOST),
        (("error", "PreemptedError", "stopped"), Cause.STOPPED),
        (("crash", "KeyError: 'a'"), Cause.CRASHED),
        (("left", 143), Cause.STOPPED),
        (("left", -signal.SIGTERM), Cause.STOPPED),
        (("left", -signal.SIGKILL), Cause.DIED),
        (("left", 2), Cause.FAULT),
        (("left", 1), Cause.CRASHED),
        (("gone", "no answer for 5 s"), Cause.DIED),
    ],
)
def test_which_failure_explains_the_others(said, cause):
    kind, *words = said
    assert Message(kind, tuple(words)).cause is cause


def test_status_0_is_no_proof_where_the_work_has_to_be_said():
    def results(code: str) -> dict:
        with Supervisor(Preemption(20.0)) as group:
            group.add_member(start_command("m0", [sys.executable, "-c", code], {}, by_status=False))
            while group.running:
                group.check_members()
        return group.results

    with pytest.raises(MemberFailedError) as failed:
        results("")
    assert failed.value.message == ("left", (0,))
    assert results(MEMBER + "say('done', 0)") == {"m0": 0}


def test_the_last_words_of_who_has_no_more_memory_are_no_crash(capsys):
    kind, (error, sentence) = final_message(lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert (kind, error) == ("error", "OpdError")
    assert "there is no more memory" in sentence
    assert "or batch.max_tokens, then with --resume --accept-changed-settings" in sentence
    capsys.readouterr()


def test_what_members_say_is_heard_in_order():
    heard = watch("say('log', 'a'); say('progress', 1, 2, 'b')", "say('done', {'c': 1})")
    assert [said for said in heard if said[0] == "m0"] == [
        ("m0", "log", "a"),
        ("m0", "progress", 1, 2, "b"),
        ("m0", "done", 0),
    ]
    assert ("m1", "done", {"c": 1}) in heard


def test_who_does_not_depend_on_the_failed_one_is_told_to_stop():
    leaves = "signal.signal(signal.SIGTERM, lambda *_: (open('told', 'w').close(), os._exit(143)))\n"
    with pytest.raises(MemberFailedError) as failed:
        watch("until('there'); " + FAULT, leaves + "open('there', 'w').close(); " + HANGS, last_words=None)
    assert isinstance(failed.value.to_error("stage x", "log"), ConfigError)
    assert Path("told").exists()


@pytest.mark.parametrize(
    ("codes", "grace", "sentence"),
    [
        ((ASKS + HANGS, HANGS), 120.0, "the run was asked to stop and did"),  # by the signal: nobody listens
        ((ASKS + HANGS, IGNORES + LATER + LOST), 120.0, "the run was asked to stop and did"),
        (
            (IGNORES + "until('there'); " + ASKS + HANGS, "open('there', 'w').close(); " + HANGS),
            1.0,
            r"^m0 did not stop within runtime.grace_seconds \(1\)",
        ),
    ],
)
def test_a_stop_is_passed_on_and_told(codes, grace, sentence):
    with pytest.raises(PreemptedError, match=sentence):
        watch(*codes, asked=Preemption(grace))


@pytest.mark.parametrize("leaves", [HANGS, IGNORES + ASKS + LOST], ids=["by the signal", "missing others"])
def test_who_was_asked_to_stop_has_its_grace_though_others_have_left(leaves):
    """It may have servers to end: those who left have no last words that would end it sooner."""
    slowly = "def later(*_):\n    time.sleep(2)\n    open('ended', 'w').close()\n    os._exit(143)\n"
    slowly += "signal.signal(signal.SIGTERM, later)\n"
    with pytest.raises(PreemptedError, match="the run was asked to stop and did"):
        watch(
            "until('there'); " + ASKS + leaves,
            slowly + "open('there', 'w').close(); " + HANGS,
            last_words=0.2,
        )
    assert Path("ended").exists()


def test_a_fault_is_told_though_the_run_was_to_stop():
    with pytest.raises(MemberFailedError, match="no such key"):
        watch(IGNORES + ASKS + LATER + FAULT, HANGS, asked=Preemption(120.0))


def test_ctrl_c_leaves_nobody():
    with pytest.raises(KeyboardInterrupt):
        watch("say('log', 'interrupt'); " + HANGS, HANGS)


@pytest.mark.parametrize("moment", ["before it listens", "between two stages"])
def test_a_member_hears_when_it_listens_that_it_was_suspended(moment):
    """Till then the signal would end it."""
    earlier = "with Preemption().handle_signals(): pass" if moment == "between two stages" else ""
    code = f"""
from opd.rollout.preemption import Preemption
{earlier}
say("log", "suspend")
time.sleep(0.5)
with Preemption().handle_signals() as asked:
    while not asked.suspended:
        time.sleep(0.01)
"""
    assert watch(code) == [("m0", "log", "suspend"), ("m0", "done", 0)]


@pytest.mark.slow
def test_a_member_ends_with_its_supervisor():
    code = """
import sys
from test_supervisor import HANGS, LISTENS, member
watched = member(0, LISTENS + HANGS)
print(watched.child.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        while not Path("there").exists():
            time.sleep(0.01)
        process.kill()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)
