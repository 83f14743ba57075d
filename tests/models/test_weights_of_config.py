"""config.json and weights that do not belong together: refused by name, wherever a folder is read."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from opd.errors import CheckpointError, ModelError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_weights import check_weights
from opd.pipelines.stages.publishing import publish_checkpoint


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path_factory.mktemp("tied") / "m", {})


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Path:
    model = tiny.model(tie_word_embeddings=False)
    return save_checkpoint(model, tiny.tokenizer(), tmp_path_factory.mktemp("apart") / "m", {})


def changed(source: Path, folder: Path, tensors=None, **config) -> Path:
    shutil.copytree(source, folder)
    (folder / "checksums.json").unlink()
    described = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def integers(weights):
    for name in [name for name in weights if "q_proj" in name]:
        weights[name] = weights[name].mul(100).to(torch.int8)


def eighths(weights):
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)


ENTRIES = {
    "load": lambda folder, tmp: CausalLM.from_pretrained(folder),
    "check": lambda folder, tmp: check_weights(folder),
    "publish": lambda folder, tmp: publish_checkpoint(folder, tmp / "published"),
}
REFUSED = {
    "fewer layers": ({"num_hidden_layers": 1}, None, r"9 tensors .*no place for.*model\.layers\.1\."),
    "more layers": ({"num_hidden_layers": 3}, None, r"lacks 9 of .*model\.layers\.2\."),
    "no layers": ({"num_hidden_layers": 0}, None, "num_hidden_layers 0"),
    "wider": ({"intermediate_size": 96}, None, r"mlp\.down_proj\.weight in the shape .* 5 more so"),
    "int8": ({}, integers, r"q_proj\.weight.* as I8"),
    "float8": ({}, eighths, r"layers\.1\.mlp\.up_proj\.weight as F8"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, "quantised .gptq"),
    "compressed": ({"compression_config": {"format": "packed"}}, None, "quantised .compression_config"),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, None, "quantised .quantization."),
    "no object": ({"quantization_config": "fp8"}, None, "quantised .quantization_config"),
    "in the text model": (
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        None,
        "quantised .awq",
    ),
    "a classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        lambda w: w.update({"score.weight": torch.ones(1, 32)}),
        r"was saved as LlamaForSequenceClassification .* and has score\.weight; give the folder of a causal",
    ),
    "a model without a head": (
        {"architectures": ["LlamaModel"], "tie_word_embeddings": False},
        None,
        r"was saved as LlamaModel .* and lacks lm_head\.weight; give the folder of a causal",
    ),
    "an empty quantisation": ({"quantization_config": {}}, None, "quantization_config .*take the key out"),
    "a short name of a type": ({"dtype": "bf16"}, None, "dtype bf16; write bfloat16, float16 or"),
    "a type by its module": ({"torch_dtype": "torch.float16"}, None, r"torch_dtype torch.float16; write"),
    "an unknown activation": ({"hidden_act": "sillu"}, None, "hidden_act sillu, .* write silu"),
    "unknown positions": ({"rope_scaling": {"type": "spiral"}}, None, "rope_type spiral"),
    "positions by text": (
        {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, None, "factor 2 of its positions",
    ),
    "positions without an angle": ({"rope_theta": 0}, None, "rope_theta 0 of its positions"),
    "positions without factors": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, None, "without the list short_factor",
    ),
    "an unknown type of model": ({"model_type": "qwen9"}, None, "model_type qwen9, .* upgrade transformers"),
    "no type of model": ({"model_type": None}, None, "model_type None"),
    "unknown method": ({"quantization_config": {"bits": 8}}, integers, "quantised"),
    "a tensor too many": (
        {},
        lambda w: w.update({"model.extra.weight": torch.ones(2)}),
        r"model\.extra\.weight",
    ),
    "a bias too many": (
        {},
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        r"q_proj\.bias",
    ),
    "a tensor missing": ({}, lambda w: w.pop("model.norm.weight"), r"lacks 1 .*model\.norm\.weight"),
    "an untied head": (
        {},
        lambda w: w.update({"lm_head.weight": torch.ones_like(w["model.embed_tokens.weight"])}),
        r"ties lm_head\.weight to model\.embed_tokens\.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused_by_name(tied, tmp_path, case, entry):
    config, tensors, told = REFUSED[case]
    folder = changed(tied, tmp_path / "m", tensors, **config)
    with pytest.raises((CheckpointError, ModelError), match=told) as caught:
        ENTRIES[entry](folder, tmp_path)
    assert "above report" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_that_is_declared_tied_but_was_trained_apart_is_refused(apart, tmp_path):
    folder = changed(apart, tmp_path / "m", tie_word_embeddings=True)
    for entry in ENTRIES.values():
        with pytest.raises(CheckpointError, match="two different ones"):
            entry(folder, tmp_path)


HARMLESS = {
    "frequencies": lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "the tied head again": lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    "masks": lambda w: w.update({"model.layers.0.attn.masked_bias": torch.ones(1)}),
    "a mask of bytes": lambda w: w.update({"model.layers.0.attn.bias": torch.ones(4, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_leftovers_of_older_releases_do_no_harm(tied, tmp_path, case):
    folder = changed(tied, tmp_path / "m", HARMLESS[case])
    check_weights(folder)
    assert CausalLM.from_pretrained(folder).digest() == CausalLM.from_pretrained(tied).digest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_disagreement(tmp_path, dtype):
    model = CausalLM.from_config(tiny.LLAMA, tokenizer=tiny.tokenizer(), dtype=dtype)
    folder = save_checkpoint(model, tiny.tokenizer(), tmp_path / "m", {})
    for entry in ENTRIES.values():
        entry(folder, tmp_path)
