"""What a stage holds in each phase of a step, of the parts that the estimate knows, as `runtime.offload` says
who leaves.
"""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import Recipe
from opd.config.train import OffloadConfig

_ENGINE = ("engine copy", "KV cache", "weights laid out for decode", "decode buffers and graphs")
_UPDATE = ("gradients", "activations", "logits of a chunk")
_BEFORE = "a teacher that writes"


def by_phase(recipe: Recipe, parts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Bytes of the `parts` of a stage by the phases that hold them."""
    offload = recipe.runtime.offload
    engine = set(_ENGINE) if offload.engine else set()
    if recipe.model.lora is not None:
        engine.discard("engine copy")  # a base that nobody pushes stays
    trainer = put_away(parts) if offload.trainer else set()
    update = {name for name in parts if name in _UPDATE or name.startswith("copies in ")}
    gone = {
        "rollout": update | trainer,
        "score": update | trainer | engine | {_BEFORE},
        "train": engine | {_BEFORE},
        "sync": update | (trainer - {"weights"}) | (engine & {"KV cache", _ENGINE[-1]}) | {_BEFORE},
    }
    return {
        phase: {name: size for name, size in parts.items() if name not in absent}
        for phase, absent in gone.items()
    }


def put_away(parts: Mapping[str, int]) -> set[str]:
    """What of `parts` leaves with the trainer: not the weights where the engine writes with these."""
    lent = {"weights"} if parts.get("engine copy") == 0 else set()
    return {"weights", "AdamW", "critics"} - lent


def handed_over(recipe: Recipe) -> Recipe | None:
    """`recipe` with everything handed over that can be; `None` where that changes nothing."""
    embedded = recipe.rollout.engine.type == "torch" and recipe.launch.type == "local"
    most = OffloadConfig(engine=embedded, trainer=not recipe.train.offloads_itself)
    if recipe.rollout.schedule != "in_turn" or most == recipe.runtime.offload:
        return None
    runtime = recipe.runtime.model_copy(update={"offload": most})
    return recipe.model_copy(update={"runtime": runtime})
