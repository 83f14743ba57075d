"""Code in an answer: whatever it tries, the machine stays as it was and the answer is not taken for right."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from opd.errors import RewardError
from opd.sandbox import answers
from opd.sandbox.answers import answer_limits, find_sandbox, run_programs, run_tests

SHORT = answer_limits(seconds=1, spare=0.0)
KINDS = ("bubblewrap", "landlock")


@pytest.fixture(params=KINDS)
def place(request):
    """Each sandbox that works here."""
    try:
        return find_sandbox(request.param)
    except RewardError as error:
        pytest.skip(str(error))


IMPORTS = (
    "import os, sys, signal, socket, subprocess, threading, ctypes, resource\nlibrary = ctypes.CDLL(None)\n"
)
TRIED = """
def f{number}():
    try:
        {line}
    except (OSError, MemoryError, ValueError, RuntimeError):
        return "refused"
    return "done"
"""


REFUSED = {
    "forks": "os.fork()",
    "forks by another call": "assert library.fork() == -1; raise OSError",
    "starts a program": "subprocess.run(['true'])",
    "becomes a program": "os.execv('/bin/true', ['true'])",
    "takes 10 GB": "bytearray(10**10)",
    "takes 10 GB in parts": "x = []\n        while True: x.append('x' * 10**8)",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "writes into the root": "open('/written', 'w')",
    "writes into the system": "open('/usr/written', 'w')",
    "writes beside its program": "open(sys.argv[0] + '.written', 'w')",
    "deletes the library": "os.remove(os.__file__)",
    "changes rights": "os.chmod('.', 0o777)",
    "makes a link out": "os.link(os.__file__, 'linked')",
    "reads passwords": "open('/etc/shadow').read()",
    "looks at its parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "kills all": "os.kill(-1, 9)",
    "kills its group": "os.killpg(0, 9)",
    "opens a socket": "socket.socket()",
    "opens a socket of datagrams": "socket.socket(type=socket.SOCK_DGRAM)",
    "opens a socket of the machine": "socket.socket(socket.AF_UNIX)",
    "writes a large file": "open('large', 'wb').write(bytes(1 << 24))",
    "opens files without end": "x = [open('/dev/null') for _ in range(1000)]",
    "starts threads without end": "while True: threading.Thread(target=signal.pause, daemon=True).start()",
}  # fmt: skip


def test_what_code_may_not_do_fails_and_the_answer_goes_on(place):
    """One answer tries everything, one after the other."""
    source = IMPORTS + "".join(
        TRIED.format(number=number, line=line) for number, line in enumerate(REFUSED.values())
    )
    tests = [f"assert f{number}() == 'refused'" for number in range(len(REFUSED))]
    verdicts = run_tests(place, source, tests, "", answer_limits())
    assert dict(zip(REFUSED, verdicts, strict=True)) == dict.fromkeys(REFUSED, True)


def test_a_folder_of_its_own_is_all_it_can_write_to_and_is_gone_afterwards(place, tmp_path):
    outside, labels = tmp_path / "written", tmp_path / "labels.jsonl"
    labels.write_text("4747")
    source = """
import os, tempfile
def own():
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("x"); file.flush(); file.seek(0)
        return file.read(), os.getcwd()
def other(path, mode):
    try:
        open(path, mode).close()
    except OSError:
        return "refused"
"""
    tests = [
        "text, folder = own()\nassert text == 'x'",
        f"assert other({str(outside)!r}, 'w') == 'refused'",
        f"assert other({str(labels)!r}, 'r') == 'refused'",
    ]
    assert run_tests(place, source, tests, "", answer_limits()) == [True, True, True]
    assert not outside.exists()


def test_nobody_is_reached_over_the_network(place):
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        source = f"""
import socket, ctypes
def f():
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=1)
    except OSError:
        return "refused"
def by_another_call():
    return ctypes.CDLL(None).socket(2, 1, 0)
"""
        tests = ["assert f() == 'refused'", "assert by_another_call() == -1"]
        assert run_tests(place, source, tests, "", answer_limits()) == [True, True]
        with contextlib.suppress(TimeoutError):
            heard.append(server.accept())
    assert heard == []


def test_of_its_job_a_program_keeps_neither_a_word_nor_a_file(place):
    source = """
