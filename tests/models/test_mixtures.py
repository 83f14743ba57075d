"""Mixtures of experts as teachers: their files hold one tensor an expert, their modules one for all."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_types
import torch
from recipes import tiny_recipe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError, ModelError, TeacherError
from opd.models import stored_form
from opd.models.architecture import empty_model
from opd.models.hf_folder import read_config
from opd.models.hf_weights import check_weights
from opd.models.stored_form import StoredForm
from opd.pipelines.check import memory
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.check.shapes import ModelShape, shape_of, stored_of
from opd.pipelines.stages.publishing import model_form, publish_checkpoint
from opd.storage.object_store import ObjectStore
from opd.storage.publish import publish
from opd.storage.published import PublishedModel
from opd.teachers.hf_reader import HFFolderReader, stream_fault
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers
from opd.types import Sample

_DEEP = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
FAMILIES = {
    "qwen3_moe": {},
    "qwen2_moe": {},  # with a shared expert behind a gate
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": _DEEP,  # latent attention, sigmoid routing in groups, a dense layer first
    "glm4_moe": _DEEP,
    "granitemoe": {},  # stacked in its files, and under other names
}
SAMPLES = tiny.samples([(3, 4), (5, 6), (2, 0), (7, 12), (1, 1)])
FILE = "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts."


def written(name: str, folder: Path, **changes) -> Path:
    """A tiny model of a family, written by transformers alone; its correction of routing is not round."""
    module = tiny_types.tiny_model(name, **FAMILIES[name] | changes)
    for key, buffer in module.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1234567, 0.1357911, len(buffer)))
    module.save_pretrained(folder)
    tiny_types.tokenizer().save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None], **config) -> None:
    """`change` the tensors of a folder, and its configuration."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))


def stacked(folder: Path) -> None:
    """Let a folder's file hold the tensors as the module does."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    own = {name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update(own)

    rewrite(folder, change)


@torch.no_grad()
def expected(folder: Path) -> Tensor:
    """Last hidden states of `SAMPLES` by transformers' own forward, one by one."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for sample in SAMPLES:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])
        hidden = module.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        first = len(sample.prompt_ids) - 1
        rows.append(hidden[first : first + len(sample.response_ids)])
    return torch.cat(rows)


def streamed(folder: Path, shards: int = 1, **placement) -> StreamedTeacher:
    """A teacher that streams what is published of `folder`."""
    url = folder.parent / f"published-{shards}"
    publish_checkpoint(folder, url, shards=shards)
    teachers = streamed_teachers({"t": str(url)}, Placement(max_tokens=16, **placement), prefetch_bytes=0)
    assert isinstance(teachers["t"], StreamedTeacher)
    return teachers["t"]


def resident(folder: Path, samples: Sequence[Sample] = SAMPLES, **placement) -> Tensor:
    """What a teacher in memory gives, its weights as aligned as streamed ones: products are rounded by it."""
    teacher = LocalTeacher("t", folder, **placement)
    for parameter in teacher.model.module.parameters():
        parameter.data = parameter.data.clone()
    return teacher.score(samples).rows


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixture_streams_to_the_hidden_states_of_transformers(name: str, tmp_path: Path):
    folder = written(name, tmp_path / "m")
    due = expected(folder)
    with closing(streamed(folder, shards=2)) as teacher:
        found = teacher.score(SAMPLES).rows
        torch.testing.assert_close(found, due, atol=1e-4, rtol=0)
        assert torch.equal(found, resident(folder, max_tokens=16))
        units = teacher.published.manifest.units
        assert teacher.stream.nbytes < sum(unit.nbytes for unit in units.values())
    stacked(folder)
    with closing(streamed(folder)) as teacher:
        assert torch.equal(teacher.score(SAMPLES).rows, found)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_what_transformers_keeps_in_float32_stays_there(name: str, tmp_path: Path):
    folder = written(name, tmp_path / "m")
    with closing(streamed(folder, dtype="bfloat16")) as teacher:
        found = teacher.score(SAMPLES).rows
        kept = [key for key in teacher.published.manifest.tensor_shapes if "e_score_correction_bias" in key]
        assert kept
        assert {teacher.skeleton.dtype_of(key) for key in kept} == {torch.float32}
    assert torch.equal(found, resident(folder, max_tokens=16, dtype="bfloat16"))


