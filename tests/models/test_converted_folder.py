"""`opd publish --dtype`: weights in another dtype, as FP8 in blocks, and from MXFP4 to FP8 without loss."""

import json
import math
import re
from contextlib import closing
from pathlib import Path

import pytest
import tiny_types
import torch
from quantised import E2M1_CODES, E4M3_CODES, FILE, rewrite
from safetensors.torch import load_file
from test_mixtures import SAMPLES, resident
from test_quantised import opened, quantised_folder
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError, ModelError
from opd.models import converted_folder
from opd.models.causal_lm import CausalLM
from opd.models.converted_folder import FORMS, FP8Weights, _is_linear, convert_folder, fp8_numbers, to_fp8
from opd.models.hf_weights import check_weights
from opd.models.quantisation import quantisation_of
from opd.models.quantised_weights import matrix_of
from opd.pipelines.cli import main
from opd.pipelines.options import build_parser
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.published import PublishedModel

FORM = quantisation_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "")


def back(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    assert FORM is not None
    return matrix_of(FORM, [codes, scales], torch.float32)


@pytest.mark.parametrize("apart", range(15))
def test_blocks_of_mxfp4_this_far_apart_become_fp8_unchanged(apart: int):
    """Every code at every pair of exponents that are `apart`, in one block of FP8."""
    low = torch.arange(-127, 126 - apart)[:, None, None]
    values = E2M1_CODES.repeat(1, 2)
    blocks = torch.cat([values * 2.0**low, values * 2.0 ** (low + apart)], dim=1).float()
    codes, scales = to_fp8(blocks)
    assert scales.shape == (len(low), 1, 1)
    assert torch.equal(back(codes, scales), blocks)


def test_every_largest_code_of_a_block_is_in_reach():
    for largest in E2M1_CODES[1:8].tolist():
        for below in range(8):  # exponents below: all codes of these are kept
            block = torch.cat([E2M1_CODES * 2.0**-below, torch.tensor([largest])]).float()[None]
            codes, scales = to_fp8(block)
            assert torch.equal(back(codes, scales), block)
            assert scales.log2().frac().eq(0).all()


def test_blocks_further_apart_are_rounded_to_the_nearest_code():
    block = torch.tensor([[6.0 * 2.0**15, 0.5, 1.5, 0.0, -0.5]])
    codes, scales = to_fp8(block)
    whole = back(codes, scales)
    assert torch.equal(whole[0, :2], torch.tensor([6.0 * 2.0**15, 0.0]))  # half of the least code, to even
    assert whole[0, 2] == 2.0
    assert scales.item() == 2.0**9


@pytest.mark.parametrize("scale", [2.0**-130, 1e-20, 1.0, 3e30, 2.0**119])
def test_numbers_become_the_nearest_codes_under_the_least_power_of_two(scale: float):
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * scale
    codes, scales = to_fp8(matrix)
    assert scales.shape == (2, 3)
    whole = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    scaled = matrix.double() / whole
    assert scaled.abs().max() <= 448
    if scale > 2.0**-120:
        assert scaled[:128, :128].abs().max() > 224
        assert scaled[128:, 256:].abs().max() > 224
    finite = E4M3_CODES[~E4M3_CODES.isnan()].unique()
    nearest = (scaled.flatten()[::97, None] - finite).abs().amin(dim=1)
    assert torch.equal((codes.double() - scaled).abs().flatten()[::97], nearest)
    assert torch.equal(codes.double(), scaled.float().to(torch.float8_e4m3fn).double())


def test_numbers_of_fp8_stay_when_they_are_rounded_again_and_in_bfloat16():
    """All codes, at every largest code of a block and every scale whose codes bfloat16 holds."""
    finite = E4M3_CODES[~E4M3_CODES.isnan()]
    for largest in finite[finite > 0].tolist():
        block = finite[finite.abs() <= largest]
        numbers = (block * 2.0 ** torch.arange(-124, 119)[:, None, None]).float()
        assert torch.equal(fp8_numbers(numbers), numbers)
        assert torch.equal(numbers.bfloat16().float(), numbers)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_size": 160, "intermediate_size": 300, "tie_word_embeddings": True}),
        ("gemma2", {}),
        ("qwen3_moe", {"moe_intermediate_size": 80, "hidden_size": 160}),  # apart in files
        ("mixtral", {"intermediate_size": 200}),
        ("deepseek_v3", {}),
        ("glm4_moe", {}),
        ("olmoe", {}),
        ("phimoe", {}),
        ("gpt_oss", {"hidden_size": 160}),
        ("jetmoe", {}),
    ],
)
def test_a_module_is_rounded_to_what_its_folder_becomes(family: str, changes: dict, tmp_path: Path):
    folder = tiny_types.write_folder(family, tmp_path / "m", **changes)
    (tmp_path / "fp8").mkdir()
    convert_folder(folder, tmp_path / "fp8", "fp8", lambda name: None)
    model, published = (CausalLM.from_pretrained(one) for one in (folder, tmp_path / "fp8"))
    weights, written = FP8Weights(model.module.config), dict(published.weights())
    for name, tensor in weights.of_weights(model.weights()):
        assert torch.equal(tensor, written[name]), name
    assert any(not torch.equal(tensor, written[name]) for name, tensor in model.weights())
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in weights.names)
    for name, tensor in model.weights():
        if name in weights.names and tensor.ndim > 2:  # a rank may have some experts
            assert torch.equal(weights.numbers(name, tensor[1:]), weights.numbers(name, tensor)[1:])


