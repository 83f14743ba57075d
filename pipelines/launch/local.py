"""The ranks of a run on this machine: started, watched, and ended together.

Each rank runs the same command with the variables torchrun would set, so under torchrun nothing here is
needed but `is_rank`. A rank that fails says why in a file; the one sentence for the person who watches is
that of the rank that failed first, not of those that lost it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from opd.config import Recipe
from opd.errors import ConfigError, OpdError, PreemptedError, RanksError
from opd.progress import hushed
from opd.rollout.preemption import EXIT_STATUS, Preemption

_LAUNCHER, _REPORT = "OPD_LAUNCHER", "OPD_RANK_REPORT"
_LOOK = 0.1
_joined = False
_LAST_WORDS = 5.0
"""Seconds the other ranks have to say what they know once one has failed."""
_LINES = 30


def is_rank(recipe: Recipe) -> bool:
    """Whether this process is one of several that torchrun, or `launch`, has started.

    Raises `ConfigError` if the recipe asks for another number, or for what ranks cannot do.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = recipe.train.ranks
    if "WORLD_SIZE" in os.environ and wanted is not None and wanted != size:
        raise ConfigError(
            f"train.ranks is {wanted}, but {size} processes were started; leave train.ranks at null under"
            " torchrun."
        )
    if size > 1:
        check_ranks(recipe, size)
    return size > 1


def wants_ranks(recipe: Recipe) -> bool:
    """Whether `launch` has to start the ranks. Raises `ConfigError` for what ranks cannot do."""
    ranks = recipe.train.ranks or 1
    if ranks > 1 and recipe.launch.type == "local":
        check_ranks(recipe, ranks)
        return True
    return False


def check_ranks(recipe: Recipe, size: int) -> None:
    """Raise `ConfigError` for what `size` ranks cannot do."""
    tensor_parallel = recipe.train.tensor_parallel
    if size % tensor_parallel:
        raise ConfigError(
            f"{size} ranks cannot be divided into groups of train.tensor_parallel {tensor_parallel}; choose a"
            " number of ranks that it divides."
        )
    if recipe.train.context_parallel not in (1, size):
        raise ConfigError(
            f"train.context_parallel is {recipe.train.context_parallel}, but sequences are shared by all"
            f" {size} ranks or by none; set it to {size} or to 1."
        )
    if recipe.runtime.workers > 1:
        raise ConfigError(
            f"runtime.workers is {recipe.runtime.workers}, but the {size} ranks of a run work on one stage at"
            " a time; set runtime.workers to 1."
        )
    if recipe.rollout.engine.type == "sglang":
        recipe.rollout.engine.urls_of(0, size)


def report(error: OpdError) -> bool:
    """Tell the process that started this rank why it ends; False if none did."""
    path = os.environ.get(_REPORT)
    if path is None:
        return False
    said = {"sentence": " ".join(str(error).split()), "lost": isinstance(error, RanksError)}
    Path(path).write_text(json.dumps(said), "utf-8")
    return True


def is_joined() -> bool:
    """Whether this rank has met the others: before, all of them find the same things wrong."""
    return _joined


def has_joined() -> None:
    """From now on an error may be this rank's alone."""
    global _joined
    _joined = True


