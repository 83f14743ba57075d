"""A small published model, and ways to change it as somebody would who may write to the store."""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import write_checkpoint

from opd.storage.manifest import manifest_digest, seal_document
from opd.storage.object_store import ObjectStore
from opd.storage.publish import ModelForm, publish

FORM = ModelForm(scale=1.0, softcap=None, tied=False, layers=2, fingerprint={"vocab_size": 50})

NAMES = [
    "../escaped", "../../escaped", "../../../../../../../../tmp/escaped", "/tmp/escaped", "/etc/hostname",
    "a/../../escaped", "files/../../escaped", "./tokenizer.json", "sub/tokenizer.json", "a//b", "a/", "/",
    "..", ".", "", " ", "...", ".hidden", "..\\escaped", "C:\\escaped", "\\\\host\\share", "a\\b",
    "tokenizer.json\0.txt", "\0", "a\nb", "a\rb", "\x1b[2Jtokenizer.json", "a" * 256, "a" * 5000, "é" * 130,
    "CON", "con.json", "NUL", "aux.txt", "COM1", "LPT9.json", "tokenizer.json.", "tokenizer.json ",
    "Tokenizer.json", "TOKENIZER.JSON", "config.json", "model.safetensors", "model.safetensors.index.json",
    "embedding.safetensors", "manifest.json", "latest", "adapter_config.json", "modeling_x.py", "~/x",
    "$HOME/x", "%2e%2e%2fescaped", "tokenizer.json?x=1", "tokenizer.json#x", "file:///tmp/escaped",
    "s3://other/key", "\u202enosj.rekenizer", "\uff54okenizer.json", "-rf", "a:b", "a*b", "\ud800",
]  # fmt: skip
"""What might become a path, and must not."""

SIZES: list[Any] = [
    -1, 0, 1, 63, 2**31, 2**50, 2**63, 2**64, 10**30, 10**400, -(2**63), 1.5, 1e9, 1e308, True, False, None,
    "2", "", [], [1], {}, {"a": 1},
]  # fmt: skip
"""What might become a size, a count or an offset."""


def made(folder: Path, shards: int = 2) -> dict[str, Any]:
    """Publish a small model in `folder`; its manifest as JSON, without its seal."""
    write_checkpoint(folder / "checkpoint")
    with ObjectStore.open(folder / "store") as store:
        publish(folder / "checkpoint", store, shards=shards, form=FORM)
    (path,) = folder.glob("store/*/manifest.json")
    document = json.loads(path.read_bytes())
    del document["sha256"]
    return document


def resealed(document: dict[str, Any], *, digest: bool) -> bytes:
    """The manifest as a careful attacker writes it: sealed, and with the digest of its new content."""
    if digest:
        # What is very broken has none.
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            document = document | {"digest": manifest_digest(document)}
    return seal_document(document)


def plant(document: dict[str, Any], manifest: bytes, original: Path, store: Path) -> None:
    """Write a store that fits the manifest as well as it can: version, `latest`, files of `original`."""
    (source,) = original.glob("*/manifest.json")
    digest = str(json.loads(manifest).get("digest")) if manifest.startswith(b"{") else document["digest"]
    version = f"{digest[:16]}-{document['shards']}"
    shutil.copytree(source.parent, store / version)
    (store / version / "manifest.json").write_bytes(manifest)
    pointer = {
        "format": document["format"],
        "format_version": document["format_version"],
        "version": version,
        "digest": digest,
    }
    (store / "latest").write_bytes(seal_document(pointer))


def changed(document: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A copy of `document` after `change`."""
    copied = copy.deepcopy(document)
    change(copied)
    return copied


def at(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    """Put `to` at `path`."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def renamed(*path: str | int, to: str) -> Callable[[dict[str, Any]], None]:
    """Give the entry at `path` the name `to`."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[to] = place.pop(path[-1])

    return change
