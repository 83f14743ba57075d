"""Quantised checkpoints: exact for every code, right as teachers and students, or refused in a sentence."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_types
import torch
from quantised import E2M1_CODES, E4M3_CODES, FILE, FORMATS, Stored, compressed, mxfp4, quantise, rewrite
from recipes import tiny_recipe
from safetensors.torch import load_file
from test_mixtures import SAMPLES, expected, resident
from tiny import tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from opd.errors import CheckpointError, ModelError, OpdError
from opd.megatron.form import rank_parameters
from opd.models.architecture import empty_model
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import read_config, scratch_config
from opd.models.hf_weights import check_weights
from opd.models.quantisation import Quantisation, quantisation_of
from opd.models.quantised_weights import folder_parts, matrix_of
from opd.models.sharded import open_empty, stored_weights
from opd.pipelines.check import memory
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.check.shapes import shape_of, stored_of
from opd.pipelines.cli import main
from opd.pipelines.stages.precision import checkpoint_dtype, weight_bytes
from opd.pipelines.stages.publishing import publish_checkpoint, whole_model
from opd.storage.published import PublishedModel
from opd.teachers.hf_reader import HFFolderReader, stream_fault
from opd.teachers.kinds import Placement
from opd.teachers.megatron_teacher import FolderSource, PublishedSource
from opd.teachers.skeleton import download_model
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers

SHAPES = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3": {"hidden_size": 64, "intermediate_size": 160},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
}
UP = "model.layers.1.mlp.up_proj.weight"
DTYPES = [torch.float32, torch.bfloat16]


def form_of(said: dict) -> Quantisation:
    found = quantisation_of({"quantization_config": said}, "here")
    assert found is not None
    return found


def quantised_folder(folder: Path, name: str, family: str = "qwen3") -> tuple[Path, Path]:
    """A tiny model in a format, and the same as plain numbers."""
    tiny_types.write_folder(family, folder / "m", **SHAPES[family])
    shutil.copytree(folder / "m", folder / "plain")
    rewrite(folder / "plain", quantise(folder / "m", name))
    return folder / "m", folder / "plain"


def opened(url: Path, **placement) -> StreamedTeacher:
    teacher = streamed_teachers({"t": str(url)}, Placement(max_tokens=16, **placement), prefetch_bytes=0)["t"]
    assert isinstance(teacher, StreamedTeacher)
    return teacher


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_every_code_of_fp8_is_its_number_times_its_scale(scale_type: torch.dtype, dtype: torch.dtype):
    form = form_of({"quant_method": "fp8", "weight_block_size": [4, 128]})
    codes = torch.arange(256, dtype=torch.uint8).repeat(12, 1)
    scales = torch.tensor([[1e-3, 0.0173], [2.0**-127, 3.3e4], [7 / 3, 2.0**-120]]).to(scale_type)
    found = matrix_of(form, [codes.view(torch.float8_e4m3fn), scales], dtype)
    due = E4M3_CODES * scales.double().repeat_interleave(4, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(found, due.float().to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_mxfp4_is_its_number_at_every_exponent(dtype: torch.dtype):
    form = form_of(FORMATS["MXFP4"][0])
    pairs = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 255, 1).view(255 * 16, 16)
    exponents = torch.arange(255, dtype=torch.uint8).repeat(16)[: len(pairs), None]
    found = matrix_of(form, [pairs, exponents], dtype)
    values = torch.stack([E2M1_CODES[(pairs & 15).int()], E2M1_CODES[(pairs >> 4).int()]], -1).flatten(1)
    due = values * torch.exp2(exponents.double() - 127)
    assert torch.equal(found.double(), due.to(dtype).double())  # 6 * 2 ** 127 is infinite in both
    with pytest.raises(ValueError, match="NaN"):
        matrix_of(form, [pairs[:1], torch.tensor([[255]], dtype=torch.uint8)], dtype)


def test_stacked_mxfp4_is_that_of_transformers():
    form = form_of({"quant_method": "mxfp4"})
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.arange(96, dtype=torch.uint8).view(3, 8, 4) + 80
    found = matrix_of(form, [blocks, scales], torch.bfloat16)
    assert found.shape == form.plain_shape(blocks.shape) == (3, 128, 8)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


def stacked_folder(tmp_path: Path) -> tuple[Path, Path]:
    """GPT-OSS as it is published, and the same as plain numbers: stacked experts in MXFP4 with biases, sinks,
    every other layer with a window.
    """
    folder = tiny_types.write_folder("gpt_oss", tmp_path / "m", hidden_size=64, intermediate_size=32)
    tensors = load_file(folder / FILE)
    plain, stored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [E, D, R], stored as [E, R, D / 32, 16 bytes]
            rows = weight.float().transpose(1, 2)
            codes, scales, numbers = mxfp4(rows.flatten(0, 1))
            del stored[name]
            stored[f"{name}_blocks"] = codes.view(*rows.shape[:2], -1, 16)
            stored[f"{name}_scales"] = scales.view(*rows.shape[:2], -1)
            plain[name] = numbers.float().view(rows.shape).transpose(1, 2)
    plain_folder = shutil.copytree(folder, tmp_path / "plain")
    rewrite(plain_folder, plain)
    rewrite(folder, stored, quantization_config={"quant_method": "mxfp4"})
    return folder, plain_folder


def test_gpt_oss_as_it_is_published_is_a_teacher_in_memory_and_streamed(tmp_path: Path):
    folder, plain_folder = stacked_folder(tmp_path)
    found = resident(folder, max_tokens=16, dtype="float32")
    torch.testing.assert_close(found, resident(plain_folder, max_tokens=16), rtol=0, atol=0)
    publish_checkpoint(folder, tmp_path / "p", shards=2)
    with closing(opened(tmp_path / "p", dtype="float32")) as teacher:
        assert torch.equal(teacher.score(SAMPLES).rows, found)


def test_of_stacked_experts_those_are_read_that_are_asked_for(tmp_path: Path):
    folder, plain = stacked_folder(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    parts, whole = folder_parts(folder), folder_parts(plain)[name]
    size, found = whole[0].numel(), torch.empty(5)
    for expert, offset in ((1, 0), (1, 7), (2, size - 5)):
        parts.read(name, expert * size + offset, found)
        assert torch.equal(found, whole.view(-1)[expert * size + offset :][:5])
    assert parts.bytes_read == 2 * (size // 2 + size // 32)  # of two experts, each once
    two = torch.empty(10)
    parts.read(name, 2 * size - 5, two)
    assert torch.equal(two, whole.view(-1)[2 * size - 5 :][:10])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["NVFP4", "NVFP4 of ModelOpt"])
def test_every_code_of_nvfp4_at_every_scale(name: str, dtype: torch.dtype):
    form = form_of(FORMATS[name][0])
    pairs = torch.arange(256, dtype=torch.uint8).view(32, 8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(32)[:, None].view(torch.float8_e4m3fn)
    values = torch.stack([E2M1_CODES[(pairs & 15).int()], E2M1_CODES[(pairs >> 4).int()]], -1).flatten(1)
    for single in (1.0, 0.00123, 2688 / 0.037):
        found = matrix_of(form, [pairs, scales, torch.tensor([single])], dtype)
        given, one = scales.double().numpy().astype(np.float32), np.float32(single)
        factors = given / one if form.divides else given * one
        due = torch.from_numpy((values.numpy() * factors.astype(np.float64)).astype(np.float32))
        assert torch.equal(found, due.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_fp8_are_those_of_transformers(dtype: torch.dtype):
    codes = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.1
    due = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    assert torch.equal(matrix_of(form_of(FORMATS["FP8 in blocks"][0]), [codes, scales], dtype), due)


def test_large_matrices_are_made_in_pieces(monkeypatch):
    form = form_of(FORMATS["FP8 in small blocks"][0])
    codes, scales = torch.randn(100, 50).to(torch.float8_e4m3fn), torch.rand(7, 3) + 0.1
    whole = matrix_of(form, [codes, scales], torch.float32)
    monkeypatch.setattr("opd.models.quantised_weights._PIECE", 17)
    assert torch.equal(matrix_of(form, [codes, scales], torch.float32), whole)


@torch.no_grad()
@pytest.mark.some(4)
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_teachers_give_what_transformers_gives_of_the_numbers(name: str, family: str, tmp_path: Path):
    folder, plain = quantised_folder(tmp_path, name, family)
    due = expected(plain)
    head = AutoModelForCausalLM.from_pretrained(plain).get_output_embeddings()
    publish_checkpoint(folder, tmp_path / "p", shards=2)
    with closing(opened(tmp_path / "p")) as teacher:
        rows = teacher.score(SAMPLES).rows
        torch.testing.assert_close(teacher.load_head().logits(rows), head(due), atol=1e-5, rtol=0)
    assert torch.equal(rows, resident(folder, max_tokens=16))
    ids = torch.arange(12)
    module = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    hidden = module.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(HFFolderReader(folder).hidden_states(ids), hidden, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["FP8 in blocks", "NVFP4"])
def test_a_stream_reads_codes_and_makes_one_layer_of_numbers(name: str, tmp_path: Path):
    folder, plain = quantised_folder(tmp_path, name)
    for path in (folder, plain):
        publish_checkpoint(path, tmp_path / f"{path.name}-p")
    with closing(opened(tmp_path / "m-p")) as teacher, closing(opened(tmp_path / "plain-p")) as other:
        rows, due = teacher.score(SAMPLES).rows, other.score(SAMPLES).rows
        torch.testing.assert_close(rows, due, atol=1e-6, rtol=0)
        mine, theirs = (one.published.manifest.units["layer.0"] for one in (teacher, other))
        assert mine.nbytes < theirs.nbytes / (3 if name == "FP8 in blocks" else 5)
        numbers = sum(
            4 * t.numel() for k, t in load_file(plain / FILE).items() if "layers.0" in k and "proj" in k
        )
        assert teacher.take_weight_bytes_peak() == teacher.stream.nbytes + numbers


def test_experts_are_read_one_by_one_from_a_quantised_mixture(tmp_path: Path):
    many = {"num_hidden_layers": 1, "num_experts": 40, "num_experts_per_tok": 1, **SHAPES["qwen3_moe"]}
    folder = tiny_types.write_folder("qwen3_moe", tmp_path / "m", **many)
    quantise(folder, "NVFP4")
    publish_checkpoint(folder, tmp_path / "p", shards=64)
    with closing(opened(tmp_path / "p")) as teacher:
        few = SAMPLES[-1:]
        assert torch.equal(teacher.score(few).rows, resident(folder, few, max_tokens=16))
        assert list(teacher._routed) == ["layer.0"]
        before = teacher.bytes_read
        teacher.score(few)
        units = teacher.published.manifest.units
        assert teacher.bytes_read - before - units["embedding"].nbytes < units["layer.0"].nbytes / 3


@pytest.mark.parametrize("name", ["FP8 by row", "MXFP4"])
def test_a_student_starts_from_the_numbers_and_is_saved_plain(name: str, tmp_path: Path):
    folder, plain = quantised_folder(tmp_path, name)
    assert checkpoint_dtype(folder) == "bfloat16"
    assert weight_bytes(folder, "float32") == weight_bytes(plain, "float32")
    assert whole_model(folder, tmp_path / "none") == folder
    made = whole_model(folder, tmp_path / "base", plain="float32")
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    module, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    due = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    assert all(torch.equal(tensor, due[key]) for key, tensor in module.state_dict().items())
    model = open_empty(folder, dtype="bfloat16")  # what several ranks read their shares from
    assert model.unread is not None
    for key, tensor in stored_weights(model):
        torch.testing.assert_close(tensor.cpu(), due[key].to(tensor.dtype), rtol=0, atol=0)


def test_a_run_starts_from_quantised_weights(tmp_path: Path):
    folder = tiny_types.write_folder("llama", tmp_path / "m", hidden_size=64)
    plain = quantise(folder, "FP8 in blocks")
    (tmp_path / "recipe.json").write_text(
        json.dumps(
            {
                "name": "quantised",
                "model": {"path": str(folder)},
                "domains": {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}},
                "teachers": {"sort": {"type": "local", "path": str(folder)}},
                "rollout": {"max_sequence": 64, "max_new_tokens": 4},
                "distill": {"steps": 1, "prompts_per_domain": 2},
                "baselines": {"methods": []},
                "evaluation": {"prompts_per_domain": 2, "every": 0},
            }
        )
    )
    run = tmp_path / "run"
    assert main(["run", str(tmp_path / "recipe.json"), "--out", str(run)]) == 0
    for saved in (run / "base", run / "merged"):
        assert "quantization_config" not in json.loads((saved / "config.json").read_text())
        assert AutoModelForCausalLM.from_pretrained(saved).dtype == torch.bfloat16
    held = load_file(run / "base" / FILE)
    assert torch.equal(held[UP], plain[UP].bfloat16())


@pytest.mark.parametrize(
    ("name", "left"), [("FP8 of ModelOpt", "input_scale"), ("NVFP4", "input_global_scale")]
)
def test_publishing_keeps_the_form_and_says_so(name: str, left: str, tmp_path: Path, capsys, ends):
    folder, plain = quantised_folder(tmp_path, name)
    capsys.readouterr()
    said = ends(0, ["publish", str(folder), str(tmp_path / "p")]).err
    assert f"its weights stay in {name.partition(' ')[0]}" in said
    assert re.search(rf"14 tensors are left out, among them \S+{left}: activations are not quantised", said)
    with PublishedModel.open(tmp_path / "p") as published:
        assert not any(left in key for key in published.manifest.tensor_shapes)
    fetched = CausalLM.from_pretrained(download_model(str(tmp_path / "p"), tmp_path / "again"))
    assert fetched.digest() == CausalLM.from_pretrained(folder).digest()
    due = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    assert all(torch.equal(tensor, due[key]) for key, tensor in fetched.weights())


def test_the_doctor_says_what_is_read(tmp_path: Path):
    folder, _ = quantised_folder(tmp_path, "FP8 in blocks")
    store = tmp_path / "p"
    publish_checkpoint(folder, store)
    domains = {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}}
    for place, kind in ((folder, "local"), (folder, "streamed"), (store, "streamed")):
        teachers = {"sort": {"type": kind, "path": str(place)}}
        changes = {"teachers": teachers, "domains": domains, "baselines": {"methods": []}}
        found = check_models(tiny_recipe(model={"path": str(folder)}, base=None, **changes), {}, Models())
        assert not [one for one in found if one.level == "error"]
        told = [one.detail for one in found if "FP8 in blocks of 128 x 128" in one.detail]
        assert len(told) == 2


def _without(ending: str) -> Callable[[Stored], None]:
    def change(tensors: Stored) -> None:
        del tensors[UP + ending]

    return change


def _as(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[Stored], None]:
    return lambda tensors: tensors.update({UP + ending: change(tensors[UP + ending])})


def _one(value: float) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        changed = scales.float()
        changed.view(-1)[-1] = value
        return changed.to(scales.dtype)

    return change


def _plain(tensors: Stored) -> None:
    for name in [key for key in tensors if "proj" in key]:
        shape = tensors.pop(name).shape
        if name.endswith("weight"):
            tensors[name] = torch.ones(shape)


WRONG: dict[str, tuple[str, Callable[[Stored], None], str]] = {
    "no scale": ("FP8 in blocks", _without("_scale_inv"), "up_proj.weight as F8_E4M3 without its scale"),
    "no scale of blocks": ("NVFP4", _without("_scale"), r"up_proj.weight_packed without its scale .*_scale"),
    "no scale of all": ("NVFP4", _without("_global_scale"), "without its scale .*_global_scale"),
    "blocks of another size": (
        "FP8 in small blocks", _as("_scale_inv", lambda t: t[:3]), r"shape \[3, 3\] where \[10, 3\] is",
    ),
    "rows of another count": ("FP8 by row", _as("_scale", lambda t: t[:9]), r"\[9, 1\] where \[160, 1\] is"),
    "a scale of another type": (
        "FP8 in blocks", _as("_scale_inv", torch.Tensor.int), "as I32 where FP8 in blocks of 128 x 128 has",
    ),
    "codes of another type": ("MXFP4", _as("_packed", torch.Tensor.int), "as I32 where MXFP4 has U8"),
    "two scales of all": ("NVFP4", _as("_global_scale", lambda t: t.repeat(2)), "which is no single scale's"),
    "an odd width": ("NVFP4", _as("_packed", lambda t: t[:, :-3].contiguous()), "blocks of 16 .* not divide"),
    "no matrix": ("NVFP4", _as("_packed", lambda t: t.view(-1)), "which is no matrix's"),
    "NaN": ("FP8 in blocks", _as("_scale_inv", _one(float("nan"))), "a scale of it is NaN, infinite"),
    "0": ("FP8 by matrix", _as("_scale", _one(0.0)), "a scale of it is NaN, infinite, negative or 0"),
    "negative": ("FP8 by row", _as("_scale", _one(-1.0)), "a scale of it is NaN, infinite, negative or 0"),
    "infinite": ("NVFP4 of ModelOpt", _as("_scale_2", _one(float("inf"))), "a scale of it is NaN, infinite"),
    "NaN of e8m0": ("MXFP4", _as("_scale", _one(255)), "a scale of it is NaN"),
    "NaN of e4m3": ("NVFP4", _as("_scale", _one(float("nan"))), "a scale of it is NaN"),
    "quantised and plain": (
        "NVFP4", lambda t: t.update({UP: torch.ones(160, 64)}), "up_proj.weight quantised and as it is",
    ),
    "another format": (
        "NVFP4", lambda t: t.update({UP: t.pop(f"{UP}_packed").view(torch.float8_e4m3fn)}),
        "up_proj.weight.* as F8_E4M3, which config.json does not explain",
    ),
    "scales of another name": (
        "FP8 in blocks",
        lambda t: [t.update({f"{n.removesuffix('_inv')}": t.pop(n)}) for n in list(t) if n.endswith("_inv")],
        "as F8_E4M3 without its scale .*_scale_inv",
    ),
    "nothing quantised": ("FP8 in blocks", _plain, "quantised .FP8 in blocks of .*, and none of them is"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_a_run(case: str, tmp_path: Path, capsys):
    name, change, told = WRONG[case]
    folder, _ = quantised_folder(tmp_path, name)
    tensors = load_file(folder / FILE)
    change(tensors)
    rewrite(folder, tensors)
    for entry in (check_weights, CausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=told) as refused:
            entry(folder)
        assert "\n" not in str(refused.value)
    capsys.readouterr()
    assert main(["publish", str(folder), str(tmp_path / "p")]) == 2
    assert not (tmp_path / "p").exists()


def test_a_number_that_is_too_large_is_said_when_it_is_made(tmp_path: Path):
    folder, _ = quantised_folder(tmp_path, "FP8 in blocks")
    tensors = load_file(folder / FILE)
    tensors[f"{UP}_scale_inv"].fill_(3e38)
    rewrite(folder, tensors)
    said = r"up_proj.* cannot be used: a number of it is NaN or too large for"
    with pytest.raises(CheckpointError, match=said):
        CausalLM.from_pretrained(folder)
    publish_checkpoint(folder, tmp_path / "p")
    with closing(opened(tmp_path / "p")) as teacher, pytest.raises(OpdError, match=said):
        teacher.score(SAMPLES)


UNREAD = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8 in e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "fp8 in blocks of .128.": {"quant_method": "fp8", "weight_block_size": [128]},
    "modelopt FP8_PB_WO": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    "compressed-tensors pack-quantized": compressed("pack-quantized", type="int", num_bits=4),
    "compressed-tensors without groups": {"quant_method": "compressed-tensors", "config_groups": {}},
    "compressed-tensors with transforms": compressed("float-quantized", strategy="tensor")
    | {"transform_config": {"u": {}}},
    "compressed-tensors in mixed formats": compressed("float-quantized", strategy="tensor")
    | {
        "config_groups": {
            name: {"weights": {"num_bits": 8, "type": "float", "strategy": name}}
            for name in ("tensor", "channel")
        }
    },
}


@pytest.mark.parametrize("name", UNREAD)
def test_other_formats_are_named_and_refused(name: str, tmp_path: Path):
    folder, _ = quantised_folder(tmp_path, "FP8 in blocks")
    rewrite(folder, load_file(folder / FILE), quantization_config=UNREAD[name])
    sentence = (
        rf"its weights are quantised \({name}.*\), which is not read here, .* give the model's unquantised"
    )
    for entry in (check_weights, CausalLM.from_pretrained, stream_fault):
        with pytest.raises(ModelError, match=sentence):
            entry(folder)


def test_a_quantised_head_is_for_teachers_in_memory(tmp_path: Path):
    folder = tiny_types.write_folder("llama", tmp_path / "m", hidden_size=64, tie_word_embeddings=False)
    tensors = load_file(folder / FILE)
    said, store = FORMATS["FP8 in blocks"]
    stored, numbers = store("lm_head.weight", tensors["lm_head.weight"].float())
    rewrite(folder, tensors | stored, quantization_config=said)
    assert torch.equal(CausalLM.from_pretrained(folder).head().weight, numbers.float())
    assert "lm_head.weight quantised, which is not streamed" in str(stream_fault(folder))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "family"),
    [("stacked MXFP4", "gpt_oss"), *((name, "llama") for name in FORMATS), ("FP8 in blocks", "qwen3_moe")],
)
def test_slices_on_megatron_core_are_those_of_the_plain_numbers(name: str, family: str, tmp_path: Path):
    """A rank's parts, from the folder and published: half of each tensor, and half of the experts."""
    stacked = family == "gpt_oss"
    folder, plain = stacked_folder(tmp_path) if stacked else quantised_folder(tmp_path, name, family)
    publish_checkpoint(folder, tmp_path / "p", shards=2)
    with closing(FolderSource(plain)) as source:
        pieces = rank_parameters(source.form, 1, 2, sharing=(1, 2) if source.form.experts else (0, 1))
        due = dict(source.read(pieces))
    published = PublishedSource(str(tmp_path / "p"), None, torch.device("cpu"))
    for source in (FolderSource(folder), published):
        with closing(source):
            found = dict(source.read(pieces))
        assert all(torch.equal(found[key].float(), tensor.float()) for key, tensor in due.items())
        assert found.keys() == due.keys()


