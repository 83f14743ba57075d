"""Published teachers as fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

# This folder's own helpers: tiny_published and ranks.
import tiny_published


@pytest.fixture
def published(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """`published(name, shards=1, seed=0, **config)`: a tiny Llama as (checkpoint, published folder)."""

    def make(name: str, *, shards: int = 1, seed: int = 0, **config) -> tuple[Path, str]:
        return tiny_published.publish(tiny.model(seed=seed, **config), tmp_path / name, shards=shards)

    return make


@pytest.fixture(params=tiny_published.FAMILIES, scope="session")
def published_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(checkpoint, published folder) of a tiny model of each family, in 3 shards. Read-only."""
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_published.publish(tiny_published.family_model(request.param), folder, shards=3)
