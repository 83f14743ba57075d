"""An engine in a process of its own that is given weights, and a sender that waits to be killed.

python sync_process.py engine HOST PORT      answers one JSON object a line
python sync_process.py sender FOLDER         writes weights into FOLDER, says so, and sleeps
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from opd.errors import OpdError
from opd.rollout.sync.broadcast import BroadcastReceiver
from opd.rollout.sync.disk import WeightFolder
from opd.rollout.sync.group import Seat, visit_store, weight_group
from opd.rollout.sync.parcel import Parcel, WeightReceiver
from opd.rollout.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from opd.types import RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from opd.rollout.torch_engine import TorchEngine

PROMPT = [3, 1, 4, 1, 5]


def greedy(engine: TorchEngine) -> list[int]:
    """What the engine writes after `PROMPT`, always the most likely token."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    steps = engine.generate([RolloutRequest("r", np.array(PROMPT, np.int32), sampling)])
    return [int(token) for step in steps for token in step.token_ids]


def serve(host: str, port: int) -> None:
    """Do what the lines say, in their order."""
    import tiny

    from opd.rollout.torch_engine import TorchEngine

    engine = TorchEngine(tiny.model(seed=9))
    group = weight_group(visit_store(host, port), Seat("test", 1, 2))
    receivers: dict[str, WeightReceiver] = {
        "disk": WeightFolder("unused"),
        "shared_memory": SharedMemoryReceiver(),
        "broadcast": BroadcastReceiver(group),
    }
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(answer(engine, receivers, asked["verb"], asked.get("parcel")))
        except OpdError as error:
            say({"error": str(error)})


def answer(engine: TorchEngine, receivers: dict[str, WeightReceiver], verb: str, parcel: dict | None) -> dict:
    if parcel is not None:
        given = Parcel(**parcel)
        weights = receivers[given.transport].receive(given)
        return {"digest": engine.update_weights(weights, given.version)}
    if verb == "greedy":
        return {"tokens": greedy(engine), "version": engine.policy_version}
    getattr(engine, verb)()
    return {}


def say(what: dict) -> None:
    print(json.dumps(what), flush=True)


def send_and_wait(folder: str) -> None:
    """Never hear from a receiver."""

    def tell(parcel: Parcel):
        say({"file": parcel.where["file"]})
        time.sleep(600)
        return list

    SharedMemorySender(folder).send([("w", torch.zeros(1000))], 1, tell)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        send_and_wait(sys.argv[2])
