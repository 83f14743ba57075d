"""The run folders that are damaged: one that is finished, and one stopped in the middle of a response."""

from pathlib import Path
from unittest.mock import patch

from recipes import tiny_recipe, write_recipe

from opd.config import Recipe
from opd.errors import PreemptedError
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages import samples_on_disk, student
from opd.pipelines.stages.pipeline_plan import plan_stages, with_needs
from opd.rollout.preemption import Preemption


class StopsInTheMiddle(Preemption):
    """Asks the run to stop after so many chunks of tokens."""

    def __init__(self, steps: int) -> None:
        super().__init__(grace=600.0)
        self._left = steps

    @property
    def needs_action(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.stop()
        return super().needs_action


def settings(seed: int, **changes) -> dict:
    """All kinds of stages, each as short as can be; every group of a specialist has signal. Rules that could
    fire on so few steps would leave a file in some scenes and not in others. Few hidden states as there are,
    they go to the cache.
    """
    domain = {"params": {"digits": 3}, "prompts": 200, "reward": "damage_rewards:even"}
    short = {"steps": 4, "prompts_per_step": 2, "group_size": 4, "checkpoint_every": 2}
    return {
        "seed": seed,
        "watch": {name: {"stages": "none"} for name in ("flat_reward", "truncation")},
        "domains": {name: {**domain, "source": f"procedural:{name}"} for name in ("sort", "add3")},
        "base": {"steps": 4, "batch_size": 8, "min_accuracy": 0.0, "checkpoint_every": 2},
        "specialist": short,
        "distill": {"steps": 6, "prompts_per_domain": 2, "checkpoint_every": 2},
        "baselines": {"methods": ["average", "off_policy"]},
        "evaluation": {"prompts_per_domain": 4, "curve_prompts": 2},
        "storage": {"hidden_memory_mb": 0},
    } | changes


def make_recipe(path: Path, seed: int = 0, **changes) -> Path:
    return write_recipe(path, **settings(seed, **changes))


def finish(recipe: Path, out: Path, *options: str) -> None:
    assert main(["run", str(recipe), "--out", str(out), *options]) == 0


def stop_in_merge(out: Path, seed: int, steps: int, **changes) -> None:
    """Make a run folder whose merge was stopped after `steps` decode steps, with responses in flight.

    Every decode step is a chunk of its own: how many a longer chunk holds is a matter of the machine's speed.
    What goes to disk goes there response by response, and its writer ends as a kill would end it.
    """
    stop_in(out, tiny_recipe(**settings(seed, **changes)), "merge", steps)


MEASURED = {
    "specialist": {
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "difficulty": {"samples": 2, "prompts": 16, "min_rate": 0.0, "max_rate": 1.0},
    },
    "distill": {"steps": 2, "prompts_per_domain": 2},
    "baselines": {"methods": ["mixed_grpo"]},
}
"""A run whose specialists measure their prompts, which its baseline reads."""


def stop_while_measuring(out: Path, seed: int) -> None:
    """Make a run folder whose second specialist was stopped while it measured its prompts."""
    stop_in(out, tiny_recipe(**settings(seed, **MEASURED)), "specialist-add3", 30)


def stop_in(out: Path, recipe: Recipe, last: str, steps: int) -> None:
    """Make a run folder whose stage `last` was stopped after `steps` decode steps."""
    with (
        RunFolder.create(out, recipe) as folder,
        patch.object(student, "CHUNK_SECONDS", 0.0),
        patch.object(samples_on_disk, "_TOGETHER", 1),
    ):
        for stage in with_needs(plan_stages(recipe), "merge"):
            asked = StopsInTheMiddle(steps if stage.name == last else 1 << 30)
            try:
                execute_stage(recipe, folder, stage, lambda *_: None, asked)
            except PreemptedError:
                assert stage.name == last
                return
    raise AssertionError(f"{last} ended before it was stopped")
