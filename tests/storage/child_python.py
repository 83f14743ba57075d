"""Python processes that work on the same folder as the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
