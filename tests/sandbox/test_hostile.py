"""Commands that want out, want more than their share, or want to stay: each ends, and nothing of it is left.

All of them stop by themselves somewhere, far beyond their quota: a sandbox that fails stops no machine.
"""

import asyncio
import os
import socket
import uuid
from dataclasses import replace

import pytest
from boxes import SMALL, gone, opened

from opd.sandbox.protocol import SandboxError


def run_python(tmp_path, substrate, code, *words, limits=SMALL, after=("echo", "on")):
    """How the code ended, and then `after`, or why there was no after."""

    async def steps():
        async with opened(tmp_path, substrate, limits) as box:
            first = await box.exec(["python3", "-c", code, *words])
            try:
                return first, await box.exec(list(after))
            except SandboxError as error:
                return first, str(error)

    return asyncio.run(steps())


FILES = """
import time
for number in range(60):
    with open(f"file-{number}", "wb") as file:
        for _ in range(4):
            file.write(bytes(1 << 20))
time.sleep(900)
"""
EMPTY = "for number in range(20_000): open(f'file-{number}', 'w').close()"
DELETED = """
import os, time
held = []
for _ in range(60):
    held.append(open("one", "wb"))
    os.unlink("one")
    for _ in range(4):
        held[-1].write(bytes(1 << 20))
    held[-1].flush()
time.sleep(900)
"""
DEEP = """
import os, time
for _ in range(20):
    for _ in range(100):
        os.mkdir("d" * 200); os.chdir("d" * 200)
    open("large", "wb").write(bytes(1 << 20))
time.sleep(900)
"""


@pytest.mark.some(4)
@pytest.mark.parametrize("code", [FILES, EMPTY, DELETED, DEEP], ids=["files", "empty", "deleted", "deep"])
def test_who_writes_without_end_is_ended_and_so_is_the_sandbox(tmp_path, substrate, code):
    first, after = run_python(tmp_path, substrate, code)
    assert (first.killed_by, first.exit) == ("disk", None)
    assert "quota" in after or "deep" in after or "more than" in after
    assert not (tmp_path / "boxes/one").exists()


def test_a_file_grows_to_its_quota_and_no_further(tmp_path, substrate):
    code = """
import os
try:
    with open("large", "wb", 0) as file:
        while True:
            file.write(bytes(1 << 16))
except OSError:
    print(os.path.getsize("large"))
    os.unlink("large")
"""
    first, after = run_python(tmp_path, substrate, code)
    assert int(first.stdout) == SMALL.disk
    assert after.stdout == b"on\n"


def test_what_is_left_over_quota_ends_the_sandbox_also_when_it_was_written_in_a_moment(tmp_path, substrate):
    code = "for n in range(3): open(str(n), 'wb').write(bytes(4 << 20))"
    first, after = run_python(tmp_path, substrate, code)
    assert first.killed_by == "disk"
    assert "quota" in after


BOMBS = {
    "children": """
import os, sys, time
for started in range(100):
    try:
        if os.fork() == 0:
            time.sleep(900)
    except OSError:
        break
    print(started + 1, flush=True)
time.sleep(900)
""",
    "generations that leave": """
import os, sys, time
for generation in range(100):
    try:
        if os.fork():
            time.sleep(900)
        os.setsid()
    except OSError:
        time.sleep(900)
    print(generation + 1, flush=True)
""",
    "threads": """
import threading, time
threading.stack_size(1 << 16)
for started in range(100):
    try: threading.Thread(target=time.sleep, args=(900,), daemon=True).start()
    except RuntimeError: break
    print(started + 1, flush=True)
time.sleep(900)
""",
}


@pytest.mark.some(2)
@pytest.mark.parametrize("code", BOMBS.values(), ids=BOMBS)
def test_processes_and_threads_are_counted(tmp_path, substrate, code):
    """Where the kernel counts, no more are started, and time runs out; else who looks ends them."""
    mark = f"mark-{uuid.uuid4().hex}"
    first, after = run_python(tmp_path, substrate, code, mark, limits=replace(SMALL, seconds=3.0))
    assert first.killed_by in ("processes", "wall")
    if first.killed_by == "wall":
        assert len(first.stdout.split()) < SMALL.processes
    assert gone(mark)
    assert after.stdout == b"on\n"


@pytest.mark.some(1)
def test_memory_is_a_quota_of_each_process_and_of_all(tmp_path, substrate):
    alone, _ = run_python(
        tmp_path, substrate, "x = bytearray(10**10)\nfor n in range(0, 10**10, 4096): x[n] = 1"
    )
    if substrate.container:
        assert alone.killed_by == "memory"
    else:
        assert alone.exit == 1
        assert b"MemoryError" in alone.stderr
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(os.urandom(1 << 20) * 100)
        time.sleep(900)
