"""Hugging Face configurations: read from a folder, or built from a recipe's dictionary with strict keys."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from opd.errors import CheckpointError, ModelError
from opd.models.hf_folder import check_small_files, described_in, read_object, refuse_code

# Read by transformers though not every configuration declares them.
_UNDECLARED_KEYS = ("rope_theta", "rope_scaling", "head_dim")


_MOST_LAYERS = 10_000


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in `folder/config.json`; of an adapter, its base's.

    Raises `CheckpointError` if it is missing or not JSON, `ModelError` if its `model_type` is unknown, if it
    names code of its own, or if its weights are quantised.
    """
    folder = described_in(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; give a folder written by Hugging Face's save_pretrained.")
    refuse_code(folder)
    check_small_files(folder)
    _refuse_endless(read_object(path), path)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as JSON; copy the folder again ({error}).") from error
    except (
        *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{path} is not a configuration this transformers release knows: {reason}"
        ) from error
    _refuse_unusable(config, path)
    return config


def _refuse_endless(described: dict[str, Any], where: str | Path) -> None:
    """Raise for layers without number, which a configuration would make a list of."""
    nested = described.get("text_config")
    for form in (described, nested if isinstance(nested, dict) else {}):
        layers = form.get("num_hidden_layers")
        if isinstance(layers, int | float) and layers > _MOST_LAYERS:
            raise ModelError(f"{where} says num_hidden_layers {layers:.6g}; no model has so many: mend it.")


def _refuse_unusable(config: PreTrainedConfig, path: Path) -> None:
    """What no part of `opd` can read, whichever way the weights come."""
    method = getattr(config, "quantization_config", None)
    if method:
        known = method.get("quant_method") if isinstance(method, dict) else None
        raise ModelError(
            f"{path} says that its weights are quantised ({known or 'quantization_config'}), which cannot be"
            " trained, merged or published; give the model's unquantised folder."
        )
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(f"{path} says num_hidden_layers {layers}; a model has one or more: mend the file.")


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """How many tokens each layer's attention sees; `None` where it sees all before."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def scratch_config(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """A configuration from `model_type` and its arguments; vocabulary and special ids are the tokenizer's.

    Raises `ModelError` for an unknown `model_type` or argument (with the nearest known one), a value of the
    wrong type, or a `vocab_size` smaller than the tokenizer's.
    """
    options = dict(config)
    model_type = options.pop("model_type", None)
    _refuse_endless(options, "model.config")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model.config.model_type is {model_type!r}, which transformers does not know"
            f"{_nearest(str(model_type), list(CONFIG_MAPPING.keys()))}."
        )
    known = AutoConfig.for_model(model_type)
    for key in options:
        if not hasattr(known, key) and key not in _UNDECLARED_KEYS:
            raise ModelError(
                f"model.config.{key} is not an argument of {type(known).__name__}"
                f"{_nearest(key, list(known.to_dict()))}."
            )
    tokens = len(tokenizer)
    rows = options.setdefault("vocab_size", tokens)
    if not isinstance(rows, int) or rows < tokens:
        raise ModelError(
            f"model.config.vocab_size is {options['vocab_size']}, fewer than the tokenizer's {tokens} tokens;"
            " leave it out."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        options[name] = getattr(tokenizer, name)
    try:
        return AutoConfig.for_model(model_type, **options)
    except (ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.config cannot be used for model_type {model_type!r}: {reason}") from error


def _nearest(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
