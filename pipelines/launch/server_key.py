"""Create the key of a run's servers. Without it they only tell whether they are ready.

Others have accounts on a machine, and a server of weights obeys every request. All of them can read a command
line. Only the user can read a file of mode 0600 and a process's environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from opd.config.servers import ServerGroupConfig
from opd.errors import LaunchError, add_path_note, reason_of
from opd.redact import hide_secret
from opd.served.plugin import opd_server_key
from opd.served.plugin.opd_server_key import VARIABLE
from opd.storage.files import open_plain

_KEY = re.compile(r"opd-[0-9a-f]{64}")
"""It begins with a letter, because SGLang takes a leading dash for another argument."""
_WRITTEN = 5.0
"""Seconds that another process may take to write it."""
_OTHERS = 0o077
_MIDDLEWARE = f"{opd_server_key.__name__.rpartition('.')[2]}.{opd_server_key.RequireKey.__name__}"


@dataclass(frozen=True)
class KeyArguments:
    """The arguments that give a server its key."""

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    plugin: bool = False
    """The server imports from the folder of opd's plug-ins."""


def key_of(groups: Iterable[ServerGroupConfig], logs: Path) -> str:
    """Return `run_key` if servers of one of these need it, else an empty string."""
    return run_key(logs) if any(group.requires_key for group in groups) else ""


def run_key(logs: Path) -> str:
    """Return the key of all servers of the run with logs in this folder.

    It is made once, so that a resumed run on a cluster can use the running servers. Raises `LaunchError` if
    the file is no such key, or others can read it.
    """
    path, until = logs / ".key", time.monotonic() + _WRITTEN
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # a resumed run, or another process of the run was faster
        _write_private(path, f"opd-{secrets.token_hex(32)}")
    while not (key := _read_key(path)) and time.monotonic() < until:
        time.sleep(0.02)
    if not _KEY.fullmatch(key):
        raise _key_error(path, "is damaged")
    hide_secret(key)
    return key


def _read_key(path: Path) -> str:
    try:
        with open(open_plain(path), "rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(1000)
    except OSError as error:
        raise _key_error(path, f"cannot be read ({error.strerror or reason_of(error)})") from None
    if mode & _OTHERS:
        raise _key_error(path, f"can be read by others (mode {mode & 0o777:o})")
    return content.decode(errors="replace")


def _key_error(path: Path, fault: str) -> LaunchError:
    return LaunchError(
        f"{path}, the key of the run's servers, {fault}; remove it and continue with --resume, which makes"
        " another, or set servers.NAME.key to false where no file can be kept from other users."
    )


def key_arguments(group: ServerGroupConfig, key: str, log: Path) -> KeyArguments:
    """Return the arguments that give a server of `group` with log `log` its `key`, if it takes one."""
    if not (key and group.requires_key):
        return KeyArguments()
    if not group.server_program.key_file:
        # vLLM's own key protects generation, but not new weights.
        return KeyArguments(["--middleware", _MIDDLEWARE], {VARIABLE: key, "VLLM_API_KEY": key}, plugin=True)
    file = log.with_name(f".{log.stem}.yaml")
    file.unlink(missing_ok=True)
    _write_private(file, f"api-key: {key}\n")
    return KeyArguments(["--config", str(file.absolute())])


def _write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read."""
    with add_path_note(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
