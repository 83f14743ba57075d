"""Teachers on real SGLang servers that sleep outside of their turns: the merge is the same.

On a CPU a server has no memory to give back; it is told by its own verbs, and ends at a wrong one.
"""

import re
from pathlib import Path

import pytest
from real_servers import GROUPS, require_sglang
from recipes import tiny_recipe

from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline

SECONDS = 1500
pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS)]  # two servers are started, on a CPU
VERB = re.compile(r'"POST /(release_memory_occupation|resume_memory_occupation|generate) HTTP/1.1" (\d+)')
STEPS = 3


def merge(folder: Path, student: Path, teachers: dict, **settings) -> list[dict]:
    recipe = tiny_recipe(
        model={"path": str(student)},
        base=None,
        teachers=teachers,
        rollout={"max_new_tokens": 5, "max_sequence": 32, "temperature": 0.7},
        distill={"steps": STEPS, "prompts_per_domain": 4, "checkpoint_every": STEPS, "teachers": "local"},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 8},
        **settings,
    )
    with RunFolder.create(folder, recipe) as opened:
        run_pipeline(recipe, opened)
    return list(read_metrics(folder / "stages" / "merge" / "metrics.jsonl"))


def test_a_merge_is_the_same_with_teachers_that_take_turns(served_models, tmp_path):
    require_sglang()
    paths = {"sort": str(served_models["a"]), "add3": str(served_models["b"])}
    # What saves a GPU's memory needs CUDA's library to start at all.
    without = {"enable-memory-saver": False, "enable-weights-cpu-backup": False}
    arguments = GROUPS["sglang"]["arguments"] | without
    group = GROUPS["sglang"] | {"arguments": arguments, "restarts": 0}
    student = served_models["b"]
    here = merge(tmp_path / "here", student, {name: {"path": path} for name, path in paths.items()})
    there = merge(
        tmp_path / "there",
        student,
        {name: {"type": "sglang", "servers": name, "path": path} for name, path in paths.items()},
        servers=dict.fromkeys(paths, group),
        runtime={"offload": {"teachers": True}},
    )
    for one, other in zip(here, there, strict=True):
        assert one["kl/mean"] == pytest.approx(other["kl/mean"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    for name in paths:
        log = (tmp_path / "there" / "logs" / "servers" / f"{name}-0.log").read_text()
        said = VERB.findall(log)
        assert {status for _, status in said} == {"200"}
        verbs = [verb.partition("_")[0] for verb, _ in said]
        # Nobody asks one that sleeps; the first turn is for who it is.
        turns = " ".join(verbs).split("release")
        assert (turns[0], turns[-1], len(turns)) == ("", "", STEPS + 3)
        assert all(re.fullmatch(r" resume( generate)+ ", turn) for turn in turns[1:-1])
