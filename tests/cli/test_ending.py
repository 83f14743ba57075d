"""How a command ends: what the machine refuses is a sentence, a bug keeps its traceback, SIGTERM is 143."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import tiny
import torch
from recipes import write_recipe
from watched import without_waiting

from opd.errors import ConfigError, OpdError, PreemptedError, from_system, reason_of
from opd.models.checkpoint import save_checkpoint
from opd.pipelines import cli, options
from opd.pipelines.cli import main
from opd.pipelines.commands.exit_status import one_line, run_command
from opd.storage.files import atomic_file, atomic_folder

RECIPE = """\
name: demo
model:
  config: {model_type: llama}
domains:
  sort: {source: "procedural:sort"}
"""


def refused(number: int, path: str | None = "/some/file") -> OSError:
    return OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))


class SerialError(Exception):
    """As compiled libraries raise them."""


@pytest.mark.parametrize(
    ("error", "word"),
    [
        *[(refused(number), "/some/file: ") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)],
        *[(refused(number), "/some/file: ") for number in (errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)],
        *[(refused(number), "/some/file: ") for number in (errno.ENOTDIR, errno.EISDIR, errno.ENOENT)],
        *[(refused(number, None), "") for number in (errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EAGAIN)],
        (SerialError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (
            RuntimeError("unable to open file </some/file> in read-only mode: x (24)"),
            "/some/file: this process",
        ),
        (RuntimeError("unable to mmap 9 bytes from file <a>: Cannot allocate memory (12)"), "no more memory"),
        (FileNotFoundError('No such file or directory: "/a/b.safetensors"'), "/a/b.safetensors: "),
        (ValueError("embedded null byte"), "NUL"),
        (ValueError("lstat: embedded null character in path"), "NUL"),
        (MemoryError(), "no more memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "no more memory"),
        (RuntimeError("can't start new thread"), "`ulimit -u`"),
        (ConfigError("a sentence"), "a sentence"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(error, word, capsys):
    def command():
        raise error

    assert run_command(command, resumes=True) == 2
    said = capsys.readouterr().err
    assert said.startswith("opd: error: ")
    assert said.count("\n") == 1
    assert word in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "error", [KeyError("a"), RuntimeError("x"), ValueError("embedded"), OSError("x"), TimeoutError("x")]
)
def test_a_bug_keeps_its_traceback_and_says_what_to_do(error, capsys):
    def command():
        raise error

    assert run_command(command, resumes=True) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("opd: this is a bug")
    assert from_system(error) is None


def test_other_ends(capsys):
    def asked():
        raise PreemptedError("asked")

    assert run_command(lambda: 7, resumes=True) == 7
    assert run_command(asked, resumes=True) == 143
    assert one_line("a\n\tb \x1b[31m\x00 é") == r"a b \x1b[31m\x00 é"


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def interrupted():
    raise KeyboardInterrupt


def without_memory():
    raise torch.OutOfMemoryError("no more of it")


@pytest.mark.parametrize("end", [terminated, interrupted, without_memory])
def test_what_cannot_be_resumed_is_not_told_to(end, capsys):
    statuses = [run_command(end, resumes=resumes) for resumes in (False, True)]
    assert statuses[0] == statuses[1]
    without, told = capsys.readouterr().err.splitlines()
    assert "--resume" in told
    assert "--resume" not in without


@pytest.mark.parametrize(
    ("words", "resumes"),
    [
        *[([name, "x"], True) for name in ("run", "specialist", "distill", "evaluate")],
        *[
            ([name, "run"], False)
            for name in (
                "doctor",
                "publish",
                "push",
                "report",
                "compare",
                "sample",
                "wal",
                "plan",
                "completion",
            )
        ],
        (["--seed", "1", "run", "x"], True),
        (["run", "x", "--dry-run"], False),
        ([], False),
    ],
)
def test_every_command_knows_whether_it_can_be_resumed(words, resumes, monkeypatch):
    monkeypatch.setattr(cli, "run_command", lambda command, resumes, last: resumes)
    assert main(words) is resumes
    named = set(options.build_parser()._subparsers._group_actions[0].choices)
    assert named == {*options.STAGES, *options.OTHERS}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_an_unwritten_file_is_named(tmp_path, form):
    """By whoever writes it: the system's own error of a write says no path."""
    target = tmp_path / "target"
    with pytest.raises(OSError, match="large") as caught:  # noqa: PT012
        if form == "file":
            with atomic_file(target) as file, Limited(1000):
                file.write(bytes(100_000))
                file.flush()
        else:
            with atomic_folder(target) as folder, Limited(1000):
                (folder / "a").write_bytes(bytes(100_000))
    assert list(tmp_path.iterdir()) == []
    sentence = str(from_system(caught.value))
    assert "ulimit -f" in sentence
    assert str(target) in sentence or "/a: " in sentence


