"""A merge on Ray whose student writes on a real SGLang server: weights come as what has changed."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_servers import GROUPS, require_sglang
from recipes import write_recipe
from safetensors.torch import load_file

SECONDS = 1500


def nobodys_weights() -> set[Path]:
    """Folders of weights that no server's guard holds; those of other runs on this machine are held."""
    found = set()
    for folder in Path("/dev/shm").glob("opd-weights-*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(folder)
            finally:
                os.close(held)
    return found


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_a_merge_on_ray_sends_its_server_what_has_changed(served_models, tmp_path):
    pytest.importorskip("ray")
    require_sglang()
    digits = {"digits": 3}
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"path": str(served_models["a"]), "dtype": "bfloat16"},
        base=None,
        domains={"sort": {"source": "procedural:sort", "params": digits, "prompts": 50}},
        servers={"student": GROUPS["sglang"]},
        launch={"type": "ray", "teachers": 0, "start_timeout": SECONDS},
        teachers={"sort": {"path": str(served_models["b"])}},
        rollout={"engine": {"type": "sglang", "servers": "student"}, "max_new_tokens": 6, "max_sequence": 32},
        distill={
            "steps": 3,
            "prompts_per_domain": 4,
            "checkpoint_every": 1,
            "teachers": "local",
            "optim": {"lr": 1e-5},
        },
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4},
    )
    before = nobodys_weights()
    out = tmp_path / "run"
    command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(recipe), "--out", str(out)]
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=SECONDS)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    steps = [json.loads(line) for line in (out / "stages/merge/metrics.jsonl").read_text().splitlines()]
    whole = sum(tensor.nbytes for tensor in load_file(out / "merged/model.safetensors").values())
    sent = [step["rollout/pushed_bytes"] for step in steps]
    assert len(sent) == 3
    assert all(0 < size < whole / 2 for size in sent[1:]), (sent, whole)
    assert not list(out.rglob("version-*"))
    assert nobodys_weights() <= before
