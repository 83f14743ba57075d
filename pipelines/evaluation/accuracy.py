"""Accuracy of a model on held-out prompts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.pipelines.evaluation.answers import keep, length_quantiles
from opd.pipelines.evaluation.statistics import Count, wilson
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import sampling_params
from opd.protocols import RolloutEngine
from opd.rollout.collect import EncodedPrompt
from opd.types import Sample, SamplingParams

Look = Callable[[list[Sample]], None]
CORRECT_ABOVE = 0.5
"""A response counts as right if its reward is above this: checkers answer 0 or 1."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers among so many."""

    correct: int
    total: int
    accuracy: float
    low: float
    """Lower end of the Wilson interval."""
    high: float
    mean_length: float
    """Tokens that the model wrote."""


def domain_accuracy(
    engine: RolloutEngine,
    data: DomainSet,
    domain: str,
    prompts: int,
    sampling: SamplingParams,
    *,
    seed: int,
    samples: int = 1,
    confidence: float = 0.95,
    look: Look = lambda samples: None,
) -> Accuracy:
    """Accuracy on the first `prompts` held-out prompts of `domain`, `samples` responses each.

    The noise depends on (seed, prompt, sample) alone, so that two models meet the same draws. `look` is given
    the scored responses.
    """
    held_out = data.held_out(domain, prompts, "evaluate")
    return prompt_accuracy(
        engine, data, held_out, sampling, seed=seed, samples=samples, confidence=confidence, look=look
    )


def prompt_accuracy(
    engine: RolloutEngine,
    data: DomainSet,
    prompts: list[EncodedPrompt],
    sampling: SamplingParams,
    *,
    seed: int,
    samples: int = 1,
    confidence: float = 0.95,
    look: Look = lambda samples: None,
) -> Accuracy:
    """Accuracy on given prompts."""
    groups = data.generate(engine, prompts, samples, sampling, seed)
    responses = [sample for group in groups for sample in group.samples]
    data.rewards.score(responses)
    look(responses)
    correct = sum((s.reward or 0.0) > CORRECT_ABOVE for s in responses)
    interval = wilson(Count(correct, len(responses)), confidence)
    length = float(np.mean([s.trainable_tokens for s in responses]))
    return Accuracy(correct, len(responses), correct / len(responses), interval.low, interval.high, length)


def evaluate_model(
    engine: RolloutEngine, data: DomainSet, recipe: Recipe, teacher: Path | None = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Sampled and greedy accuracy on every domain, as the results file holds them, and a few of the sampled
    answers there (`answers.keep`); of a `teacher` in its folder, which may end its responses elsewhere.
    """
    config = recipe.evaluation
    domains: dict[str, Any] = {}
    kept: dict[str, list[Any]] = {}
    for domain in recipe.domains:
        row: dict[str, Any] = {}
        seen: list[Sample] = []
        for name, greedy, samples in (("sampled", False, config.samples_per_prompt), ("greedy", True, 1)):
            found = asdict(
                domain_accuracy(
                    engine,
                    data,
                    domain,
                    config.prompts_per_domain,
                    sampling_params(recipe, data.tokenizer, greedy, teacher),
                    seed=recipe.seed,
                    samples=samples,
                    confidence=config.confidence,
                    look=lambda samples, name=name, seen=seen: (
                        seen.extend(samples) if name == "sampled" else None
                    ),
                )
            )
            length = found.pop("mean_length")
            row[name] = found
            if name == "sampled":
                row["mean_length"] = length
        row["lengths"] = length_quantiles(seen)
        kept[domain] = keep(seen, data.rewards.text, CORRECT_ABOVE)
        domains[domain] = row
    return domains, kept
