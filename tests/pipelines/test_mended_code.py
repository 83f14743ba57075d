"""A reward that raises in the middle of a run, mended, and gone on with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import write_recipe

BROKEN = """
def reward(sample):
    number = sample.uid.split("/")[2:3]  # of the check before a run: an answer
    if number and int(number[0]) >= 4:
        raise ZeroDivisionError("late")
    return float(sample.text[:1] == "1")
"""


@pytest.mark.slow
def test_a_reward_that_is_mended_during_a_run_goes_on_where_it_is_said(tmp_path: Path):
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        base=None,
        domains={"one": {"source": "procedural:sort", "prompts": 50, "reward": "late_rewards:reward"}},
        specialist={"steps": 3, "prompts_per_step": 2, "group_size": 2, "checkpoint_every": 1},
        distill={"steps": 1, "prompts_per_domain": 2},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 3, "every": 0},
    )
    code = tmp_path / "late_rewards.py"

    def opd(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", "run", *words]
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    code.write_text(BROKEN)
    broken = opd()
    assert broken.returncode == 2, broken.stderr
    assert "raised ZeroDivisionError: late (late_rewards.py:5)" in broken.stderr
    assert "mend it and go on with --resume --accept-changed-code." in broken.stderr
    code.write_text(BROKEN.replace('raise ZeroDivisionError("late")', "return 0.0"))
    refused = opd("--resume")
    assert refused.returncode == 2
    assert "restore it, or go on with what it is now by --resume --accept-changed-code" in refused.stderr
    mended = opd("--resume", "--accept-changed-code")
    assert mended.returncode == 0, mended.stderr
    assert mended.stderr.count("late_rewards.py (domains.one.reward)") == 1
    (change,) = json.loads((tmp_path / "run/results.json").read_text())["code_changes"]
    assert "specialist-one" in change["under_way"]
    assert list(change["files"]["domains.one.reward"]) == ["late_rewards.py"]
    page = (tmp_path / "run/report.html").read_text()
    assert "User code changed during the run:" in page
    assert "late_rewards.py (domains.one.reward)" in page