def end_with_launcher() -> None:
    """In a rank that `launch` started: ignore Ctrl-C, which the launcher hears, and end when it is gone."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    report: Path
    log: Path | None

    def said(self) -> dict[str, Any] | None:
        return json.loads(self.report.read_text("utf-8")) if self.report.exists() else None


def launch(recipe: Recipe, argv: Sequence[str]) -> int:
    """Run `opd ARGV` as `train.ranks` ranks; returns the exit status.

    Raises what the first rank to fail has said, as an `OpdError`, after all of them have ended; and
    `PreemptedError` if this process was asked to stop.
    """
    size, grace = recipe.train.ranks or 1, recipe.runtime.grace_seconds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opd-ranks-")))
        store = _open_store(recipe)
        preemption = stack.enter_context(Preemption(grace).listen(leave=False))
        stack.enter_context(hushed())  # the first rank speaks
        ranks: list[_Rank] = []
        ended: list[int | None] = []
        try:
            for number in range(size):
                ranks.append(_start(number, size, store.port, argv, folder, stack))
            _watch(ranks, preemption)
            ended = [rank.process.poll() for rank in ranks]
        finally:
            _end(ranks, grace)
        return _outcome(ranks, ended, preemption)


def _open_store(recipe: Recipe) -> Any:
    """Where the ranks find each other. It lives here, so that it outlives any of them."""
    from opd.rendezvous import host_store

    port = recipe.train.port
    try:
        return host_store("127.0.0.1", recipe.train.timeout_seconds, port or 0)[0]
    except (OSError, RuntimeError) as error:
        raise RanksError(
            f"port {port} of 127.0.0.1 cannot be used for the ranks ({' '.join(str(error).split())[:120]});"
            " choose another train.port, or leave it at null."
        ) from error


def _start(number: int, size: int, port: int, argv: Sequence[str], folder: Path, stack: ExitStack) -> _Rank:
    said = folder / f"rank-{number}.json"
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # What torchrun sets for ranks that are clients of its own store, as these are of this process's.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        _LAUNCHER: str(os.getpid()),
        _REPORT: str(said),
    }
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = folder / f"rank-{number}.log" if number else None
    out: IO[bytes] | None = None if log is None else stack.enter_context(log.open("wb"))
    command = [sys.executable, "-m", "opd.pipelines.cli", *argv]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    return _Rank(number, process, said, log)


def _watch(ranks: list[_Rank], preemption: Preemption) -> None:
    """Return once all have ended, or one has failed and the others had time to say what they know."""
    suspended, stopped, deadline = False, False, float("inf")
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if preemption.suspended != suspended:
            suspended = preemption.suspended
            _signal(ranks, signal.SIGUSR1 if suspended else signal.SIGUSR2)
        if preemption.stopping and not stopped:
            stopped = True
            _signal(ranks, signal.SIGTERM)
            deadline = time.monotonic() + preemption.grace
        if any(rank.process.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + _LAST_WORDS)
        time.sleep(_LOOK)


def _signal(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


def _end(ranks: list[_Rank], grace: float) -> None:
    """No rank outlives this: told to stop, given the grace period if none has failed, then killed."""
    failed = any(rank.process.poll() for rank in ranks)
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + (0.0 if failed else grace)
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _outcome(ranks: list[_Rank], ended: list[int | None], preemption: Preemption) -> int:
    """The exit status; `ended` are those of the ranks that ended by themselves."""
    codes = [rank.process.returncode for rank in ranks]
    if not any(codes):
        return 0
    # A rank that had not begun to listen ends by the signal itself.
    if preemption.stopping and all(code in (0, EXIT_STATUS, -signal.SIGTERM) for code in codes):
        preemption.check()
    said = [(rank, own) for rank in ranks if (own := rank.said()) is not None]
    for rank, own in said:
        if not own["lost"]:
            raise OpdError(f"rank {rank.number}: {own['sentence']}")
    # One that was killed comes before those that crashed for want of it.
    for rank, code in sorted(zip(ranks, ended, strict=True), key=lambda pair: pair[1] or 0):
        if code not in (None, 0, 2, EXIT_STATUS):
            raise _crash(rank)
    if said:
        raise RanksError(said[0][1]["sentence"])
    if EXIT_STATUS in codes:
        raise PreemptedError(
            f"rank {codes.index(EXIT_STATUS)} was asked to stop and did; continue with --resume."
        )
    if preemption.stopping:
        raise PreemptedError(
            f"the ranks did not stop within runtime.grace_seconds ({preemption.grace:g}) and were ended;"
            " continue with --resume."
        )
    return max(code for code in codes if code) if max(codes) > 0 else 1


def _crash(rank: _Rank) -> OpdError:
    code = rank.process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        reason = " (the system may have run out of memory)" if code == -signal.SIGKILL else ""
        return RanksError(f"rank {rank.number} was ended by {name}{reason}; continue with --resume.")
    if rank.log is not None:
        tail = rank.log.read_text("utf-8", errors="replace").splitlines()[-_LINES:]
        print("\n".join(tail), file=sys.stderr)
    return RanksError(f"rank {rank.number} ended with exit status {code}; what it said is above.")