def test_memory_that_putting_together_takes_is_counted(tmp_path: Path):
    folder = written("qwen3_moe", tmp_path / "m")
    with closing(streamed(folder)) as teacher:
        teacher.score(SAMPLES)
        experts = sum(t.nbytes for n, t in load_file(folder / FILE).items() if n.startswith(EXPERTS))
        assert teacher.take_weight_bytes_peak() == teacher.stream.nbytes + experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_what_a_streamed_mixture_takes(dtype: str, tmp_path: Path):
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 40, "num_hidden_layers": 3}
    folder = written("qwen3_moe", tmp_path / "m", **wide)
    publish_checkpoint(folder, tmp_path / "p")
    teachers = streamed_teachers(
        {"t": str(tmp_path / "p")}, Placement(dtype=dtype), prefetch_bytes=memory.MIB
    )
    with closing(teachers["t"]) as teacher:
        assert isinstance(teacher, StreamedTeacher)
        teacher.score(SAMPLES)
        head = teacher.load_head()  # which is kept
        peak = teacher.take_weight_bytes_peak()
    del head
    shape = shape_of(config := read_config(folder), empty_model(config, folder))
    student = shape_of(small := tiny.model().module.config, empty_model(small, folder))
    recipe = tiny_recipe(
        base=None,
        model={"path": str(folder), "dtype": dtype},
        teachers={"sort": {"type": "streamed", "path": str(tmp_path / "p")}},
        domains={"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}},
        storage={"prefetch_mb": 1},
        baselines={"methods": []},
    )
    for stored in (stored_of(str(folder)), stored_of(str(tmp_path / "p"))):
        planned = memory.memory_parts(recipe, student, {"sort": replace(shape, **stored)})
        assert peak <= memory.sizes_of(planned)["teachers"] < 1.3 * peak


@torch.no_grad()
def test_a_folder_that_nobody_published_is_read_layer_by_layer(tmp_path: Path):
    folder = written("deepseek_v3", tmp_path / "m")
    ids = torch.arange(12)
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    due = module.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(HFFolderReader(folder).hidden_states(ids), due, atol=1e-4, rtol=0)


def test_layers_that_predict_tokens_further_ahead_are_left_out_and_said(tmp_path: Path, capsys, ends):
    folder, ahead = written("glm4_moe", tmp_path / "m"), "model.layers.46."
    due = expected(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        tensors.update({name.replace("model.layers.1.", ahead): t.clone() for name, t in last.items()})
        tensors[f"{ahead}eh_proj.weight"] = torch.zeros(32, 64)

    rewrite(folder, add)
    capsys.readouterr()
    said = ends(0, ["publish", str(folder), str(tmp_path / "p")]).err
    assert f"tensors are left out, among them {ahead}" in said
    with PublishedModel.open(tmp_path / "p") as published:
        assert list(published.manifest.units) == ["embedding", "layer.0", "layer.1", "norm", "head"]
    teacher = streamed_teachers({"t": str(tmp_path / "p")}, Placement(), prefetch_bytes=0)["t"]
    with closing(teacher):
        torch.testing.assert_close(teacher.score(SAMPLES).rows, due, atol=1e-4, rtol=0)
    torch.testing.assert_close(LocalTeacher("t", folder).score(SAMPLES).rows, due, atol=1e-4, rtol=0)
    assert HFFolderReader(folder).hidden_states(torch.arange(5)).shape == (5, 32)


def test_a_layer_of_a_larger_model_is_no_layer_further_ahead(tmp_path: Path):
    """Transformers names layers 46 and 92 as those that GLM-4.5 has too many, and one model has 92."""
    folder = tmp_path / "m"
    config = tiny_types.tiny_config("glm4_moe", num_hidden_layers=47, first_k_dense_replace=47)
    config.save_pretrained(folder)
    form = StoredForm(empty_model(read_config(folder), folder))
    names = ["model.layers.46.input_layernorm.weight", "model.layers.92.input_layernorm.weight"]
    assert form.left_out(names) == {names[1]}


def _without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[EXPERTS + name]

    return change


def _as_it_is(tensors: dict[str, Tensor]) -> None:
    """Leave them."""


def _renumbered(tensors: dict[str, Tensor]) -> None:
    for part in ("gate", "up", "down"):
        tensors[f"{EXPERTS}7.{part}_proj.weight"] = tensors.pop(f"{EXPERTS}3.{part}_proj.weight")


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}1.up_proj.weight"] = torch.zeros(8, 32)


def _twice(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}down_proj"] = torch.zeros(4, 32, 16)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], None], dict, str, str]] = {
    "one tensor of an expert is missing": (
        _without("2.up_proj.weight"), {}, "layers.1 has no tensor mlp.experts.2.up_proj.weight",
        "lacks model.layers.1.mlp.experts.2.up_proj.weight, and has others",
    ),
    "an expert is missing": (
        _without("3.up_proj.weight", "3.gate_proj.weight", "3.down_proj.weight"), {},
        "layers.1 has no tensor mlp.experts.3.down_proj.weight", "lacks model.layers.1.mlp.experts.3.down",
    ),
    "experts are counted otherwise": (
        _renumbered, {}, "layers.1 has no tensor mlp.experts.3.down_proj.weight", "lacks model.layers.1.mlp",
    ),
    "fewer experts in the configuration": (
        _as_it_is, {"num_local_experts": 3}, "layers.0 has an unknown tensor mlp.experts.3.down_proj.weight",
        "mlp.experts.3.down_proj.weight has no place in it",
    ),
    "more experts in the configuration": (
        _as_it_is, {"num_local_experts": 6}, "layers.0 has no tensor mlp.experts.4.down_proj.weight",
        "lacks model.layers.0.mlp.experts.4.down_proj.weight",
    ),
    "an expert of another shape": (
        _narrow, {}, "layers.1.mlp.experts.1.up_proj.weight has shape [8, 32] where [16, 32] is needed",
        "mlp.experts.1.up_proj.weight has shape [8, 32] where [16, 32] is needed",
    ),
    "both forms": (
        _twice, {}, "layers.1.mlp.experts.down_proj is held as one and in parts too",
        "mlp.experts.down_proj is held as one and in parts too",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_experts_that_do_not_fit_are_named_before_a_run(name: str, tmp_path: Path, capsys, ends):
    change, config, streaming, loading = WRONG[name]
    folder = written("qwen3_moe", tmp_path / "m")
    rewrite(folder, change, **config)
    assert streaming in str(stream_fault(folder))
    with pytest.raises(CheckpointError) as refused:
        check_weights(folder)
    assert loading in str(refused.value)
    capsys.readouterr()
    assert loading in " ".join(ends(2, ["publish", str(folder), str(tmp_path / "p")]).err.split())
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_without_number_are_not_named_one_by_one(name: str, tmp_path: Path, monkeypatch):
    folder = written(name, tmp_path / "m")
    rewrite(folder, _as_it_is, num_local_experts=2_000_000)

    def named(*_: object) -> None:
        raise AssertionError("two million names")

    monkeypatch.setattr(stored_form, "revert_weight_conversion", named)
    assert re.search(r"layers.0 has no tensor \S*experts\.4\.", str(stream_fault(folder)))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.\S*experts\.4\.\S+, and has others"):
        check_weights(folder)


@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 2), ("deepseek_v3", 1), ("mixtral", 2)])
def test_the_doctor_counts_what_a_token_uses(name: str, layers: int, tmp_path: Path):
    folder = written(name, tmp_path / "m")
    module = empty_model(config := read_config(folder), folder)
    experts = {key: p.numel() for key, p in module.named_parameters() if ".mlp.experts." in key}
    assert len(experts) == 2 * layers
    count, chosen = (8, 3) if name == "deepseek_v3" else (4, 2)
    shape = shape_of(config, module)
    assert shape.parameters - shape.used == sum(experts.values()) * (count - chosen) // count
    assert f"of which a token uses {shape.used:,}" in shape.size_text
    assert (shape.experts, shape.expert_count) == (sum(experts.values()), count)
    assert shape.split_experts == sum(experts.values()) // layers  # also where other layers have none
    dense = read_config(tiny_types.write_folder("llama", tmp_path / "dense"))
    assert shape_of(dense, empty_model(dense, tmp_path)).idle == 0