import os, stat, sys
def files():
    found = []
    for number in range(64):
        try:
            found += [number] if stat.S_ISREG(os.fstat(number).st_mode) else []
        except OSError:
            pass
    return found
def words():
    return sys.argv[1:]
"""
    own = "import sys\nassert sys.argv[1:] == []"
    assert (
        run_tests(place, source, ["assert files() == words() == []", own], "", answer_limits()) == [True] * 2
    )
    assert run_programs(place, "import sys\nprint(sys.argv[1:])", [""], answer_limits()) == ["[]\n"]


FAKES = {
    "exits at once": "import os\nos._exit(0)",
    "exits politely": "raise SystemExit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "is whatever one wants": "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __lt__ = __gt__ = __eq__\n    __hash__ = None\ndef f(x): return A()",  # noqa: E501
    "equals in a number's clothes": "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return A(0)",  # noqa: E501
    "equals in a list": "class A(list):\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "contains all": "class A:\n    __contains__ = lambda s, o: True\n    __iter__ = lambda s: iter([])\ndef f(x): return A()",  # noqa: E501
    "takes the names of the tests": "def all(x): return True\nisinstance = abs = len = sorted = all\ndef check(f): pass\ndef f(x): return 0",  # noqa: E501
    "takes assertions away": "import builtins\nclass AssertionError(Exception): pass\nbuiltins.AssertionError = AssertionError\nbuiltins.__build_class__ = None\ndef f(x): assert False",  # noqa: E501
    "writes verdicts everywhere": "import os\nfor n in range(64):\n    try: os.write(n, b'1' * 99)\n    except OSError: pass\ndef f(x): return 0",  # noqa: E501
    "answers before it is asked": 'import os\nfor n in range(64):\n    try: os.write(n, b\'{"f": ["object", 0]}\\n\' + b\'{"value": true, "changed": [null]}\\n\' * 99)\n    except OSError: pass',  # noqa: E501
    "brings the tests names of Python's own": """
import os, json
said = {"f": ["object", 0], "__builtins__": ["dict", ["abs", ["object", 0]], ["set", ["object", 0]]]}
said = json.dumps(said) + "\\n" + (json.dumps({"value": True, "changed": [None]}) + "\\n") * 99
for n in range(3, 64):
    try: os.write(n, said.encode())
    except OSError: pass
""",
    "raises what tests expect": "def f(x): raise KeyboardInterrupt",
    "changes what is given": "def f(x):\n    if isinstance(x, list): x.clear()\n    return x",
    "looks for the tests": """
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if "4747" in repr(value)[:10**5]: return 4747
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, (str, bytes, list, dict)) and "4747" in repr(value)[:10**5]: return 4747
    for path in ("/proc/self/cmdline", "/proc/self/environ", "/proc/1/cmdline", "tests.py", sys.argv[0]):
        try:
            if "4747" in open(path).read(): return 4747
        except OSError: pass
