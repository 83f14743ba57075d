"""One rank that writes with a model which ranks share; run by test_sharded_engine.py, one process a rank.

    python sharded_engine_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` says what is done, one after another; see `one_task`.
"""

import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import joined

from opd.errors import OpdError, RolloutError
from opd.models.causal_lm import CausalLM
from opd.models.sharded import open_empty, shard_model
from opd.ranks import Ranks
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.sharded import ModelSharing
from opd.rollout.shared_groups import write_shared
from opd.rollout.torch_engine import TorchEngine
from opd.types import SampleGroup, SamplingParams

SLOTS = 4


def prompts(count: int) -> list[EncodedPrompt]:
    """So many prompts of unequal lengths."""
    drawn = np.random.default_rng(3)
    lengths = [2 + 3 * (number % 4) for number in range(count)]
    return [
        EncodedPrompt(f"p{number}", "a", drawn.integers(0, 13, length).astype(np.int32), label=number)
        for number, length in enumerate(lengths)
    ]


def answered(engine, mine: list[EncodedPrompt], each: int, most: int) -> list[SampleGroup]:
    """What `engine` writes, to its stop ids or `most` tokens."""
    return collect(engine, mine, each, SamplingParams(max_new_tokens=most, stop_ids=(3,)), 5)


def told(groups: list[SampleGroup]) -> list[dict]:
    """The responses, JSON-able."""
    return [
        {
            "uid": sample.uid,
            "ids": sample.response_ids.tolist(),
            "logprobs": sample.rollout_logprobs.tolist(),
            "versions": sample.policy_versions.tolist(),
        }
        for group in groups
        for sample in group.samples
    ]


def whole_engine(folder: Path, task: dict) -> TorchEngine:
    """An engine of one process, which decodes as the shared one does or by its own decoder."""
    model = CausalLM.from_pretrained(folder / task["model"], dtype=task.get("dtype", "float32"))
    return TorchEngine(model, max_running=SLOTS, max_sequence=48, lean=task.get("lean"))


def one_task(rank: int, task: dict, folder: Path, ranks: Ranks) -> dict:
    """Write `task["each"]` responses to each of `task["prompts"]` prompts; `task["stops"]` says how a rank
    ends in the middle, if one does.
    """
    model = open_empty(folder / task["model"], dtype=task.get("dtype", "float32"))
    root = shard_model(model, ranks)
    engine = TorchEngine(model, max_running=SLOTS, max_sequence=48, sharing=ModelSharing(root, ranks))
    pool, passes = FaultTolerantRollout([engine]), 0

    def write(mine: list[EncodedPrompt]) -> list[SampleGroup]:
        nonlocal passes
        inner = engine.next_chunk

        def next_chunk():
            nonlocal passes
            passes += 1
            if rank == 1 and passes == 4:
                if task.get("stops") == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if task.get("stops") == "raises":
                    raise RolloutError("rank 1 has had enough.")
            return inner()

        engine.next_chunk = next_chunk
        return answered(pool, mine, task["each"], task["most"])

    groups = write_shared(ranks, prompts(task["prompts"]), write, engine=pool)
    held = sum(p.to_local().numel() for p in model.module.parameters())
    return {"said": told(groups), "steps": passes, "held": held, "of": model.parameter_count}


def main() -> None:
    """Every task of FOLDER/tasks.json in turn."""
    with joined(240) as (rank, folder):
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        port = torch.tensor([own.port if own else 0])
        dist.broadcast(port, 0)
        store = own or dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=240))
        for task in json.loads((folder / "tasks.json").read_text()):
            ranks = Ranks(dist.group.WORLD, dist.PrefixStore(task["name"], store))
            try:
                result = one_task(rank, task, folder, ranks)
            except OpdError as error:
                result = {"error": type(error).__name__, "message": str(error)}
            (folder / f"{task['name']}-{rank}.json").write_text(json.dumps(result))
        os._exit(0)  # a group of which a rank was killed cannot be left in good order


if __name__ == "__main__":
    main()
