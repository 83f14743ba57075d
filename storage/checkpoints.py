"""Numbered checkpoints in one folder, of which the newest whole one is always found again.

    folder/step_40/
        model.safetensors        one file per entry of `tensors`; with several ranks each writes its own, to
        optimizer.safetensors    model-00002-of-00004.safetensors
        manifest.json            written last: step, owner, state, the sha256 of every file above, and its own

A step's folder appears by one rename, after every byte of it is durable; the manifest's checksums show later
changes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import CheckpointError, from_system
from opd.storage.files import atomic_folder, check_files, file_state, read_sealed, write_sealed
from opd.untrusted import is_file_name

if TYPE_CHECKING:
    from torch import Tensor

    from opd.storage.tensors import TensorParts, TensorPiece

Tensors = Mapping[str, Mapping[str, "Tensor | TensorPiece"]]
Compare = Callable[[Path, Mapping[str, str], str, type[CheckpointError]], None]
"""`check_files`, or a version of it for several ranks."""

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_INSTEAD = "an older checkpoint is used, or the stage starts again"
_STEP_FOLDER = re.compile(r"step_(\d+)")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, and whose files match it."""

    folder: Path
    step: int
    state: dict[str, Any]
    """State passed to `save` with the tensors: counters, cursor positions, generator states. JSON."""
    compared: dict[str, tuple[int, ...]]
    """File name without suffix -> state of the file when it was compared."""

    def load(self, name: str) -> TensorParts:
        """Return the tensors saved under `name`, by any ranks. Each is read on first use. Raises
        `CheckpointError` if there are none, a part of one is missing, or a file has changed.
        """
        from opd.storage.tensors import TensorParts

        files = [file for file in sorted(self.compared) if _PART.sub("", file) == name]
        if not files:
            names = ", ".join(sorted({_PART.sub("", file) for file in self.compared})) or "none"
            raise CheckpointError(f"{self.folder} has no tensors {name!r}; it has {names}")
        for file in files:
            path = self.folder / f"{file}.safetensors"
            if file_state(path) != self.compared[file]:
                raise CheckpointError(
                    f"{path} is corrupt: it has changed since it was compared; restore it or use an older"
                    " checkpoint"
                )
        return TensorParts(self.folder / f"{file}.safetensors" for file in files)


class CheckpointStore:
    """Saves every so many steps, keeps the newest `keep`, and finds the newest complete one after a crash."""

    def __init__(self, folder: str | Path, keep: int = 2, owner: str = "") -> None:
        """`owner`: the run and the stage. `latest` skips checkpoints of another owner."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least one checkpoint")
        self.folder = Path(folder)
        self.keep = keep
        self.owner = owner

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Write `tensors` (one file per entry) and `state` (JSON) as the checkpoint of `step`.

        Replaces a checkpoint of the same step. Afterwards drops all but the newest `keep` up to `step`, and
        those of later steps, which a run resumed from before them has abandoned. Raises `CheckpointError` if
        something cannot be written. The other checkpoints are then untouched.
        """
        from opd.storage.tensors import write_files

        with self.draft_checkpoint(step) as draft:
            self.seal_checkpoint(draft, step, write_files(draft, tensors), state)

    @contextlib.contextmanager
    def draft_checkpoint(self, step: int) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of `step` when the block ends, see `save`. Every rank
        may `write_files` into it. One rank makes it, and writes its `seal` when all have finished.
        """
        final = self.folder / f"step_{step}"
        try:
            with atomic_folder(final, replace=True) as folder:
                yield folder
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                str(from_system(error) or f"{final} cannot be written ({error})")
            ) from error
        saved = sorted(self._saved_steps(), reverse=True)
        retained = [other for other in saved if other <= step][: self.keep]
        for other in saved:
            if other not in retained:
                shutil.rmtree(self.folder / f"step_{other}", ignore_errors=True)

    def seal_checkpoint(
        self, draft: Path, step: int, digests: Mapping[str, str], state: dict[str, Any]
    ) -> None:
        """Write the manifest of a checkpoint whose files, by name without suffix, have these `digests`."""
        document = {"step": step, "owner": self.owner, "state": state, "files": dict(digests)}
        try:
            write_sealed(draft / _MANIFEST, document)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {self.folder / f'step_{step}'} is not JSON ({error}); keep only finite"
                " numbers, strings, lists and dicts"
            ) from error

    def latest(self, compare: Compare = check_files) -> Checkpoint | None:
        """Return the newest complete checkpoint that matches its checksums, by `compare`, or None. A skipped
        one, corrupt or of another owner, is logged.
        """
        for step in sorted(self._saved_steps(), reverse=True):
            folder = self.folder / f"step_{step}"
            if not (folder / _MANIFEST).exists():
                continue  # incomplete: its manifest, written last, is missing
            try:
                return _read_checkpoint(folder, step, self.owner, compare)
            except CheckpointError as error:
                _log.warning("skipping checkpoint %s: %s", folder, error)
        return None

    def _saved_steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = [_STEP_FOLDER.fullmatch(path.name) for path in self.folder.iterdir()]
        return [int(match.group(1)) for match in matches if match]


def _read_checkpoint(folder: Path, step: int, owner: str, compare: Compare) -> Checkpoint:
    """Return the checkpoint in `folder`, with every digest compared. Raises `CheckpointError`."""
    path = folder / _MANIFEST
    manifest = read_sealed(path, _INSTEAD, CheckpointError)
    try:
        saved_step, saved_owner = manifest["step"], manifest["owner"]
        state, digests = dict(manifest["state"]), dict(manifest["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no manifest ({error!r}); {_INSTEAD}") from error
    if saved_step != step:
        raise CheckpointError(f"{path} is of step {saved_step}, not of step {step}; {_INSTEAD}")
    if saved_owner != owner:
        raise CheckpointError(f"{path} is of another run or stage ({saved_owner}); {_INSTEAD}")
    files = {f"{name}.safetensors": digest for name, digest in digests.items()}
    states = {name: file_state(folder / f"{name}.safetensors") for name in digests if is_file_name(name)}
    compare(folder, files, _INSTEAD, CheckpointError)
    return Checkpoint(folder, step, state, states)
