"""Numbered checkpoints in one folder, of which the newest whole one is always found again.

    folder/step_40/
        model.safetensors        one file per entry of `tensors`
        optimizer.safetensors
        manifest.json            written last: step, owner, state, the sha256 of every file above, and its own

A step's folder appears by one rename, after every byte of it is durable; the manifest's checksums catch what
happens to it later.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import CheckpointError, from_system
from opd.storage.files import atomic_folder, check_files, read_sealed, write_sealed

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_INSTEAD = "an older checkpoint is used, or the stage starts again"
_STEP_FOLDER = re.compile(r"step_(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest has been read and whose files have been compared with it."""

    folder: Path
    step: int
    state: dict[str, Any]
    """What `save` was given beside the tensors: counters, cursor positions, generator states. JSON."""
    digests: dict[str, str]
    """File name without suffix -> sha256 in hex."""

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors saved under `name`. Raises `CheckpointError` if there is none or its bytes changed."""
        from opd.storage.tensors import load_tensors

        if name not in self.digests:
            known = ", ".join(sorted(self.digests)) or "none"
            raise CheckpointError(f"{self.folder} has no tensors {name!r}; it has {known}")
        return load_tensors(self.folder / f"{name}.safetensors", self.digests[name])


class CheckpointStore:
    """Saves every so many steps, keeps the newest `keep`, and finds the newest whole one after a crash."""

    def __init__(self, folder: str | Path, keep: int = 2, owner: str = "") -> None:
        """`owner`: the run and the stage; `latest` skips what another has saved."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least one checkpoint")
        self.folder = Path(folder)
        self.keep = keep
        self.owner = owner

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]
    ) -> Checkpoint:
        """Write `tensors` (one file per entry) and `state` (JSON) as the checkpoint of `step`.

        Replaces a checkpoint of the same step; afterwards drops all but the newest `keep` up to `step`, and
        those of later steps, which a run resumed from before them has abandoned. Raises `CheckpointError` if
        something cannot be written; the other checkpoints are then untouched.
        """
        from opd.storage.tensors import save_tensors

        for name in tensors:
            if not _FILE_NAME.fullmatch(name):
                raise CheckpointError(
                    f"{name!r} cannot name a checkpoint file; use letters, digits, _ . and -"
                )
        final = self.folder / f"step_{step}"
        try:
            with atomic_folder(final, replace=True) as folder:
                digests = {
                    name: save_tensors(folder / f"{name}.safetensors", values)
                    for name, values in tensors.items()
                }
                manifest = {"step": step, "owner": self.owner, "state": state, "files": digests}
                _write_manifest(folder, manifest, final)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            said = from_system(error) or f"{final} cannot be written ({error})"
            raise CheckpointError(str(said)) from error
        self._drop_old(newest=step)
        return Checkpoint(final, step, state, digests)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is complete and whose bytes match its checksums, or None. One that is
        skipped, corrupt or of another owner, is logged.
        """
        for step in sorted(self._steps(), reverse=True):
            folder = self.folder / f"step_{step}"
            if not (folder / _MANIFEST).exists():
                continue  # incomplete: its manifest, written last, is not there
            try:
                return _read(folder, step, self.owner)
            except CheckpointError as error:
                _log.warning("skipping checkpoint %s: %s", folder, error)
        return None

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = [_STEP_FOLDER.fullmatch(path.name) for path in self.folder.iterdir()]
        return [int(match.group(1)) for match in matches if match]

    def _drop_old(self, newest: int) -> None:
        steps = sorted(self._steps(), reverse=True)
        kept = [step for step in steps if step <= newest][: self.keep]
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.folder / f"step_{step}", ignore_errors=True)


def _write_manifest(folder: Path, manifest: dict[str, Any], final: Path) -> None:
    try:
        write_sealed(folder / _MANIFEST, manifest)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of {final} is not JSON ({error}); keep only finite numbers, strings, lists and dicts"
        ) from error


def _read(folder: Path, step: int, owner: str) -> Checkpoint:
    """The checkpoint in `folder`, with every digest compared. Raises `CheckpointError`."""
    path = folder / _MANIFEST
    manifest = read_sealed(path, _INSTEAD, CheckpointError)
    try:
        found, state, digests = manifest["step"], dict(manifest["state"]), dict(manifest["files"])
        of = manifest["owner"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no manifest ({error!r}); {_INSTEAD}") from error
    if found != step:
        raise CheckpointError(f"{path} is of step {found}, not of step {step}; {_INSTEAD}")
    if of != owner:
        raise CheckpointError(f"{path} is of another run or stage ({of}); {_INSTEAD}")
    files = {f"{name}.safetensors": digest for name, digest in digests.items()}
    check_files(folder, files, _INSTEAD, CheckpointError)
    return Checkpoint(folder, step, state, digests)
