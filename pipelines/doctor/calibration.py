"""`opd doctor --pairs FILE`: does a domain's reward prefer the better of two answers?

A row has `prompt` (text or messages), `chosen` and `rejected`, and `label` where the reward needs one; or
`chosen` and `rejected` are whole conversations, as in much preference data. By Bradley and Terry's model
(1952) the better one is preferred with probability sigmoid(r(chosen) - r(rejected)): the share of pairs in
which that is above one half is the accuracy that reward models are measured by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opd.config import Recipe
from opd.errors import ConfigError, DataError
from opd.pipelines.doctor.checks import Finding, attempt
from opd.pipelines.doctor.examine import show
from opd.pipelines.doctor.rewards import answer_to
from opd.pipelines.evaluation.statistics import FEW, score_interval
from opd.progress import doing
from opd.rewards.kinds import check_labels, own_reward, scored_by
from opd.rollout.prompts import Prompt, encode_prompt
from opd.rollout.rewards import Job


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: Prompt
    chosen: str
    rejected: str


def calibrate(recipe: Recipe, path: Path, domain: str | None, *, as_json: bool = False) -> int:
    """Print how the reward of `domain` orders the pairs in `path`; returns the exit status."""
    if domain is None and len(recipe.domains) == 1:
        domain = next(iter(recipe.domains))
    if domain is None or domain not in recipe.domains:
        known = ", ".join(recipe.domains)
        raise ConfigError(f"--pairs needs --domain, one of {known}: whose reward is asked")
    findings = attempt(f"pairs {domain}", lambda: [_measured(recipe, domain, path)])
    return show(f"opd doctor: {recipe.name}", findings, as_json=as_json)


def _measured(recipe: Recipe, domain: str, path: Path) -> Finding:
    config, pairs = recipe.domains[domain], read_pairs(path, domain)
    function = own_reward(config)
    if function is None:
        raise ConfigError(
            f"domain {domain} is scored by its source's own checker; --pairs is for a `reward` of its own"
        )
    check_labels(config, domain, [pair.prompt for pair in pairs])
    context = _contexts(recipe, domain)
    samples = []
    for number, pair in enumerate(pairs):
        for name in ("chosen", "rejected"):
            one = answer_to(f"{name} {number + 1}", pair.prompt, getattr(pair, name), context(pair.prompt))
            samples.append(one)
    job = Job(function, samples, recipe.rollout.reward_timeout, "answer")
    with doing(f"asking the reward of {domain} for {len(samples)} answers"):
        job.start()
        scores = [score for score, _ in job.result()]
    return _told(scored_by(config), domain, scores[::2], scores[1::2], recipe.evaluation.confidence)


def _told(
    by: str, domain: str, chosen: Sequence[float], rejected: Sequence[float], confidence: float
) -> Finding:
    margins = [better - worse for better, worse in zip(chosen, rejected, strict=True)]
    count, ties = len(margins), margins.count(0.0)
    right = (sum(margin > 0 for margin in margins) + ties / 2) / count
    found = score_interval(right, count, confidence)
    loss = sum(_softplus(-margin) for margin in margins) / count
    detail = (
        f"{by}: Bradley-Terry accuracy {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) on {count:,}"
        f" pairs, {ties:,} of them ties, which count half; loss {loss:.3f} nats"
    )
    level = "ok"
    if found.low <= 0.5:
        level, detail = "warning", f"{detail}; it is not shown to be better than chance"
        detail += ": give more pairs" if count < FEW and found.high > 0.5 else ": mend the reward"
    numbers = found._asdict() | {"pairs": count, "ties": ties, "loss": loss}
    return Finding(level, f"pairs {domain}", detail, numbers)


def _softplus(x: float) -> float:
    """log(1 + exp(x))"""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _contexts(recipe: Recipe, domain: str) -> Callable[[Prompt], str]:
    """What the student reads of a prompt: through its chat template, if it has a tokenizer before it is
    trained."""
    source = recipe.model.tokenizer or recipe.model.path
    if source is None:
        return lambda prompt: prompt.text if prompt.text is not None else str(prompt.messages)
    from opd.pipelines.stages.domains import template_arguments
    from opd.pipelines.stages.student import tokenizer_of

    tokenizer: Any = tokenizer_of(recipe, Path(source))
    template = template_arguments(recipe, domain)
    return lambda prompt: str(
        tokenizer.decode(encode_prompt(prompt, tokenizer, template), skip_special_tokens=False)
    )


def read_pairs(path: Path, domain: str) -> list[Pair]:
    """The pairs of a `.jsonl` or `.parquet` file. Raises `DataError` naming file and line."""
    from opd.data.load import prompt_of, rows_of

    pairs = []
    for where, row in rows_of(path, domain, set()):
        answers = {}
        for column in ("chosen", "rejected"):
            answers[column], before = _answer(where, column, row.get(column))
            if before and row.get("prompt") is None:
                row = row | {"prompt": before}
        pairs.append(Pair(prompt_of(where, row, domain), answers["chosen"], answers["rejected"]))
    if not pairs:
        raise DataError(f"{path} has no pairs; give rows with `prompt`, `chosen` and `rejected`.")
    return pairs


def _answer(where: str, column: str, given: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of an answer, and the messages before it, where it is a conversation."""
    from opd.data.load import check_messages, check_text

    if isinstance(given, str):
        check_text(where, given, column)
        return given, []
    if isinstance(given, list) and given:
        read = check_messages(where, given, column)
        if read[-1]["role"] == "assistant":
            return read[-1]["content"], read[:-1]
    raise DataError(
        f"{where}: `{column}` is no text, and no messages that end with the assistant's; mend it."
    )
