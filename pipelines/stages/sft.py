"""Fine-tune on the demonstrations of a file: a cold start of the base, or a specialist."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.config import Recipe, SFTConfig
from opd.data.demonstrations import (
    Demonstration,
    DemonstrationEncoder,
    EncodedDemonstration,
    SizedDemonstrations,
    limit_lengths,
    missing_header,
    read_demonstrations,
)
from opd.errors import ConfigError, DataError
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import load_domains, sequence_limit
from opd.pipelines.stages.loop import Extent, StepContext, train
from opd.pipelines.stages.sample_source import StaticSource
from opd.pipelines.stages.student import Student, model_stops
from opd.pipelines.stages.supervised import SupervisedAlgorithm, supervised_sample
from opd.progress import set_activity
from opd.rollout.prompts import Domain, Prompt, PromptCursor, hash_fraction
from opd.train.backend import Backend
from opd.train.terms import CrossEntropyTerm
from opd.types import Sample

_log = logging.getLogger(__name__)


def split_rows(
    recipe: Recipe, config: SFTConfig, rows: Sequence[Demonstration]
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split `rows` by a hash of their question into those to train on, and those to measure the cross-entropy
    on. Questions of a domain's evaluation are always held out.

    Raises `DataError` if nothing is left to train on.
    """
    evaluated = evaluation_questions(load_domains(recipe))
    train: list[Demonstration] = []
    held_out: list[Demonstration] = []
    for row in rows:
        (held_out if is_held_out(row, config, evaluated) else train).append(row)
    if not train:
        raise DataError(
            f"{config.source}: all {len(rows)} demonstrations are held out; add some, or lower held_out from"
            f" {config.held_out:g}."
        )
    held_out.sort(key=lambda row: row.prompt.key)
    return train, held_out[: recipe.evaluation.prompts_per_domain]


def evaluation_questions(domains: Mapping[str, Domain]) -> set[str]:
    """Return the keys of held-out prompts for `is_held_out`."""
    prompts = (prompt for domain in domains.values() for prompt in domain.held_out)
    return {key for prompt in prompts for key in (prompt.key, _question_text(prompt))}


def is_held_out(row: Demonstration, config: SFTConfig, evaluated: set[str]) -> bool:
    """Return whether `row` is not trained on."""
    key = row.prompt.key
    return key in evaluated or _question_text(row.prompt) in evaluated or hash_fraction(key) < config.held_out


def _question_text(prompt: Prompt) -> str:
    """Return the user's text, the same for a text or messages and for any system message. For messages
    without it, return the key.
    """
    contents = [message["content"] for message in prompt.messages or [] if message["role"] == "user"]
    contents = [prompt.text] if prompt.text is not None else contents
    texts = [text.strip() for text in contents if isinstance(text, str)]
    return "\n".join(texts) if texts and len(texts) == len(contents) else prompt.key