@pytest.mark.parametrize("chosen", [9, -1])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_more_experts_a_token_than_there_are_is_said_before_a_run(
    name: str, chosen: int, tmp_path: Path, ends
):
    folder = written(name, tmp_path / "m")
    rewrite(folder, _as_it_is, num_experts_per_tok=chosen)
    said = rf"num_experts_per_tok is {chosen}, and a layer has \d experts to choose from; mend"
    assert re.search(said, str(stream_fault(folder)))
    with pytest.raises(ModelError, match=said):
        LocalTeacher("t", folder).score(SAMPLES)
    with closing(streamed(folder)) as teacher, pytest.raises(ModelError, match=said):
        teacher.score(SAMPLES)
    assert re.search(said, " ".join(ends(0, ["publish", str(folder), str(tmp_path / "p")]).err.split()))


NOT_SHARED = {
    "llama": (2, "and a LlamaForCausalLM has no experts that ranks can share; set it to auto or 1"),
    "qwen3_moe": (3, "has 4 experts a layer, which 3 ranks cannot share equally; set it to auto or 1"),
}


@pytest.mark.parametrize("family", NOT_SHARED)
def test_experts_that_ranks_cannot_share_are_said_before_a_run(family: str, tmp_path: Path):
    ranks, said = NOT_SHARED[family]
    folder = tiny_types.write_folder(family, tmp_path / "m")
    for size, faults in ((ranks, 1), ("auto", 0)):
        recipe = tiny_recipe(base=None, model={"path": str(folder)}, train={"expert_parallel": size})
        found = check_models(recipe, {}, Models())
        assert sum(said in finding.detail and finding.level == "error" for finding in found) == faults


