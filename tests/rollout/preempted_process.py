"""A generating process for tests: `preempted_process.py FOLDER` writes its tokens to a log in FOLDER.

Says `step N` after each step, and `preempted ...` when it was asked to stop. It waits to be suspended after
step 5, and to be stopped after step 9.
"""

import sys
import time
from pathlib import Path

import numpy as np
import tiny
import torch

from opd.output import LogForwarder
from opd.pipelines.stages.stage_rollout import KVFile
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.preemption import PreemptedError, Preemption
from opd.rollout.request_state import Recovery
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, SamplingParams


def requests() -> list[RolloutRequest]:
    """Six requests of forty tokens."""
    prompts = np.random.default_rng(0).integers(0, 10, (6, 4)).astype(np.int32)
    return [RolloutRequest(f"r{i}", p, SamplingParams(max_new_tokens=40)) for i, p in enumerate(prompts)]


def main(folder: Path) -> None:
    """Generate, and print what happens."""
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, flush=True)

    told = LogForwarder(lambda record: say(record.getMessage()))
    with Preemption().handle_signals() as asked, TokenWAL(folder / "wal") as log, told:
        rollout = FaultTolerantRollout(
            [TorchEngine(tiny.model())], log, preemption=asked, recovery=Recovery(KVFile(folder / "kv"))
        )
        try:
            for number, _ in enumerate(rollout.generate(requests())):
                say(f"step {number}")
                while (number == 5 and not asked.suspended) or (number == 9 and not asked.is_stopping):
                    time.sleep(0.01)
        except PreemptedError as error:
            say(f"preempted: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
