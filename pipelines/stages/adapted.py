"""LoRA in a run: which models are adapted, what is exported, and how adapted teachers are published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.config import Recipe
from opd.models.adapters import AdaptedLM, MergingLM, has_adapter, read_adapter, save_adapted
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import adapter_base, made_once
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.commands.publish import publish_checkpoint
from opd.pipelines.records.inputs import model_digests
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.precision import checkpoint_dtype
from opd.storage.sealed import digest_of
from opd.teachers.published_adapter import publish_adapter

SHARED_BASE = "adapted-base"
"""Where, below the root of published teachers, the bases lie that adapters belong to."""


def adapted(recipe: Recipe, model: CausalLM, path: Path, dtype: str | None = None) -> CausalLM:
    """`model`, read from `path`, as it is trained: with the adapters of `model.lora`, if the recipe has it.

    `dtype`: what adapters are kept in, if it is not that of `model`.
    """
    lora = recipe.model.lora
    if lora is None:
        return model
    found = AdaptedLM(model, lora, path, recipe.seed)
    if dtype is not None:
        found.keep_adapters_in(torch_dtype(dtype))
    return found


def receiving(recipe: Recipe, model: CausalLM) -> CausalLM:
    """`model` as an engine holds it: one that merges the adapters it is sent, if the recipe trains them."""
    return model if recipe.model.lora is None else MergingLM(model, recipe.model.lora)


def all_weights(context: StageContext) -> StageContext:
    """`context` of a stage that trains all weights, whatever the recipe says of adapters."""
    recipe = context.recipe
    model = recipe.model.model_copy(update={"lora": None})
    return replace(context, recipe=recipe.model_copy(update={"model": model}))


def save_trained(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, card: dict[str, Any]
) -> str:
    """Write the Hugging Face folder, adapters merged and kept beside; returns the digest of its weights."""
    if isinstance(model, AdaptedLM):
        return save_adapted(model, tokenizer, folder, card)
    save_checkpoint(model, tokenizer, folder, card)
    return model.digest()


def whole_model(source: Path, out: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """`source`, or for an adapter of peft's the model it makes of its base, written to `out`.

    What was written there of the same adapter and base is kept, unless a byte of it has changed.
    """
    base = adapter_base(source)
    if base is None:
        return source

    def write() -> None:
        model = CausalLM.from_pretrained(source, dtype=checkpoint_dtype(base))
        card = {"base": str(base), "adapter": str(source)}
        save_checkpoint(model, tokenizer or load_tokenizer(source), out, card)

    return made_once(out, digest_of(model_digests(source)), write)


def published_with_base(context: StageContext, name: str) -> str | None:
    """URL of teacher `name` published as an adapter, and its base once beside it; `None` if it kept none.

    Raises `CheckpointError` or `StorageError` if either cannot be published.
    """
    source = context.teacher_source(name)
    if not has_adapter(source):
        return None
    storage = context.recipe.storage
    root = (storage.published or str(context.folder.published)).rstrip("/")
    published = publish_checkpoint(read_adapter(source).base, f"{root}/{SHARED_BASE}", shards=storage.shards)
    base = f"{root}/{SHARED_BASE}/{published.manifest.version}"
    return f"{root}/{name}/{publish_adapter(source, f'{root}/{name}', base)}"
