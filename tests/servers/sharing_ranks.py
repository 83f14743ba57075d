"""One rank of several that write on the same servers; run by test_sharing_ranks.py (`rank_processes`).

A task has versions of weights given in turn. In each the ranks write their shares of the requests; every
token is in a log and is checked by the model of its version. `fault` says what happens meanwhile.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dialects import DIALECTS, LITTLE
from little_processes import place_of
from rank_processes import do_tasks
from served_writing import assert_written, requests, written

from opd.config.train import LoRAConfig
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.rollout import served_workers
from opd.rollout.delta_push import DeltaPush
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.served_workers import FolderPush
from opd.rollout.sglang_engine import TensorPush
from opd.rollout.weight_mirror import WeightMirror
from opd.rollout.weight_sync import WeightFolder, sync_weights
from opd.storage.wal import TokenWAL

LORA = LoRAConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj"])
SECONDS = 20.0
"""That a rank waits for another."""
PUSHES = ("/update_weights_from_disk", "/update_weights_from_distributed", "/collective_rpc")
PUSHES = (*PUSHES, "/load_lora_adapter", "/v1/load_lora_adapter")


def push_of(task: dict[str, Any], dialect: Any, root: Path) -> Any:
    """The way of new weights."""
    model = Path(task["models"]["a"])
    if task["sync"] == "adapters":
        return dialect.adapters_alone(root, model, LORA)
    if task["sync"] == "tensors":
        return TensorPush(bucket_bytes=4096)
    if task["sync"] == "delta":
        mirrors = {}
        for number, url in enumerate(task["urls"]):
            place = root / f"opd-weights-{number}"
            place.mkdir(parents=True)
            mirrors[url] = WeightMirror([place])
        return DeltaPush(mirrors, bytes, dialect.reads, model, 1 << 16)
    return FolderPush(WeightFolder(root, model), dialect.reads)


def model_of(task: dict[str, Any], version: int) -> CausalLM:
    """What the trainer has after so many steps."""
    folder = Path(task["models"]["a"])
    if task["sync"] == "adapters":
        model = AdaptedLM(CausalLM.from_pretrained(folder), LORA, folder)
        noise = torch.Generator().manual_seed(version)
        for _, tensor in model.adapters():
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * 0.3)
        return model
    if task["sync"] == "delta":  # most stays
        model = CausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.module.model.layers[0].mlp.up_proj.weight[3] += 0.25 * version
        return model
    return CausalLM.from_pretrained(Path(task["models"]["ab"[version % 2]]))


def signal_server(task: dict[str, Any], number: int) -> None:
    os.kill(place_of(Path(task["servers"]), task["fault"]["server"])["pid"], number)


class KilledIn:
    """A push in whose middle a server ends: once it was sent so many parts of version 1."""

    def __init__(self, push: Any, task: dict[str, Any]) -> None:
        self._push, self._task, self._parts = push, task, task["fault"].get("parts", 1)
        self.version = -1

    def prepare(self, weights: Any, version: int) -> Any:
        self.version = version
        return self._push.prepare(weights, version)

    async def load(self, send: Any, server: Any, name: str, prepared: Any) -> int:
        url = self._task["urls"][self._task["fault"]["server"]]

        async def send_or_kill(to: Any, method: str, path: str, body: Any) -> Any:
            if self.version == 1 and to.url == url and path in PUSHES:
                self._parts -= 1
                if self._parts == 0 and "rank" in self._task["fault"]:
                    os._exit(0)
                elif self._parts == 0:
                    signal_server(self._task, signal.SIGKILL)
            return await send(to, method, path, body)

        return await self._push.load(send_or_kill, server, name, prepared)


def chunks(rank: int, task: dict[str, Any], version: int, steps: Iterator[Any]) -> Iterator[Any]:
    """`steps`, with the fault that is due among them."""
    fault = task.get("fault", {})
    for number, chunk in enumerate(steps):
        yield chunk
        if number == 0 and version == 1 and rank == fault.get("rank"):
            if fault["what"] in ("server", "hang"):
                end = signal.SIGKILL if fault["what"] == "server" else signal.SIGSTOP
                signal_server(task, end)
            elif fault["what"] == "rank":
                os._exit(0)  # nothing is closed; its connections break


def one_task(rank: int, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    served_workers.KEEP = 0.1
    store = dist.PrefixStore(task["name"], dist.distributed_c10d._get_default_store())
    ranks = Ranks(dist.group.WORLD, store, task["name"])
    dialect = DIALECTS[task["dialect"]]
    push = push_of(task, dialect, folder / f"weights-{task['name']}-{rank}")
    fault = task.get("fault", {})
    if fault.get("what") == "push":
        push = KilledIn(push, task)
    patience = replace(LITTLE, unreachable=60.0, timeout=fault.get("timeout", LITTLE.timeout))
    urls, form = task["urls"], Path(task["models"]["a"])
    engine = dialect.make_engine(urls, form, push, patience=patience, version=-1, ranks=ranks, room=4 * 70)
    tokens: dict[str, list[int]] = {}
    models: dict[int, CausalLM] = {}
    try:
        with TokenWAL(folder / f"wal-{task['name']}-{rank}") as log:
            rollout = FaultTolerantRollout([engine], log)
            for version in range(task["versions"]):
                models[version] = model_of(task, version)
                every = requests(task["count"], task["new"])
                wanted = ranks.shard([replace(one, uid=f"{version}/{one.uid}") for one in every])
                if task.get("in_flight") and 0 < version < task["versions"] - 1:
                    steps = chunks(rank, task, version, rollout.generate(wanted))
                    before = [next(steps)]
                    digest = sync_weights(rollout, models[version].weights(), version)
                else:
                    digest = sync_weights(rollout, models[version].weights(), version)
                    # Another rank's uses a server once that says that it holds them.
                    assert not rank or not any(one.admitted for one in engine._workers.pool.servers)
                    before, steps = [], chunks(rank, task, version, rollout.generate(wanted))
                assert digest == models[version].quick_digest()
                found = written([*before, *steps], wanted)
                assert_written(wanted, found, {v: m for v, m in models.items() if v >= version - 1})
                tokens |= {uid: one.ids for uid, one in found.items()}
                ranks.barrier("the end of a step")
                if task.get("sleeps"):
                    engine.sleep()
            counters = rollout.take_counters()
    finally:
        engine.close()
    return {"tokens": tokens, "counters": counters}


if __name__ == "__main__":
    do_tasks(one_task, SECONDS)
