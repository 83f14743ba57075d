"""What parent and child say to each other, and who hears the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from opd.child import PARENT, Channel, Child, LimitedProcess, listen, parent_channel
from opd.errors import OpdError


@pytest.fixture
def ends():
    """A channel, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        yield channel, theirs
        channel.close()


@pytest.fixture
def child():
    """Starts a Python program that has `parent`, its channel."""
    begin = (
        "import json, os, subprocess, sys\nfrom opd.child import parent_channel\nparent = parent_channel()\n"
    )
    started = []

    def start(code: str) -> Child:
        started.append(Child([sys.executable, "-c", begin + code]))
        return started[-1]

    yield start
    for one in started:
        one.kill_process()


def test_a_message_is_heard_once_it_is_whole(ends):
    channel, theirs = ends
    assert channel.receive_message(0.0) is None
    theirs.sendall(b'{"a": ')
    assert channel.receive_message(0.0) is None
    theirs.sendall(b'1}\n[2]\n"cut off')
    assert [channel.receive_message(0.0), channel.receive_message()] == [b'{"a": 1}', b"[2]"]
    theirs.shutdown(socket.SHUT_WR)
    for seconds in (0.0, None):
        with pytest.raises(EOFError):
            channel.receive_message(seconds)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_message_that_is_too_long_is_not_heard(ends, end):
    channel, theirs = ends
    theirs.sendall(b"x" * 70_000 + end)
    with pytest.raises(EOFError):
        channel.receive_message(most=69_999 if end else 50_000)


def test_what_is_said_by_threads_or_is_long_arrives_whole(child):
    asked = child("while True: parent.send_message(json.loads(parent.receive_message()))")
    for message in ("a\nb", {"é": [None, 1.5]}, "x" * 3_000_000):
        asked.channel.send_message(message)
        assert json.loads(asked.channel.receive_message() or b"") == message


def test_who_hung_up_still_hears_the_last_words(child):
    asked = child("try: parent.receive_message()\nexcept EOFError: parent.send_message('bye')\nsys.exit(7)")
    asked.channel.hang_up()
    assert asked.channel.receive_message() == b'"bye"'
    assert asked.wait() == 7
    assert asked.channel.wait_closed(60.0)


LOOK = """
import os
links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
print([os.readlink(link) for link in links if os.path.lexists(link)], os.environ.get("OPD_PARENT"))
"""


def test_what_a_child_starts_has_no_end_of_its_own(child):
    look = (
        f"subprocess.run([sys.executable, '-c', {LOOK!r}], capture_output=True, text=True, close_fds=False)"
    )
    asked = child(f"parent.send_message({look}.stdout)")
    said = json.loads(asked.channel.receive_message() or b"")
    assert "/dev/null" in said
    assert "socket:" not in said
    assert said.endswith("None\n")
    assert PARENT not in os.environ


def test_a_command_that_cannot_be_run_leaves_nothing_open():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="nowhere"):
        Child(["/nowhere/at/all"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("closed", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_a_parent_may_have_closed_its_standard_streams(closed, tmp_path):
    code = f"""
import os
for number in {closed}: os.close(number)
from opd.child import LimitedProcess
from opd.sandbox.answers import answer_limits, find_sandbox, run_programs
process = LimitedProcess("opd.rewards.verifier", 1 << 28)
request = {{"pattern": "a+", "text": "caab", "ignore_case": False, "full": False, "group": None}}
answer = process.request_answer(request, 5.0)
programs = run_programs(find_sandbox(), "print(input())", ["7"], answer_limits())
with open({str(tmp_path / "told")!r}, "w") as file:
    file.write(repr((answer is not None, programs)))
"""
    subprocess.run([sys.executable, "-c", code], timeout=300)
    assert (tmp_path / "told").read_text() == "(True, ['7\\n'])"


def test_a_program_that_cannot_begin_is_no_endless_request():
    with pytest.raises(OpdError, match="no_such_module ended with status 1 before it was ready"):
        LimitedProcess("no_such_module", 1 << 28).request_answer({}, 5.0)


def test_a_dead_child_is_known_though_another_has_its_end(child):
    code = """
import time
other = os.fork()
if other == 0:
    time.sleep(3600)
parent.send_message(other)
os._exit(3)
"""
    one, heard, over = child(code), [], threading.Event()
    listen(one.channel, heard.append, over.set, lambda: one.status() is None)
    assert over.wait(300)
    (other,) = map(json.loads, heard)
    os.kill(other, signal.SIGKILL)  # which it was there for


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_listens_ends_with_what_it_cannot_hear(ends):
    channel, theirs = ends
    over = threading.Event()
    theirs.sendall(b"[]\n")
    thread = listen(channel, lambda said: json.loads(said)[0], over.set)
    assert over.wait(300)
    thread.join(300)


@pytest.mark.parametrize("said", ["x", "99999", "1"])
def test_a_variable_that_names_no_channel_is_none(said, monkeypatch):
    monkeypatch.setenv(PARENT, said)
    assert parent_channel() is None
