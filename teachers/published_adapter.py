"""Adapters in an object store: small, and worth nothing without the published base they name.

    URL/adapter.json                     what is here, and where and what the base is; written last
    URL/VERSION/adapter.safetensors      `A` and `B` of every adapted layer
    URL/VERSION/adapter.json             the same as above, for those who want this version

The base is named by the URL of one published version and by its digest, so that neither a newer version under
that URL nor another model can take its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from opd.errors import CheckpointError, StorageError
from opd.models.adapters import read_adapter, weight_digests
from opd.models.hf_folder import check_folder
from opd.models.lora import adapter_pairs, merged
from opd.storage.object_store import ObjectStore
from opd.storage.published import PublishedModel
from opd.storage.store_faults import StoreOptions

FORMAT, FORMAT_VERSION = "opd-published-adapter", 1
DESCRIPTION, WEIGHTS = "adapter.json", "adapter.safetensors"


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """One teacher's difference from a published base."""

    base: str
    """URL of the base's published version."""
    digest: str
    """sha256, hex: identity of base, adapter and scaling together."""
    base_digest: str
    scaling: float
    pairs: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)
    """`A` `[r, in]` and `B` `[out, r]` by the name of the weight they are added to."""
    bytes_read: int
    """Bytes received from its store."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())

    def merge(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` of the base, those that are adapted as new tensors with their adapter merged."""
        found = dict(tensors)
        for name in self.pairs.keys() & tensors.keys():
            base = tensors[name]
            a, b = (half.to(base.device) for half in self.pairs[name])
            found[name] = merged(base, a, b, self.scaling)
        return found

    @classmethod
    def open(cls, url: str | Path, *, options: StoreOptions | None = None) -> PublishedAdapter:
        """Read the adapter at `url`, or the version whose own folder it is.

        Raises `StorageError` if there is none, or if it is incomplete or corrupt.
        """
        with ObjectStore.open(url, options=options) as store:
            described = _described(store)
            path = described["weights"]["path"]
            path = path if store.exists(path) else path.rpartition("/")[2]
            data = store.get(path)
            if hashlib.sha256(data).hexdigest() != described["weights"]["sha256"]:
                raise StorageError(
                    f"{store.name(path)} is corrupt: its sha256 differs; publish the adapter again."
                )
            try:
                pairs = adapter_pairs(safetensors.torch.load(data).items())
            except SafetensorError as error:
                raise StorageError(
                    f"{store.name(path)} is no safetensors file; publish the adapter again."
                ) from error
            base = described["base"]
            return cls(
                base["url"],
                described["digest"],
                base["digest"],
                described["scaling"],
                pairs,
                store.bytes_read,
            )


def is_adapter(url: str | Path) -> bool:
    """Whether adapters were published at `url`."""
    with ObjectStore.open(url) as store:
        return store.exists(DESCRIPTION)


def publish_adapter(
    folder: str | Path, url: str | Path, base_url: str, *, options: StoreOptions | None = None
) -> str:
    """Publish the adapters kept in the merged model's `folder` below `url`; returns the version's name.

    `base_url` is the published version of their base. Raises `CheckpointError` if the base on disk is no
    longer the one they were trained on, or the adapters name tensors that the published base does not have.
    """
    adapter = read_adapter(folder)
    check_folder(adapter.base)
    if weight_digests(adapter.base) != adapter.base_files:
        raise CheckpointError(
            f"the base {adapter.base} has changed since the adapters in {folder} were trained on it; publish"
            " the merged model instead."
        )
    with PublishedModel.open(base_url, options=options) as base:
        base_digest = base.manifest.digest
        known = {name: t.shape for unit in base.manifest.units.values() for name, t in unit.tensors.items()}
    for name, (a, b) in adapter.pairs.items():
        if known.get(name) != (b.shape[0], a.shape[1]):
            raise CheckpointError(f"{folder} adapts {name}, which {base_url} does not have in that shape.")
    flat = {
        f"{name.removesuffix('.weight')}.lora_{part}.weight": tensor
        for name, pair in adapter.pairs.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    data = safetensors.torch.save(flat)
    sha256 = hashlib.sha256(data).hexdigest()
    identity = json.dumps([base_digest, adapter.scaling, sha256])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    version = digest[:16]
    described = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": digest,
        "base": {"url": base_url, "digest": base_digest},
        "scaling": adapter.scaling,
        "weights": {"path": f"{version}/{WEIGHTS}", "sha256": sha256},
    }
    document = (json.dumps(described, indent=2) + "\n").encode()
    with ObjectStore.open(url, options=options) as store:
        store.put(f"{version}/{WEIGHTS}", data)
        store.put(f"{version}/{DESCRIPTION}", document)
        store.put(DESCRIPTION, document)
    return version


def _described(store: ObjectStore) -> dict[str, Any]:
    broken = f"{store.name(DESCRIPTION)} is incomplete or corrupt; publish the adapter again."
    try:
        found = json.loads(store.get(DESCRIPTION))
        if (found["format"], found["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise StorageError(
                f"{store.name(DESCRIPTION)} is of a form this release does not read; update opd."
            )
        parts = (found["base"]["digest"], float(found["scaling"]), found["weights"]["sha256"])
        if hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest() != found["digest"]:
            raise StorageError(broken)
        _ = found["base"]["url"], found["weights"]["path"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(broken) from error
    return found
