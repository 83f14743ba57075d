"""Ten teachers in a store that is no folder, read by two ranks of one node, with and without its copies."""

import json

import pytest
import ranks
import tiny
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from tiny_published import publish

from opd.storage.published import PublishedModel

NAMES = [f"teacher{number}" for number in range(10)]
STEPS = 3


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Name -> where it is published, in 2 shards, as objects that fsspec reads."""
    folder = tmp_path_factory.mktemp("teachers")
    found = {}
    for seed, name in enumerate(NAMES):
        _, path = publish(tiny.model(seed=seed), folder / name, shards=2)
        found[name] = f"local://{path}"
    return found


def run(folder, urls, **options) -> None:
    """One task, `whole`, of two ranks, which both have samples of six of the teachers."""
    folder.mkdir()
    owner = [0, 1] * 5 + [1, 0] * 3
    task = {"name": "whole", "urls": urls, "domains": NAMES, "owner": owner, "steps": STEPS}
    (folder / "tasks.json").write_text(json.dumps([task | {"prefetch_bytes": 20_000} | options]))
    run_ranks(ranks.__file__, 2, folder)


def results(folder) -> list[dict]:
    return [json.loads((folder / f"whole-{rank}.json").read_text()) for rank in range(2)]


def gradients(folder) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"whole-{rank}.safetensors") for rank in range(2)]


def same(one, other) -> bool:
    """Whether both ranks have the same gradients, to the bit."""
    pairs = list(zip(one, other, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


@pytest.fixture(scope="module")
def without(urls, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without") / "run"
    run(folder, urls)
    return folder


@pytest.mark.slow
def test_after_the_first_step_nothing_comes_from_the_store(urls, without, tmp_path):
    run(tmp_path / "run", urls, copies=str(tmp_path / "copies"))
    assert same(gradients(tmp_path / "run"), gradients(without))
    whole = 0
    for url in urls.values():
        with PublishedModel.open(url) as model:
            assert model.manifest.head.tied  # its bytes are the embedding's
            whole += model.manifest.nbytes - model.manifest.units["head"].nbytes
    first = 0
    for result, plain in zip(results(tmp_path / "run"), results(without), strict=True):
        (opened, _), *steps = result["came"]
        first += steps[0][0] - opened
        assert [read for read, _ in steps] == [steps[0][0]] * STEPS
        assert [cached for _, cached in steps] == sorted({cached for _, cached in steps})
        assert result["counters"]["bytes_read"] == steps[-1][0]
        assert result["counters"]["cached_bytes"] >= steps[-1][1] > 0  # and what was read ahead
        assert plain["came"][-1][0] - plain["came"][0][0] > 2 * (steps[-1][0] - opened)
        assert plain["counters"]["cached_bytes"] == 0
    assert first == whole


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_fills_leaves_copies_that_are_right(urls, without, tmp_path):
    copies = str(tmp_path / "copies")
    with pytest.raises(AssertionError, match=r"rank-1\.log \(-9\)"):
        run(tmp_path / "killed", urls, copies=copies, killed=1)
    assert not (tmp_path / "killed" / "whole-1.json").exists()
    run(tmp_path / "run", urls, copies=copies)
    assert same(gradients(tmp_path / "run"), gradients(without))
