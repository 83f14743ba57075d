"""Snapshots of sandboxes' homes, by content: each file once, and a list of names with the snapshot's digest.

    objects/ab/abcd...     the bytes whose sha256 is the name
    manifests/ab/abcd...   JSON: every path with its kind, mode, size and object; the name is its sha256

Stored data is untrusted: names, sizes and digests are checked before a home is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opd.errors import StorageError, limit_fix
from opd.sandbox.home import Home, Node, parts_of
from opd.sandbox.protocol import Limits, SandboxError
from opd.storage.files import atomic_file, open_plain, remove_tree
from opd.untrusted import bounded_integer, convert_decode_errors, read_document, safe_excerpt

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
_MANIFEST_BYTES = 1 << 28
_MEND = "the state is lost; begin the episode again"


class SnapshotStore:
    """One folder of snapshots, shared by many sandboxes of one process. Threads may call it concurrently."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        """`durable`: stored data survives a power cut, and not only the process."""
        self.folder = folder
        self._durable = durable
        self._lock = threading.RLock()
        self._unnamed: set[str] = set()
        """Digests stored by this process that no record names yet."""

    def store_snapshot(self, home: Home, nodes: dict[str, Node]) -> str:
        """Store the snapshot of `nodes`, just scanned from `home`, and return its digest. Raises
        `StorageError` if it cannot be written, `SandboxError` if a file has changed since the scan.
        """
        document = {"version": 1, "nodes": {path: list(node) for path, node in sorted(nodes.items())}}
        data = json.dumps(document, separators=(",", ":")).encode()
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._unnamed.add(digest)
            for path, node in nodes.items():
                if node.kind == "file" and not self._is_stored("objects", node.content, node.size):
                    self._copy_in(home, path, node)
            self._write_object("manifests", digest, data)
        return digest

    def _copy_in(self, home: Home, path: str, node: Node) -> None:
        target, digest = self._object_path("objects", node.content), hashlib.sha256()
        try:
            with (
                os.fdopen(home.open_file(path), "rb") as source,
                atomic_file(target, durable=self._durable) as file,
            ):
                remaining = node.size + 1
                while remaining and (data := source.read(min(_CHUNK, remaining))):
                    digest.update(data)
                    file.write(data)
                    remaining -= len(data)
                if digest.hexdigest() != node.content:
                    raise SandboxError(
                        f"{safe_excerpt(path)!r} in a sandbox's home changed while it was kept"
                    )
        except OSError as error:
            raise self._write_error(error) from error

    def put_bytes(self, data: bytes) -> str:
        """Store bytes next to the snapshots and return their digest. Raises `StorageError`."""
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._unnamed.add(digest)
            self._write_object("objects", digest, data)
        return digest

    def get_bytes(self, digest: str, most: int) -> bytes:
        """Return stored bytes. Raises `StorageError` if they are missing, more than `most`, or changed."""
        return self._read_object("objects", digest, most)

    def read_nodes(self, digest: str, limits: Limits) -> dict[str, Node]:
        """Return a snapshot's nodes. Raises `StorageError` for an invalid snapshot, or one over `limits`."""
        data = self._read_object("manifests", digest, _MANIFEST_BYTES)
        with convert_decode_errors(
            lambda cause: StorageError(f"snapshot {digest} is none ({cause}); {_MEND}")
        ):
            document = read_document(data, _MANIFEST_BYTES)
            if not isinstance(document, dict) or document.get("version") != 1:
                raise ValueError("it is of another form")
            nodes = {path: _parse_node(path, entry) for path, entry in document["nodes"].items()}
            for path in nodes:
                above = path.rpartition("/")[0]
                if above and (above not in nodes or nodes[above].kind != "folder"):
                    raise ValueError(f"{safe_excerpt(path)!r} is below what is no folder")
            size = sum(node.size for node in nodes.values())
            if len(nodes) > limits.files or size > limits.disk:
                raise ValueError(f"{len(nodes)} files and {size} bytes are more than the quota")
        return nodes

    def restore(self, digest: str, home: Home, limits: Limits) -> dict[str, Node]:
        """Restore a home at once and return its nodes. Raises `StorageError` as `nodes`, and for a file that
        is missing or damaged. Then the home is unchanged.
        """
        nodes = self.read_nodes(digest, limits)
        fresh = Path(tempfile.mkdtemp(prefix=".restore-", dir=home.folder.parent))
        try:
            for path, node in sorted(nodes.items()):
                target = fresh / path
                if node.kind == "folder":
                    target.mkdir(0o700)
                elif node.kind == "link":
                    os.symlink(node.content, target)
                else:
                    self._copy_out(node, target)
            for path, node in sorted(nodes.items(), reverse=True):
                if node.kind != "link":
                    (fresh / path).chmod(node.mode)
            fresh.chmod(0o755)
            home.replace_contents(fresh)
        except OSError as error:
            if fresh.exists():
                remove_tree(fresh)
            if isinstance(error, StorageError):
                raise
            raise self._write_error(error) from error
        return nodes

    def _copy_out(self, node: Node, target: Path) -> None:
        source, digest, size = self._object_path("objects", node.content), hashlib.sha256(), 0
        try:
            opened = os.fdopen(open_plain(source), "rb")
        except OSError as error:
            raise _read_error(source, error) from error
        with opened, target.open("xb") as file:
            while size <= node.size and (data := opened.read(_CHUNK)):
                digest.update(data)
                file.write(data)
                size += len(data)
        if size != node.size or digest.hexdigest() != node.content:
            raise StorageError(f"{source} is damaged: it is not what was kept; {_MEND}")

    def release_digests(self, digests: Iterable[str]) -> None:
        """Tell that records name `digests` now, so `sweep` will be given them."""
        with self._lock:
            self._unnamed.difference_update(digests)

    def remove_unreferenced(self, states: Iterable[str], objects: Iterable[str], limits: Limits) -> int:
        """Remove all but these snapshots with their files, these objects, and digests not named yet. Returns
        the number of files removed. An unreadable snapshot keeps nothing. Links are never followed, because
        the store makes none.
        """
        with self._lock:
            snapshots = set(states) | self._unnamed
            contents = set(objects) | self._unnamed
            for digest in snapshots:
                with contextlib.suppress(StorageError):
                    contents.update(
                        n.content for n in self.read_nodes(digest, limits).values() if n.kind == "file"
                    )
            removed = 0
            for kind, names in (("manifests", snapshots), ("objects", contents)):
                for path in self._stored_files(kind):
                    if path.name not in names:
                        path.unlink()
                        removed += 1
            return removed

    def _stored_files(self, kind: str) -> Iterator[Path]:
        """Yield the store's own files: named by digests, in folders that are no links."""
        if _is_folder(self.folder) and _is_folder(self.folder / kind):
            for shelf in filter(_is_folder, sorted((self.folder / kind).glob("??"))):
                for path in sorted(shelf.iterdir()):
                    if _DIGEST.fullmatch(path.name) and not _is_folder(path):
                        yield path

    def _object_path(self, kind: str, digest: str) -> Path:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise StorageError(f"{safe_excerpt(digest)!r} is no digest of a snapshot; {_MEND}")
        return self.folder / kind / digest[:2] / digest

    def _is_stored(self, kind: str, digest: str, size: int) -> bool:
        """Return True if it is stored in full. A power cut may leave half a file."""
        try:
            status = self._object_path(kind, digest).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size

    def _write_object(self, kind: str, digest: str, data: bytes) -> None:
        target = self._object_path(kind, digest)
        try:
            if not self._is_stored(kind, digest, len(data)):
                with atomic_file(target, durable=self._durable) as file:
                    file.write(data)
        except OSError as error:
            raise self._write_error(error) from error

    def _read_object(self, kind: str, digest: str, most: int) -> bytes:
        path = self._object_path(kind, digest)
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) > most:
                    raise StorageError(f"{path} has more than {most} bytes; {_MEND}")
                data = file.read(size)
        except StorageError:
            raise
        except OSError as error:
            raise _read_error(path, error) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StorageError(f"{path} is damaged: it is not what was kept; {_MEND}")
        return data

    def _write_error(self, error: OSError) -> StorageError:
        mend = limit_fix(error, "check its disk and permissions")
        return StorageError(
            f"snapshots in {self.folder} cannot be written ({error.strerror or error}); {mend}"
        )


