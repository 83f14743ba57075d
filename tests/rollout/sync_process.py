"""An engine in a process of its own that is given weights: answers one JSON object a line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np

from opd.errors import OpdError
from opd.rollout.sync.disk import WeightFolder
from opd.rollout.sync.parcel import Parcel
from opd.types import RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from opd.rollout.torch_engine import TorchEngine

PROMPT = [3, 1, 4, 1, 5]


def greedy(engine: TorchEngine) -> list[int]:
    """What the engine writes after `PROMPT`, always the most likely token."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    steps = engine.generate([RolloutRequest("r", np.array(PROMPT, np.int32), sampling)])
    return [int(token) for step in steps for token in step.token_ids]


def serve() -> None:
    """Do what the lines say, in their order."""
    import tiny

    from opd.rollout.torch_engine import TorchEngine

    engine, folder = TorchEngine(tiny.model(seed=9)), WeightFolder("unused")
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(answer(engine, folder, asked["verb"], asked.get("parcel")))
        except OpdError as error:
            say({"error": str(error)})


def answer(engine: TorchEngine, folder: WeightFolder, verb: str, parcel: dict | None) -> dict:
    if parcel is not None:
        given = Parcel(**parcel)
        return {"digest": engine.update_weights(folder.receive(given), given.version)}
    if verb == "greedy":
        return {"tokens": greedy(engine), "version": engine.policy_version}
    getattr(engine, verb)()
    return {}


def say(what: dict) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    serve()
