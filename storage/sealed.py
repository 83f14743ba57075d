"""What was written with a digest is read with it: JSON that carries its own, and the digests of files.

A sealed document is a JSON object whose entry `sha256` is over all its other entries, however they are laid
out. It may hold the digests of files, among them other lists of digests: so one seal covers a whole tree, and
large files are hashed once, when they are written or loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opd.errors import OpdError, RunFolderError, StorageError
from opd.foreign import object_path, read_document
from opd.storage.files import open_plain, read_plain, write_atomic

SEAL = "sha256"
_MAX_BYTES = 256 * 2**20
"""Of a JSON file; models' tokenizers are the largest."""
_SETTLED = 2.0
"""Seconds after which another change of a file shows in its time stamps, on every file system."""
_known: dict[tuple[int, ...], str] = {}
"""Digests of files this process has read, by what the system says when a file changes."""


def digest_of(value: Any) -> str:
    """sha256 (hex) of a JSON value; the order of keys and white space do not count."""
    plain = json.loads(json.dumps(value, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_sealed(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Replace the file at `path`, durably, by `document` and its digest.

    Raises `ValueError` or `TypeError` for what JSON cannot hold, and `OSError`.
    """
    sealed = {**document, SEAL: digest_of(document)}
    write_atomic(path, (json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_object(path: Path, mend: str, kind: type[OpdError] = RunFolderError) -> dict[str, Any]:
    """The JSON object in the file `path`, sealed or not; raises `kind`, with the way out `mend`."""
    try:
        data = read_document(read_plain(path, follow=True), _MAX_BYTES)
    except OSError as error:
        raise kind(f"{path} cannot be read ({error.strerror or error}); {mend}") from None
    except ValueError as error:
        raise kind(f"{path} cannot be read as JSON ({error}); {mend}") from None
    if not isinstance(data, dict):
        raise kind(f"{path} holds no JSON object; {mend}")
    return data


def read_sealed(path: Path, mend: str, kind: type[OpdError] = RunFolderError) -> dict[str, Any]:
    """What `write_sealed` wrote to `path`, without the seal.

    Raises `kind`, with the way out `mend`, if it cannot be read, has no seal, or is not what was sealed.
    """
    return unsealed(path, read_object(path, mend, kind), mend, kind)


def unsealed(
    path: Path, document: dict[str, Any], mend: str, kind: type[OpdError] = RunFolderError
) -> dict[str, Any]:
    """`document`, read from `path`, without its seal; `kind` if that is missing or of another document."""
    found = dict(document)
    seal = found.pop(SEAL, None)
    if seal is None:
        raise kind(f"{path} has no {SEAL}: it is damaged, or an older release wrote it; {mend}")
    try:
        whole = seal == digest_of(found)
    except ValueError:  # NaN and infinity, which are never written
        whole = False
    if not whole:
        raise kind(f"{path} is not what was written: its {SEAL} differs; {mend}")
    return found


def file_digest(path: str | os.PathLike[str]) -> str:
    """sha256 (hex) of a file's bytes; what this process has hashed and did not change is not read again.

    Raises `OSError`.
    """
    with os.fdopen(open_plain(path, follow=True), "rb") as file:
        key = _state(file.fileno())
        if key in _known:
            return _known[key]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        *_, changed = key
        if key == _state(file.fileno()) and time.time_ns() - changed > _SETTLED * 1e9:
            _known[key] = digest
    return digest


def digests_of(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """sha256 of files below `root`, by their names from there."""
    return {path.relative_to(root).as_posix(): file_digest(path) for path in paths}


def check_files(
    root: Path, digests: Mapping[str, str], mend: str, kind: type[OpdError] = RunFolderError
) -> None:
    """Raise `kind`, naming the first file below `root` that is missing or not of the digest it had."""
    for name, expected in digests.items():
        try:
            path = root / object_path(name)
        except StorageError as error:
            raise kind(f"{root}: {error}") from None
        try:
            found = file_digest(path)
        except FileNotFoundError:
            raise kind(f"{path} is missing; {mend}") from None
        except OSError as error:
            raise kind(f"{path} cannot be read ({error.strerror or error}); {mend}") from None
        if found != expected:
            raise kind(f"{path} does not have the {SEAL} it was written with; {mend}")


def _state(descriptor: int) -> tuple[int, ...]:
    now = os.fstat(descriptor)
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
