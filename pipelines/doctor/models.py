"""Whether student, teachers and tokenizers can be read and fit together; no weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.recipe import WEIGHT_MERGES
from opd.errors import ModelError
from opd.pipelines.doctor.checks import Finding, attempt, given_teachers

if TYPE_CHECKING:
    from opd.data.prompts import Domain


_NAMES = ("architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache")
"""Keys of a configuration that change nothing in what its weights compute."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What an estimate needs to know of a model."""

    parameters: int
    hidden_size: int
    windows: tuple[int | None, ...]
    """How far each layer's attention sees; `None`: to the beginning."""
    vocabulary: int
    kv_width: int
    """Key-value heads times head size: values per token, layer and side of the cache."""

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


@dataclass(slots=True)
class Models:
    """What the checks found out, for the estimate and the KL check."""

    tokenizer: Any = None
    config: Any = None
    """The student's Hugging Face configuration."""
    student: Shape | None = None
    teachers: dict[str, Shape] = field(default_factory=dict)


def check_models(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    """Checks student, teachers and prompts; fills `models`."""
    findings = attempt("student", lambda: _check_student(recipe, domains, models))
    if models.tokenizer is not None:
        for name, path in given_teachers(recipe).items():
            findings += attempt(
                f"teacher {name}", lambda n=name, p=path: _check_teacher(recipe, n, p, models)
            )
        for name, domain in domains.items():
            findings += attempt(
                f"prompts {name}", lambda d=domain: _check_prompts(recipe, d, models.tokenizer)
            )
    return findings


def _check_student(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    from opd.models.hf_config import read_config, scratch_config
    from opd.models.hf_folder import check_folder
    from opd.models.hf_weights import check_weights
    from opd.pipelines.domains import student_tokenizer

    model = recipe.model
    models.tokenizer = student_tokenizer(recipe, domains.values())
    if model.path is not None:
        check_folder(Path(model.path))
        check_weights(Path(model.path))
        config = read_config(Path(model.path))
    else:
        config = scratch_config(model.config or {}, models.tokenizer)
    models.config = config
    models.student = _shape(config, model.path or "model.config")
    size = f"{models.student.parameters:,} parameters, vocabulary {len(models.tokenizer)}"
    return [
        Finding("ok", "student", f"{config.model_type}, {size}"),
        *_check_ids("student", config, models.tokenizer),
        *_check_temperature("student", model.path, recipe.rollout.temperature),
    ]


def _check_teacher(recipe: Recipe, name: str, source: str, models: Models) -> list[Finding]:
    from opd.models.hf_folder import check_folder
    from opd.models.hf_weights import check_weights
    from opd.teachers.download import is_published, small_files

    if not is_published(source):
        check_folder(Path(source))
        check_weights(Path(source))
    with small_files(source) as folder:
        return _check_teacher_files(recipe, name, folder, models)


def _check_teacher_files(recipe: Recipe, name: str, path: Path, models: Models) -> list[Finding]:
    from opd.models.hf_config import read_config
    from opd.models.tokenizers import differences, fingerprint, load_tokenizer

    title = f"teacher {name}"
    config, tokenizer = read_config(path), load_tokenizer(path)
    apart = differences(fingerprint(models.tokenizer), fingerprint(tokenizer))
    if apart:
        detail = f"the tokenizers of student and teacher differ: {'; '.join(apart)}"
        return [Finding("error", title, f"{detail}; use a teacher with the student's tokenizer")]
    shape = _shape(config, str(path))
    models.teachers[name] = shape
    return [
        Finding("ok", title, f"{config.model_type}, {shape.parameters:,} parameters, same tokenizer"),
        *_check_ids(title, config, tokenizer),
        *_check_temperature(title, str(path), recipe.rollout.temperature),
        *_check_weight_merges(title, recipe, config, models),
    ]


def _check_weight_merges(title: str, recipe: Recipe, config: Any, models: Models) -> list[Finding]:
    """Arithmetic on weights needs models of one configuration; distillation does not."""
    asked = [method for method in recipe.baselines.methods if method in WEIGHT_MERGES]
    ours, theirs = _form(models.config), _form(config)
    apart = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not asked or not apart:
        return []
    detail = f"its configuration differs from the student's in {', '.join(apart)}"
    return [Finding("error", title, f"{detail}; take {', '.join(asked)} out of baselines.methods")]


def _form(config: Any) -> dict[str, Any]:
    """What of a configuration changes the function its weights compute."""
    form = config.get_text_config().to_dict()
    return {key: value for key, value in form.items() if not key.startswith("_") and key not in _NAMES}


def _shape(config: Any, source: str) -> Shape:
    """Counts the parameters of the model without making them."""
    import torch
    from transformers import AutoModelForCausalLM

    from opd.models.hf_config import layer_windows

    text = config.get_text_config()
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the family's constructor meets
        raise ModelError(f"{source} does not describe a causal language model: {error}") from None
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        hidden_size=text.hidden_size,
        windows=layer_windows(config),
        vocabulary=text.vocab_size,
        kv_width=heads * width,
    )


def _check_ids(title: str, config: Any, tokenizer: Any) -> list[Finding]:
    """Vocabulary and special ids of one model against its tokenizer."""
    text, findings = config.get_text_config(), []
    if text.vocab_size < len(tokenizer):
        detail = f"its vocabulary has {text.vocab_size} rows, but the tokenizer has {len(tokenizer)} tokens"
        findings.append(Finding("error", title, f"{detail}; use the tokenizer the model was trained with"))
    if tokenizer.eos_token_id is None:
        detail = "its tokenizer has no end-of-sequence token, so no response could end; set eos_token"
        findings.append(Finding("error", title, detail))
    for name in ("bos", "eos", "pad"):
        there, here = getattr(text, f"{name}_token_id", None), getattr(tokenizer, f"{name}_token_id")
        known = there if isinstance(there, list) else [there]
        if here is not None and there is not None and here not in known:
            detail = f"config.json says {name}_token_id {there}, the tokenizer {here}; the latter is used"
            findings.append(Finding("warning", title, detail))
    return findings


def _check_temperature(title: str, path: str | None, temperature: float) -> list[Finding]:
    """A model tuned to be sampled at another temperature than the recipe's is another policy."""
    file = Path(path) / "generation_config.json" if path is not None else None
    if file is None or not file.is_file():
        return []
    try:
        own = json.loads(file.read_bytes()).get("temperature")
    except (OSError, ValueError, AttributeError):
        return [Finding("warning", title, f"{file} is not readable JSON; it is not used")]
    if own is None or own == temperature:
        return []
    detail = f"its generation_config.json says temperature {own}, rollout.temperature is {temperature:g}"
    return [Finding("warning", title, f"{detail}; both models are sampled and scored at the recipe's")]


def _check_prompts(recipe: Recipe, domain: Domain, tokenizer: Any) -> list[Finding]:
    """A few prompts: do they need a chat template, are they empty, do they fit?"""
    from opd.data.load import encode_prompt

    title, rollout = f"prompts {domain.name}", recipe.rollout
    prompts = [*domain.train[:16], *domain.held_out[:16]]
    if any(prompt.messages is not None for prompt in prompts) and not tokenizer.chat_template:
        detail = (
            "prompts are messages but the tokenizer has no chat template; use text prompts or another model"
        )
        return [Finding("error", title, detail)]
    lengths = [len(encode_prompt(prompt, tokenizer)) for prompt in prompts]
    if min(lengths, default=0) == 0:
        return [Finding("error", title, "a prompt has no tokens; every prompt needs at least one")]
    longest = max(lengths) + rollout.max_new_tokens
    if longest > rollout.max_sequence:
        detail = (
            f"a prompt and its response take {longest} tokens, rollout.max_sequence is {rollout.max_sequence}"
        )
        return [Finding("error", title, f"{detail}; raise it or lower rollout.max_new_tokens")]
    return [Finding("ok", title, f"{min(lengths)} to {max(lengths)} tokens")]
