"""Several processes read published teachers together: 1/N each, the same step, and no rank left waiting."""

import json
import shutil
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from quantised import quantise
from rank_processes import run_ranks
from safetensors.torch import load_file
from tiny_published import publish

from opd.errors import TeacherError
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.published import PublishedModel
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule

NAMES = ["a", "b", "c"]
STEPS = 2
UNEVEN = [0, 0, 1, 0, 0, 1, 0, 0]
"""Which rank has which sample: rank 1 has some of teacher c alone."""
OWNERS = {"both": UNEVEN, "most": [1] * 7 + [0]}
"""The same of a mixture."""


EXPERTS = 64


def run(folder: Path, world: int, tasks: list[dict]) -> None:
    """Start `world` ranks on `tasks` and wait until they have ended well."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(ranks.__file__, world, folder)


def task(name: str, urls: dict | list, owner: list[int]) -> dict:
    return {
        "name": name,
        "urls": urls,
        "owner": owner,
        "domains": NAMES,
        "steps": STEPS,
        "prefetch_bytes": 20_000,
    }


def broken_copy(url: str, target: Path) -> Path:
    """The published model with one wrong bit in the middle of rank 1's part."""
    shutil.copytree(url, target)
    shard = next(target.rglob("shard-00001-of-00002.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    return target


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """name -> (checkpoint, published in 2 shards). The second is quantised, the last a mixture of experts."""
    folder = tmp_path_factory.mktemp("teachers")
    wide = {"hidden_size": 64, "intermediate_size": 128}
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    kinds = dict.fromkeys(NAMES, wide) | {"c": wide | experts | {"moe_intermediate_size": 32}}
    made = {}
    for i, name in enumerate(NAMES):
        checkpoint, url = publish(tiny.model(seed=10 + i, **kinds[name]), folder / name, shards=2)
        if name == "b":
            quantise(checkpoint, "NVFP4")
            publish_checkpoint(checkpoint, url, shards=2)
        made[name] = checkpoint, url
    return made


@pytest.fixture(scope="module")
def expected(teachers):
    """The gradient of one process with all teachers loaded and all samples."""
    loaded = {
        name: LocalTeacher(name, checkpoint, max_tokens=16) for name, (checkpoint, _) in teachers.items()
    }
    schedule = TeacherSchedule(loaded, Router({name: {name: 1.0} for name in NAMES}, "one_hot"))
    return ranks.gradient(schedule, ranks.samples(NAMES))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """(checkpoint, published) of a mixture whose experts are read one by one."""
    kind = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 1}
    model = tiny.model(seed=20, **kind, moe_intermediate_size=16)
    return publish(model, tmp_path_factory.mktemp("mixture"), shards=96)


@pytest.fixture(scope="module")
def two_ranks(teachers, mixture, tmp_path_factory):
    """The folder two ranks wrote: rank 1 cannot read, all is well, experts are asked for by both and by one
    alone, rank 1 closes its stream, rank 1 dies.
    """
    folder = tmp_path_factory.mktemp("two")
    urls = {name: url for name, (_, url) in teachers.items()}
    broken = urls | {"b": str(broken_copy(urls["b"], folder / "broken"))}
    dies = task("dies", urls, [0, 1] * 4) | {"dies": 1}
    broken_task, whole = task("broken", [urls, broken], [0, 1] * 4), task("whole", urls, UNEVEN)
    routed = [
        task(f"routed-{name}", {"m": mixture[1]}, owner) | {"domains": ["m"]}
        for name, owner in OWNERS.items()
    ]
    run(folder, 2, [broken_task, whole, *routed, task("leaves", urls, []), dies])
    return folder


def results(folder: Path, name: str, world: int) -> list[dict]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]


