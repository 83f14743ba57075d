"""The files of a sandbox from outside: read, written and listed without following a link.

Commands may leave anything that a file system holds. Every folder is opened from its parent, so no name and
no link leads out of the home. Anything but files, folders and links is removed after its command.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from opd.sandbox.protocol import HomeEntry, Limits, SandboxError
from opd.storage.files import remove_tree
from opd.untrusted import safe_excerpt

DEEPEST = 64
"""Levels of folders."""
_LONGEST = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SETTLED = 2.0
"""Seconds after which another change of a file shows in its times, on every file system."""


class Node(NamedTuple):
    """One name in a home."""

    kind: Literal["file", "folder", "link"]
    mode: int = 0o700
    """Of a file or folder. It is made readable and enterable for its owner."""
    size: int = 0
    content: str = ""
    """sha256 (hex) of a file, or the target of a link."""


Nodes = Mapping[str, Node]
"""All nodes of a home by path. Paths that are not UTF-8 are as from `os.fsdecode`."""


def parts_of(path: str) -> list[str]:
    """Return the names along a path from the home. Raises `SandboxError` if it could lead elsewhere."""
    parts = path.split("/") if path else []
    if "\0" in path or len(os.fsencode(path)) > _LONGEST or any(part in ("", ".", "..") for part in parts):
        raise SandboxError(
            f"{safe_excerpt(path)!r} is no path within a sandbox's home; give names between single slashes,"
            " none of them `.` or `..`"
        )
    if len(parts) > DEEPEST or any(len(os.fsencode(part)) > 255 for part in parts):
        raise SandboxError(
            f"{safe_excerpt(path)!r} is too long: at most {DEEPEST} names of 255 bytes are read in a"
            " sandbox's home"
        )
    return parts


def changed_names(before: Nodes, after: Nodes) -> tuple[str, ...]:
    """Names that were written, made or removed."""
    return tuple(sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p)))


_KINDS: dict[int, Literal["file", "folder", "link"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
}


class Home:
    """One folder, and quotas. Nothing else may change it during a call."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self._limits = limits
        self._digests: dict[tuple[int, ...], str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, path: str, most: int) -> bytes:
        """See `Sandbox.read`."""
        *above, name = parts_of(path) or [""]
        with self._refuse_errors(path), self._open_folder(above) as folder_fd:
            file = os.open(name or ".", _FILE, dir_fd=folder_fd)
            with os.fdopen(file, "rb", closefd=True) as opened:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.ENXIO, "it is no file")
                return opened.read(most)

    def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`. An existing name is replaced and not written into, because it may be a link,
        or have another name elsewhere.
        """
        *above, name = parts_of(path) or [""]
        if not name or len(data) > self._limits.disk:
            raise SandboxError(
                f"{safe_excerpt(path)!r} cannot be written: it has no name, or more bytes than the quota"
            )
        temporary = f".{secrets.token_hex(8)}.tmp"
        with self._refuse_errors(path), self._open_folder(above, make=True) as folder_fd:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(temporary, flags, 0o644, dir_fd=folder_fd), "wb") as file:
                    file.write(data)
                os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder_fd)
                raise

    def list(self, path: str) -> list[HomeEntry]:
        """See `Sandbox.list`."""
        with (
            self._refuse_errors(path),
            self._open_folder(parts_of(path)) as folder_fd,
            os.scandir(folder_fd) as entries,
        ):
            listed = []
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                listed.append(
                    HomeEntry(entry.name, _KINDS.get(stat.S_IFMT(status.st_mode), "other"), status.st_size)
                )
            return sorted(listed, key=lambda entry: entry.path)

    def scan_nodes(self) -> dict[str, Node]:
        """Return all nodes. Raises `SandboxError` over quota, or if folders are too deep."""
        nodes: dict[str, Node] = {}
        try:
            with self._open_folder([]) as folder_fd:
                self._scan_folder(folder_fd, "", 0, nodes)
        except OSError as error:
            raise SandboxError(f"a sandbox's home cannot be read ({error.strerror or error})") from error
        size = sum(node.size for node in nodes.values())
        if size > self._limits.disk:
            raise SandboxError(
                f"a sandbox's home holds {size} bytes where {self._limits.disk} are allowed; raise its quota"
            )
        return nodes

    def _scan_folder(self, folder_fd: int, prefix: str, depth: int, nodes: dict[str, Node]) -> None:
        if depth > DEEPEST:
            raise SandboxError(f"a sandbox's home has folders more than {DEEPEST} deep")
        with os.scandir(folder_fd) as entries:
            names = sorted(entry.name for entry in entries)
        if len(nodes) + len(names) > self._limits.files:
            raise SandboxError(
                f"a sandbox's home holds more than {self._limits.files} files; raise its quota"
            )
        for name in names:
            status, path = os.stat(name, dir_fd=folder_fd, follow_symlinks=False), prefix + name
            if stat.S_ISLNK(status.st_mode):
                nodes[path] = Node("link", 0o777, 0, os.readlink(name, dir_fd=folder_fd))
            elif stat.S_ISREG(status.st_mode):
                nodes[path] = self._file_node(name, folder_fd, status)
            elif stat.S_ISDIR(status.st_mode):
                nodes[path] = Node("folder", _grant_mode(name, folder_fd, status, 0o700))
                below = os.open(name, _FOLDER, dir_fd=folder_fd)
                try:
                    self._scan_folder(below, f"{path}/", depth + 1, nodes)
                finally:
                    os.close(below)
            else:  # a pipe, a socket or a device is not part of a snapshot
                os.unlink(name, dir_fd=folder_fd)

    def _file_node(self, name: str, folder_fd: int, status: os.stat_result) -> Node:
        mode = _grant_mode(name, folder_fd, status, 0o400)
        file = os.open(name, _FILE, dir_fd=folder_fd)
        with os.fdopen(file, "rb") as opened:
            now = os.fstat(file)
            key = (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
            digest = self._digests.get(key)
            if digest is None:
                if now.st_size > self._limits.disk:
                    raise SandboxError(
                        f"a file of {now.st_size} bytes is more than a sandbox's home may hold"
                    )
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
                if time.time_ns() - now.st_ctime_ns > _SETTLED * 1e9:
                    self._digests[key] = digest
        return Node("file", mode, now.st_size, digest)

    def open_file(self, path: str) -> int:
        """Open a file that `scan_nodes` has found and return its descriptor. Raises `OSError`."""
        *above, name = parts_of(path)
        with self._open_folder(above) as folder_fd:
            return os.open(name, _FILE, dir_fd=folder_fd)

    def replace_contents(self, folder: Path) -> None:
        """Replace the home's contents by `folder` as a whole."""
        old = self.folder.with_name(f".{secrets.token_hex(8)}.old")
        os.rename(self.folder, old)
        os.rename(folder, self.folder)
        self._digests.clear()
        remove_tree(old)

    @contextlib.contextmanager
    def _open_folder(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of a folder within."""
        folder_fd = os.open(self.folder, _FOLDER)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder_fd)
                below = os.open(part, _FOLDER, dir_fd=folder_fd)
                os.close(folder_fd)
                folder_fd = below
            yield folder_fd
        finally:
            os.close(folder_fd)

    @contextlib.contextmanager
    def _refuse_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = "a link is on its way" if error.errno == errno.ELOOP else error.strerror or str(error)
            raise SandboxError(f"{safe_excerpt(path)!r} in a sandbox's home cannot be used: {why}") from error


def _grant_mode(name: str, folder_fd: int, status: os.stat_result, least: int) -> int:
    """Return the permissions of a file or folder, after granting its owner at least `least`."""
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if mode & least != least or stat.S_IMODE(status.st_mode) != mode:
        mode |= least
        os.chmod(name, mode, dir_fd=folder_fd)  # no link, because nothing else runs here
    return mode
