"""One rank that runs stages; run by test_stages_on_ranks.py, one process a rank.

    python stage_ranks.py RANK WORLD FOLDER

`FOLDER/tasks.json` names run folders and stages; see `run_task`.
"""

import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np
import tiny
import torch
import torch.distributed as dist
from rank_processes import joined
from recipes import tiny_recipe

from opd.errors import CheckpointError, TrainingError
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.checkpoint_saver import save_collectively
from opd.pipelines.stages.pipeline_plan import plan_stages
from opd.pipelines.stages.student import Student
from opd.ranks import Ranks
from opd.rollout.rewards import RewardRunner, wrap_reward
from opd.rollout.torch_engine import TorchEngine
from opd.storage.checkpoints import CheckpointStore
from opd.types import SampleGroup

SECONDS = 240
"""How long a rank waits for the other."""


class Watch:
    """What a rank learns from, and an engine of its own pace."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps
        self.batches: list[str] = []
        self.digests: dict[int, str] = {}
        """Batch -> what its responses are. Several may be written at once."""
        self._rollout, self._next_chunk = Student.sample_groups, TorchEngine.next_chunk
        self._submit = TorchEngine.submit

    def rollout(self, student: Student, *given) -> list[SampleGroup]:
        """`Student.sample_groups`, remembered."""
        groups = self._rollout(student, *given)
        digest = hashlib.sha256()
        for group in groups:
            for sample in group.samples:
                digest.update(sample.uid.encode())
                for name in ("response_ids", "rollout_logprobs", "policy_versions"):
                    digest.update(np.ascontiguousarray(getattr(sample, name)).tobytes())
        self.digests[given[3]] = digest.hexdigest()
        return groups

    def submit(self, engine: TorchEngine, requests) -> None:
        """`TorchEngine.submit`, remembered."""
        self.batches += [request.uid for request in requests]
        self._submit(engine, requests)

    def next_chunk(self, engine: TorchEngine):
        """`TorchEngine.next_chunk`, at times slower on one rank, at times on the other; and so slow on one
        with what will not be learnt from that the other waits for it when both have ended.
        """
        pause = 0.02 if len(self.digests) % 2 == self.rank % 2 else 0.0
        if self.rank and len(self.digests) >= self.steps:
            pause = 1.0
        time.sleep(pause)
        return self._next_chunk(engine)


def run_task(task: dict, ranks: Ranks, folder: Path) -> None:
    """Run stage `task["stage"]` in the run folder `task["folder"]`; `slow`, its number of steps, gives
    ranks engines of unequal pace. What this rank has learnt from, or was asked where it only measures, is
    written to `NAME-RANK.json`, and what has stopped it, last."""
    watch = Watch(ranks.rank, task["slow"])
    Student.sample_groups = lambda *given: watch.rollout(*given)
    if task["stage"] in ("evaluate", "baseline-ties"):
        TorchEngine.submit = lambda *given: watch.submit(*given)
    if task["slow"]:
        TorchEngine.next_chunk = lambda *given: watch.next_chunk(*given)
    recipe = tiny_recipe(**task["recipe"])
    try:
        execute_stage(
            recipe,
            RunFolder.attach(Path(task["folder"])),
            plan_stages(recipe)[task["stage"]],
            lambda *_: None,
            ranks=ranks,
        )
    except TrainingError as error:
        watch.batches.append(str(error))
    finally:
        Student.sample_groups, TorchEngine.next_chunk = watch._rollout, watch._next_chunk
        TorchEngine.submit = watch._submit
    (folder / f"{task['name']}-{ranks.rank}.json").write_text(
        json.dumps([watch.digests[batch] for batch in sorted(watch.digests)] + watch.batches)
    )


def said_to(ranks: Ranks) -> list:
    """Return what this rank knows of samples that all have, and each of which one has rewarded."""
    reward = wrap_reward(lambda sample: {"reward": sample.length, "feedback": sample.uid}, "own")
    samples = tiny.samples([(2, 3), (2, 4), (2, 5)])
    RewardRunner({"a": reward}, tiny.tokenizer()).score_shared(ranks, samples)
    return [[sample.reward, sample.feedback] for sample in samples]


def refusal_of(ranks: Ranks, folder: Path) -> str:
    """Return what this rank says of a checkpoint that the first one cannot complete."""
    store, tensors = CheckpointStore(folder / "refused"), {"model": {"w": torch.ones(1)}}
    try:
        save_collectively(store, ranks, 1, tensors, {"number": math.nan})
    except CheckpointError as error:
        return str(error)
    return "it is there"


def store_of(rank: int) -> dist.TCPStore:
    """One store for both ranks, as their launcher has it for a run."""
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([own.port if own else 0])
    dist.broadcast(port, 0)
    return own or dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)


def main() -> None:
    """Every task of FOLDER/tasks.json in turn."""
    with joined(SECONDS) as (rank, folder):
        ranks = Ranks(dist.group.WORLD, store_of(rank))
        said = {"rewards": said_to(ranks), "refusal": refusal_of(ranks, folder)}
        (folder / f"said-{rank}.json").write_text(json.dumps(said))
        for task in json.loads((folder / "tasks.json").read_text()):
            run_task(task, ranks, folder)


if __name__ == "__main__":
    main()
