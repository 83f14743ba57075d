"""A streamed mixture: only the experts that tokens were routed to are read, and the bytes are counted."""

from contextlib import closing
from pathlib import Path

import pytest
import tiny
import torch
from test_mixtures import SAMPLES, expected, resident, stacked, written
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.errors import StorageError
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.shard_cache import ShardCache
from opd.teachers.kinds import Placement
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers
from opd.types import Sample

EXPERTS = 40
MANY = {"num_hidden_layers": 3, "num_experts": EXPERTS, "num_experts_per_tok": 1}
SHARDS = 64
"""As many blocks has a layer, so that an expert's are few."""


def few(length: int = 4) -> list[Sample]:
    """One short sample."""
    return tiny.samples([(1, length - 1)])


def routed(folder: Path, chosen: list[Sample]) -> list[set[int]]:
    """The experts of each layer that transformers sends the tokens of `chosen` to."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found: list[set[int]] = []

    def note(part: torch.nn.Module, given: tuple, options: dict) -> None:
        choices = options.get("top_k_index", given[1] if len(given) > 1 else None)
        assert choices is not None
        found.append(set(choices.flatten().tolist()))

    for layer in module.model.layers:
        layer.mlp.experts.register_forward_pre_hook(note, with_kwargs=True)
    layers = module.config.num_hidden_layers
    for sample in chosen:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])
        with torch.no_grad():
            module.model(input_ids=ids[None], use_cache=False)
    return [set().union(*found[index::layers]) for index in range(layers)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[Path, str]:
    """(folder, published) of three layers of 40 experts, one a token."""
    room = tmp_path_factory.mktemp("mixture")
    folder = written("qwen3_moe", room / "m", **MANY)
    publish_checkpoint(folder, room / "p", shards=SHARDS)
    return folder, str(room / "p")


def opened(url: str, **placement) -> StreamedTeacher:
    teacher = streamed_teachers({"t": url}, Placement(**placement), prefetch_bytes=0)["t"]
    assert isinstance(teacher, StreamedTeacher)
    return teacher


def read_by(teacher: StreamedTeacher, samples: list[Sample]) -> tuple[Tensor, int]:
    """What it gives, and the bytes that this took."""
    assert teacher.digest
    before = teacher.bytes_read
    return teacher.score(samples).rows, teacher.bytes_read - before


def test_a_tenth_of_the_experts_is_a_tenth_of_their_bytes(mixture):
    folder, url = mixture
    with closing(opened(url)) as teacher:
        rows, read = read_by(teacher, few())
        units, layers = teacher.published.manifest.units, teacher._routed
        assert list(layers) == ["layer.0", "layer.1", "layer.2"]
        due, whole = units["embedding"].nbytes + units["norm"].nbytes, 0
        for index, experts in enumerate(routed(folder, few())):
            layer, entry = layers[f"layer.{index}"], units[f"layer.{index}"]
            assert len(experts) <= EXPERTS // 10
            for blocks in (layer.shared_blocks, layer.blocks_of(experts)):
                due += sum(stop - start for start, stop in map(entry.block_range, blocks))
            whole += entry.nbytes
        assert read == due
        assert read - units["embedding"].nbytes < whole / 3  # of which the attention is one part in nine
        assert torch.equal(rows, resident(folder, few()))
        peak = teacher.take_weight_bytes_peak()
        assert peak < units["layer.0"].nbytes


def test_micro_batches_ask_one_after_the_other(mixture):
    folder, url = mixture
    samples = tiny.samples([(1, 2), (2, 1), (1, 1)])
    with closing(opened(url, max_tokens=3)) as teacher:
        rows, read = read_by(teacher, samples)
        assert torch.equal(rows, resident(folder, samples, max_tokens=3))
        again, as_much = read_by(teacher, samples)  # nothing is left of the first pass
        assert as_much == read
        assert torch.equal(again, rows)


def test_pieces_of_a_long_sequence_ask_too(mixture):
    folder, url = mixture
    samples = tiny.samples([(2, 5)])
    with closing(opened(url, sequence_chunk=3)) as teacher:
        rows, _ = read_by(teacher, samples)
        torch.testing.assert_close(rows, resident(folder, samples), atol=1e-5, rtol=0)


def test_where_most_experts_are_needed_the_next_layers_are_read_whole(mixture):
    folder, url = mixture
    samples = tiny.samples([(4, 56)] * 6)
    needed = routed(folder, samples)
    assert len(needed[0]) > EXPERTS / 2
    with closing(opened(url)) as teacher:
        rows, read = read_by(teacher, samples)
        units, first = teacher.published.manifest.units, teacher._routed["layer.0"]
        blocks = [*first.shared_blocks, *first.blocks_of(needed[0])]
        due = sum(stop - start for start, stop in map(units["layer.0"].block_range, blocks))
        due += sum(units[name].nbytes for name in ("embedding", "layer.1", "layer.2", "norm"))
        assert read == due
        assert torch.equal(rows, resident(folder, samples))


@pytest.mark.parametrize("shards", [SHARDS, 4])
def test_experts_that_are_stacked_or_in_few_blocks_are_read_whole(tmp_path: Path, shards: int):
    folder = written("qwen3_moe", tmp_path / "m", **MANY)
    due = resident(folder, few())
    if shards == SHARDS:
        stacked(folder)
    publish_checkpoint(folder, tmp_path / "p", shards=shards)
    with closing(opened(str(tmp_path / "p"))) as teacher:
        rows, read = read_by(teacher, few())
        assert not teacher._routed
        units = teacher.published.manifest.units
        assert read == sum(unit.nbytes for name, unit in units.items() if name != "head")
        assert torch.equal(rows, due)


def test_a_flipped_bit_in_a_routed_expert_is_named_and_the_teacher_goes_on(tmp_path: Path):
    folder = written("qwen3_moe", tmp_path / "m", **MANY)
    publish_checkpoint(folder, tmp_path / "p", shards=SHARDS)
    with closing(opened(str(tmp_path / "p"))) as teacher:
        due, _ = read_by(teacher, few())
        layer = teacher._routed["layer.1"]
        block = layer.blocks_of(routed(folder, few())[1])[1]
        [extent] = [
            one
            for one in teacher.published.manifest.rank_extents("layer.1", 0, 1)
            if one.start <= layer.unit.block_range(block)[0] < one.stop
        ]
        file = tmp_path / "p" / teacher.published.manifest.shard_path(extent.shard)
        place = extent.offset + layer.unit.block_range(block)[0] - extent.start
        whole = file.read_bytes()
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=rf"layer\.1, block {block}\) are corrupt"):
            teacher.score(few())
        file.write_bytes(whole)
        assert torch.equal(teacher.score(few()).rows, due)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "glm4_moe"])
def test_other_families_are_read_by_their_experts(name: str, tmp_path: Path):
    count = "num_local_experts" if name == "mixtral" else "n_routed_experts"
    groups = {} if name == "mixtral" else {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    folder = written(name, tmp_path / "m", **{count: EXPERTS} | groups)
    due = expected(folder)
    publish_checkpoint(folder, tmp_path / "p", shards=SHARDS)
    with closing(opened(str(tmp_path / "p"), max_tokens=16)) as teacher:
        assert teacher._routed.keys() >= {"layer.1"}
        torch.testing.assert_close(teacher.score(SAMPLES).rows, due, atol=1e-4, rtol=0)


def test_a_stream_that_waits_for_routing_can_be_closed(mixture):
    teacher = opened(mixture[1])
    teacher.prefetch()  # its thread reads a layer, and never hears of experts
    teacher.close()
    assert teacher.stream._thread is not None
    assert not teacher.stream._thread.is_alive()
    assert teacher.weight_bytes == 0


def test_experts_of_an_object_store_come_from_the_nodes_copies(mixture, tmp_path: Path):
    url = f"local://{mixture[1]}"
    with closing(ShardCache(tmp_path / "copies")) as cache:
        teacher = streamed_teachers({"t": url}, Placement(), prefetch_bytes=0, cache=cache)["t"]
        assert isinstance(teacher, StreamedTeacher)
        with closing(teacher):
            first, read = read_by(teacher, few())
            again, came = read_by(teacher, few())
            assert (came, teacher.cached_bytes) == (0, read)
            assert torch.equal(first, again)


def test_two_mixtures_take_turns_on_one_stream(mixture, tmp_path: Path):
    folder = written("mixtral", tmp_path / "m", num_local_experts=EXPERTS)
    publish_checkpoint(folder, tmp_path / "p", shards=SHARDS)
    urls = {"a": mixture[1], "b": str(tmp_path / "p")}
    teachers = streamed_teachers(urls, Placement(), prefetch_bytes=1 << 16)
    due = {"a": resident(mixture[0], few()), "b": resident(folder, few())}
    for name in "abba":
        for other in teachers.values():
            assert isinstance(other, StreamedTeacher)
            other.prefetch()  # what was asked for before is dropped, though its thread waits for routing
        assert torch.equal(teachers[name].score(few()).rows, due[name])
    teachers["a"].close()
