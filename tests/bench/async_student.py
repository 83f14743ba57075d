"""A student whose responses are really long-tailed, with two teachers, for `async_gain.py`.

Two domains of digit prompts. The first digit of a prompt sets how long its answer is on average, from 8
tokens to about 200, and an answer ends after every token with the same probability: a mixture of geometric
lengths. The teachers agree with the student about lengths and prefer some digits, which is what the student
has to learn.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from recipes import tiny_recipe

from opd.config import Recipe
from opd.data.procedural import DigitTask, register
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage

# Actors of a cluster on this machine find the tasks, too.
_here, _others = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, _others]))

SHORTEST, RATIO, LONGEST = 8.0, 1.43, 600
"""Mean tokens of an answer to a prompt that begins with 0, ratio from one digit to the next, limit."""
DOMAINS = ("low", "high")


class Chatter(DigitTask):
    """Digits without end, until they end."""

    preferred = "0123456789"

    def right(self, digits: str) -> str:
        """No answer is right: nobody asks."""
        return digits

    def wrong_rule(self, digits: str) -> str:
        """Nor wrong."""
        return digits

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """An answer of random length; a share `right` of its digits are preferred ones, the rest any."""
        mean = SHORTEST * RATIO ** int(self.digits(prompt)[0])
        length = min(int(rng.geometric(1 / mean)), LONGEST - 1)
        preferred = rng.random(length) < right
        mine = rng.choice(list(self.preferred), length)
        return "".join(np.where(preferred, mine, rng.choice(list("0123456789"), length)))


@register("bench_low")
class Low(Chatter):
    """Prefers low digits."""

    preferred = "01234"


@register("bench_high")
class High(Chatter):
    """Prefers high digits."""

    preferred = "56789"


def recipe(config: dict[str, Any], **changes: Any) -> Recipe:
    """What all runs have in common."""
    tasks = {"low": "async_student:Low", "high": "async_student:High"}
    settings = {
        "model": {"config": config},
        "domains": {
            name: {"source": f"procedural:{task}", "params": {"digits": 5}, "prompts": 20_000}
            for name, task in tasks.items()
        },
        "rollout": {"max_new_tokens": LONGEST, "max_sequence": LONGEST + 8, "log": None},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 2, "every": 0, "curve_prompts": 2},
        "runtime": {"threads": 1},
    }
    return tiny_recipe(**(settings | changes))


def model_config(hidden: int, layers: int) -> dict[str, Any]:
    """A small Llama."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LONGEST + 8,
        "tie_word_embeddings": True,
    }


def make_models(folder: Path, hidden: int, layers: int, steps: int = 200) -> dict[str, Path]:
    """`student`, `low` and `high` below `folder`, trained on demonstrations where they are not there yet.

    The student has seen answers of the same lengths with all digits alike.
    """
    paths = {}
    for seed, (name, share) in enumerate({"student": 0.0, "low": 0.8, "high": 0.8}.items()):
        out = folder / f"{hidden}x{layers}" / name
        paths[name] = out / "base"
        if (paths[name] / "config.json").exists():
            continue
        base = {
            "steps": steps,
            "batch_size": 24,
            "right": share,
            "wrong_rule": 0.0,
            "checkpoint_every": 10_000,
        }
        base["optim"] = {"lr": 3e-3, "warmup_steps": 10}
        own = recipe(model_config(hidden, layers), base=base, seed=seed)
        with RunFolder.create(out, own) as opened:
            run_stage(own, opened, "base")
    return paths