time.sleep(900)
"""
    together, after = run_python(tmp_path, substrate, code)
    assert together.killed_by == "memory"
    assert after.stdout == b"on\n"


@pytest.mark.some(1)
def test_output_is_cut_while_it_is_read(tmp_path, substrate):
    code = "import sys\nsys.stdout.write('x' * 50_000_000)\nsys.stderr.write('e' * 10)"
    first, _ = run_python(tmp_path, substrate, code)
    assert (first.exit, first.stdout, first.stderr) == (0, b"x" * SMALL.output, b"e" * 10)
    assert first.cut == 50_000_000 - SMALL.output
    first, after = run_python(tmp_path, substrate, "for _ in range(300): print('x' * 1_000_000)")
    assert (first.killed_by, len(first.stdout)) == ("output", SMALL.output)
    assert after.stdout == b"on\n"


DAEMON = """
import os, signal, sys, time
for number in (1, 2, 3, 15):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for place in range(3): os.close(place)
        time.sleep(900)
    os._exit(0)
print("started", flush=True)
"""


def test_a_daemon_does_not_survive_its_command(tmp_path, substrate):
    mark = f"mark-{uuid.uuid4().hex}"
    first, _ = run_python(tmp_path, substrate, DAEMON, mark)
    assert (first.exit, first.stdout) == (0, b"started\n")
    assert gone(mark)


def test_who_keeps_the_output_open_keeps_nobody_waiting(tmp_path, substrate):
    first, _ = run_python(
        tmp_path, substrate, "import os, time\nif os.fork() == 0: time.sleep(900)\nprint(1)"
    )
    assert (first.exit, first.killed_by) == (0, None)


async def test_the_home_can_be_emptied_and_used_again(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        await box.write("a", b"x")
        state = await box.snapshot()
        first = await box.exec(["sh", "-c", 'rm -rf "$HOME" ./* .* 2>/dev/null; echo gone'])
        second = await box.exec(["sh", "-c", "ls -A; echo again > b; cat b"])
        await box.restore(state)
        data = await box.read("a")
    assert first.stdout == b"gone\n"
    assert first.files_changed == ("a",)
    assert (second.stdout, data) == (b"again\n", b"x")


def test_nothing_outside_is_read_written_or_reached(tmp_path, substrate):
    secret = tmp_path / "secret"
    secret.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import ctypes, os, socket, signal
def tried(what):
    try: what()
    except (OSError, SystemError): return print("refused")
    print("done")
tried(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5))
tried(lambda: socket.create_connection(("1.1.1.1", 53), timeout=5))
tried(lambda: open({str(secret)!r}).read())
tried(lambda: open({str(secret)!r}, "w"))
tried(lambda: os.link({str(secret)!r}, "linked"))
tried(lambda: os.rename({str(secret)!r}, "moved"))
tried(lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)))
tried(lambda: os.kill({os.getpid()}, signal.SIGTERM))
tried(lambda: open("/proc/{os.getpid()}/environ").read())
tried(lambda: open("/etc/passwd").read())
tried(lambda: open("/usr/x", "w"))
tried(lambda: ctypes.CDLL(None).unshare(0x10000000) and os.listdir("/nowhere"))
tried(lambda: ctypes.CDLL(None).mount(b"none", b"/", b"tmpfs", 0, None) and os.listdir("/nowhere"))
tried(lambda: ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) and os.listdir("/nowhere"))
"""
        if substrate.container:  # its first process is the image's shell, which a command may stop for itself
            code = "\n".join(line for line in code.splitlines() if "ptrace" not in line)
        first, _ = run_python(tmp_path, substrate, code)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    said = first.stdout.split()
    if substrate.container:  # the image has a file of that name
        del said[9]
    assert len(said) == (12 if substrate.container else 14)
    assert set(said) == {b"refused"}, (first.stdout, first.stderr)
    assert secret.read_text() == "kept"


SETTINGS = """
import os, stat
open_ = []
for above, folders, files in os.walk("/proc"):
    if above == "/proc":
        folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self")]
    for name in files if above != "/proc/pressure" else ():  # anybody's, and they change nothing
        path = os.path.join(above, name)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            open_ += [path] if stat.S_ISREG(os.stat(path).st_mode) else []  # engines put /dev/null there
        except OSError:
            pass
print(len(open_), open_[:3])
"""


def test_no_setting_of_the_kernel_can_be_written(tmp_path, substrate):
    """`/proc/sys/kernel/core_pattern` names a program that the kernel runs as root outside of everything."""
    first, _ = run_python(tmp_path, substrate, SETTINGS)
    assert first.stdout.split()[:1] == [b"0"], first.stdout


