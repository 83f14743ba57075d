"""`end.sh` ends a server's whole process group and removes its shared memory, and nobody else's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

END = Path(__file__).resolve().parents[2] / "examples" / "sglang_teachers" / "cpu_server" / "end.sh"
SERVER = """
import signal, subprocess, sys
from multiprocessing import resource_tracker, shared_memory

block = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(block._name, "shared_memory")  # as a server that does not tidy up
child = subprocess.Popen(["sleep", "600"])
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(block.name, child.pid, flush=True)
signal.pause()
"""

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory as files is Linux's")


def start(kind: str) -> tuple[subprocess.Popen, Path, int]:
    command = [sys._base_executable, "-c", SERVER, kind]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    with server.stdout:
        name, child = server.stdout.readline().split()
    return server, Path("/dev/shm", name), int(child)


@pytest.mark.parametrize("kind", ["obedient", "deaf"])
def test_a_server_leaves_nothing(kind):
    server, block, child = start(kind)
    other, others, _ = start("obedient")
    try:
        assert block.exists()
        subprocess.run(["bash", str(END), str(server.pid)], env=os.environ | {"PATIENCE": "1"}, check=True)
        server.wait(120)
        assert not block.exists()
        assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
        assert others.exists()
        assert other.poll() is None
    finally:
        subprocess.run(["bash", str(END), str(server.pid), str(other.pid)], check=True)
        other.wait(120)
    assert not others.exists()
