"""Start and end the ranks of a run on this machine.

Each rank runs the same command with torchrun's variables. Under torchrun only `is_rank` is needed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.errors import ConfigError, OpdError, PreemptedError, RanksError, reason_of
from opd.pipelines.launch import supervisor
from opd.pipelines.records.hub import rank_variables
from opd.pipelines.records.run_folder import HubRecord
from opd.progress import suppress_heartbeats
from opd.rollout.preemption import EXIT_STATUS, Preemption
from opd.untrusted import ranks_here

_joined = False
_LINES = 30


def is_rank(recipe: Recipe) -> bool:
    """Return whether this process is one of several that torchrun, or `launch`, has started.

    Raises `ConfigError` if the recipe has another number of ranks or cannot run on several.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = recipe.train.ranks
    if "WORLD_SIZE" in os.environ and wanted is not None and wanted != size:
        raise ConfigError(
            f"train.ranks is {wanted}, but {size} processes were started; leave train.ranks at null under"
            " torchrun."
        )
    if size == 1:
        return False
    check_ranks(recipe, size)
    local_size = ranks_here(size)  # without torchrun, as under Ray and Slurm, all may be here
    if local_size < size and recipe.servers:  # they listen on the first machine's own address alone
        raise ConfigError(
            f"servers.{min(recipe.servers)} would be started for the {local_size} ranks of one machine, where"
            f" {size - local_size} of the {size} ranks cannot reach it; start the servers yourself and give"
            " their urls, or start all ranks on one machine."
        )
    return True


def wants_ranks(recipe: Recipe) -> bool:
    """Return whether `launch` must start the ranks. Raises `ConfigError` if the recipe cannot run on them."""
    ranks = recipe.train.ranks or 1
    if ranks > 1 and recipe.launch.type == "local":
        check_ranks(recipe, ranks)
        return True
    return False


def check_ranks(recipe: Recipe, size: int) -> None:
    """Raise `ConfigError` if the recipe cannot run on `size` ranks."""
    if misfit := recipe.train.rank_count_fault(size):
        raise ConfigError(f"{misfit}.")
    if recipe.runtime.workers > 1:
        raise ConfigError(
            f"runtime.workers is {recipe.runtime.workers}, but several ranks, and the trainer of launch: ray,"
            " work on one stage at a time; set runtime.workers to 1."
        )


def rank_environment(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of `size`, which meet at `address`."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def is_joined() -> bool:
    """Return whether this rank has met the others. Before, all ranks find the same errors."""
    return _joined


def has_joined() -> None:
    """Note that from now on an error may be this rank's alone."""
    global _joined
    _joined = True


def launch_ranks(recipe: Recipe, argv: Sequence[str], hub: HubRecord | None = None) -> int:
    """Run `opd ARGV` as `train.ranks` ranks, and return the exit status.

    `hub`: the names in `recipe` on the Hub, and their commits. Raises the message of the first failed rank as
    an `OpdError`, after all have ended. Raises `PreemptedError` if this process is to stop.
    """
    size = recipe.train.ranks or 1
    with (
        tempfile.TemporaryDirectory(prefix="opd-ranks-") as folder,
        Preemption(recipe.runtime.grace_seconds).handle_signals(leave=False) as preemption,
        suppress_heartbeats(),  # the first rank prints
    ):
        store = _open_store(recipe)
        command = [sys.executable, "-m", "opd.pipelines.cli", *argv]
        commits = rank_variables(hub or {})
        try:
            with supervisor.Supervisor(preemption) as ranks:
                for number in range(size):
                    environment = rank_environment(number, size, "127.0.0.1", store.port) | commits
                    environment |= {
                        "LOCAL_RANK": str(number),
                        "LOCAL_WORLD_SIZE": str(size),
                        # torchrun's setting for ranks that are clients of its store, as these are of ours.
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "TORCHELASTIC_RESTART_COUNT": "0",
                        # glibc retains freed memory for threads, in up to eight arenas a core. With threads
                        # that read ten teachers that was 100 MiB of unused memory. Only the environment is
                        # early enough to change it.
                        "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2"),
                    }
                    name = f"rank {number}"
                    log = Path(folder) / name if number else None
                    member = supervisor.start_command(name, command, environment, log, by_status=False)
                    ranks.add_member(member)
                while ranks.running:
                    ranks.check_members()
        except supervisor.MemberFailedError as failed:
            return _rank_status(failed.member, failed.message)
        return 0


def _open_store(recipe: Recipe) -> Any:
    """Open the store where the ranks find each other. It lives here, so that it outlives any of them."""
    from opd.ranks import host_store

    port = recipe.train.port
    try:
        return host_store("127.0.0.1", recipe.train.timeout_seconds, port or 0)[0]
    except (OSError, RuntimeError) as error:
        raise RanksError(
            f"port {port} of 127.0.0.1 cannot be used for the ranks ({reason_of(error)[:120]});"
            " choose another train.port, or leave it at null."
        ) from error


_OF_A_RANK = re.compile(r"(on )?rank \d+: ")
"""Start of a message that names another rank's error."""


def _rank_status(rank: supervisor.ProcessMember, message: supervisor.Message) -> int:
    """Return the exit status of a rank that printed its error. Raises any other rank's message or its end."""
    if message.kind == "error":
        kind, sentence = message.words
        if kind == "RanksError":
            raise RanksError(sentence)
        raise OpdError(sentence if _OF_A_RANK.match(sentence) else f"{rank.name}: {sentence}")
    status = message.words[0]
    if status == 0:
        raise RanksError(
            f"{rank.name} ended with exit status 0 before its work was done: C code that code of yours calls"
            " may have ended it; take that out, then continue with --resume."
        )
    if status == supervisor.REFUSED:
        return status
    if status == EXIT_STATUS:
        raise PreemptedError(f"{rank.name} was asked to stop and did; continue with --resume.")
    if status < 0:
        reason = " (the system may have run out of memory)" if status == -signal.SIGKILL else ""
        name = signal.Signals(-status).name
        raise RanksError(f"{rank.name} was ended by {name}{reason}; continue with --resume.")
    if rank.log is not None:
        tail = rank.log.read_text("utf-8", errors="replace").splitlines()[-_LINES:]
        print("\n".join(tail), file=sys.stderr)
    raise RanksError(f"{rank.name} ended with exit status {status}; what it said is above.")
