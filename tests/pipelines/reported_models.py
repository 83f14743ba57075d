"""Model folders of public reports: configurations and weights."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from public_reports import Report, edit, plain, refuses, save_model, tokenizer, used
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def made(**config: Any) -> Callable[[Path], Path]:
    """A model of this configuration."""
    return lambda folder: save_model(folder, **config)


def described(drop: tuple[str, ...] = (), model: dict[str, Any] | None = None, **changes: Any):
    """A model whose config.json was changed after it was saved."""
    return lambda folder: edit(save_model(folder, **(model or {})) / CONFIG, drop, **changes)


def weighed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **config: Any):
    """A model whose weights were changed after it was saved."""

    def make(folder: Path) -> Path:
        save_model(folder, **config)
        tensors = change(load_file(folder / WEIGHTS))
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        return folder

    return make


def without(name: str, **config: Any):
    return weighed(lambda held: {key: value for key, value in held.items() if key != name}, **config)


def renamed(change: Callable[[str], str], **config: Any):
    return weighed(lambda held: {change(key): value for key, value in held.items()}, **config)


def beside(**config: Any):
    """A tensor more than the model has a place for."""
    name, shape = config.pop("name"), config.pop("shape")
    return weighed(lambda held: held | {name: torch.ones(shape)}, **config)


def sharded(folder: Path) -> Path:
    """A model in two files and their index."""
    save_model(folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def without_a_shard(folder: Path) -> Path:
    (sharded(folder) / "model-00002-of-00002.safetensors").unlink()
    return folder


def misplaced(folder: Path) -> Path:
    path = sharded(folder) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = min(index["weight_map"])
    index["weight_map"][first] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    return folder


def headless_entry(folder: Path) -> Path:
    """A header with a tensor of no element type."""
    save_model(folder)
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length]) | {"x": {"dtype": "", "shape": [], "data_offsets": [0, 0]}}
    said = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])
    return folder


def without_metadata(folder: Path) -> Path:
    save_model(folder)
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS)
    return folder


def as_pickle(folder: Path) -> Path:
    save_model(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def grown(folder: Path) -> Path:
    """A tokenizer that got tokens after the model was saved."""
    save_model(folder)
    more = tokenizer()
    more.add_tokens(["<c>", "<d>", "<e>", "<f>"])
    more.save_pretrained(folder)
    return folder


def of_yarn(**more: Any):
    return made(rope_parameters=YARN | {"rope_theta": 10000.0} | more)


def in_old_form(scaling: dict[str, Any] | None, theta: float = 500.0):
    """`rope_theta` and `rope_scaling` at the top, as transformers 4 wrote them."""
    return described(("rope_parameters",), rope_theta=theta, rope_scaling=scaling)


def of_theta(theta: float, **rope: Any):
    """The reference for a configuration of the old form."""

    def reference(folder: Path) -> Any:
        module = plain(folder)
        held = module.config.rope_parameters
        assert held["rope_theta"] == theta, held
        assert all(held[key] == value for key, value in rope.items()), held
        return module

    return reference


MODELS = [
    Report(
        "vllm-project/vllm#44158",
        "a Llama whose `rope_theta` stands in `rope_parameters`, as transformers 5 writes it",
        "theta 10,000 in place of it, without a word",
        "its own theta",
        used(made(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), of_theta(500.0)),
    ),
    Report(
        "sgl-project/sglang#14745",
        "`rope_theta` at the top of config.json, as transformers 4 wrote it",
        "wrong angles, or an AttributeError",
        "its own theta",
        used(in_old_form(None), of_theta(500.0)),
    ),
    Report(
        "vllm-project/vllm#6897",
        "`rope_scaling` with the old key `type: linear`",
        "warnings of unknown keys",
        "scaled as it says",
        used(in_old_form({"type": "linear", "factor": 2.0}), of_theta(500.0, rope_type="linear", factor=2.0)),
    ),
    Report(
        "sgl-project/sglang#2943",
        "YaRN by `rope_scaling` with the old key `type`, as Qwen2.5's card writes it",
        "the length stays that of before, and the start is refused",
        "scaled as it says",
        used(
            in_old_form({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
            of_theta(500.0, rope_type="yarn", factor=4.0),
        ),
    ),
    Report(
        "vllm-project/vllm#48351",
        "YaRN with an `attention_factor` of its own",
        "another magnitude, without a word",
        "the factor that it says",
        used(of_yarn(attention_factor=1.0)),
    ),
    Report(
        "vllm-project/vllm#48623",
        "YaRN with `mscale` and `mscale_all_dim`",
        "27 % off in every attention score",
        "as transformers computes it",
        used(of_yarn(mscale=1.0, mscale_all_dim=0.7)),
    ),
    Report(
        "huggingface/transformers#38224",
        "YaRN with `factor` and `original_max_position_embeddings` that disagree with the positions",
        "the factor has no effect",
        "the factor that it says",
        used(of_yarn(factor=8.0), lambda folder: of_theta(10000.0, factor=8.0)(folder)),
    ),
    Report(
        "huggingface/transformers#40126",
        "a Qwen2 with a window on layers from `max_window_layers` on",
        "the window on no layer",
        "the window where the configuration has it",
        used(made(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    ),
    Report(
        "Blackwellboy/model-serving-minefield#107",
        "a Qwen3 with `sliding_window` and without `use_sliding_window`",
        "a window that is not the model's",
        "no window, as the model was trained",
        used(made(model_type="qwen3", sliding_window=4, head_dim=8)),
    ),
    Report(
        "axolotl-ai-cloud/axolotl#1047",
        "a Mistral with `sliding_window: null`",
        "a TypeError at the first batch",
        "no window",
        used(made(model_type="mistral", sliding_window=None)),
    ),
    Report(
        "huggingface/transformers#29623",
        "a Mistral whose window is shorter than the text",
        "one token more or less by the attention's kind",
        "as many tokens as transformers' eager attention sees",
        used(made(model_type="mistral", sliding_window=5)),
    ),
    Report(
        "InternLM/lmdeploy#2761",
        "`head_dim` that is not hidden_size / heads (Mistral Nemo)",
        "wrong shapes",
        "its own head_dim",
        used(made(model_type="mistral", head_dim=12, sliding_window=None)),
    ),
    Report(
        "paiml/entrenar#262",
        "a Qwen3 whose heads are wider together than the hidden state",
        "a shape mismatch",
        "its own head_dim",
        used(made(model_type="qwen3", head_dim=16)),
    ),
    Report(
        "modular/modular#6665",
        "`num_key_value_heads: null`",
        "`unsupported operand type(s) for %: 'NoneType' and 'int'`",
        "as many as heads, as transformers reads it",
        used(described(model={"num_key_value_heads": 4}, num_key_value_heads=None)),
    ),
    Report(
        "huggingface/transformers#13076",
        "weights in float16 with `torch_dtype`, the old key",
        "loaded in float32 or float16 by chance",
        "their values, in the type that the recipe asks for",
        used(
            lambda folder: edit(
                weighed(lambda held: {name: tensor.half() for name, tensor in held.items()})(folder) / CONFIG,
                ("dtype",),
                torch_dtype="float16",
            ),
            streamed=False,
        ),
    ),
    Report(
        "arcee-ai/mergekit#425",
        "more rows in the embedding than the tokenizer has tokens (Qwen2.5)",
        "rows cut off in some merges",
        "the tokens that the tokenizer has",
        used(made(vocab_size=40)),
    ),
    Report(
        "huggingface/transformers#26714",
        "a tokenizer with more tokens than the embedding has rows (CodeLlama)",
        "an index out of range while it trains",
        "refused, with both numbers",
        refuses(r"has 16 rows, but the tokenizer's ids go on to 19", grown),
    ),
    Report(
        "huggingface/transformers#42612",
        "`tie_word_embeddings: true` beside a head of its own",
        "the head overwritten by the embedding, without a word",
        "refused: the two disagree",
        refuses(r"ties lm_head\.weight", described(tie_word_embeddings=True)),
    ),
    Report(
        "stepfun-ai/Step-Audio-EditX#38",
        "a head of its own, and a config.json that does not say so, of a family that ties by default",
        "tied, and gibberish written",
        "refused: the two disagree",
        refuses(
            r"ties lm_head\.weight",
            described(
                ("tie_word_embeddings",), {"model_type": "gemma", "tie_word_embeddings": False, "head_dim": 8}
            ),
        ),
    ),
    Report(
        "huggingface/transformers#34759",
        "weights without the embedding (MobileLLM)",
        "the embedding is random",
        "refused, with the tensor's name",
        refuses(r"lacks .*model\.embed_tokens\.weight", without("model.embed_tokens.weight")),
    ),
    Report(
        "huggingface/transformers#38870",
        "a tied model of which only the head is stored",
        "an embedding on the meta device",
        "the embedding is the head",
        used(renamed(lambda name: name.replace("model.embed_tokens", "lm_head"), tie_word_embeddings=True)),
    ),
    Report(
        "hiyouga/LlamaFactory#6803",
        "safetensors without metadata",
        "`'NoneType' object has no attribute 'get'`",
        "used",
        used(without_metadata),
    ),
    Report(
        "pytorch/torchtitan#3764",
        "safetensors whose header names a tensor without an element type",
        "`invalid JSON in header`",
        "refused, with the file's name",
        refuses(r"model\.safetensors is truncated or corrupt", headless_entry),
    ),
    Report(
        "sgl-project/sglang#32279",
        "an index that names a file which is not there",
        "its weights are whatever the memory held",
        "refused, with the file's name",
        refuses(r"model-00002-of-00002\.safetensors is missing", without_a_shard),
    ),
    Report(
        "huggingface/huggingface_hub#4728",
        "an index that names a tensor's file wrongly",
        "accepted",
        "refused, with the tensor's name",
        refuses(r"lm_head\.weight", misplaced),
    ),
    Report(
        "karpathy/nanoGPT#325",
        "names that begin with `_orig_mod.`, of a compiled model",
        "random weights, or missing keys",
        "refused, with a tensor's name",
        refuses(r"as torch\.compile does.*_orig_mod\.save", renamed(lambda name: f"_orig_mod.{name}")),
    ),
    Report(
        "FareedKhan-dev/train-llm-from-scratch#36",
        "names that begin with `module.`, of a wrapped model",
        "163 missing keys and random weights",
        "refused, with a tensor's name",
        refuses(r"as DistributedDataParallel", renamed(lambda name: f"module.{name}")),
    ),
    Report(
        "vllm-project/vllm#34888",
        "a layer more than config.json counts (multi-token prediction)",
        "a ValueError while it loads",
        "refused, with the tensor's name",
        refuses(r"no place for.*layers\.2\.", beside(name="model.layers.2.eh_proj.weight", shape=(32, 64))),
    ),
    Report(
        "OpenRLHF/OpenRLHF#1039",
        "a reward model's folder: `LlamaForSequenceClassification`, a `score` and no head",
        "a random head answers",
        "refused, with the tensor's name",
        refuses(
            r"lm_head\.weight|score\.weight",
            weighed(
                lambda held: (
                    {k: v for k, v in held.items() if k != "lm_head.weight"}
                    | {"score.weight": torch.ones(1, 32)}
                )
            ),
        ),
    ),
    Report(
        "ncsoft/offsetbias#2",
        "a reward model with a tied embedding, whose head is therefore not missing",
        "served as what it is not",
        "refused, with the tensor's name",
        refuses(
            r"no place for.*score\.weight",
            beside(name="score.weight", shape=(1, 32), tie_word_embeddings=True),
        ),
    ),
    Report(
        "predibase/lorax#51",
        "a folder with pytorch_model.bin alone",
        "`No local weights found`",
        "refused: a pickle is never read",
        refuses(r"pytorch_model\.bin is a pickle", as_pickle),
    ),
    Report(
        "vllm-project/vllm#36217",
        "a `model_type` that this release of transformers does not know",
        "a ValueError of 40 lines",
        "refused, with the name and what to do",
        refuses(r"qwen9", described(model_type="qwen9", architectures=["Qwen9ForCausalLM"])),
    ),
    Report(
        "meta-llama/llama#427",
        "a config.json with fewer key-value heads than the weights",
        "a list of size mismatches",
        "refused, with a tensor's name",
        refuses(r"k_proj\.weight in the shape", described(num_key_value_heads=1)),
    ),
]
