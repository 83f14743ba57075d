"""New weights for an engine: pause, flush, push, verify, resume; and folders of them for others."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from opd.errors import RolloutError
from opd.models.causal_lm import DigestedTensors, WeightsDigest
from opd.models.hf_folder import INDEX
from opd.models.stored_form import StoredForm
from opd.protocols import RolloutEngine
from opd.storage.files import permit_as

Weights = Iterable[tuple[str, "Tensor"]]
"""Named tensors, iterated once."""
SHARD_BYTES = 1 << 30


def sync_weights(engine: RolloutEngine, weights: Weights, version: int) -> str:
    """Give `engine` the `weights` as `version` and return their quick digest.

    The trainer's own tensors are passed on without a copy. Raises `RolloutError` if the engine holds other
    weights than were sent, and the engine's own errors. It stays paused then, so that no token is sampled
    with unknown weights.
    """
    pushed = WeightsDigest(quick=True)
    engine.pause()
    engine.flush()
    digest = engine.update_weights(DigestedTensors(weights, pushed), version)
    if digest != pushed.hex_digest():
        raise RolloutError(
            f"after the push of version {version} the engine holds other weights than the trainer; restart"
            " with --resume."
        )
    engine.resume()
    return digest


def tensors_of_files(weights: Weights, form: StoredForm, digest: WeightsDigest) -> Weights:
    """Yield `weights` of a module as its files hold them, which is how servers read them: one tensor an
    expert. `digest` receives the module's weights, put together again from what was yielded.

    Raises `RolloutError` if they cannot be put together.
    """
    for name, tensor in weights:
        parts = form.of_files(name, tensor)
        yield from parts.items()
        whole = form.of_module(parts)
        if whole.keys() != {name}:
            raise RolloutError(
                f"{name} cannot be sent to servers by the names of its files ({min(parts)}); set"
                " rollout.engine to {type: torch}."
            )
        digest.add(name, whole[name])


def bucket_tensors(weights: Weights, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield groups of consecutive tensors of at most `nbytes` in total. A larger tensor is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class WeightFolder:
    """Hugging Face folders of successive versions below `root`. The newest is kept, and those being read.

    A version is written under another name and renamed when it is complete, so that no reader sees half of
    it. Leftovers of a killed writer are removed when the next one begins.

    Args:
        root: On a disk that every receiver sees under the same path.
        model: A Hugging Face folder whose configuration and tokenizer are copied, for receivers that need
            more than tensors.
        shard_bytes: Files are closed when they have grown to this size, which bounds the memory.
    """

    behind: ClassVar[int] = 0
    """Number of versions before the newest that are kept too."""

    def __init__(
        self, root: str | Path, model: str | Path | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.root, self.model = Path(root).absolute(), None if model is None else Path(model)
        self._versions: deque[Path] = deque()
        """The folders that are kept, oldest first."""
        self._shard_bytes = shard_bytes
        self._swept = False
        self._readers: Counter[Path] = Counter()
        self._lock = threading.Lock()

    def write_version(self, weights: Weights, version: int) -> Path:
        """Write version `version`, remove older ones without readers, and return its folder."""
        if not self._swept:
            self._remove_leftovers()
        folder, draft = self.root / f"version-{version}", self.root / f".version-{version}"
        with self._lock:
            if self._readers[folder]:
                raise RolloutError(f"{folder} is still being read; give new weights a version of their own.")
        for leftover in (draft, folder):  # of a failed attempt
            shutil.rmtree(leftover, ignore_errors=True)
        draft.mkdir(parents=True)
        self._write_files(draft, weights)
        os.replace(draft, folder)
        with self._lock:
            if folder in self._versions:
                self._versions.remove(folder)
            self._versions.append(folder)
            while len(self._versions) > 1 + self.behind:
                older = self._versions.popleft()
                if not self._readers[older]:
                    shutil.rmtree(older, ignore_errors=True)
        return folder

    @property
    def newest_folder(self) -> Path | None:
        """The version written last."""
        return self._versions[-1] if self._versions else None

    def _write_files(self, folder: Path, weights: Weights) -> None:
        """Write the receivers' files into an empty folder."""
        for file in self.model.iterdir() if self.model is not None else ():
            if file.suffix == ".json" and file.name != INDEX:
                shutil.copyfile(file, folder / file.name)
        from safetensors.torch import save_file

        files: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        count = size = total = 0

        def flush_shard() -> None:
            nonlocal count, size
            file = f"model-{count:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, file))
            shard.clear()
            count, size = count + 1, 0

        for name, tensor in weights:
            shard[name] = copy = tensor.detach().to("cpu", copy=True).contiguous()
            size, total = size + copy.nbytes, total + copy.nbytes
            if size >= self._shard_bytes:
                flush_shard()
        if shard:
            flush_shard()
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index), "utf-8")
        permit_as(folder / INDEX, folder)  # a server may be another user's

    @contextmanager
    def lease_version(self, folder: Path) -> Iterator[bool]:
        """Keep a version while the block runs. Yields True if it is there."""
        with self._lock:
            exists = folder == self.newest_folder or self._readers[folder] > 0
            self._readers[folder] += exists
        try:
            yield exists
        finally:
            with self._lock:
                self._readers[folder] -= exists
                if not self._readers[folder]:
                    del self._readers[folder]
                    if folder not in self._versions:
                        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove every version."""
        self._remove_leftovers()
        self._versions.clear()

    def _remove_leftovers(self) -> None:
        """Remove leftovers of any sender. Raises `RolloutError` for a link, which may lead elsewhere."""
        if self.root.is_symlink():
            raise RolloutError(f"{self.root} is a link, and new weights need a folder; remove it.")
        for leftover in (*self.root.glob("version-*"), *self.root.glob(".version-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        self._swept = True
