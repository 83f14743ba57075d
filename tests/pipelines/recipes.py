"""A recipe small enough to run whole in a few seconds."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from opd.config import Recipe
from opd.rollout.collect import collect
from opd.types import SampleGroup


def tiny_recipe(**changes) -> Recipe:
    """Two digit domains, a two-layer model, a handful of steps of everything."""
    settings = {
        "name": "tiny",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32,
                "tie_word_embeddings": True,
            }
        },
        "domains": {
            "sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200},
            "add3": {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 200},
        },
        "base": {
            "steps": 200,
            "batch_size": 64,
            "right": 0.7,
            "wrong_rule": 0.2,
            "optim": {"lr": 0.01},
            "checkpoint_every": 15,
        },
        "rollout": {"max_new_tokens": 5, "max_sequence": 16},
        "specialist": {
            "steps": 8,
            "prompts_per_step": 8,
            "group_size": 4,
            "minibatches": 2,
            "checkpoint_every": 3,
        },
        "distill": {"steps": 8, "prompts_per_domain": 8, "checkpoint_every": 3},
        "baselines": {"scales": [0.5, 1.0], "tuning_prompts": 10},
        "evaluation": {"prompts_per_domain": 20, "every": 4, "curve_prompts": 10},
    }
    settings |= changes
    settings["runtime"] = {"threads": 1} | settings.get("runtime", {})  # whatever the machine
    return Recipe.model_validate(settings)


def folder_recipe(folder: Path, **rollout: Any) -> Recipe:
    """The model in `folder` as student, and as teacher of one domain."""
    domain = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20, "teacher": "t"}
    return Recipe.model_validate(
        {
            "name": "folder",
            "model": {"path": str(folder)},
            "teachers": {"t": {"path": str(folder)}},
            "domains": {"sort": domain},
            "rollout": {"max_new_tokens": 4, "max_sequence": 16} | rollout,
            "distill": {"steps": 1, "prompts_per_domain": 2},
            "baselines": {"methods": []},
            "evaluation": {"prompts_per_domain": 4},
        }
    )


def episode_settings(environment: dict[str, Any]) -> dict[str, Any]:
    """What makes `sort` of `tiny_recipe` a domain of episodes, beside one of single answers."""
    given = tiny_recipe()
    domains = {name: one.model_dump(mode="json", exclude_none=True) for name, one in given.domains.items()}
    domains["sort"]["environment"] = environment
    return {
        "model": {"config": {**given.model.config, "max_position_embeddings": 64}},
        "domains": domains,
        "base": {"steps": 100, "batch_size": 64, "right": 0.7, "wrong_rule": 0.2, "optim": {"lr": 0.01}},
        "rollout": {"max_new_tokens": 12, "max_sequence": 32},
        "specialist": {"steps": 2, "prompts_per_step": 4, "group_size": 2, "checkpoint_every": 1},
        "distill": {"steps": 2, "prompts_per_domain": 4, "checkpoint_every": 1},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 6},
    }


NO_CURVE = {"prompts_per_domain": 20, "every": 0}
"""An evaluation that measures nothing while a stage trains."""


def shaped_specialist() -> dict[str, Any]:
    """That of `tiny_recipe`, with everything that shapes a reward and an advantage that sees all of it."""
    shaping = {
        "clip": [-1.0, 0.9],
        "truncated_reward": 0.1,
        "overlong_buffer": 2,
        "overlong_penalty": 0.3,
        "length_coef": 0.2,
        "running_std": True,
        "mask_truncated": True,
    }
    own = {"shaping": shaping, "advantage": {"type": "dr_grpo"}}
    return tiny_recipe().specialist.model_dump(mode="json", exclude_none=True) | own


def write_recipe(path: Path, **changes) -> Path:
    """`tiny_recipe` as a YAML file."""
    path.write_text(
        yaml.safe_dump(tiny_recipe(**changes).model_dump(mode="json", exclude_none=True), sort_keys=False)
    )
    return path


def varied(sample: Any) -> float:
    """A reward in which the answers of a model made from noise differ."""
    return sum(map(ord, sample.text)) / 100 + len(sample.text)


def by_tokens(group: SampleGroup) -> list[np.ndarray]:
    """An estimator that looks at tokens: the reward, less for later ones and more for even ones."""
    best = max(sample.reward or 0.0 for sample in group.samples)
    found = []
    for sample in group.samples:
        places = np.arange(len(sample.response_ids))
        values = ((sample.reward or 0.0) - best + (sample.response_ids % 2 == 0)) / (1 + places)
        found.append(np.where(sample.loss_mask, values, 0).astype(np.float32))
    return found


def own_rollout(engine, prompts, group_size, sampling, seed) -> list[SampleGroup]:
    """A rollout of one's own, one prompt after another."""
    return [collect(engine, [prompt], group_size, sampling, seed)[0] for prompt in prompts]