def _is_folder(path: Path) -> bool:
    """Return True for a folder, False for a link to one."""
    return path.is_dir() and not path.is_symlink()


def _read_error(path: Path, error: OSError) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{path} is missing; {_MEND}")
    return StorageError(f"{path} cannot be read ({error.strerror}); {limit_fix(error, _MEND)}")


def _parse_node(path: Any, entry: Any) -> Node:
    """Parse one entry of an untrusted manifest. Raises `ValueError` if `store_snapshot` does not write it."""
    kind, mode, size, content = entry
    try:
        parts = parts_of(path)
    except SandboxError as error:
        raise ValueError(str(error)) from None
    if not parts or kind not in ("file", "folder", "link") or not isinstance(content, str):
        raise ValueError(f"{safe_excerpt(path)!r} is no entry")
    bounded_integer(mode, 0, 0o777, "a mode")
    bounded_integer(size, 0, 1 << 48, "a size")
    if kind == "file" and not _DIGEST.fullmatch(content):
        raise ValueError(f"{safe_excerpt(path)!r} has no digest")
    if kind != "file" and size:
        raise ValueError(f"{safe_excerpt(path)!r} has a size and is no file")
    if kind == "link" and ("\0" in content or not 0 < len(os.fsencode(content)) < 4096):
        raise ValueError(f"{safe_excerpt(path)!r} leads nowhere")
    return Node(kind, mode, size, content)
