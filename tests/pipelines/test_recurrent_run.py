"""A student whose layers carry a state from token to token, through the stages: what its engine and trainer
compute, and a run that is stopped.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_types
import torch
from attempts import digests, interrupted_merge, killed_run, merged, specialist_weights
from recipes import episode_settings, tiny_recipe, write_recipe
from safetensors.torch import load_file

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline

TYPES = ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "lfm2")
EXACT = 2e-5


def recipe_of(path: Path, kind: str, **changes: Any) -> Recipe:
    """A student of `kind`, and a teacher of another seed."""
    for name, seed in (("student", 0), ("teacher", 1)):
        if not (path / name).exists():
            module = tiny_types.tiny_model(kind, seed=seed)
            module.save_pretrained(path / name)
            tiny_types.tokenizer().save_pretrained(path / name)
    sort = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200}
    settings = {
        "model": {"path": str(path / "student")},
        "base": None,
        "domains": {"sort": sort | {"reward": "recipes:varied"}},
        "specialist": {"steps": 3, "prompts_per_step": 4, "group_size": 4, "checkpoint_every": 1},
        "distill": {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 1},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4, "every": 0},
    }
    return tiny_recipe(**settings | changes)


def require_small_mismatch(metrics: Path) -> None:
    rows = read_metrics(metrics)
    assert len(rows) == 3
    assert max(row["mismatch/max_abs"] for row in rows) < EXACT


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_specialist_that_is_stopped_ends_with_the_same_weights(tmp_path, kind):
    recipe, stage = recipe_of(tmp_path, kind), "specialist-sort"
    whole = specialist_weights(recipe, tmp_path / "whole")
    require_small_mismatch(tmp_path / "whole" / "stages" / stage / "metrics.jsonl")
    stopped = specialist_weights(recipe, tmp_path / "stopped", stop_after=1)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    start = load_file(tmp_path / "student" / "model.safetensors")
    assert any(not torch.equal(whole[name], start[name]) for name in whole)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_merge_that_is_interrupted_ends_with_the_same_weights(tmp_path, kind):
    how = {"type": "local"} if kind == "falcon_h1" else {}  # its layers cannot be streamed
    teachers = {"teachers": {"t": {"path": str(tmp_path / "teacher")} | how}}
    recipe = recipe_of(tmp_path, kind, **teachers)
    domains = {"sort": recipe.domains["sort"].model_dump(mode="json", exclude_none=True) | {"teacher": "t"}}
    recipe = recipe_of(tmp_path, kind, **teachers, domains=domains)
    whole, _ = merged(recipe, tmp_path / "whole")
    require_small_mismatch(tmp_path / "whole" / "stages" / "merge" / "metrics.jsonl")
    stopped = interrupted_merge(recipe, tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1"])
@pytest.mark.filterwarnings("ignore")
def test_a_run_with_an_agent_that_is_killed_ends_with_the_same_weights(tmp_path, kind):
    """Turns go on from the states of the turns before."""
    pytest.importorskip("aiohttp")
    own = episode_settings({"type": "agent", "params": {"run": "agents:plain", "turns": 2}})
    recipe = recipe_of(tmp_path, kind)
    own |= {"model": recipe.model.model_dump(mode="json", exclude_none=True), "base": None}
    own["domains"].pop("add3")  # which its tokenizer does not know
    own["distill"] |= {"teachers": "local"}  # layers of Falcon-H1 cannot be streamed
    with RunFolder.create(tmp_path / "whole", tiny_recipe(**own)) as folder:
        run_pipeline(tiny_recipe(**own), folder)
    rows = read_metrics(tmp_path / "whole" / "stages" / "specialist-sort" / "metrics.jsonl")
    assert all(row["rollout/kept_tokens"] > 0 and row["mismatch/max_abs"] < EXACT for row in rows)
    path, out = write_recipe(tmp_path / "recipe.yaml", **own), tmp_path / "run"
    killed_run(path, out, 1, 1500)
    assert digests(out) == digests(tmp_path / "whole")
