"""A recipe whose agent uses tools: trained, killed in the middle of commands, resumed to the same weights."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attempts import run_only
from full import FULL
from recipes import episode_settings, tiny_recipe, write_recipe

from opd.config import Recipe
from opd.environments.trajectory import read_trajectories
from opd.models.causal_lm import CausalLM
from opd.pipelines.cli import main


def settings(**params) -> dict:
    """One domain of episodes with a shell, and one of single answers."""
    settings = episode_settings({"type": "spoken:Spoken", "params": params, "turn_tokens": 3})
    settings.pop("distill")
    settings["base"] |= {"steps": 20, "batch_size": 32}
    settings["rollout"] |= {"log": {"keep": 5}}
    settings["specialist"] |= {"prompts_per_step": 3}
    return settings | {"evaluation": {"prompts_per_domain": 2}}


def weights(out: Path) -> str:
    return CausalLM.from_pretrained(out / "specialists/sort").digest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tools") / "run"
    recipe: Recipe = tiny_recipe(**settings())
    run_only(recipe, out, "specialist-sort")
    assert not (out / "stages/specialist-sort/episodes").exists()
    return out


@pytest.fixture(scope="module")
def undisturbed(finished) -> str:
    return weights(finished)


@pytest.mark.slow
def test_the_newest_episodes_stay_to_be_shown_and_replayed(finished, capsys, ends):
    told = ends(0, ["trajectory", "show", str(finished)]).out
    assert "episodes  5, 10 commands" in told
    uid = re.findall(r"^  (\S+): 2 steps, 2 commands", told, re.MULTILINE)[-1]
    assert "cksum" in ends(0, ["trajectory", "show", str(finished), "--episode", uid]).out
    assert main(["trajectory", "replay", str(finished), "--episode", uid]) == 0
    assert "2 commands run again, all as before" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_in_the_middle_of_commands_the_weights_are_the_same(tmp_path, undisturbed):
    recipe = write_recipe(tmp_path / "recipe.yaml", **settings())
    out = tmp_path / "run"
    command = [sys.executable, "-m", "opd.pipelines.cli", "specialist", str(recipe), "--domain", "sort"]
    command += ["--out", str(out)]
    log, met = out / "stages/specialist-sort/episodes", 0
    for wanted in (2, 7, 16) if FULL else (7,):
        options = ["--resume"] if (out / "config.json").exists() else []
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None and begun(log) < wanted:
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if log.is_dir():
            episodes, report = read_trajectories(log)
            assert report.damage is None
            met += sum(len(one.commands) for one in episodes.values())
    assert met > 0, "every kill came before the first command or after the last"
    show = [sys.executable, "-m", "opd.pipelines.cli", "trajectory", "show", str(out)]
    told = subprocess.run(show, capture_output=True, text=True, timeout=120)
    assert re.search(r"episodes  \d+, \d+ commands?", told.stdout) or "log of trajectories" in told.stderr
    finish = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert finish.returncode == 0, finish.stderr
    assert weights(out) == undisturbed


def begun(log: Path) -> int:
    """How many commands the log has seen begin, as far as its newest file tells."""
    try:
        return sum(path.read_bytes().count(b'"attempts"') for path in log.glob("*.wal"))
    except OSError:
        return 0