@pytest.mark.parametrize(
    ("train", "rounded"),
    [
        ({"ranks": 2}, 40 + 2 * (960 - 600) // 2 + 600 // 2),
        ({"ranks": 3}, 40 + 2 * 960 // 2),
        ({"ranks": 2, "expert_parallel": 1}, 40 + 2 * 960 // 2),
    ],
)
def test_the_plan_counts_shared_experts_in_the_layers_dtype(train: dict, rounded: int):
    shape = ModelShape(1000, 4, (None, None), vocabulary=10, kv_width=4, experts=600, expert_count=4)
    recipe = tiny_recipe(model={"config": tiny.LLAMA, "dtype": "bfloat16"}, train=train)
    parts = memory.sizes_of(memory.memory_parts(recipe, shape, {}))
    assert parts["copies in bfloat16"] == 2 * rounded


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
def test_whole_numbers_in_place_of_weights_are_refused_before_a_run(
    family: str, dtype: torch.dtype, tmp_path: Path
):
    folder = tiny_types.write_folder(family, tmp_path / "m")
    key = f"{EXPERTS}2.up_proj.weight" if family == "qwen3_moe" else "model.layers.1.self_attn.q_proj.weight"

    def whole(tensors: dict[str, Tensor]) -> None:
        tensors[key] = tensors[key].to(dtype)

    rewrite(folder, whole)
    said = f"holds {re.escape(key)} as I(32|8), which is not computed with; give a model whose weights are in"
    assert re.search(said, str(stream_fault(folder)))
    with ObjectStore.open(tmp_path / "p") as store:  # as another writer may have
        publish(folder, store, shards=1, form=model_form(folder))
    teacher = streamed_teachers({"t": str(tmp_path / "p")}, Placement(), prefetch_bytes=0)["t"]
    with closing(teacher), pytest.raises(TeacherError, match=said):
        teacher.score(SAMPLES)
