"""Several ranks started by `opd`: what they refuse, and that none is left when one dies or hangs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from dialects import DIALECTS
from little_models import little
from ray_runs import Run, settings
from recipes import tiny_recipe, write_recipe
from stops import VARIABLE
from torch.distributed.device_mesh import init_device_mesh

from opd import ranks
from opd.errors import ConfigError, RanksError
from opd.pipelines.commands.exit_status import run_command
from opd.pipelines.launch.local import is_rank, launch_ranks, wants_ranks
from opd.rollout.sharded import PASS

SECONDS = 240


def test_without_ranks_nothing_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not is_rank(tiny_recipe())
    assert not wants_ranks(tiny_recipe(train={"ranks": 1}))


def test_ranks_are_started_for_a_local_run(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert wants_ranks(tiny_recipe(train={"ranks": 2}))


def test_a_process_of_torchrun_is_a_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank(tiny_recipe())
    with pytest.raises(ConfigError, match=r"train.ranks is 3, but 2 processes were started"):
        is_rank(tiny_recipe(train={"ranks": 3}))


@pytest.mark.parametrize(
    ("rank", "joined", "error", "says"),
    [
        ("0", False, ConfigError("no such key"), True),
        ("1", False, ConfigError("no such key"), False),  # rank 0 of this machine reads the same recipe
        ("1", True, ConfigError("a fault of this rank"), True),
        ("0", True, RanksError("rank 3 was lost"), True),
        ("7", True, RanksError("rank 3 was lost"), False),
    ],
)
def test_under_torchrun_a_machine_says_an_error_once(monkeypatch, capsys, rank, joined, error, says):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("opd.pipelines.launch.local._joined", joined)

    def command() -> int:
        raise error

    assert run_command(command, resumes=True) == 2
    assert capsys.readouterr().err == (f"opd: error: {error}\n" if says else "")


def test_what_ranks_cannot_do_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError, match=r"3 ranks cannot be divided into groups of train.tensor_parallel 2"
    ):
        is_rank(tiny_recipe(train={"backend": "megatron", "tensor_parallel": 2}))
    with pytest.raises(ConfigError, match=r"runtime.workers is 2"):
        is_rank(tiny_recipe(runtime={"workers": 2}))


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        recipe = tiny_recipe(train={"ranks": 2, "port": taken.getsockname()[1]})
        with pytest.raises(RanksError, match=r"cannot be used for the ranks .* choose another train.port"):
            launch_ranks(recipe, ["run", "nothing.yaml"])


def test_ranks_without_threads_say_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    def refused(*_):
        raise RuntimeError("Resource temporarily unavailable")  # what C++ raises for a thread

    monkeypatch.setattr(ranks, "_find_others", refused)
    said = r"rank 1 of 2 cannot meet the others: the system gives no more processes or threads; .*ulimit -u"
    with pytest.raises(RanksError, match=said), ranks.join_ranks("cpu", 5.0):
        pass


@pytest.mark.parametrize(
    ("entered", "miss", "late"),
    [([5, 5, 4], [], "rank 9 did"), ([5, 5, 0], [], "rank 9 did"), ([4, 5, 4], [], "rank 4, 9 did"),
     ([5, 5, 5], [0], "rank 9 did"), ([6, 5, 6], [0, 2], "another rank did")],
)  # fmt: skip
def test_who_did_not_come_is_named_by_its_number_among_all_ranks(monkeypatch, entered, miss, late):
    monkeypatch.setattr(ranks, "_OTHERS", 0.0)
    store = torch.distributed.HashStore()
    some = ranks.Ranks(store=store, name="some")
    some.rank, some.size, some._members, some._entered = 1, 3, [4, 7, 9], 4  # one of three, of more
    for number, count in enumerate(entered):
        if count:
            store.set(some._rank_key(number), str(count))
    for number in miss:
        store.set(f"misses/{some._rank_key(number)}", "1")
    said = rf"^{late} not come to the work, and rank 7 cannot"
    with pytest.raises(RanksError, match=said), some.collective("the work"):
        raise RuntimeError("Connection closed by peer")


def test_a_rank_waits_for_the_main_rank_however_long_that_works(monkeypatch):
    """As long as it gives signs of life: here the time-out is 300 s, and a look takes no time."""
    store, looks = torch.distributed.HashStore(), []

    def look(seconds):
        looks.append(seconds)
        if len(looks) == 4000:  # after 1000 s
            store.set("base", "1")
        elif len(looks) < 4000 and len(looks) % 1000 == 0:
            store.add(ranks._BEAT, 1)

    monkeypatch.setattr(ranks.time, "sleep", look)
    waiting = ranks.Ranks(store=store)
    waiting.rank, waiting.size = 1, 2
    waiting._wait_for("base", "the new base")
    assert len(looks) == 4000
    with pytest.raises(RanksError, match=r"^rank 0 did not come to the models, for which rank 1 waits"):
        waiting._wait_for("models", "the models")
    assert sum(looks[4000:]) == pytest.approx(store.timeout.total_seconds() * (1 + 1 / ranks._BEATS), abs=1)


STOPPED = """
import os, signal, sys
from opd.errors import RanksError
from opd.ranks import join_ranks
from opd.rollout.shared_groups import WriterBarrier

