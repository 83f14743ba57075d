"""The acceptance of a GPU runs whole on a machine without one, at tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("accept.sh")


def accept(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], check=False, capture_output=True, text=True, env=environment
    )


@pytest.mark.slow
def test_every_section_runs_dry(tmp_path):
    done = accept("--dry", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == []
    assert report["machine"]["dry"]
    (kernels,) = report["kernels"].values()
    assert kernels["chunked, 16 tokens"]["error"] < 1e-4
    assert report["streamed"]["same rows"]
    assert report["quickstart"]["models"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    done = accept("--only", "ceilings")
    assert done.returncode == 2
    assert "no CUDA device; --dry" in done.stderr
    assert "Traceback" not in done.stderr
