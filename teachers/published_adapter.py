"""Adapters in an object store: small, and worth nothing without the published base they name.

    URL/adapter.json                     the content, and the base's URL and digest; written last
    URL/VERSION/adapter.safetensors      `A` and `B` of every adapted layer
    URL/VERSION/adapter.json             the same as above, for those who want this version

The base is named by the URL of one published version and by its digest, so that neither a newer version under
that URL nor another model can take its place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
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
from opd.models.peft_folder import adapter_pairs, merge_weight, shares_head
from opd.models.quantisation import quantisation_of
from opd.redact import redact
from opd.storage.manifest import HEAD_WEIGHT
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.published import PublishedModel
from opd.untrusted import read_document, safe_excerpt

FORMAT, FORMAT_VERSION = "opd-published-adapter", 1
DESCRIPTION, WEIGHTS = "adapter.json", "adapter.safetensors"
_MAX_BYTES, _MAX_URL = 64 * 2**10, 4096
"""Limits in bytes of the description, and of the URL of a base."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """One teacher's difference from a published base."""

    base: str
    """URL of the base's published version."""
    digest: str
    """sha256, hex: identity of base, adapter and scaling."""
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

    def require_base(self, digest: str) -> None:
        """Raise `StorageError` unless `digest`, of the model published at `base`, is `base_digest`."""
        if digest != self.base_digest:
            raise StorageError(
                f"{self.base} has digest {digest[:12]} and the adapter published for it was trained on"
                f" {self.base_digest[:12]}; publish the adapter again."
            )

    def merge(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` of the base. Adapted ones are new tensors with their adapter merged."""
        merged = dict(tensors)
        for name in self.pairs.keys() & tensors.keys():
            base = tensors[name]
            a, b = (half.to(base.device) for half in self.pairs[name])
            merged[name] = merge_weight(base, a, b, self.scaling)
        return merged

    @classmethod
    def open(cls, url: str | Path, *, options: StoreOptions | None = None) -> PublishedAdapter:
        """Read the adapter at `url`, or the version whose own folder it is.

        Raises `StorageError` if there is none, or if it is incomplete or corrupt.
        """
        with ObjectStore.open(url, options=options) as store:
            described = _read_description(store)
            path = f"{described['digest'][:16]}/{WEIGHTS}"
            path = path if store.exists(path) else WEIGHTS
            data = store.get(path)
            if hashlib.sha256(data).hexdigest() != described["weights"]["sha256"]:
                raise StorageError(
                    f"{store.object_address(path)} is corrupt: its sha256 differs; publish the adapter again."
                )
            try:
                pairs = adapter_pairs(safetensors.torch.load(data).items())
            except SafetensorError as error:
                raise StorageError(
                    f"{store.object_address(path)} is no safetensors file; publish the adapter again."
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
    """Return whether adapters were published at `url`."""
    with ObjectStore.open(url) as store:
        return store.exists(DESCRIPTION)


def publish_adapter(
    folder: str | Path, url: str | Path, base_url: str, *, options: StoreOptions | None = None
) -> str:
    """Publish the adapters stored in the merged model's `folder` below `url`. Return the version's name.

    `base_url` is the published version of their base. Raises `CheckpointError` if the base on disk is no
    longer the one they were trained on, or the adapters name tensors that the published base does not have.
    """
    base_url = str(base_url)
    if redact(base_url) != base_url:
        raise StorageError(
            f"the adapters in {folder} would be published with the password in the URL of their base,"
            f" {redact(base_url)}; give credentials by the environment."
        )
    if not _is_base_url(base_url, str(url)):
        raise StorageError(
            f"a base at {safe_excerpt(base_url)!r} is of another kind of store than {url}; choose one."
        )
    adapter = read_adapter(folder)
    check_folder(adapter.base)
    if weight_digests(adapter.base) != adapter.base_files:
        raise CheckpointError(
            f"the base {adapter.base} has changed since the adapters in {folder} were trained on it; publish"
            " the merged model instead."
        )
    with PublishedModel.open(base_url, options=options) as base:
        base_digest = base.manifest.digest
        tied = base.manifest.head.tied
        shapes, form = base.manifest.tensor_shapes, quantisation_of(base.manifest.config, base_url)
        if form is not None:
            shapes, _ = form.plain_form(shapes, base.manifest.tensor_formats, base_url)
    for name, (a, b) in adapter.pairs.items():
        if tied and name == HEAD_WEIGHT:
            raise shares_head(folder, name)
        if shapes.get(name) != (b.shape[0], a.shape[1]):
            raise CheckpointError(f"{folder} adapts {name}, which {base_url} does not have in that shape.")
    flat = {
        f"{name.removesuffix('.weight')}.lora_{part}.weight": tensor
        for name, pair in adapter.pairs.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    data = safetensors.torch.save(flat)
    sha256 = hashlib.sha256(data).hexdigest()
    digest = _adapter_digest(base_digest, adapter.scaling, sha256)
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


def _read_description(store: ObjectStore) -> dict[str, Any]:
    broken = f"{store.object_address(DESCRIPTION)} is incomplete or corrupt; publish the adapter again."
    data = store.get(DESCRIPTION, most=_MAX_BYTES)
    try:
        document = read_document(data, _MAX_BYTES)
        if (document["format"], document["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise StorageError(
                f"{store.object_address(DESCRIPTION)} is of a form this release does not read; update opd."
            )
        base, scaling, sha256 = document["base"], document["scaling"], document["weights"]["sha256"]
        digests = (base["digest"], sha256, document["digest"])
        if not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in digests):
            raise StorageError(broken)
        if not isinstance(scaling, float) or not math.isfinite(scaling):
            raise StorageError(broken)
        if _adapter_digest(base["digest"], scaling, sha256) != document["digest"]:
            raise StorageError(broken)
        if document["weights"]["path"] != f"{document['digest'][:16]}/{WEIGHTS}":
            raise StorageError(broken)
        if not _is_base_url(base["url"], store.url):
            raise StorageError(
                f"{store.object_address(DESCRIPTION)} names the base {safe_excerpt(base['url'])!r}, which is"
                " no path and no URL of the kind of its own store; publish the adapter again."
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(broken) from error
    return document


def _adapter_digest(base_digest: str, scaling: float, sha256: str) -> str:
    """Return sha256, hex, of base, scaling and weights."""
    return hashlib.sha256(json.dumps([base_digest, scaling, sha256]).encode()).hexdigest()


def _is_base_url(url: object, store_url: str) -> bool:
    """Return whether `url` may be a base: a folder, or a store of the adapter's kind. So an adapter makes
    nobody open another kind of store.
    """
    if not isinstance(url, str) or not 0 < len(url) <= _MAX_URL or not url.isprintable():
        return False
    scheme, separator, _ = url.partition("://")
    return not separator or scheme in ("file", "s3", store_url.partition("://")[0])
