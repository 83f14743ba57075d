"""One recipe with everything: agents whose tools run in sandboxes, a student on servers that writes ahead,
and teachers on servers of both programs. Its environment, and what it notes of the batches learnt from.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from opd.environments.protocol import Action, Step
from opd.environments.tools import Tools
from opd.environments.trajectory import Command
from opd.types import RolloutBatch

LITTLE = Path(__file__).parents[1] / "servers" / "little_launch.py"
LEARNT = "learnt.jsonl"
STEPS, PROMPTS, TURNS, AHEAD = 12, 3, 3, 2
OTHER = {"sglang": "vllm", "vllm": "sglang"}
LOST = "0"
"""What a command says that was ended by another than itself."""


class Counts(Tools):
    """Each turn but the last adds a line to a file in its sandbox, and is told how many there are."""

    def __init__(self) -> None:
        super().__init__(["shell"], {"seconds": 10, "memory_mb": 128, "processes": 16, "disk_mb": 1})

    @classmethod
    def schemas(cls) -> list[dict[str, Any]]:
        return []

    async def _run_step(self, action: Action) -> Step:
        reward = len(set(action.text)) / 12
        if action.turn == TURNS - 1:
            return Step(reward=reward, done=True)
        line = "echo >> lines; sleep 0.2; wc -l < lines"
        outcome = await self._run_command(Command(("/bin/sh", "-c", line), repeatable=True), action.turn)
        said = outcome.stdout.decode().strip()
        return Step(said if outcome.exit == 0 else LOST, reward, info={f"turn{action.turn}": said})


def note_batch(batch: RolloutBatch) -> RolloutBatch:
    """A `to_batch` that changes nothing: a line of `LEARNT` in the working directory for each sample."""
    for sample in batch.samples:
        written = {
            "uid": sample.uid,
            "domain": sample.domain,
            "prompt": sample.prompt_ids.tolist(),
            "response": sample.response_ids.tolist(),
            "logprobs": sample.rollout_logprobs.tolist(),
            "versions": sample.policy_versions.tolist(),
            "mask": sample.loss_mask.tolist(),
            "episode": sample.metadata.get("episode", {}),
        }
        descriptor = os.open(LEARNT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, json.dumps(written).encode() + b"\n")
        os.close(descriptor)
    return batch


def whole_recipe(models: dict[str, Path], notes: Path, engine: str, **changes: Any) -> dict[str, Any]:
    """Two engines of one program, a teacher of each, agents in one of two domains. Servers note what they are
    in folders below `notes`, by the name of their group.
    """

    def group(name: str, program: str, **more: Any) -> dict[str, Any]:
        (notes / name).mkdir(parents=True, exist_ok=True)
        arguments = {"notes": str(notes / name), **more.pop("arguments", {})}
        command = [sys.executable, str(LITTLE)]
        # A server of a run that was killed may be started again often.
        base = {"type": program, "command": command, "start_seconds": 120, "restarts": 20}
        return base | {"arguments": arguments} | more

    digits = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 60}
    return {
        "name": "whole",
        "model": {"path": str(models["a"])},
        "domains": {
            "sort": digits | {"environment": {"type": "whole_picture:Counts", "turn_tokens": 4}},
            "add3": digits | {"source": "procedural:add3"},
        },
        "servers": {
            "engines": group("engines", engine, count=2, arguments={"seconds": 0.03}),
            "sort": group("sort", OTHER[engine]),
            "add3": group("add3", engine),
        },
        "teachers": {
            "sort": {"type": OTHER[engine], "servers": "sort", "path": str(models["b"])},
            "add3": {"type": engine, "servers": "add3", "path": str(models["b"])},
        },
        "rollout": {
            "engine": {"type": engine, "servers": "engines"},
            "schedule": "async",
            "max_ahead": AHEAD,
            "max_staleness": AHEAD,
            "max_new_tokens": 20,
            "max_sequence": 40,
        },
        "distill": {
            "steps": STEPS,
            "prompts_per_domain": PROMPTS,
            "checkpoint_every": 1,
            "optim": {"lr": 0.0003},
            "to_batch": "whole_picture:note_batch",
        },
        "launch": {"type": "ray"},
        "runtime": {"threads": 1},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4, "every": 0},
    } | changes