def test_a_new_model_is_not_quantised():
    with pytest.raises(ModelError, match="quantization_config is not an argument of LlamaConfig"):
        scratch_config({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, tokenizer())


def test_the_plan_counts_what_a_quantised_mixture_takes(tmp_path: Path):
    folder, _ = quantised_folder(tmp_path, "NVFP4", "qwen3_moe")
    publish_checkpoint(folder, tmp_path / "p")
    with closing(opened(tmp_path / "p")) as teacher:
        teacher.score(SAMPLES)
        head = teacher.load_head()
        peak = teacher.take_weight_bytes_peak()
    del head
    shape = shape_of(config := read_config(folder), empty_model(config, folder))
    recipe = tiny_recipe(
        base=None,
        model={"path": str(folder), "dtype": "float32"},
        teachers={"sort": {"type": "streamed", "path": str(tmp_path / "p")}},
        domains={"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}},
        storage={"prefetch_mb": 1},
        baselines={"methods": []},
    )
    stored = replace(shape, **stored_of(str(tmp_path / "p")))
    assert peak <= memory.sizes_of(memory.memory_parts(recipe, shape, {"sort": stored}))["teachers"]


def test_types_without_a_format_are_refused_by_every_teacher(tmp_path: Path):
    folder, _ = quantised_folder(tmp_path, "FP8 by row")
    rewrite(folder, load_file(folder / FILE), quantization_config=None)
    with pytest.raises(OpdError, match=r"which config\.json does not explain"):
        check_weights(folder)
    assert stream_fault(folder) is not None


def test_parts_are_the_numbers_of_the_model(tmp_path: Path):
    folder, plain = quantised_folder(tmp_path, "NVFP4", "qwen3_moe")
    parts, due = folder_parts(folder), load_file(plain / FILE)
    assert parts.keys() == due.keys()
    assert all(torch.equal(parts[key], tensor) for key, tensor in due.items())
    some = torch.empty(7)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    parts.read(name, 5, some)
    assert torch.equal(some, due[name].view(-1)[5:12])