def check_gradients(folder: Path, world: int, expected: dict[str, torch.Tensor], what: str = "whole") -> None:
    for rank in range(world):
        found = load_file(folder / f"{what}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-4)


def test_two_ranks_make_the_step_of_one(two_ranks, expected):
    check_gradients(two_ranks, 2, expected)


def test_two_ranks_read_half_of_every_layer_each(two_ranks, teachers):
    for rank, result in enumerate(results(two_ranks, "whole", 2)):
        samples = ranks.samples(NAMES)
        mine = {samples[i].domain for i, who in enumerate(UNEVEN) if who == rank}
        counters = result["counters"]
        assert counters["head_loads"] == STEPS * len(mine)
        assert (counters["resident_heads_peak"], counters["prefetched_heads_peak"]) == (1, 1)
        for name, (_, url) in teachers.items():
            body, head = sizes(url)
            layers = result["read"][name] - (STEPS * head if name in mine else 0)
            # Beside the steps: what is read ahead of the first teacher for a next one, at most once.
            ahead = body / 2 if name == "a" else 0
            assert STEPS * body / 2 * 0.99 <= layers <= (STEPS * body / 2 + ahead) * 1.01


@pytest.mark.parametrize("name", OWNERS)
def test_two_ranks_read_the_experts_of_either_and_half_of_them_each(two_ranks, mixture, name):
    schedule = TeacherSchedule(
        {"m": LocalTeacher("m", mixture[0], max_tokens=16)}, Router({"m": {"m": 1.0}}, "one_hot")
    )
    check_gradients(two_ranks, 2, ranks.gradient(schedule, ranks.samples(["m"])), f"routed-{name}")
    body, head = sizes(mixture[1])
    read = [result["read"]["m"] for result in results(two_ranks, f"routed-{name}", 2)]
    heads = [STEPS * head if rank in OWNERS[name] else 0 for rank in range(2)]
    layers = [one - own for one, own in zip(read, heads, strict=True)]
    assert abs(layers[0] - layers[1]) < 0.1 * sum(layers)  # the first takes the odd block
    assert sum(layers) < 0.8 * STEPS * body


def sizes(url: str) -> tuple[int, int]:
    """(bytes without the head, bytes of the head)."""
    with PublishedModel.open(url) as model:
        head = model.manifest.units["head"].nbytes
        return model.manifest.nbytes - head, head


def test_every_rank_stops_where_one_cannot_read(two_ranks):
    first, second = results(two_ranks, "broken", 2)
    assert (first["error"], second["error"]) == ("TeacherRanksError", "StorageError")
    assert "rank 1 could not read its part of layer." in first["message"]
    assert "shard-00001-of-00002" in second["message"]


def test_a_rank_that_closes_its_stream_ends_the_others_with_a_sentence(two_ranks):
    first, second = results(two_ranks, "leaves", 2)
    assert second == {"units": 1}
    assert first["error"] == "TeacherRanksError"
    assert "was not gathered, rank 1 has stopped to read teachers" in first["message"]


def test_a_rank_that_dies_ends_the_others_with_a_sentence(two_ranks):
    result = json.loads((two_ranks / "dies-0.json").read_text())
    assert result["error"] == "TeacherRanksError"
    assert "was not gathered, another rank is gone" in result["message"]
    assert not (two_ranks / "dies-1.json").exists()


@pytest.mark.long
@pytest.mark.slow
def test_three_ranks_of_two_shards(teachers, expected, tmp_path):
    """Parts that are no whole shard, some of them empty."""
    owner = [0, 1, 2, 1, 2, 0, 1, 2]
    run(tmp_path, 3, [task("whole", {name: url for name, (_, url) in teachers.items()}, owner)])
    check_gradients(tmp_path, 3, expected)


class Collective(LocalTeacher):
    """A loaded teacher that says it needs every rank."""

    collective, bytes_read, stall_seconds = True, 0, 0.0

    def prefetch(self):
        """Nothing to read ahead."""

    prefetch_head = discard_head = prefetch

    def take_weight_bytes_peak(self):
        return 0


def test_a_schedule_of_collective_teachers_asks_for_its_group(teachers):
    router = Router({"a": {"a": 1.0}}, "one_hot")
    schedule = TeacherSchedule({"a": Collective("a", teachers["a"][0])}, router)
    samples = tiny.samples([(2, 2)])
    schedule.assign(samples)
    with pytest.raises(TeacherError, match="needs their group"):
        schedule.score(samples)
