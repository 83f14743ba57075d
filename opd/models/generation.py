"""`generation_config.json`: settings of a model that opd does not follow, and the file opd writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from opd.errors import CheckpointError
from opd.models.hf_folder import described_in, read_object
from opd.types import SamplingParams
from opd.untrusted import is_unset, safe_excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "generation_config.json"
_FOLLOWED = frozenset({"eos_token_id", "temperature", "top_p", "top_k"})
"""Keys with a recipe field, or that end responses."""
_FREE = frozenset(
    {
        "transformers_version", "_from_model_config", "do_sample", "bos_token_id", "pad_token_id",
        "decoder_start_token_id", "max_length", "max_new_tokens", "max_time", "length_penalty",
        "early_stopping", "num_return_sequences", "use_cache", "cache_implementation", "cache_config",
        "max_cache_len", "return_dict_in_generate",
        "output_attentions", "output_hidden_states", "output_scores", "output_logits", "is_assistant",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "compile_config",
        "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size",
    }
)  # fmt: skip
"""Keys that change no answer, except its length."""
_NEUTRAL = {
    **dict.fromkeys(
        (
            "repetition_penalty", "encoder_repetition_penalty", "typical_p", "num_beams", "num_beam_groups",
            "guidance_scale", "top_h",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "min_p",
            "diversity_penalty", "epsilon_cutoff", "eta_cutoff", "penalty_alpha",
        ),
        0,
    ),
}  # fmt: skip
"""Neutral values of settings. Any other setting in the file that has a value is not followed."""


def not_followed(folder: Path) -> str | None:
    """Return a sentence with the settings of the model in `folder` that no engine here follows, or `None`.

    Raises `CheckpointError` for a file that is no JSON object.
    """
    path = described_in(folder) / FILE
    settings = read_object(path) if path.is_file() else {}
    unread = [
        f"{safe_excerpt(key)} {safe_excerpt(value, 40)}"
        for key, value in settings.items()
        if key not in _FOLLOWED and key not in _FREE
        if not is_unset(value) and value != _NEUTRAL.get(key)
    ]
    if not unread:
        return None
    return (
        f"its {FILE} asks for {', '.join(unread)}, which nothing here follows: answers are written and"
        " measured without; programs that do follow it will give others"
    )


def sampling_of(folder: Path) -> dict[str, float]:
    """Return the sampling settings of the model in `folder`, if given: `temperature` (0 if `do_sample` is
    false), `top_p` and `top_k`.

    Raises `CheckpointError` for a number out of range.
    """
    path = described_in(folder) / FILE
    settings = read_object(path) if path.is_file() else {}
    if settings.get("do_sample") is False:
        return {"temperature": 0.0}
    sampling = {}
    for key, (least, most) in _BOUNDS.items():
        value = settings.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (key == "top_k" and value != int(value)):
            kind = "whole number" if key == "top_k" else "number"
            raise CheckpointError(
                f"{path} says {key} {safe_excerpt(value, 40)}; give a {kind} from {least:,} to {most:,}."
            )
        sampling[key] = int(value) if key == "top_k" else float(value)
    return sampling


_BOUNDS = {"temperature": (0, 1000), "top_p": (1e-6, 1), "top_k": (0, 2**31 - 1)}


def generation_of(tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> GenerationConfig:
    """Return the generation config of a model trained to answer with `sampling`: stop ids and sampling
    settings. It has nothing else, because its answers were generated without.
    """
    stops: Sequence[int] = sampling.stop_ids
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=list(stops) or None,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
