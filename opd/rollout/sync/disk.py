"""Weights by a folder: a version is there as a whole under its name, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opd.errors import RolloutError
from opd.foreign import is_file_name, shown
from opd.models.causal_lm import WeightsDigest
from opd.models.hf_folder import INDEX, read_object
from opd.rollout.sync.parcel import Parcel, Tell, Weights

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 1 << 30


class WeightFolder:
    """Hugging Face folders of successive versions below `root`; only the newest is kept.

    A version is written under another name and renamed when it is whole, so that nobody ever reads half of
    it; what a killed writer left behind is removed when the next one begins. Both ends of the transport.

    Args:
        root: On a disk that every receiver sees under the same path.
        model: A Hugging Face folder whose configuration and tokenizer are copied, for receivers that need
            more than tensors.
        shard_bytes: Files are closed when they have grown to this size: no more than that is in memory.
    """

    def __init__(
        self, root: str | Path, model: str | Path | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.root, self.model = Path(root).absolute(), None if model is None else Path(model)
        self.newest: Path | None = None
        self._shard_bytes = shard_bytes
        self._swept = False

    def write(self, weights: Weights, version: int) -> Path:
        """Write version `version` and forget the one before; returns its folder."""
        if not self._swept:
            self._sweep()
        folder, draft = self.root / f"version-{version}", self.root / f".version-{version}"
        for place in (draft, folder):  # of an attempt that failed
            shutil.rmtree(place, ignore_errors=True)
        draft.mkdir(parents=True)
        for file in self.model.iterdir() if self.model is not None else ():
            if file.suffix == ".json" and file.name != INDEX:
                shutil.copyfile(file, draft / file.name)
        _write_shards(draft, weights, self._shard_bytes)
        os.replace(draft, folder)
        older, self.newest = self.newest, folder
        if older is not None and older != folder:
            shutil.rmtree(older, ignore_errors=True)
        return folder

    def send(self, weights: Weights, version: int, tell: Tell) -> tuple[str, Sequence[str]]:
        """See `WeightSender`; the newest version stays, for a receiver that comes late."""
        digest = WeightsDigest()
        folder = self.write(digest.watch(weights), version)
        return digest.hex(), tell(Parcel("disk", version, {"folder": str(folder)}))()

    def receive(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReceiver`."""
        from safetensors import SafetensorError, safe_open

        folder = Path(parcel.where["folder"])
        try:
            placed = read_object(folder / INDEX).get("weight_map")
            if not isinstance(placed, dict) or not all(map(is_file_name, placed.values())):
                raise RolloutError(f"{folder / INDEX} names no files beside it; send the weights again.")
            for file in dict.fromkeys(placed.values()):
                with safe_open(folder / file, framework="pt") as opened:
                    for name in (name for name, where in placed.items() if where == file):
                        yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"version {parcel.version} cannot be read from {folder} ({_cause(error)}); trainer and"
                " engines must see one file system under the same path."
            ) from None

    def close(self) -> None:
        """Remove every version."""
        self._sweep()
        self.newest = None

    def _sweep(self) -> None:
        """Remove what this or an earlier sender has left."""
        for found in (*self.root.glob("version-*"), *self.root.glob(".version-*")):
            shutil.rmtree(found, ignore_errors=True)
        self._swept = True


def _cause(error: Exception) -> str:
    return shown(getattr(error, "strerror", None) or error, 300)


def _write_shards(folder: Path, weights: Weights, limit: int) -> None:
    from safetensors.torch import save_file

    placed: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    count = size = total = 0

    def flush() -> None:
        nonlocal count, size
        file = f"model-{count:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(shard, file))
        shard.clear()
        count, size = count + 1, 0

    for name, tensor in weights:
        kept = tensor.detach().to("cpu", copy=True).contiguous()
        shard[name] = kept
        size, total = size + kept.nbytes, total + kept.nbytes
        if size >= limit:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index), "utf-8")
