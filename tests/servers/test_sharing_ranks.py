"""Ranks that share servers: each server is given every version once, and neither tokens nor weights depend on
how many ranks and servers there are, or on what ends meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sharing_ranks
from dialects import DIALECTS
from little_models import little
from little_processes import little_processes, place_of
from rank_processes import run_ranks

from opd.models.causal_lm import CausalLM
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import Workers
from opd.rollout.vllm_engine import VLLMVerbs
from opd.served.http_client import PoolOptions, UnavailableError

pytest.importorskip("orjson", reason="needs the extra sglang")
pytest.importorskip("peft", reason="needs the extra lora")
VERSIONS, COUNT, NEW = 3, 6, 8


def run(tmp_path: Path, world: int, tasks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank says of each task."""
    folder = tmp_path / f"{world}-ranks"
    folder.mkdir(exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(sharing_ranks.__file__, world, folder)
    found = []
    for task in tasks:
        files = [folder / f"{task['name']}-{rank}.json" for rank in range(world)]
        found.append([json.loads(file.read_text()) if file.exists() else {} for file in files])
    return found


def task_of(models: dict[str, Path], dialect: str, sync: str, urls: list[str], **more: Any) -> dict[str, Any]:
    own = {"name": f"{dialect}-{sync}-{len(urls)}", "dialect": dialect, "sync": sync, "urls": urls}
    own |= {"models": {name: str(models[name]) for name in "ab"}, "versions": VERSIONS}
    return own | {"count": COUNT, "new": NEW} | more


def tokens_of(results: list[dict[str, Any]]) -> dict[str, list[int]]:
    assert not any("error" in one for one in results), results
    return {uid: ids for one in results for uid, ids in one["tokens"].items()}


async def test_a_server_that_hangs_is_left_long_before_other_ranks_give_up():
    ranks: Any = SimpleNamespace(is_alone=False, timeout=0.2, gather_json=lambda value, label: [value])
    verbs = VLLMVerbs(ServedModel(24, 200), "processed_logprobs")
    workers = Workers(PoolOptions(["http://127.0.0.1:9"]), None, 0, verbs, None, ranks)
    (server,) = workers.pool.servers
    with pytest.raises(UnavailableError, match=r"silent for 0\.05 s"):
        await workers._limit_wait(server, asyncio.Event().wait())


WAYS = [
    ("sglang", "disk"),
    ("vllm", "adapters"),
    ("sglang", "tensors"),
    ("sglang", "adapters"),
    ("vllm", "disk"),
    ("vllm", "delta"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "world", "count"), [(WAYS[:1], 2, 1), (WAYS, 3, 2), (WAYS, 2, 3)])
def test_each_server_is_given_every_version_once(padded_models, tmp_path, ways, world, count):
    """By all ways of new weights, counted by the servers and by the first rank's metric."""
    whole = sum(tensor.nbytes for _, tensor in CausalLM.from_pretrained(padded_models["a"]).weights())
    with ExitStack() as stack:
        tasks, servers = [], []
        for dialect, sync in ways:
            kind = DIALECTS[dialect].little
            own = [stack.enter_context(little(kind, padded_models["a"])) for _ in range(count)]
            for server in own:
                server.lora = dict(DIALECTS[dialect].lora) if sync == "adapters" else None
            urls, sleeps = [server.url for server in own], (dialect, sync) == ("sglang", "disk")
            tasks.append(task_of(padded_models, dialect, sync, urls, sleeps=sleeps))
            servers.append(own)
        found = run(tmp_path, world, tasks)
    for (_, sync), own, results in zip(ways, servers, found, strict=True):
        assert len(tokens_of(results)) == VERSIONS * COUNT
        taken = [server.received for server in own]
        counted = results[0]["counters"]["received_bytes"]
        assert all("received_bytes" not in one["counters"] for one in results[1:])
        for server in own:
            assert server.told.count("/release_memory_occupation") == VERSIONS * (own is servers[0])
        if sync in ("disk", "tensors"):
            assert taken == [VERSIONS * whole] * count
            assert VERSIONS * whole * count <= counted < 1.1 * VERSIONS * whole * count
        elif sync == "delta":  # all once, then little
            assert whole * count < counted < 1.5 * whole * count
        else:  # a trial, and adapters
            assert taken == [taken[0]] * count
            assert 0 < taken[0] < whole
            assert counted < count * whole
            assert {len(server.folders) for server in own} == {VERSIONS + 1}
    by_way = dict(zip(ways, map(tokens_of, found), strict=True))
    assert by_way["sglang", "disk"] == by_way.get(("sglang", "tensors"), by_way["sglang", "disk"])


def faulty_run(
    models: dict[str, Path], tmp_path: Path, faults: list[Fault], world: int
) -> list[list[dict[str, Any]]]:
    """What ranks say of tasks with faults, on two servers of their own each."""
    with ExitStack() as stack:
        tasks, places = [], []
        for number, (dialect, sync, fault) in enumerate(faults):
            lora = dict(DIALECTS[dialect].lora) if sync == "adapters" else None
            settings = [
                {"seconds": fault.get("seconds", 0.02), "lora": lora},
                {"seconds": 0.02, "lora": lora},
            ]
            place = tmp_path / f"servers-{number}"
            urls = stack.enter_context(little_processes(dialect, models["a"], place, settings))
            places.append([place_of(place, server)["pid"] for server in range(2)])
            more = {"name": f"task-{number}", "servers": str(place), "fault": fault, "new": 16}
            tasks.append(task_of(models, dialect, sync, urls, **more, in_flight=fault.get("in_flight", True)))
        found = run(tmp_path, world, tasks)
        for task, before in zip(tasks, places, strict=True):  # the fault has happened
            killed = {task["fault"]["server"]} if task["fault"]["what"] in ("server", "push") else set()
            after = [place_of(Path(task["servers"]), server)["pid"] for server in range(2)]
            assert {server for server in range(2) if before[server] != after[server]} == killed
        return found


def server_of(number: int, **more: Any) -> dict[str, Any]:
    return {"what": "server", "server": number, "rank": 1} | more


def push_to(number: int, **more: Any) -> dict[str, Any]:
    return {"what": "push", "server": number} | more


Fault = tuple[str, str, dict[str, Any]]
FAULTS: dict[str, list[Fault]] = {
    "few": [("sglang", "tensors", push_to(0, parts=3))],
    "three": [
        ("sglang", "disk", server_of(0)),
        ("vllm", "disk", push_to(1)),
        ("sglang", "adapters", server_of(1)),
        ("sglang", "disk", {"what": "slow", "seconds": 0.2, "server": 0}),
        ("sglang", "tensors", push_to(1, parts=5)),
        ("vllm", "adapters", server_of(0)),
    ],
    "two": [
        ("sglang", "tensors", server_of(1, in_flight=False)),
        ("sglang", "disk", push_to(0, in_flight=False)),
        ("vllm", "disk", server_of(0)),
        ("vllm", "adapters", server_of(1, in_flight=False)),
    ],
    "hung": [
        ("sglang", "disk", {"what": "hang", "server": 0, "rank": 1, "timeout": 3.0}),
        ("vllm", "disk", {"what": "hang", "server": 1, "rank": 1, "timeout": 3.0, "in_flight": False}),
    ],
}


@pytest.mark.parametrize(
    ("faults", "world"),
    [
        ("few", 2),
        *(
            pytest.param(name, n, marks=pytest.mark.slow)
            for name, n in (("three", 3), ("two", 2), ("hung", 2))
        ),
    ],
)
def test_servers_that_are_killed_slow_or_hung_lose_no_token_and_change_none(
    padded_models, tmp_path, faults, world
):
    """While they write, and in the middle of a push. What is started at their port is given the newest
    weights before it serves any rank, although only the first gives them. Each rank checks its tokens itself.
    A server that takes connections and answers nothing counts as away.
    """
    found = faulty_run(padded_models, tmp_path, FAULTS[faults], world)
    for fault, results in zip(FAULTS[faults], found, strict=True):
        assert len(tokens_of(results)) == VERSIONS * COUNT, fault
        if fault in FAULTS["few"]:  # what was cut off is no weights; each of the two was given every version
            whole = sum(one.nbytes for _, one in CausalLM.from_pretrained(padded_models["a"]).weights())
            counted = [one["counters"].get("received_bytes", 0) for one in results]
            assert 2 * VERSIONS * whole <= counted[0] < 2.2 * VERSIONS * whole
            assert not any(counted[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "fault"), [(2, {"what": "rank", "rank": 2}), (0, {"what": "push", "rank": 0, "server": 1})]
)
def test_a_rank_that_is_gone_ends_the_others_with_one_sentence(padded_models, tmp_path, who, fault):
    """In its writing, or in the middle of its push. The same ranks then go on with what was logged, and
    others write the same tokens.
    """
    with ExitStack() as stack:
        settings = [{"seconds": 0.02}] * 2
        place = tmp_path / "servers"
        urls = stack.enter_context(little_processes("sglang", padded_models["a"], place, settings))
        gone = task_of(padded_models, "sglang", "disk", urls, name="gone", fault=fault, servers=str(place))
        (results,) = run(tmp_path, 3, [gone])
        for rank, one in enumerate(results):
            assert (one.get("error") is None) == (rank == who)
            assert rank == who or re.match(rf"rank [\d, ]*{who}[\d, ]* did not come to ", one["message"])
        (resumed,) = run(tmp_path, 3, [gone | {"fault": {}}])
        (others,) = run(tmp_path, 2, [gone | {"fault": {}}])
        assert tokens_of(resumed) == tokens_of(others)
        assert len(tokens_of(others)) == VERSIONS * COUNT