def test_what_is_written_to_the_folder_for_temporary_files_counts(tmp_path, substrate):
    code = """
import os, time
for number in range(60):
    with open(os.path.join(os.environ["TMPDIR"], f"file-{number}"), "wb") as file:
        for _ in range(4):
            file.write(bytes(1 << 20))
print("written", flush=True)
time.sleep(2)
"""
    first, _ = run_python(tmp_path, substrate, code)
    if substrate.kind == "process":  # elsewhere it is a file system of its own, of a size of its own
        assert first.killed_by == "disk"
    else:
        assert first.exit != 0
        assert b"written" not in first.stdout


def test_what_watches_a_command_cannot_be_ended_or_changed_by_it(tmp_path, substrate):
    code = """
import os
for pid in (1, os.getppid()):
    for number in (9, 19, 15):
        try: os.kill(pid, number)
        except OSError: pass
    for name in ("mem", "environ", "fd"):
        try: print(os.listdir(f"/proc/{pid}/{name}") if name == "fd" else open(f"/proc/{pid}/{name}", "rb"))
        except OSError: pass
os._exit(7)
"""
    if not substrate.keeps["signals"]:
        pytest.skip("an older kernel: the process substrate does not keep signals in, and says so")
    first, after = run_python(tmp_path, substrate, code)
    assert (first.exit, after.stdout) == (7, b"on\n")
    assert first.stdout == b"" or substrate.container, "process 1 of a container watches nothing"


async def test_links_lead_nowhere_for_who_looks_from_outside(tmp_path, substrate):
    secret = tmp_path / "secret"
    secret.write_text("kept")

    async with opened(tmp_path, substrate) as box:
        made = f"ln -s {secret} file; ln -s {tmp_path} folder; ln -s ../../../secret up; ln -s . self"
        await box.exec(["sh", "-c", made])
        for path in ("file", "folder/secret", "up", "self/file", "folder"):
            with pytest.raises(SandboxError):
                await box.read(path)
        for path in ("folder/new", "self/new", "folder"):
            with pytest.raises(SandboxError):
                await box.list(path) if path == "folder" else await box.write(path, b"x")
        await box.write("file", b"own")
        state = await box.snapshot()
        await box.restore(state)
        assert await box.read("file") == b"own"
    assert secret.read_text() == "kept"
    assert not (tmp_path / "new").exists()


async def test_pipes_sockets_and_odd_names_stop_nobody(tmp_path, substrate):
    code = """
import os, socket
os.mkfifo("pipe")
try:
    with socket.socket(socket.AF_UNIX) as made: made.bind("socket")
except OSError: pass
for name in (b"new\\nline", b"\\xff\\xfe", b"-rf", b"a b", b"\\xe2\\x80\\xae", b"'", b"..."):
    with open(name, "wb") as file: file.write(name)
os.mkdir(b"\\n"); open(b"\\n/\\x01", "w").close()
os.mkdir("closed"); open("closed/file", "w").close()
"""

    async with opened(tmp_path, substrate) as box:
        made = await box.exec(["python3", "-c", code])
        assert made.exit == 0, made.stderr
        with pytest.raises(SandboxError):
            await box.read("pipe")
        state = await box.snapshot()
        await box.exec(["sh", "-c", "rm -rf -- * ...; ls -A"])
        await box.restore(state)
        names = {entry.path for entry in await box.list()}
        data = await box.read("new\nline")
        same = await box.snapshot() == state
    odd = {"new\nline", "\udcff\udcfe", "-rf", "a b", "\u202e", "'", "...", "\n", "closed"}
    assert names == odd
    assert set(made.files_changed) == odd | {"\n/\x01", "closed/file"}
    assert (data, same) == (b"new\nline", True)


async def test_what_a_command_may_not_read_any_more_is_kept_all_the_same(tmp_path, substrate):
    async with opened(tmp_path, substrate) as box:
        await box.exec(["sh", "-c", "umask 777; mkdir d; echo x > f"])
        state = await box.snapshot()
        await box.restore(state)
        found = (await box.exec(["sh", "-c", "stat -c %a d f"])).stdout
    assert found == b"700\n400\n"


def test_folders_deeper_than_any_path_end_the_sandbox_and_are_removed(tmp_path, substrate):
    code = "import os\nfor _ in range(100): os.mkdir('d'); os.chdir('d')"
    first, after = run_python(tmp_path, substrate, code)
    assert first.killed_by == "disk"
    assert "deep" in after
    assert not (tmp_path / "boxes/one").exists()
