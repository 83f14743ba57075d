"""Adapter folders of public reports, as peft wrote them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from public_reports import Report, edit, plain, refuses, save_model, tokenizer, used
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def adapted(model: dict[str, Any] | None = None, **config: Any) -> Callable[[Path], Path]:
    """An adapter with random numbers, and its base beside it."""

    def make(folder: Path) -> Path:
        from peft import LoraConfig, get_peft_model

        base = save_model(folder.parent / "base", **(model or {}))
        options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = get_peft_model(
                AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options)
            )
            torch.manual_seed(0)
            with torch.no_grad():
                for name, parameter in wrapped.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.2)
            wrapped.save_pretrained(folder)
        return folder

    return make


def by_peft(folder: Path) -> Any:
    """The base with the adapter applied by peft, unmerged."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(plain(folder.parent / "base"), folder)


def said(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: edit(adapted()(folder) / SETTINGS, **changes)


def weighed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        held = load_file(adapted()(folder) / ADAPTER)
        changed = {name: tensor.contiguous() for name, tensor in change(held).items()}
        save_file(changed, folder / ADAPTER, metadata={"format": "pt"})
        return folder

    return make


def renamed(old: str, new: str) -> Callable[[Path], Path]:
    return weighed(lambda held: {name.replace(old, new): tensor for name, tensor in held.items()})


def on_quantised(folder: Path) -> Path:
    """An adapter whose base says that it is quantised by bitsandbytes."""
    adapted()(folder)
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    edit(folder.parent / "base" / "config.json", quantization_config=method)
    return folder


def with_a_model(folder: Path) -> Path:
    """An adapter in the folder of a whole model."""
    adapted()(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((folder.parent / "base" / name).read_bytes())
    return folder


def with_more_tokens(folder: Path) -> Path:
    """An adapter that was trained with tokens its base does not know."""
    adapted()(folder)
    more = tokenizer()
    more.add_tokens(["<c>"])
    more.save_pretrained(folder)
    return folder


def without_weights(folder: Path) -> Path:
    """An adapter of which only the pickle is there."""
    adapted()(folder)
    torch.save(load_file(folder / ADAPTER), folder / "adapter_model.bin")
    (folder / ADAPTER).unlink()
    return folder


def in_a_checkpoint(folder: Path) -> Path:
    """The folder above a trainer's checkpoints."""
    folder.mkdir()
    adapted()(folder / "checkpoint-20")
    (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "checkpoint-20"}))
    return folder