def length_limit(recipe: Recipe, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """Return a demonstration's maximum tokens, and their source. Raises `ConfigError` above the model's."""
    if config.max_length is None:
        return sequence_limit(recipe, tokenizer, recipe.rollout.max_sequence, "rollout.max_sequence")
    limit, why = sequence_limit(recipe, tokenizer, config.max_length, "max_length")
    if limit < config.max_length:
        raise ConfigError(f"max_length {config.max_length} of `sft` is more than {why} {limit}; lower it.")
    return limit, why


def demonstration_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> DemonstrationEncoder:
    """Return the encoder of demonstrations into the student's tokens."""
    stops = [stop.token_id for stop in model_stops(recipe, tokenizer)]
    return DemonstrationEncoder(tokenizer, recipe.model.chat_template_kwargs, stops)


def refuse_template(rows: Sequence[Demonstration], writes: DemonstrationEncoder) -> None:
    """Raise `DataError` for messages if the tokenizer's chat template cannot render their prompts. It may be
    missing, or have no generation prompt.
    """
    if all(row.messages is None for row in rows):
        return
    if not writes.tokenizer.chat_template:
        raise DataError(
            "demonstrations are messages, but the tokenizer has no chat template; set model.chat_template to"
            " a file or a folder that has one, or give `prompt` and `completion` as texts."
        )
    header = missing_header(writes.tokenizer, writes.template)
    if header is not None:
        raise DataError(
            f"the chat template has no generation prompt: a prompt ends before {header!r}, which the model"
            " would have to write; give model.chat_template one that heeds add_generation_prompt."
        )


def fine_tune(
    context: StageContext, config: SFTConfig, start: Path, out: Path, domain: str | None = None
) -> dict[str, Any]:
    """Train the model in `start` on the demonstrations of `config`, write it to `out`, return the result
    numbers.

    `domain`: use its rows alone. `None` uses all. Raises `DataError` for demonstrations that cannot be read
    or encoded.
    """
    recipe = context.recipe
    # Cross-entropy is of the model's own distribution, whatever the sampling temperature is.
    plain = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"temperature": 1.0})})
    student = Student.open(
        replace(context, recipe=plain), start, config.optim, config.batch, [CrossEntropyTerm()]
    )
    parts = split_rows(recipe, config, read_demonstrations(config.source, domain))
    encoder = demonstration_encoder(recipe, student.tokenizer)
    limit, why = length_limit(recipe, config, student.tokenizer)
    refuse_template([row for part in parts for row in part], encoder)
    with set_activity("encoding demonstrations"):
        learned, held_out = (limit_lengths(part, encoder, limit, config.too_long, why) for part in parts)
    dropped = learned.describe_dropped(limit, why)
    if dropped:
        _log.info("%s: %s", context.stage, dropped)
    if not learned.rows:
        raise DataError(f"{config.source}: no demonstration is left to learn from; {dropped}.")
    cursor = PromptCursor(learned.rows, recipe.seed, f"{context.stage}/sft")

    def step_samples(index: int) -> list[Sample]:
        first = index * config.batch_size
        rows = cursor.next_prompts(first, config.batch_size)
        return [_demonstration_sample(f"{context.stage}/{first + i}", *row) for i, row in enumerate(rows)]

    algorithm = FineTuning(config, student.backend, context.stage, held_out)
    algorithm.steps = steps = config.steps or math.ceil(config.epochs * len(learned.rows) / config.batch_size)
    source, extent = StaticSource(step_samples, student), Extent(steps=steps)
    result = train(context, algorithm, source, student.backend, extent, config.checkpoint_every)
    result |= {
        "demonstrations": len(learned.rows),
        "held_out": len(held_out.rows),
        "left_out": len(learned.dropped),
        "cut": len(learned.cut),
        **algorithm.measure_loss(result["steps"]),
    }
    exported = {"digest": student.export_model(out, context.stage_card(result))}
    return result | exported | {"stop_ids": student.stop_ids}


def _demonstration_sample(uid: str, row: Demonstration, encoded: EncodedDemonstration) -> Sample:
    return supervised_sample(uid, row.prompt.domain, encoded.prompt_ids, encoded.response_ids, encoded.mask)


class FineTuning(SupervisedAlgorithm):
    """Cross-entropy on demonstrations, measured on held-out ones.

    Args:
        stage: Prefix of the samples' uids.
    """

    steps = 0
    """Steps of the stage, set once they are known."""

    def __init__(
        self, config: SFTConfig, backend: Backend, stage: str, held_out: SizedDemonstrations
    ) -> None:
        super().__init__(config.optim)
        self._every, self._backend = config.evaluate_every, backend
        self._held_out = [
            _demonstration_sample(f"{stage}/held_out/{i}", *row) for i, row in enumerate(held_out.rows)
        ]
        self._measured: tuple[int, dict[str, float]] = (-1, {})

    def count_tokens(self, samples: Any) -> int:
        return 0  # the student has generated none

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        done = step.index + 1
        if done != self.steps and not (self._every and done % self._every == 0):
            return {}
        with step.timer("evaluate"):
            return self.measure_loss(done)

    def measure_loss(self, version: int) -> dict[str, float]:
        """Return the cross-entropy per token on held-out rows, if any, for present weights of `version`."""
        if self._held_out and self._measured[0] != version:
            logprobs = self._backend.recompute_logprobs(self._held_out)
            counted = [
                values[sample.loss_mask].astype(np.float64)
                for values, sample in zip(logprobs, self._held_out, strict=True)
            ]
            tokens = sum(map(len, counted))
            self._measured = (version, {"held_out/ce": -float(sum(map(np.sum, counted))) / tokens})
        return self._measured[1]