""".replace("4747", "47' + '47"),
    "patches what judges": "import json, sys, os\njson.dumps = lambda *a, **k: '1'\nos.write = print\nsys.modules['json'].loads = lambda *a: [0, 'call', [], []]\ndef f(x): return 0",  # noqa: E501
    "crashes": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "recurses": "def f(x): return f(x)",
    "nests": "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    "syntax": "def f(x: return",
    "an endless name": "x" * 10**6,
}
TESTS = [
    "assert f(3) == 4747",
    "assert all(f(i) == 4747 for i in range(3))",
    "assert f([1]) == [1, 4747] and len(f([1])) == 2",
    "assert 4747 in f(4)",
    "assert not (f(5) != 4747) and isinstance(f(5), int) and f(5) < 4748",
    "def check(f):\n    assert f(1) == 4747\ncheck(f)",
    "assert abs(f(6) - 4747) < 1e-6",
    "assert set(f(7)) == set([4747])",
    {"call": "f", "arguments": [1], "expected": 4747},
]  # fmt: skip


@pytest.mark.parametrize("what", FAKES)
def test_success_cannot_be_faked(what):
    """In the sandbox that is taken here; the tests are elsewhere in all of them."""
    assert not any(run_tests(find_sandbox(), FAKES[what], TESTS, "", answer_limits(seconds=2)))


PROGRAMS = {
    "exits at once": "import os\nos._exit(0)",
    "fails": "print(4747)\nraise SystemExit(1)",
    "looks for the output": "import sys\nf = sys._getframe()\nwhile f:\n    print([v for v in f.f_locals.items() if '47' + '47' in repr(v)])\n    f = f.f_back",  # noqa: E501
    "prints gigabytes": "while True: print('x' * 10**6)",
    "prints gigabytes elsewhere": "import sys\nwhile True: print('x' * 10**6, file=sys.stderr)",
    "sleeps": "import time\ntime.sleep(1000)",
    "computes": "while True: pass",
    "forks": "import os\nwhile True: os.fork()",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "writes the size of an output": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'\\x04' + bytes(7) + b'4747')\n    except OSError: pass",  # noqa: E501
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_that_does_not_answer_is_wrong(what):
    (written,) = run_programs(find_sandbox(), PROGRAMS[what], ["1"], SHORT)
    assert written is None or written.strip() != "4747"


def test_output_is_cut_where_its_limit_is(place):
    source = "import sys\ntry:\n    while True: sys.stdout.write('x' * 10**5)\nexcept OSError: pass"
    written = run_programs(place, source, ["", ""], answer_limits(seconds=5, output=1 << 20))
    assert [one if one is None else len(one) for one in written] in ([None, None], [1 << 20, 1 << 20])
    assert run_programs(place, "print(input() * 2)", ["a", "b"], answer_limits()) == ["aa\n", "bb\n"]


def test_to_write_nothing_is_an_answer_too(place):
    assert run_programs(place, "print(input(), end='')", ["a", "\n"], answer_limits()) == ["a", ""]


def test_what_comes_after_a_sleeper_has_no_time_left():
    tests = ["assert f(1) == 1", "f(1000)", "assert f(1) == 1"]
    source = "import time\ndef f(x):\n    time.sleep(x - 1)\n    return x"
    assert run_tests(find_sandbox(), source, tests, "", SHORT)[1:] == [False, False]


def running() -> set[int]:
    """Processes of sandboxes, of this test or of others that run now."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"opd/sandbox/grader.py" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            pass
    return found


@pytest.mark.some(1)
def test_nothing_of_it_is_left(place, tmp_path, monkeypatch):
    monkeypatch.setattr(answers.tempfile, "tempdir", str(tmp_path))
    source = (
        "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(1000,)).start()"
    )
    seen: set[int] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.update(running())

    watching = threading.Thread(target=watch)
    watching.start()
    assert run_tests(place, source, ["time.sleep(1000)"], "import time", SHORT) == [False]
    stop.set()
    watching.join()
    assert seen
    until = time.monotonic() + 60
    while seen & running() and time.monotonic() < until:  # others' may still be at work
        time.sleep(0.1)
    assert not seen & running()
    assert os.listdir(tmp_path) == []


DEEP = """
import os
def f():
    os.symlink("/", "everything")
    os.umask(0o777)
    os.mkdir("closed")
    os.umask(0)
    for _ in range(1100):
        os.mkdir("a" * 255)
        os.chdir("a" * 255)
"""


def test_a_folder_deeper_than_any_path_is_removed_and_ends_no_run(place, tmp_path, monkeypatch):
    monkeypatch.setattr(answers.tempfile, "tempdir", str(tmp_path))
    assert run_tests(place, DEEP, ["f()"], "", answer_limits(spare=60.0)) == [True]
    assert os.listdir(tmp_path) == []


def test_without_namespaces_and_landlock_the_limits_hold_and_what_does_not_is_said(monkeypatch):
    monkeypatch.setattr("opd.sandbox.isolation.bubblewrap_path", lambda: None)
    monkeypatch.setattr(answers.lockdown, "landlock_version", lambda: 0)
    found = find_sandbox.__wrapped__("auto")
    assert found.kind == "limits"
    assert {"reading", "writing"} <= set(found.allowed_attempts)
    source = "def f(): return bytearray(10**10)\ndef g(): return 1"
    assert run_tests(found, source, ["f()", "assert g() == 1"], "", answer_limits()) == [False, True]
    for kind in KINDS:
        with pytest.raises(RewardError, match=f"the sandbox {kind} does not work here"):
            find_sandbox.__wrapped__(kind)
