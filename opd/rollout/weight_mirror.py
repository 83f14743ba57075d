"""A copy of a server's weights on its own node, as a folder that it reads: the receiving end of `DeltaPush`.

It is written in full once and then changed in place. It is valid only while its digest is the expected one.
The server's guard (`server_guard.py`) makes the folder, and removes it with all its files. Here files are
only written into an existing folder, so nothing is left if the writing process is killed.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.errors import RolloutError, reason_of
from opd.models.causal_lm import weights_digest
from opd.models.hf_folder import SINGLE
from opd.rollout.weight_delta import Form, form_from_json, unpack_blocks
from opd.served.plugin.opd_hidden_states import SHARED, remove_abandoned
from opd.storage.tensors import header_of
from opd.untrusted import is_file_name

_log = logging.getLogger(__name__)

VARIABLE = "OPD_WEIGHTS_FOLDERS"
"""Tells a server's guard which folders to make, and to remove when the server is gone."""
_PREFIX = "opd-weights-"
_YOUNG = 60.0
"""Seconds in which a new folder's owner may not have locked it yet."""


def mirror_places() -> list[Path]:
    """Return new folders for a server's weights: in shared memory, and as a fallback for temporary files."""
    name = f"{_PREFIX}{uuid.uuid4().hex}"
    return [Path(root) / name for root in _root_folders()]


def _root_folders() -> list[str]:
    return list(dict.fromkeys((SHARED, tempfile.gettempdir())))


def remove_ownerless() -> None:
    """Remove this user's folders whose server and guards were all killed at once, as when a job takes too
    much memory. No process holds their lock.
    """
    for root in _root_folders():
        for folder in Path(root).glob(f"{_PREFIX}*"):
            remove_abandoned(folder, _YOUNG, lock=None)


@dataclass(slots=True)
class _WeightsFile:
    """The file of weights that is there now."""

    path: Path
    tensors: dict[str, Tensor]
    """In their order, as views of the mapped file."""
    form: Form
    digest: str | None
    """Digest of the weights, or None while they are changed."""


class WeightMirror:
    """Implements the module's mirror. One caller at a time.

    Args:
        places: Folders that another process makes and removes. The first with enough space is used.
        promised: Bytes of shared memory reserved for other processes, which die without it.
    """

    def __init__(self, places: Sequence[Path], promised: int = 0) -> None:
        self._places, self._promised = list(places), promised
        self._own: _WeightsFile | None = None

    def held(self) -> str | None:
        """Return the quick digest of the weights, or None if they are missing or incomplete."""
        entry = self._own
        return None if entry is None or not entry.path.exists() else entry.digest

    def folder(self) -> str | None:
        """Return the Hugging Face folder that has them."""
        return None if self._own is None or self.held() is None else str(self._own.path.parent)

    def begin(self, form: Any, files: Mapping[str, bytes]) -> bool:
        """Allocate space for all weights, in the form of `form_as_json`. The previous weights are dropped.
        `files` are written next to them. Returns False if the server and its folders are gone.

        Raises `RolloutError` if there is no space, or if a file or the form is invalid.
        """
        tensors = form_from_json(form)
        for name in files:
            if not is_file_name(name) or not name.endswith(".json"):
                raise RolloutError(
                    f"a file {name!r} was sent beside new weights; send the model's .json files."
                )
        self._drop_file()
        header = _file_header(tensors)
        size = len(header) + sum(entry.nbytes for entry in tensors)
        free, message = [path for path in self._places if path.is_dir()], "there is no folder"
        for path in free:
            try:
                self._leave_promised(path, size)
                self._own = _create_file(path, tensors, header, size)
                for name, content in files.items():
                    (path / name).write_bytes(content)
                return True
            except OSError as error:
                self._drop_file()
                if not path.is_dir():
                    return False
                message = reason_of(error)
        if not free:
            return False
        raise RolloutError(
            f"{os.uname().nodename} has no room for {size / 2**20:.0f} MiB of new weights in"
            f" {' or '.join(str(path.parent) for path in free)} ({message}); give it more shared memory, or"
            " set rollout.engine.folder to one that all nodes see."
        )

    def change(self, base: str) -> bool:
        """Begin to change the weights. Returns False if they are not `base`, so all weights must be sent."""
        if self.held() != base or self._own is None:
            return False
        self._own.digest = None
        return True

    def take(self, part: Any) -> None:
        """Write a part (bytes or [bytes] uint8) of the version begun. Raises as `unpack`."""
        entry = self._own
        if entry is None or entry.digest is not None:
            raise RolloutError("a part of new weights came that nobody had begun to send; send them anew.")
        for block in unpack_blocks(bytes(part), entry.form):
            block.write_to(entry.tensors[block.name].view(-1))

    def settle(self, digest: str) -> str | None:
        """Finish after all parts. Returns the folder if the weights have that quick digest, or None if the
        server and its folders are gone.

        Raises `RolloutError` if they have another digest.
        """
        entry = self._own
        if entry is None or not entry.path.exists():
            return None
        actual = weights_digest(entry.tensors.items(), quick=True)
        if actual != digest:
            raise RolloutError(
                f"{entry.path.parent} holds weights of the digest {actual} and not {digest}, as were sent;"
                " send them anew, and look at the node's memory if that comes again."
            )
        entry.digest = digest
        return str(entry.path.parent)

    def _leave_promised(self, path: Path, size: int) -> None:
        """Raise `OSError` if `size` bytes there leave less than the reserved memory."""
        if str(path.parent) == SHARED and shutil.disk_usage(path).free - size < self._promised:
            raise OSError(errno.ENOSPC, "what is free is promised to others")

    def _drop_file(self) -> None:
        entry, self._own = self._own, None
        if entry is not None:
            with suppress(OSError):
                entry.path.unlink()


def _file_header(form: Form) -> bytes:
    empty = {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in _by_size(form)
    }
    return header_of(empty, {"format": "pt"})


def _by_size(form: Form) -> Form:
    """Sort by element size, widest first, as in the file, so that all are aligned."""
    return tuple(sorted(form, key=lambda entry: -entry.dtype.itemsize))


def _create_file(folder: Path, form: Form, header: bytes, size: int) -> _WeightsFile:
    """Make a file of zeros of that form in `folder`. Raises `OSError` if there is no space."""
    path = folder / SINGLE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocate first: a write to a mapped page without memory ends the process.
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, header, 0)
        content = mmap.mmap(descriptor, size)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)
    tensors, at = {}, len(header)
    for entry in _by_size(form):
        if entry.element_count:
            flat = torch.frombuffer(content, dtype=entry.dtype, count=entry.element_count, offset=at)
        else:
            flat = torch.empty(0, dtype=entry.dtype)
        tensors[entry.name] = flat.view(entry.shape)
        at += entry.nbytes
    return _WeightsFile(path, {entry.name: tensors[entry.name] for entry in form}, form, None)