class Limited:
    """No file may grow beyond so many bytes while the block runs."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("it is\nwrong."), "it is wrong"),
        (AssertionError(), "AssertionError"),
        (NotImplementedError("  "), "NotImplementedError"),
        (KeyError("rope"), "there is no 'rope'"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_without_words_is_told_by_its_type(error, words):
    assert reason_of(error) == words


def test_the_errors_of_workers_are_picklable_sentences():
    error = from_system(refused(errno.ENOSPC))
    assert type(error)(*error.args).args == error.args
    assert isinstance(error, OpdError)


LEAVES = """
import os, sys
from opd.pipelines.commands.exit_status import run_command
from opd.user_code import call_user_code
from opd.errors import OpdError
import leaves
def command():
    with call_user_code("f", OpdError):
        getattr(leaves, sys.argv[1])()
    print("the end")
    return 0
sys.exit(run_command(command, resumes=True, last=True))
"""
OWN = """
import atexit, json, os, sys, threading
def exits(): sys.exit(0)
def leaves(): os._exit(0)
def leaves_with_7(): os._exit(7)
def becomes(): os.execv("/bin/true", ["true"])
def becomes_another(): os.execlp("true", "true")
def becomes_with(): os.execvpe("true", ["true"], {})
def fails_and_leaves(): atexit.register(lambda: os._exit(0)); exits()
def leaves_at_the_end(): atexit.register(os._exit, 3); atexit.register(lambda: os._exit(4))
def starts():
    child = os.fork()
    if not child: os.execlp("true", "true")
    assert os.waitpid(child, 0)[1] == 0
def forks():
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start(); child.join()
    assert child.exitcode == 0
def closes(): sys.stdout.close(); sys.stderr.close()
def closes_both(): sys.__stdout__.close(); os.close(2); sys.stdout = sys.__stdout__
def closes_numbers(): os.close(1); os.close(2)
def detaches(): sys.stdout.detach()
def forked(status, child):
    pid = os.fork()
    if pid: assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    else: child()
def child_returns(): forked(0, lambda: None)
def child_exits(): forked(3, lambda: sys.exit(3))
def child_raises(): forked(1, lambda: {}["a"])
def child_closes(): forked(0, lambda: os.closerange(3, 1024))
def threads():
    for _ in range(3):
        thread = threading.Thread(target=lambda: json.loads("no"), name="mine")
        thread.start(); thread.join()
def others_threads():
    thread = threading.Thread(target=json.loads, args=("no",))
    thread.start(); thread.join()
"""


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("exits", 2, "f raised SystemExit: 0 (leaves.py:3)"),
        ("leaves_with_7", 7, "ended by os._exit(7) in leaves.py:5"),
        ("becomes", 2, "ended by os.exec of true in leaves.py:6"),
        ("becomes_another", 2, "true in leaves.py:7"),
        ("becomes_with", 2, "true in leaves.py:8"),
        ("fails_and_leaves", 2, "f raised SystemExit: 0"),
        *[(name, 0, "the end") for name in ("forks", "closes", "closes_both", "closes_numbers", "detaches")],
        *[(name, 0, "the end") for name in ("starts", "leaves_at_the_end")],
        *[(name, 0, "the end") for name in ("child_returns", "child_exits", "child_raises", "child_closes")],
        ("threads", 0, "the end"),
        ("leaves", 2, "ended by os._exit(0) in leaves.py:4"),
    ],
)
def test_only_the_command_ends_itself_with_success(tmp_path, name, status, words):
    (tmp_path / "leaves.py").write_text(OWN)
    command = [sys.executable, "-c", LEAVES, name]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, cwd=tmp_path, env=buffered, capture_output=True, text=True, check=False)
    assert result.returncode == status, result
    said = result.stdout if status == 0 else result.stderr
    assert words in said
    assert said.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("name", "words", "lines"),
    [
        ("child_returns", "", 0),
        ("child_raises", "warning: a process that f forked raised KeyError: 'a' (leaves.py:30)", 1),
        ("threads", "thread mine of code of yours, while f ran, raised JSONDecodeError: Expecting value", 1),
        ("others_threads", "Traceback (most recent call last)", 12),
    ],
)
def test_what_code_of_ones_own_starts_says_one_line(tmp_path, name, words, lines):
    """An exception in a process that it forks, or in a thread; what is a library's keeps its traceback."""
    (tmp_path / "leaves.py").write_text(OWN)
    command = [sys.executable, "-c", LEAVES, name]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stdout == "the end\n"
    assert words in result.stderr
    assert result.stderr.count("\n") == lines or name == "others_threads"


