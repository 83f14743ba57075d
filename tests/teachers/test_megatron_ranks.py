"""Megatron-Core with tensor parallel size 2, in two gloo processes: the numbers of one process."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file

pytest.importorskip("megatron.core", reason="needs the extra megatron", exc_type=ImportError)

import megatron_models as models
import megatron_rank
from tiny_published import publish

from opd.kernels.ops import linear_kl
from opd.storage.published import PublishedModel
from opd.teachers.local_teacher import LocalTeacher

pytestmark = pytest.mark.slow

V = megatron_rank.VOCABULARY


def run(folder: Path, tasks: list[dict]) -> None:
    """Start two ranks on `tasks` and wait until they have ended well."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(megatron_rank.__file__, 2, folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """family -> (model, checkpoint, published in 2 shards), and one more Qwen3."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: models.model(name) for name in models.FAMILIES}
    made["other"] = models.model("qwen3", seed=4)
    return {name: (model, *publish(model, folder / name, shards=2)) for name, model in made.items()}


@pytest.fixture(scope="module")
def two_ranks(saved, tmp_path_factory):
    """The folder in which two ranks wrote what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    broken = shutil.copytree(saved["llama"][2], folder / "broken")
    shard = next(broken.rglob("shard-00001-of-00002.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    tasks = [
        {"name": family, "sources": {"t": str(saved[family][1 + i % 2])}, "keep": i % 3 == 0}
        for i, family in enumerate(models.FAMILIES)
    ]
    turns = {"qwen3": saved["qwen3"][2], "other": saved["other"][2]}
    tasks += [
        {"name": "turns", "sources": turns, "keep": False},
        {"name": "kept", "sources": turns, "keep": True},
        {"name": "broken", "sources": [{"t": saved["llama"][2]}, {"t": str(broken)}], "keep": False},
        {"name": "after", "sources": {"t": saved["llama"][2]}, "keep": False},
    ]
    run(folder, tasks)
    return folder


def of_ranks(folder: Path, name: str) -> list[dict]:
    return [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)]


def reports(folder: Path, name: str) -> list[dict]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_logits_are_those_of_transformers_on_both_ranks(saved, two_ranks, family):
    expected = models.transformers_logits(saved[family][0])[:, :V]
    for found in of_ranks(two_ranks, family):
        assert (found["t/logits"] - expected).abs().max() <= 1e-4
    first, second = of_ranks(two_ranks, family)
    assert torch.equal(first["t/rows"], second["t/rows"])


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3_moe"])
def test_the_vocabulary_parallel_kl_is_that_of_whole_heads(saved, two_ranks, family):
    teacher = LocalTeacher("t", saved[family][1], vocabulary=V)
    student = tiny.model(seed=77, hidden_size=32)
    input_ids, position_ids, cu_seqlens, at = models.packed()
    hidden = student.hidden(input_ids, position_ids, cu_seqlens)[at].detach().requires_grad_()
    rows = teacher.score(tiny.samples(models.LENGTHS)).rows
    own = student.head(V)
    values = linear_kl(hidden, own, rows, teacher.load_head(), temperature=megatron_rank.TEMPERATURE)
    values.sum().backward()
    ranks = of_ranks(two_ranks, family)
    for found in ranks:
        torch.testing.assert_close(found["t/kl"], values.detach(), atol=1e-4, rtol=0)
        torch.testing.assert_close(found["t/grad_hidden"], hidden.grad, atol=1e-5, rtol=1e-4)
    head = torch.cat([found["t/grad_head"] for found in ranks])
    assert [len(found["t/grad_head"]) for found in ranks] == [8, 5]  # of 15 rows, padded to 16
    torch.testing.assert_close(head, own.weight.grad[:V], atol=1e-4, rtol=1e-3)


def test_two_teachers_take_turns_and_every_byte_is_read_by_one_rank(saved, two_ranks):
    for name, keep in (("turns", False), ("kept", True)):
        report = reports(two_ranks, name)
        assert [rank["loads"] for rank in report] == [4, 4]
        for teacher in ("qwen3", "other"):
            with PublishedModel.open(saved[teacher][2]) as published:
                units = published.manifest.units
            body = sum(unit.nbytes for unit in units.values() if unit.name != "head")
            # Two swaps, and the head twice each time; or everything once.
            expected = body + units["head"].nbytes if keep else 2 * body + 4 * units["head"].nbytes
            assert sum(rank["read"][teacher] for rank in report) == expected
            assert max(rank["read"][teacher] for rank in report) < 0.6 * expected
    for one, other in zip(of_ranks(two_ranks, "turns"), of_ranks(two_ranks, "kept"), strict=True):
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    expected = models.transformers_logits(saved["other"][0])[:, :V]
    assert (of_ranks(two_ranks, "turns")[0]["other/logits"] - expected).abs().max() <= 1e-4


def test_a_rank_that_cannot_read_stops_both_and_the_next_teacher_is_read(two_ranks):
    healthy, failed = reports(two_ranks, "broken")
    assert failed["error"] == "StorageError"
    assert "corrupt" in failed["message"]
    assert healthy["error"] == "TeacherRanksError"
    assert "rank 1 could not read" in healthy["message"]
    assert all("error" not in report for report in reports(two_ranks, "after"))
