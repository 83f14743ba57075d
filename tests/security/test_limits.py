"""What the system gives an ordinary user less of: permissions, threads, address space. One sentence each."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from watched import without_waiting

from opd.errors import OpdError, from_system
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import check_folder
from opd.pipelines.commands.exit_status import require_address_space
from opd.pipelines.report import write_report
from opd.storage.files import atomic_folder, write_atomic

NOBODY = 65534


@contextmanager
def ordinary() -> Iterator[None]:
    """Be no administrator in the block, to whom no file is closed."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, and nobody but its owner write."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def model(folder: Path) -> Path:
    return save_checkpoint(tiny.model(), tiny.tokenizer(), folder / "model", {})


def unreadable(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> Path:
        folder.chmod(0o755)
        (model(folder) / name).chmod(0)
        return folder / "model"

    return make


def finished(folder: Path) -> Path:
    folder.chmod(0o755)
    import opd.pipelines.report.page  # with libraries that may be an administrator's own  # noqa: F401

    (folder / "results.json").write_text('{"name": "x"}')
    folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
    return folder


def target(folder: Path) -> Path:
    return folder / "target"


@pytest.mark.parametrize(
    ("make", "act", "named"),
    [
        (unreadable("model.safetensors"), check_folder, "model.safetensors: access is refused"),
        (unreadable("config.json"), check_folder, "config.json cannot be read (Permission denied)"),
        (finished, write_report, "report.html: access is refused"),
        (target, lambda path: write_atomic(path, b"x"), "target: access is refused"),
        (target, lambda path: atomic_folder(path).__enter__(), "target: access is refused"),
    ],
)
def test_what_may_not_be_read_or_written_is_named_as_itself(place, make, act, named):
    given = make(place)
    with ordinary(), pytest.raises(Exception, match=r".") as caught:
        act(given)
    sentence = str(from_system(caught.value))
    assert named in sentence
    assert ".tmp" not in sentence


class PanicException(BaseException):
    """As compiled libraries raise them."""


@pytest.mark.parametrize(
    "error",
    [
        PanicException(
            "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError"
        ),
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),  # of C++
    ],
)
def test_too_few_threads_are_a_sentence(error):
    assert isinstance(from_system(error), OpdError)
    assert "`ulimit -u`" in str(from_system(error))


def limited(limit: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command under a limit of the system's, in a process of its own."""
    program = (
        f"import resource, sys\nfrom opd.pipelines import cli\n{limit}\nsys.exit(cli.main({list(words)}))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_command_that_may_start_no_thread_says_so(tmp_path):
    refuse = 'import threading\ndef no(self): raise RuntimeError("can\'t start new thread")'
    said = limited(f"{refuse}\nthreading.Thread.start = no", "report", str(tmp_path))
    assert said.returncode == 2
    assert without_waiting(said.stderr).startswith(
        "opd: error: the system gives no more processes or threads"
    )
    assert without_waiting(said.stderr).count("\n") == 1


def test_address_space_for_the_cache_is_asked_for_before_a_run(tmp_path, monkeypatch):
    domains = "domains: {sort: {source: 'procedural:sort'}}"
    (tmp_path / "recipe.yaml").write_text(f"{domains}\nname: x\nmodel: {{config: {{model_type: llama}}}}\n")
    limit = "resource.setrlimit(resource.RLIMIT_AS, (2000 << 20, -1))"
    words = ["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]
    said = limited(limit, *words)
    assert said.returncode == 2
    assert "set storage.cache_mb to 0" in said.stderr
    assert without_waiting(said.stderr).count("\n") == 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2000 << 20, -1))
    require_address_space(cache=False)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_a_model_may_be_read_by_whom_the_user_lets(tmp_path, umask):
    """And by nobody else: whichever library has written a file of it."""
    before = os.umask(umask)
    try:
        made = model(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o666 & ~umask}
    assert made.stat().st_mode & 0o777 == 0o777 & ~umask