def test_an_exit_from_anywhere_is_no_success(capsys):
    assert run_command(lambda: sys.exit(0), resumes=True) == 2
    assert "ended by sys.exit(0) in test_ending.py" in capsys.readouterr().err


def test_that_a_rank_has_stopped_is_said_once(monkeypatch, capsys):
    def command() -> int:
        raise PreemptedError("asked to stop, and did")

    assert run_command(command, resumes=True) == 143
    assert capsys.readouterr().err == "opd: asked to stop, and did\n"
    monkeypatch.setenv("OPD_PARENT", "9")  # who started it says so
    assert run_command(command, resumes=True) == 143
    assert capsys.readouterr().err == ""


STOPPED = """
import os, signal, sys, threading, time
from opd.pipelines import cli
def later():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=later, daemon=True).start()
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("moment", [0.0, 0.3, 0.6, 0.9, 1.2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_with_143_at_any_moment(tmp_path, moment, ranks):
    """During imports and checks, before and while ranks start: moments that no stage listens in. On a fast
    machine the last ones are in the first stage, which never ends by itself.
    """
    write_recipe(tmp_path / "recipe.yaml", train={"ranks": ranks})
    words = ["run", "recipe.yaml", "--out", "run", "--base.steps", "1000000"]
    result = subprocess.run(
        [sys.executable, "-c", STOPPED, str(moment), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 143, result.stderr
    assert "Traceback" not in result.stderr


def test_nobody_reading_is_no_error(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", "recipe.yaml", "--dry-run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait() in (0, 141)
        assert b"Traceback" not in process.stderr.read()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("form", ["file", "folder", "model"])
def test_a_full_disk_is_named_and_left_clean(small_disk, form):
    target = small_disk / "target"
    with pytest.raises(Exception, match=r"space|os error 28") as caught:  # noqa: PT012
        if form == "file":
            with atomic_file(target) as file:
                file.write(bytes(1_000_000))
        elif form == "folder":
            with atomic_folder(target) as folder:
                (folder / "a").write_bytes(bytes(1_000_000))
        else:
            save_checkpoint(tiny.model(hidden_size=128), tiny.tokenizer(), target, {})
    sentence = str(from_system(caught.value))
    assert sentence.startswith(f"{target}: the disk is full; free some space")
    assert list(small_disk.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["run", "recipe.yaml"], ["doctor", "recipe.yaml"], ["publish", "a", "b"]])
def test_too_little_address_space_is_said_before_torch_is_imported(tmp_path, words):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, resource.RLIM_INFINITY))
from opd.pipelines.cli import main
status = main({words})
assert not {{"torch", "numpy"}} & set(sys.modules)
sys.exit(status)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert len(without_waiting(result.stderr).splitlines()) == 1
    assert "may take 600 MiB of address space" in result.stderr
    assert "`ulimit -v`" in result.stderr


def test_a_command_leaves_no_descriptor(capsys):
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    main(["run", "nothing.yaml"])
    before = held()
    for _ in range(20):
        main(["run", "nothing.yaml"])
    deadline = time.monotonic() + 60
    while (
        held() > before and time.monotonic() < deadline
    ):  # a thread closes its end when it hears of the other's
        time.sleep(0.01)
    assert held() <= before
    assert "no such recipe file" in capsys.readouterr().err