with join_ranks("cpu", 4.0) as ranks:
    ranks.barrier("the start")
    writers = WriterBarrier(ranks.new_group("rollouts"))
    try:
        if ranks.is_main:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if sys.argv[1] == "barrier":
            ranks.barrier("the work")
        elif sys.argv[1] == "writers":
            writers.wait_for_ranks()
        else:
            ranks.main_first(lambda: None, "the work")
    except RanksError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("meets", "said"),
    [("main_first", "rank 0 did not come to the work, for which rank 1 waits"),
     ("barrier", "another rank did not come to the work, and rank 1 cannot go on alone"),
     ("writers", "another rank did not come to the responses of a batch")],
)  # fmt: skip
def test_a_first_rank_that_stops_with_the_store_ends_the_others(tmp_path, meets, said):
    """Under Slurm the first rank has the store, and answers no question about who is late."""
    (tmp_path / "rank.py").write_text(STOPPED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "rank.py"), meets],
            env={**given, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, _ = started[1].communicate(timeout=SECONDS)
        assert out.startswith(said)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def mesh_group() -> Any:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")).get_group("a")


def megatron_group() -> Any:
    pytest.importorskip("megatron.core")
    from opd.megatron.module import model_parallel

    with model_parallel(1) as group:
        return group


@pytest.mark.parametrize("make", [lambda: dist.new_group([0]), mesh_group, megatron_group])
def test_every_group_waits_as_long_as_the_recipe_says(make):
    """torch's own groups wait half an hour, and Megatron-Core's do, too."""
    before = dist.distributed_c10d.default_pg_timeout
    with ranks._default_wait(timedelta(seconds=7)), ranks.process_group():
        backend = make()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    assert dist.distributed_c10d.default_pg_timeout == before


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_leaves_with_status_0_has_not_done_its_work(tmp_path):
    """By C code, of which Python hears nothing: what is done is said by the rank."""
    (tmp_path / "leaves.py").write_text("import ctypes\nctypes.CDLL(None)._exit(0)\n")
    domains = {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "reward": "leaves:f"}}
    recipe = write_recipe(tmp_path / "recipe.yaml", train={"ranks": 2}, domains=domains)
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(tmp_path / "run")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "opd: error: rank 0 ended with exit status 0 before its work was done" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seconds", "sentence"),
    [
        (signal.SIGKILL, 600.0, "rank 1 was ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, 30.0, "rank 1 did not come to", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_run(tmp_path, number, seconds, sentence):
    recipe = write_recipe(tmp_path / "recipe.yaml", train={"ranks": 2, "timeout_seconds": seconds})
    out = tmp_path / "run"
    command = ["run", str(recipe), "--out", str(out), "--base.steps", "100000"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "opd.pipelines.cli", *command], stdout=log, stderr=log, cwd=tmp_path
        )
    found: dict[int, int] = {}
    left: list[int] = []
    try:
        deadline = time.monotonic() + SECONDS
        metrics = out / "stages" / "base" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        found = ranks_of(process.pid)
        os.kill(found[1], number)
        assert process.wait(SECONDS) == 2
    finally:
        process.kill()
        process.wait()
        left = [pid for pid in found.values() if Path(f"/proc/{pid}").exists()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    said = (tmp_path / "log").read_text().splitlines()[-1]
    assert said.startswith("opd: error: ")
    assert sentence in said
    assert found.keys() == {0, 1}
    assert not left


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks a launcher has started, by rank."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher:
            found |= {int(e[5:]): pid for e in environment if e.startswith(b"RANK=")}
    return found


SHARED = {"engine": {"type": "torch", "sharded": True}}
AHEAD = {"schedule": "ahead"}
STOPS = [
    (1, "the forward and backward passes", {}),
    (1, "the metrics of a step", {}),
    (1, "the writing of a checkpoint", {}),
    (1, "the responses of a batch", AHEAD),
    (1, "the rewards of a batch", AHEAD),
    (1, PASS, SHARED),
    (0, "the teachers' sources", {}),
    (1, "the pause of the servers", {"engine": {"type": "sglang"}}),
    (0, "the new weights of servers", {"engine": {"type": "vllm"}}),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("rank", "label", "rollout"), STOPS)
def test_a_rank_that_stops_at_a_collective_is_named_with_it(tmp_path, monkeypatch, rank, label, rollout):
    """Each group of ranks waits as long as the recipe says, not as long as torch does: half an hour."""
    recipe = settings(tmp_path)
    with ExitStack() as stack:
        if (kind := rollout.get("engine", {}).get("type", "torch")) != "torch":
            pytest.importorskip("orjson", reason="needs the extra sglang")
            server = stack.enter_context(little(DIALECTS[kind].little, tmp_path / "base"))
            rollout = {"engine": {"type": kind, "urls": [server.url]}}
        for domain in recipe["domains"].values():
            domain["reward"] = "stops:reward"
        recipe["rollout"] |= rollout
        recipe["train"] = {"ranks": 2, "timeout_seconds": 30}
        recipe["evaluation"]["every"] = 0
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        monkeypatch.setenv(VARIABLE, f"{rank}:{label}")
        with Run(path, tmp_path / "run") as run:
            status, said = run.finish(SECONDS)
    assert status == 2, said
    # A checkpoint is written by a thread: the others see it there, or in what they do meanwhile.
    seen = label.replace("the writing of a checkpoint", "the (writing of a checkpoint|responses of a batch)")
    assert re.search(rf"opd: error: rank {rank} did not come to {seen}", said), said
    assert [line for line in said.splitlines() if "error" in line] == [said.splitlines()[-1]]