def test_a_model_without_such_matrices_is_refused(tmp_path: Path):
    folder = tiny_types.write_folder("gpt2", tmp_path / "m")
    (tmp_path / "fp8").mkdir()
    with pytest.raises(CheckpointError, match="has no matrix in its layers that FP8 is for"):
        convert_folder(folder, tmp_path / "fp8", "fp8", lambda name: None)
    with pytest.raises(ModelError, match="type gpt2 has no matrix in its layers that FP8 is for"):
        FP8Weights(tiny_types.tiny_config("gpt2"))


def test_what_is_not_finite_is_refused(tmp_path: Path):
    folder = tiny_types.write_folder("llama", tmp_path / "m", hidden_size=64)
    for number in (math.inf, -math.inf, math.nan, 248 * 2.0**120):  # the last one would round to infinity
        with pytest.raises(ValueError, match="NaN, infinity, or a number that FP8 makes infinite"):
            to_fp8(torch.tensor([[1.0, number]]))
    assert fp8_numbers(torch.tensor([[3.29e38]])).item() == 240 * 2.0**120
    (tmp_path / "out").mkdir()
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("inf")
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight cannot become FP8: it holds NaN, infinity"):
        convert_folder(folder, tmp_path / "out", "fp8", lambda name: None)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_published_as_fp8_a_teacher_is_that_of_the_fp8_folder(
    family: str, tmp_path: Path, monkeypatch, capsys
):
    folder = tiny_types.write_folder(family, tmp_path / "m", hidden_size=64)
    monkeypatch.setattr(converted_folder, "_FILE_BYTES", 1 << 14)  # several files
    (tmp_path / "fp8").mkdir()
    done = convert_folder(folder, tmp_path / "fp8", "fp8", lambda name: None)
    assert 0 < done.rounded <= done.numbers
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 2
    check_weights(tmp_path / "fp8")
    capsys.readouterr()
    assert main(["publish", str(folder), str(tmp_path / "p"), "--dtype", "fp8"]) == 0
    assert f"{done.rounded:,} of {done.numbers:,} numbers were rounded to FP8" in capsys.readouterr().err
    with closing(opened(tmp_path / "p")) as teacher:
        assert torch.equal(teacher.score(SAMPLES).rows, resident(tmp_path / "fp8", max_tokens=16))
        formats = teacher.published.manifest.tensor_formats
    experts = [name for name in formats if "gate.weight" in name or "norm" in name]
    assert all(formats[name] != "F8_E4M3" for name in experts)
    assert {formats[name] for name in formats if name.endswith("_proj.weight")} == {"F8_E4M3"}


def test_transformers_reads_the_fp8_folder_as_these_numbers(tmp_path: Path):
    folder = tiny_types.write_folder(
        "qwen3", tmp_path / "m", hidden_size=256, intermediate_size=384, head_dim=64
    )
    (tmp_path / "fp8").mkdir()
    convert_folder(folder, tmp_path / "fp8", "fp8", lambda name: None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32).state_dict()
    ours = {
        name: tensor
        for file in (tmp_path / "fp8").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    matrices = [name for name in ours if f"{name}_scale_inv" in ours]
    assert len(matrices) == 14
    for name in matrices:
        assert torch.equal(theirs[name], back(ours[name], ours[f"{name}_scale_inv"]))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_is_told_to_leave_the_head(tied: bool, tmp_path: Path):
    folder = tiny_types.write_folder("llama", tmp_path / "m", hidden_size=64, tie_word_embeddings=tied)
    convert_folder(folder, tmp_path / "fp8", "fp8", lambda name: None)
    apart = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert apart["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def test_mxfp4_published_as_fp8_is_the_same_teacher(tmp_path: Path, capsys):
    folder, _ = quantised_folder(tmp_path, "MXFP4")
    capsys.readouterr()
    assert main(["publish", str(folder), str(tmp_path / "p"), "--dtype", "fp8"]) == 0
    assert "numbers became FP8, none of them changed" in capsys.readouterr().err
    with closing(opened(tmp_path / "p")) as teacher:
        assert torch.equal(teacher.score(SAMPLES).rows, resident(folder, max_tokens=16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantised_model_is_published_in_a_dtype(dtype: str, tmp_path: Path):
    folder, plain = quantised_folder(tmp_path, "NVFP4")
    publish_checkpoint(folder, tmp_path / "p", dtype=dtype)
    with PublishedModel.open(tmp_path / "p") as published:
        assert "quantization_config" not in published.manifest.config
        assert published.manifest.config["dtype"] == dtype
        formats = published.manifest.tensor_formats
        assert formats.keys() == load_file(plain / FILE).keys() | {"lm_head.weight"}
        named = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        assert {formats[name] for name in formats if name.endswith("proj.weight")} == {named}
    with closing(opened(tmp_path / "p")) as teacher:
        found = teacher.score(SAMPLES).rows
    if dtype == "float32":
        assert torch.equal(found, resident(plain, max_tokens=16))


def test_the_command_knows_the_forms():
    parser = build_parser()
    for form in FORMS:
        assert parser.parse_known_args(["publish", "a", "b", "--dtype", form])[0].dtype == form


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "phimoe", "hunyuan_v1_moe", "jetmoe", "qwen2_moe"]
)
def test_what_chooses_experts_is_not_rounded(family: str):
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_types.tiny_config(family))
    choosers = [
        name
        for name, _ in module.named_parameters()
        if re.search(r"\.(gate|router|wg|layer|shared_expert_gate)\.", name) and ".layers." in name
    ]
    assert choosers
    assert not any(_is_linear(module, name) for name in choosers if name.endswith("weight"))
    assert any(_is_linear(module, name) for name, _ in module.named_parameters())
