"""The cluster of `examples/ray_cluster`: starts where Ray never ran, and leaves no trace of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "ray_cluster" / "cluster.py"
NEWEST = Path("/tmp/ray/ray_current_cluster")
"""Where Ray looks for a cluster that nobody named."""
COMMAND = f"""
import json, os, pathlib
newest = pathlib.Path({str(NEWEST)!r})
print(json.dumps([os.environ["RAY_ADDRESS"], newest.read_text() if newest.exists() else None]))
"""


@pytest.mark.long
def test_it_starts_and_its_address_is_told_to_the_command_alone():
    pytest.importorskip("ray")
    before = NEWEST.read_text() if NEWEST.exists() else None
    done = subprocess.run(
        [sys.executable, str(CLUSTER), sys.executable, "-c", COMMAND],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    address, newest = json.loads(done.stdout.splitlines()[-1])
    assert address in done.stdout.splitlines()[0]
    assert newest == before
    assert (NEWEST.read_text() if NEWEST.exists() else None) == before
