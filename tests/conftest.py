"""Shared by every test: a fixed number of threads, and where child processes find the tests' own helpers."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import full
import left_over
import pytest
import torch
from hypothesis import settings
from watched import without_waiting

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

gc.disable()  # while files are collected; `pytest_runtestloop` enables it
torch.set_num_threads(1)
# The first call of a kernel warms caches, and shared machines pause: a deadline would test the machine.
settings.register_profile("opd", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("full", settings.get_profile("opd"), max_examples=100)
settings.load_profile("opd")


LEFT_OUT = ("slow", "long", "check")
"""Markers of tests that a run without `--full` leaves out, unless `-m` names the marker or `::` the test."""
FIRST = ("train", "pipelines", "servers", "crash", "examples")
"""Folders with the files that take longest."""
left_out = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        default=full.FULL,
        help="run the tests marked `slow`, `long` and `check` too, and more cases of generated ones",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="of whole folders with --full: write what became of their tests into tests/full.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Files that choose their number of cases when they are imported see the option too, and processes that
    tests start import the same helpers (`pythonpath` in `pyproject.toml`).
    """
    helpers = [str(path) for path in config.getini("pythonpath")]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, others), *helpers]))
    if config.getoption("--full"):
        os.environ["OPD_FULL_TESTS"] = "1"
        full.FULL = True
        settings.load_profile("full")
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        try:
            config.pluginmanager.register(full.Recorder(config))
        except ValueError as wrong:
            raise pytest.UsageError(str(wrong)) from None
    config.stash[left_out] = 0
    left_over.end_with_this_process()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what waits for `--full`, of what `-k` and `-m` have chosen. Folders whose files take longest
    come first: they must not begin when the other processes have finished.
    """
    for item in items:
        if "sglang" in getattr(item, "fixturenames", ()):  # a real server, which is installed first
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--full"):
        wanted = config.getoption("-m")
        markers = [name for name in LEFT_OUT if not wanted or name not in wanted]
        called = {item for item in items if is_called(item, config)}
        waiting = {item for item in items if any(map(item.get_closest_marker, markers))} - called
        waiting |= other_cases([item for item in items if item not in waiting | called])
        config.hook.pytest_deselected(items=[item for item in items if item in waiting])
        items[:] = [item for item in items if item not in waiting]
        config.stash[left_out] = 0 if wanted else len(waiting)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left out"] = config.stash[left_out]
    items.sort(key=lambda item: item.path.parent.name not in FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Of several processes that find a file not yet compiled one compiles it, and the others read what it
    wrote: in a new clone compiling takes as long as the rest of collecting.
    """
    path = collector.path
    compiled = path.parent.joinpath("__pycache__").glob(f"{path.stem}.*-pytest-*.pyc")
    if sys.dont_write_bytecode or not isinstance(collector, pytest.Module) or any(compiled):
        return (yield)
    with path.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage only among what the tests make: what was imported and collected stays to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names, given = inspect.signature(pyfuncitem.obj).parameters, pyfuncitem.funcargs
    asyncio.run(pyfuncitem.obj(**{name: given[name] for name in names if name in given}))
    return True


def is_called(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether an argument with `::` names the test, its class or its function."""
    own = item.nodeid.partition("::")[2]
    for argument in config.args:
        path, _, name = argument.partition("::")
        here = name and item.path == Path(config.invocation_params.dir, path).resolve()
        if here and (own == name or own.startswith((f"{name}::", f"{name}["))):
            return True
    return False


def other_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those that `@pytest.mark.some(count)` leaves out: all of a test's cases but so many, evenly chosen."""
    found: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some"):
            found.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    others = set()
    for cases in found.values():
        marker = cases[0].get_closest_marker("some")
        assert marker is not None
        (count,) = marker.args
        chosen = {round(i * (len(cases) - 1) / max(count - 1, 1)) for i in range(count)}
        others |= {case for number, case in enumerate(cases) if number not in chosen}
    return others


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process that has run tests says how many it left out: all leave out the same."""
    said = getattr(node, "workeroutput", {}).get("left out", 0)
    node.config.stash[left_out] = max(node.config.stash[left_out], said)  # a killed one says nothing


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run."""
    count = config.stash.get(left_out, 0)
    if count and not hasattr(config, "workeroutput"):
        print(
            f"left out: {count} tests, which `bash tests/run.sh --full` runs; those of a folder:"
            " `bash tests/run.sh train --full`; one: `bash tests/run.sh FILE::TEST`"
        )


@pytest.fixture(autouse=True)
def arithmetic() -> None:
    """A stage sets the arithmetic of all of its process. It takes numbers that are not normal for zero, which
    Hypothesis draws, and its threads keep to that. Tiny tensors want one thread: more wait for one another.
    """
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of compiled layers that PyTorch's own operators run."""
    from torch._dynamo.backends.debugging import aot_eager

    from opd.models import compiled_layers

    torch._dynamo.reset()
    compiled_layers.layer_graphs.cache_clear()
    monkeypatch.setattr(compiled_layers, "compile_graph", aot_eager)
    yield
    compiled_layers.layer_graphs.cache_clear()
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def reports(request: pytest.FixtureRequest) -> Iterator[None]:
    """At its end every stage draws the report, a third of the time of the smallest ones: only where tests of
    the file look at it (`pytestmark = pytest.mark.reports`).
    """
    run = sys.modules.get("opd.pipelines.run")
    with pytest.MonkeyPatch.context() as patch:
        if run is not None and request.node.get_closest_marker("reports") is None:
            patch.setattr(run, "write_report", lambda folder: folder / "report.html")
        yield


@pytest.fixture
def ends(capsys: pytest.CaptureFixture[str]) -> Callable[[int, list[str]], Any]:
    """`ends(status, words)`: runs a command that must end with this status; returns what it printed, without
    lines about waiting.
    """

    def run(status: int, words: list[str]) -> Any:
        from opd.pipelines.cli import main

        assert main(words) == status
        printed = capsys.readouterr()
        return printed._replace(err=without_waiting(printed.err))

    return run


@pytest.fixture
def pretended() -> Iterator[Any]:
    """A CUDA device that is not there; see `pretend_cuda.py`."""
    import pretend_cuda

    with pretend_cuda.gpu() as made:
        yield made


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tiny_recipe()` with its base and specialists, made once for all processes: to be read."""
    from shared_runs import made_once, train_specialists

    return made_once(tmp_path_factory, "tiny-run", train_specialists)


@pytest.fixture(scope="session")
def finished_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run to its end, with its report: to be read."""
    from shared_runs import finish, made_once

    return made_once(tmp_path_factory, "finished-run", lambda path: finish(tiny_run, path))


REAL = [pytest.param("real", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["pretended", *REAL])
def gpu(request: pytest.FixtureRequest) -> Any:
    """A CUDA device: `pretended`, and where there is one and `-m gpu` asks for it a real one."""
    if request.param == "pretended":
        return request.getfixturevalue("pretended")
    import pretend_cuda

    return pretend_cuda.RealGpu()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """With `--dist loadfile`: a file's tests share a process, and so do those that share the SGLang server,
    which takes a minute to start.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "sglang" if "/test_sglang_" in file or "real-sglang" in nodeid else file

    return ByFile(config, log)
