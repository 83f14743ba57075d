"""A merge of ten teachers published on a real S3 server, read by two ranks, against all of them in memory."""

import json
from pathlib import Path

import merge_ranks
import pytest
import torch
from attempts import run_only
from rank_processes import run_ranks
from recipes import tiny_recipe, write_recipe
from safetensors.torch import load_file
from seaweedfs import aws_environment

from opd.pipelines.stages.publishing import publish_checkpoint
from opd.pipelines.stages.supervised import new_base
from opd.storage.published import PublishedModel

pytestmark = pytest.mark.slow  # two processes beside this one, and seven merges
STEPS, PROMPTS = 3, 2
NAMES = [f"domain{i}" for i in range(10)]
SETTINGS = {
    "domains": {
        name: {"source": "procedural:sort", "params": {"digits": 3 + i % 2}, "prompts": 60}
        for i, name in enumerate(NAMES)
    },
    "base": None,
    "distill": {"steps": STEPS, "prompts_per_domain": PROMPTS, "samples_per_prompt": 2},
}


@pytest.fixture(scope="module")
def merges(s3, tmp_path_factory):
    """The folder of a merge with everything in memory, `loaded`, and of the merges of two ranks."""
    folder = tmp_path_factory.mktemp("merges")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(s3.endpoint).items():
            patch.setenv(name, value)
        new_base(tiny_recipe(**SETTINGS), folder / "base")
        for i, name in enumerate(NAMES):
            new_base(tiny_recipe(**SETTINGS, seed=i + 1), folder / name)
            publish_checkpoint(folder / name, f"s3://models/ten/{name}", shards=2)
        given = {
            "model": {"path": str(folder / "base")},
            "teachers": {name: {"path": f"s3://models/ten/{name}"} for name in NAMES},
        }
        write_recipe(folder / "recipe.yaml", **SETTINGS | given)
        local = SETTINGS | given | {"distill": SETTINGS["distill"] | {"teachers": "local"}}
        recipe = tiny_recipe(**local)
        run_only(recipe, folder / "loaded", "merge")
        run_ranks(merge_ranks.__file__, 2, folder)
        manifests = []
        for name in NAMES:
            with PublishedModel.open(f"s3://models/ten/{name}") as model:
                manifests.append(model.manifest)
    return folder, manifests


def student(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "merged" / "model.safetensors")


def done(run: Path) -> dict:
    return json.loads((run / "stages/merge/done.json").read_text())


def test_the_merge_changes_every_weight(merges):
    folder, _ = merges
    before, after = load_file(folder / "base" / "model.safetensors"), student(folder / "loaded")
    assert all(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["replicated", "copied"])
def test_reading_together_changes_no_bit_of_the_student(merges, mode, rank):
    folder, _ = merges
    assert done(folder / f"{mode}-{rank}")["digest"] == done(folder / "loaded")["digest"]
    counters = done(folder / f"{mode}-{rank}")["counters"]
    assert counters["head_loads"] == STEPS * len(NAMES)
    assert counters["resident_heads_peak"] == 1


def test_two_ranks_with_half_of_the_samples_each_end_with_the_same_student(merges):
    folder, _ = merges
    ours, theirs = (done(folder / f"parallel-{rank}")["digest"] for rank in range(2))
    assert ours == theirs
    found = student(folder / "parallel-0")  # transformers writes weights on the first rank alone
    for name, weight in student(folder / "loaded").items():
        torch.testing.assert_close(found[name], weight, atol=2e-6, rtol=1e-5)


def test_every_rank_reads_half_of_the_layers(merges):
    folder, (manifest, *_) = merges
    head = manifest.units["head"].nbytes
    body = manifest.nbytes - head
    for mode in ("replicated", "parallel"):
        for rank in range(2):
            counters = done(folder / f"{mode}-{rank}")["counters"]
            layers = counters["bytes_read"] - counters["head_loads"] * head
            # Beside the steps: manifests, and the first teacher's layers ahead of a step that never comes.
            assert layers >= STEPS * len(NAMES) * body / 2 * 0.99
            assert layers <= (STEPS * len(NAMES) * body / 2 + body / 2) * 1.01 + len(NAMES) * 60_000


def test_a_node_reads_each_teacher_once(merges):
    """After the first step nothing comes from the store."""
    folder, manifests = merges
    first = 0
    for rank in range(2):
        lines = (folder / f"copied-{rank}" / "stages/merge/metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if "bytes_read" in row]
        assert len(steps) == STEPS
        assert [row["bytes_read"] for row in steps[1:]] == [0] * (STEPS - 1)
        assert all(row["cached_bytes"] > 0 for row in steps[1:])
        first += steps[0]["bytes_read"]
    assert all(manifest.head.tied for manifest in manifests)  # its bytes are the embedding's
    weights = sum(manifest.nbytes - manifest.units["head"].nbytes for manifest in manifests)
    small = 2 * len(NAMES) * 60_000  # manifests, by each rank
    assert weights <= first <= weights + small
