"""Ring attention, in which no rank has all keys and values, against ranks that gather them."""

import json
from pathlib import Path

import pytest
import ring_ranks
from rank_processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank has compared."""
    folder = tmp_path_factory.mktemp("ring")
    run_ranks(str(Path(ring_ranks.__file__)), 1, folder, seconds=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ring_ranks.WORLD)]


@pytest.mark.parametrize("world", [2, 3, ring_ranks.WORLD])
@pytest.mark.parametrize("case", ring_ranks.CASES)
def test_the_ring_attends_as_ranks_with_all_keys_and_values_do(found, case, world):
    """Output and gradients in float32, of the largest entry of each; `blocks` is how far plain blocks are."""
    for rank in found[:world] if world == 3 else found:
        differences = rank[f"{case}-{world}"]
        assert differences.keys() == {"output", "query", "key", "value", "blocks"}
        assert max(differences.values()) <= 1e-5