ADAPTERS = [
    Report(
        "sgl-project/sglang#40835",
        "an adapter with `use_rslora`",
        "scaled √r times too weakly, without a word",
        "as peft scales it",
        used(adapted(use_rslora=True), by_peft, streamed=False),
    ),
    Report(
        "NVIDIA/TensorRT-LLM#1668",
        "`use_rslora` with a rank of 9 and every linear layer",
        "a wrong scale, bad answers",
        "as peft scales it",
        used(adapted(use_rslora=True, r=9, target_modules="all-linear"), by_peft, streamed=False),
    ),
    Report(
        "axolotl-ai-cloud/axolotl#3673",
        "ranks and scales by layer: `rank_pattern`, `alpha_pattern`",
        "the one of all is used",
        "as peft scales it",
        used(adapted(alpha_pattern={"layers.1.self_attn.q_proj": 64}), by_peft, streamed=False),
    ),
    Report(
        "huggingface/peft#2018",
        "an adapter on a head that is tied to the embedding",
        "merged into both, without a word",
        "refused: the head is the embedding",
        refuses(r"lm_head", adapted({"tie_word_embeddings": True}, target_modules=["lm_head"])),
    ),
    Report(
        "huggingface/peft#436",
        "an adapter on the embedding",
        "an AttributeError while it is merged",
        "refused, with the tensor's name",
        refuses(r"embed_tokens", adapted(target_modules=["embed_tokens", "q_proj"])),
    ),
    Report(
        "vllm-project/vllm#34186",
        "names that have another prefix than the model's",
        "the base answers, and nobody says so",
        "refused, with the tensor's name",
        refuses(
            r"adapts language_model\.layers", renamed("model.model.layers", "model.language_model.layers")
        ),
    ),
    Report(
        "hiyouga/LlamaFactory#10294",
        "an adapter of a model with images on its text model",
        "a warning of missing keys",
        "refused, with the tensor's name",
        refuses(
            r"adapts model\.language_model\.layers",
            renamed("model.model.layers", "model.model.language_model.layers"),
        ),
    ),
    Report(
        "huggingface/diffusers#11675",
        "names with the adapter's own, `lora_A.default_0`",
        "missing keys",
        "refused, with the tensor's name",
        refuses(r"lora_[AB]\.default_0", renamed("lora_A.weight", "lora_A.default_0.weight")),
    ),
    Report(
        "huggingface/peft#1932",
        "a layer of `target_modules` that the file has no tensors of",
        "left at its start, without a word",
        "refused, with the layer's name",
        refuses(
            r"down_proj",
            weighed(lambda held: {name: tensor for name, tensor in held.items() if "down_proj" not in name}),
        ),
    ),
    Report(
        "alvdansen/signet-trainer#105",
        "an adapter without any tensor",
        "the base answers under the adapter's name",
        "refused",
        refuses(r"no adapter of any layer|no tensors", weighed(lambda held: {})),
    ),
    Report(
        "huggingface/peft#276",
        "tensors of another rank than `r` says",
        "a size mismatch of 60 lines",
        "refused, with both ranks",
        refuses(r"rank", said(r=8)),
    ),
    Report(
        "huggingface/peft#1035",
        "an adapter on a layer with a bias of its own (OPT)",
        "other answers after it is merged",
        "as peft applies it",
        used(adapted({"attention_bias": True}, target_modules=["q_proj", "o_proj"]), by_peft, streamed=False),
    ),
    Report(
        "unslothai/unsloth-zoo#326",
        "an adapter on a base in 4 bits",
        "a merge that returns nothing",
        "refused: the base is quantised",
        refuses(r"base.*quantised \(bitsandbytes\)", on_quantised),
    ),
    Report(
        "huggingface/transformers#25215",
        "`base_model_name_or_path: null`",
        "a request for the repository `None`",
        "refused, with the file and the key",
        refuses(r"adapter_config\.json does not name its base", said(base_model_name_or_path=None)),
    ),
    Report(
        "unslothai/unsloth#699",
        "a base of another machine",
        "a download of gigabytes in its place",
        "refused, with the base's name",
        refuses(
            r"adapter on .*/content/llama.*write the base's folder",
            said(base_model_name_or_path="/content/llama"),
        ),
    ),
    Report(
        "huggingface/transformers#43781",
        "a whole model and an adapter in one folder",
        "the adapter's base is loaded in the model's place",
        "refused: one of them has to move",
        refuses(r"holds a model and an adapter", with_a_model),
    ),
    Report(
        "huggingface/peft#3608",
        "DoRA",
        "a merge that is off by some per cent",
        "refused, with the setting's name",
        refuses(r"use_dora", adapted(use_dora=True)),
    ),
    Report(
        "huggingface/peft#2422",
        "whole layers beside the adapters: `modules_to_save`",
        "left out by some programs",
        "refused, with the setting's name",
        refuses(r"modules_to_save", adapted(modules_to_save=["lm_head"])),
    ),
    Report(
        "huggingface/peft#3531",
        "an adapter on GPT-2's transposed layers: `fan_in_fan_out`",
        "merged along the wrong side",
        "as peft applies it",
        used(said(fan_in_fan_out=True), by_peft, streamed=False),
    ),
    Report(
        "thinking-machines-lab/tinker-cookbook#593",
        "tokens that the adapter's folder has and its base has not",
        "a size mismatch",
        "refused, with both numbers",
        refuses(r"has 16 rows, but the tokenizer's ids go on to 16", with_more_tokens),
    ),
    Report(
        "unslothai/unsloth#327",
        "an adapter as a pickle: adapter_model.bin",
        "`is not a full model or a PEFT model`",
        "refused: a pickle is never read",
        refuses(r"adapter_model\.(bin is a pickle|safetensors is missing)", without_weights),
    ),
    Report(
        "huggingface/open-r1#126",
        "the folder above a trainer's checkpoints",
        "a file that does not exist, of 60 lines",
        "refused, with what is missing",
        refuses(r"is the folder above models.*checkpoint-20", in_a_checkpoint),
    ),
]
