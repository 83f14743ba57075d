"""Python processes that work on the same folder as the test."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PREAMBLE = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
from {helpers} import *
"""


@contextmanager
def child_python(helpers: str, script: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script` with all of the module `helpers` imported; killed at the end if it still
    lives. The script finds `folder`, and `arguments` from `sys.argv[2]` on.
    """
    code = _PREAMBLE.format(helpers=helpers) + script
    command = [sys.executable, "-c", code, str(folder), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def python_on_small_disk(code: str, folder: Path, size: str) -> subprocess.CompletedProcess[str]:
    """Run `code`, which finds `folder` in `sys.argv[1]`, while a disk of `size` (as tmpfs says it) is mounted
    there for it alone. Skips the test where a process may not mount.
    """
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    own_mounts = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(folder)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own_mounts, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets a test mount no file system of its own")
    command = [sys.executable, "-W", "error", "-c", code, str(folder)]
    return subprocess.run([*own_mounts, *command], capture_output=True, text=True)
