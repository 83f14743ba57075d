"""Accuracy of a model on held-out prompts, greedy and sampled.

A few answers of an evaluation, kept to be read: what base, teacher and student wrote to a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.pipelines.evaluation.statistics import Count, wilson
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import sampling_params
from opd.protocols import RolloutEngine
from opd.rollout.collect import EncodedPrompt
from opd.types import Sample, SamplingParams, Status

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


PROMPTS = 256
"""Held-out prompts of a domain whose answers are kept, at most."""
CHARACTERS = 1500
"""Most of a prompt, a label or an answer that is kept."""
SHOWN = 3
"""Examples of each kind."""
KINDS = ("wins", "losses", "regressions")
"""Right where the base was wrong; wrong where the teacher was right; wrong where the base was right."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model wrote to one prompt."""

    uid: str
    prompt: str
    label: str
    text: str
    right: bool
    cut: bool
    """Whether the response ended at the length limit."""


def keep(samples: Sequence[Sample], text: Callable[[Sample], str], right_above: float) -> list[Any]:
    """The first scored answer to each of the first `PROMPTS` prompts, JSON-able, in their order.

    `text` gives a response as its reward sees it.
    """
    first = {sample.group_uid: sample for sample in reversed(samples)}
    order = list(dict.fromkeys(sample.group_uid for sample in samples))[:PROMPTS]
    return [asdict(_answer(first[uid], text(first[uid]), right_above)) for uid in order]


def _answer(sample: Sample, text: str, right_above: float) -> Answer:
    label = sample.label if isinstance(sample.label, str) else json.dumps(sample.label, default=str)
    messages = sample.metadata.get("messages")
    said = [f"{message.get('role')}: {message.get('content')}" for message in messages or []]
    prompt = "\n".join(said) or str(sample.metadata.get("prompt", ""))
    right = (sample.reward or 0.0) > right_above
    cut = sample.status is Status.TRUNCATED
    return Answer(sample.group_uid, _short(prompt), _short(label), _short(text), right, cut)


def _short(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} \u2026"


def length_quantiles(samples: Sequence[Sample]) -> dict[str, float]:
    """How long responses are, in tokens that the model wrote, and which share of them was cut."""
    lengths = np.array([sample.trainable_tokens for sample in samples])
    low, middle, high = np.quantile(lengths, (0.1, 0.5, 0.9)).tolist()
    cut = float(np.mean([sample.status is Status.TRUNCATED for sample in samples]))
    return {"p10": low, "p50": middle, "p90": high, "max": float(lengths.max()), "cut": cut}


def side_by_side(
    answers: dict[str, dict[str, list[Any]]], domains: Sequence[str], teachers: Mapping[str, str]
) -> dict[str, Any]:
    """domain -> how many prompts were compared, and of each of `KINDS` how many there are and a few of them.

    `answers`: model -> domain -> what `keep` gave; `teachers`: domain -> the model that is its teacher.
    An example is shown once, under the last kind it is of.
    """
    found = {}
    for domain in domains:
        sides = {
            side: {answer["uid"]: answer for answer in answers.get(model, {}).get(domain, [])}
            for side, model in (("base", "base"), ("teacher", teachers.get(domain, "")), ("merged", "merged"))
        }
        rows = [
            {"prompt": merged["prompt"], "label": merged["label"]}
            | {side: _told(of.get(uid)) for side, of in sides.items()}
            for uid, merged in sides["merged"].items()
        ]
        if not rows:
            continue
        kinds = [(row, _kinds(row)) for row in rows]
        found[domain] = {"compared": len(rows)} | {
            kind: {
                "count": sum(kind in own for _, own in kinds),
                "shown": [row for row, own in kinds if own and own[-1] == kind][:SHOWN],
            }
            for kind in KINDS
        }
    return found


def _told(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if answer is None else {key: answer[key] for key in ("text", "right", "cut")}


def _kinds(row: dict[str, Any]) -> list[str]:
    base, teacher, merged = (row[side] for side in ("base", "teacher", "merged"))
    kinds = []
    if base is not None and merged["right"] and not base["right"]:
        kinds.append("wins")
    if teacher is not None and teacher["right"] and not merged["right"]:
        kinds.append("losses")
    if base is not None and base["right"] and not merged["right"]:
        kinds.append("regressions")
    return kinds
