"""What the tests of a node's copies share: published models in a store that is no folder, and readers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cached_rows import blobs
from checkpoints import copy_of, expected_bytes, write_checkpoint

from opd.storage.object_store import ObjectStore
from opd.storage.publish import ModelForm, publish
from opd.storage.published import PublishedModel
from opd.storage.shard_cache import ShardCache

SHARDS = 8
"""As many blocks as a unit has, and files."""


def published(folder: Path, name: str = "a", seed: int = 0, tied: bool = False) -> dict[str, bytes]:
    """Publish a model below `folder`, see `url_of`; the bytes of its tensors."""
    tensors = write_checkpoint(folder / f"model-{name}", hidden=128, vocabulary=700, tied=tied, seed=seed)
    with ObjectStore.open(folder / "store" / name) as store:
        publish(folder / f"model-{name}", store, shards=SHARDS, form=ModelForm(layers=2, tied=tied))
    return expected_bytes(tensors, tied)


def url_of(folder: Path, name: str = "a") -> str:
    """Of the same files as objects that fsspec reads, which every process of the node can."""
    return f"local://{folder}/store/{name}"


@contextmanager
def opened(folder: Path, name: str = "a", budget: int | None = None) -> Iterator[PublishedModel]:
    """The model, with the copies in `folder/copies/node`, as a process or a stage of its own has it."""
    cache = ShardCache(folder / "copies" / "node", budget)
    try:
        with PublishedModel.open(url_of(folder, name), cache=cache) as model:
            yield model
    finally:
        cache.close()


def read(folder: Path, name: str = "a", world: int = 1, budget: int | None = None) -> tuple[dict, int, int]:
    """The tensors' bytes, how many came from the store, and how many from the copies."""
    with opened(folder, name, budget) as model:
        before = model.bytes_read
        tensors = copy_of(model, world)
        return tensors, model.bytes_read - before, model.cached_bytes


def copies_of(folder: Path) -> list[Path]:
    """The files that hold the copies, the largest first."""
    return sorted(blobs(folder / "copies" / "node"), key=lambda path: -path.stat().st_size)
