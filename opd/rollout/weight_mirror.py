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
from typing import TYPE_CHECKING, Any

import torch

from opd.errors import RolloutError, reason_of
from opd.models.causal_lm import weights_digest
from opd.models.hf_folder import SINGLE
from opd.rollout.weight_delta import Form, form_from_json, unpack_blocks
from opd.served.plugin.opd_hidden_states import SHARED, remove_abandoned
from opd.storage.tensors import header_of
from opd.untrusted import is_file_name

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

VARIABLE = "OPD_WEIGHTS_FOLDERS"
"""Tells a server's guard which folders to make, and to remove when the server is gone."""
_PREFIX = "opd-weights-"
_YOUNG = 60.0
"""Seconds in which a new folder's owner may not have locked it yet."""


def mirror_places() -> list[Path]:
    """Return folders for one server's weights, with unique names: in shared memory, and as a fallback on the
    disk for temporary files.
    """
    name = f"{_PREFIX}{uuid.uuid4().hex}"
    return [Path(root) / name for root in _root_folders()]


def _root_folders() -> list[str]:
    return list(dict.fromkeys((SHARED, tempfile.gettempdir())))


def remove_ownerless() -> None:
    """Remove this user's folders whose server and guards were all killed at once, as when a job takes too
    much memory. No process holds their lock.
    """
    for root in _root_folders():
        for left in Path(root).glob(f"{_PREFIX}*"):
            remove_abandoned(left, _YOUNG, lock=None)


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
        own = self._own
        return None if own is None or not own.path.exists() else own.digest

    def folder(self) -> str | None:
        """Return the Hugging Face folder that has them."""
        return None if self._own is None or self.held() is None else str(self._own.path.parent)

    def begin(self, form: Any, files: Mapping[str, bytes]) -> bool:
        """Allocate space for all weights, in the form of `form_as_json`. The previous weights are dropped.
        `files` are written next to them. Returns False if the server and its folders are gone.

        Raises `RolloutError` if there is no space, or if a file or the form is invalid.
        """
        known = form_from_json(form)
        for name in files:
            if not is_file_name(name) or not name.endswith(".json"):
                raise RolloutError(
                    f"a file {name!r} was sent beside new weights; send the model's .json files."
                )
        self._drop_file()
        header = _file_header(known)
        size = len(header) + sum(own.nbytes for own in known)
        left, told = [place for place in self._places if place.is_dir()], "there is no folder"
        for place in left:
            try:
                self._leave_promised(place, size)
                self._own = _create_file(place, known, header, size)
                for name, content in files.items():
                    (place / name).write_bytes(content)
                return True
            except OSError as error:
                self._drop_file()
                if not place.is_dir():
                    return False
                told = reason_of(error)
        if not left:
            return False
        raise RolloutError(
            f"{os.uname().nodename} has no room for {size / 2**20:.0f} MiB of new weights in"
            f" {' or '.join(str(place.parent) for place in left)} ({told}); give it more shared memory, or"
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
        own = self._own
        if own is None or own.digest is not None:
            raise RolloutError("a part of new weights came that nobody had begun to send; send them anew.")
        for block in unpack_blocks(bytes(part), own.form):
            block.write_to(own.tensors[block.name].view(-1))

    def settle(self, digest: str) -> str | None:
        """Finish after all parts. Returns the folder if the weights have that quick digest, or None if the
        server and its folders are gone.

        Raises `RolloutError` if they have another digest.
        """
        own = self._own
        if own is None or not own.path.exists():
            return None
        found = weights_digest(own.tensors.items(), quick=True)
        if found != digest:
            raise RolloutError(
                f"{own.path.parent} holds weights of the digest {found} and not {digest}, as were sent; send"
                " them anew, and look at the node's memory if that comes again."
            )
        own.digest = digest
        return str(own.path.parent)

    def _leave_promised(self, place: Path, size: int) -> None:
        """Raise `OSError` if `size` bytes there leave less than the reserved memory."""
        if str(place.parent) == SHARED and shutil.disk_usage(place).free - size < self._promised:
            raise OSError(errno.ENOSPC, "what is free is promised to others")

    def _drop_file(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            with suppress(OSError):
                own.path.unlink()


def _file_header(form: Form) -> bytes:
    empty = {own.name: torch.empty(own.shape, dtype=own.dtype, device="meta") for own in _by_size(form)}
    return header_of(empty, {"format": "pt"})


def _by_size(form: Form) -> Form:
    """Sort by element size, widest first, as in the file, so that all are aligned."""
    return tuple(sorted(form, key=lambda own: -own.dtype.itemsize))


def _create_file(place: Path, form: Form, header: bytes, size: int) -> _WeightsFile:
    """Make a file of zeros of that form in `place`. Raises `OSError` if there is no space."""
    path = place / SINGLE
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
    found, at = {}, len(header)
    for own in _by_size(form):
        if own.element_count:
            flat = torch.frombuffer(content, dtype=own.dtype, count=own.element_count, offset=at)
        else:
            flat = torch.empty(0, dtype=own.dtype)
        found[own.name] = flat.view(own.shape)
        at += own.nbytes
    return _WeightsFile(path, {own.name: found[own.name] for own in form}, form, None)
