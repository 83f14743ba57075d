"""The million-token example, with fewer tokens."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd.config.load import load_recipe

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "million_token" / "run.py"


def run(options: list[str]) -> subprocess.CompletedProcess[str]:
    """The example to its good end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_memory_is_drawn_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    log = importlib.import_module("job").MemoryLog(every=0.0)
    with log:
        for _ in range(2):
            log.draw(tmp_path / "memory.png", "title")
    assert (tmp_path / "memory.png").exists()


@pytest.mark.slow
def test_the_example_plans_scores_trains_and_draws_its_memory(tmp_path):
    options = ["--tokens", "20000", "--long", "1", "--short", "3", "--out", str(tmp_path)]
    done = run(options)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tokens"] == 21_200
    assert results["heavy_bytes_read_by_planning"] == 0
    assert results["head_loads"] == 2
    assert results["kl_mean"] > 0.1
    assert results["grad_norm"] > 0
    assert 0 < results["peak_mib_before_the_data"] < results["peak_mib"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    for phase in ("write", "score", "train"):
        assert phase in done.stderr
    again = run(options)
    assert "write" not in again.stderr  # the store is there
    repeated = json.loads((tmp_path / "results.json").read_text())
    assert (repeated["kl_mean"], repeated["grad_norm"]) == (results["kl_mean"], results["grad_norm"])


@pytest.mark.long
@pytest.mark.slow
def test_the_example_with_full_attention_learns_from_all_tokens_before(tmp_path):
    found = {}
    for name, more in (("window", []), ("full", ["--full-attention"])):
        options = ["--tokens", "4096", "--long", "1", "--short", "0", "--out", str(tmp_path / name), *more]
        run(options)
        found[name] = json.loads((tmp_path / name / "results.json").read_text())
    assert found["full"]["tokens"] == 4096
    assert 0 < found["full"]["grad_norm"] != found["window"]["grad_norm"]
    config = load_recipe(
        [EXAMPLE.with_name("recipe.yaml"), EXAMPLE.with_name("full_attention.yaml")]
    ).model.config
    assert config is not None
    assert (config["sliding_window"], config["num_hidden_layers"]) == (None, 1)
