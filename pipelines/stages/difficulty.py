"""Measure the difficulty of prompts for a specialist's start model, before its first step.

stages/STAGE/difficulty.json has the question (model, reward, sampling, samples, seed) and one entry per
prompt, in their order. An entry has the prompt's key and its number of right answers. The file is written
atomically every so many prompts. A killed stage continues behind it. A damaged file, or one of other
questions, is written again, with the same rates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.config.rewards import HOW_ASKED
from opd.config.specialist import DifficultyConfig
from opd.errors import DataError, RunFolderError
from opd.pipelines.evaluation.measure import is_right
from opd.pipelines.records.inputs import model_digests
from opd.pipelines.records.stage_names import specialist_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import Student
from opd.redact import redact_json
from opd.rollout.prompts import Domain, keyed_permutation
from opd.storage.files import digest_of, read_sealed, write_sealed

_log = logging.getLogger(__name__)

_WRITES = 100
"""Number of times the file is written, about."""
_BINS = 10
"""Maximum bars of a histogram."""
_TOKENS = 1 << 53
"""Maximum plausible number of tokens."""
_AGAIN = "it is measured again"
_LABEL = "the difficulty of prompts"


@dataclass(frozen=True, slots=True)
class Rates:
    """The measurements of a domain's training prompts."""

    domain: str
    samples: int
    """Answers to each prompt."""
    right: dict[int, int]
    """Index of a prompt -> its number of right answers, in the order of the measurements."""
    tokens: int = 0
    """Response tokens generated for it."""

    def rate_of(self, index: int) -> float:
        """Return the share of right answers to the training prompt at `index`."""
        return self.right[index] / self.samples

    def selected_indices(self, config: DifficultyConfig) -> list[int]:
        """Return the indices of the prompts to train on, easy ones first, equal ones in measured order."""
        rates = {index: self.rate_of(index) for index in self.right}
        selected = [index for index, rate in rates.items() if config.min_rate <= rate <= config.max_rate]
        return sorted(selected, key=lambda index: -rates[index])

    def histogram_bars(self) -> list[tuple[str, int]]:
        """Return a histogram: the label of each bar, and its number of prompts."""
        counts = list(self.right.values())
        if self.samples <= _BINS:
            return [(f"{right} of {self.samples}", counts.count(right)) for right in range(self.samples + 1)]
        bars = [0] * _BINS
        for right in counts:
            bars[min(right * _BINS // self.samples, _BINS - 1)] += 1
        return [(f"{10 * i}-{10 * i + 10} %", count) for i, count in enumerate(bars)]

    def summary_numbers(self, config: DifficultyConfig) -> dict[str, Any]:
        """Return the format of results and report."""
        rates = [self.rate_of(index) for index in self.right]
        return {
            "prompts": len(rates),
            "samples": self.samples,
            "tokens": self.tokens,
            "pass_at_1": sum(rates) / len(rates),
            f"pass_at_{self.samples}": sum(rate > 0 for rate in rates) / len(rates),
            "too_hard": sum(rate < config.min_rate for rate in rates),
            "too_easy": sum(rate > config.max_rate for rate in rates),
            "kept": len(self.selected_indices(config)),
            "histogram": dict(self.histogram_bars()),
        }

    def summary_sentence(self, config: DifficultyConfig) -> str:
        """Format the histogram and the number of remaining prompts."""
        total = self.summary_numbers(config)
        bars = ", ".join(f"{name}: {count}" for name, count in self.histogram_bars() if count)
        return (
            f"{total['prompts']} training prompts, of {self.samples} answers each so many were right: {bars};"
            f" {total['kept']} are trained on, {total['too_hard']} are below a rate of {config.min_rate:g}"
            f" and {total['too_easy']} above {config.max_rate:g}"
        )


def measure_difficulty(
    context: StageContext, student: Student, data: DomainSet, domain: str, start: Path
) -> Rates:
    """Measure the rates of a domain's training prompts for the model in `start`, which `student` still is.

    Raises `DataError` if none is left to train on, and `PreemptedError` if the run is to stop.
    """
    config, ranks = context.recipe.specialist.difficulty, context.ranks
    assert config is not None
    query = DifficultyQuery.from_stage(context, data.domains[domain], config, start)
    # One rank reads, so that damage is the same for all.
    earlier = ranks.gather_json(query.read() if ranks.is_main else None, _LABEL)[0]
    rows, tokens = [(str(key), int(right)) for key, right in earlier["prompts"]], int(earlier["tokens"])
    lot, total = context.recipe.specialist.prompts_per_step, len(query.order)
    written = len(rows)
    if written < total and student.rollout_engine.policy_version != 0:
        student.push_weights(0)  # no restore yet, so these are the weights of `start`
    while len(rows) < total:
        prompts = [
            data.training_prompt(domain, index, f"{context.stage}/difficulty/{domain}/{index}")
            for index in query.order[len(rows) : len(rows) + lot]
        ]
        groups = student.sample_groups(prompts, config.samples, student.rollout_engine)
        samples = [sample for group in groups for sample in group.samples]
        data.rewards.score_shared(ranks, samples)
        for group in groups:
            rows.append((query.keys[len(rows)], sum(map(is_right, group.samples))))
        tokens += sum(sample.trainable_tokens for sample in samples)
        if len(rows) - written >= total // _WRITES or len(rows) == total:
            written = len(rows)
            if ranks.is_main:
                query.write(rows, tokens)
        if student.rollouts is not None:  # neither the log nor a step's metrics need these responses
            student.rollouts.release_responses([sample.uid for sample in samples])
            student.rollouts.take_counters({})
        share = sum(right for _, right in rows) / (len(rows) * config.samples)
        context.progress(len(rows), total, f"difficulty: {share:.2f} right")
        if ranks.any_rank(context.preemption.is_stopping, _LABEL):
            context.preemption.stop()  # if only another rank got the signal
            context.preemption.check()
    right = {index: count for index, (_, count) in zip(query.order, rows, strict=True)}
    rates = Rates(domain, config.samples, right, tokens)
    _log.info("domain %s: %s", domain, rates.summary_sentence(config))
    if not rates.selected_indices(config):
        raise DataError(
            f"domain {domain}: no prompt is left to train on ({rates.summary_sentence(config)}); widen"
            " specialist.difficulty.min_rate and max_rate, measure more prompts or take more samples of each,"
            " give other prompts or another base, or leave specialist.difficulty out."
        )
    return rates


def read_difficulty(context: StageContext, data: DomainSet, domain: str) -> Rates | None:
    """Return the measurements of the specialist of `domain`.

    `None` if it was not to measure, or is not trained here. Raises `RunFolderError` if its record or its file
    has changed.
    """
    config = context.recipe.for_domain(domain).specialist.difficulty
    stage = specialist_stage(domain)
    if config is None or domain not in context.recipe.grpo_domains():
        return None
    context.folder.stage_done(stage)
    path = context.folder.difficulty_path(stage)
    again = f"restore it, or delete {path.parent} to run the stage again"
    document = read_sealed(path, again)
    order, keys = _prompt_order(context.recipe, data.domains[domain], config)
    rows = _valid_rows(document, keys, config.samples)
    if rows is None or len(rows) != len(order):
        raise RunFolderError(f"{path} is of other prompts than this run's, or impossible; {again}")
    return Rates(domain, config.samples, {i: right for i, (_, right) in zip(order, rows, strict=True)})


@dataclass(frozen=True, slots=True)
class DifficultyQuery:
    """A measurement, and its file."""

    path: Path
    domain: str
    samples: int
    order: list[int]
    keys: list[str]
    question: dict[str, Any]
    """Everything the rates depend on, beside the prompts."""

    @classmethod
    def from_stage(
        cls, context: StageContext, domain: Domain, config: DifficultyConfig, start: Path
    ) -> DifficultyQuery:
        """Return the stage's query of `domain`, with the model in `start`."""
        recipe, rollout = context.recipe, context.recipe.rollout
        reward = recipe.domains[domain.name].model_dump(mode="json")["reward"]
        # Only the settings that affect its numbers.
        reward = reward and {name: value for name, value in reward.items() if name not in HOW_ASKED}
        question = {
            "stage": context.folder.owner_id(context.stage),
            "model": digest_of(model_digests(start)),
            "reward": digest_of(redact_json(reward)),
            "sampling": [rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens],
            "samples": config.samples,
            "seed": recipe.seed,
        }
        order, keys = _prompt_order(recipe, domain, config)
        path = context.folder.difficulty_path(context.stage)
        return cls(path, domain.name, config.samples, order, keys, question)

    def read(self) -> dict[str, Any]:
        """Return an earlier attempt's measurements of the same question, if they are valid. Raises
        `RunFolderError` if the path is a folder.
        """
        nothing = {"prompts": [], "tokens": 0}
        if not self.path.exists():
            return nothing
        if self.path.is_dir():
            raise RunFolderError(f"{self.path} is a folder, where a file belongs; move it away")
        try:
            document = read_sealed(self.path, _AGAIN)
        except RunFolderError as error:
            _log.warning("%s", error)
            return nothing
        if document.get("question") != self.question:
            _log.warning("%s is of another question; %s", self.path, _AGAIN)
            return nothing
        rows, tokens = _valid_rows(document, self.keys, self.samples), document.get("tokens")
        if rows is None or not _is_count(tokens, _TOKENS):
            _log.warning("%s is of other prompts, or has impossible numbers; %s", self.path, _AGAIN)
            return nothing
        return {"prompts": rows, "tokens": tokens}

    def write(self, rows: Sequence[tuple[str, int]], tokens: int) -> None:
        """Replace the file, durably."""
        write_sealed(self.path, {"question": self.question, "tokens": tokens, "prompts": list(rows)})


def _prompt_order(recipe: Recipe, domain: Domain, config: DifficultyConfig) -> tuple[list[int], list[str]]:
    """Return the indices and keys of the measured training prompts, as a function of the seed."""
    drawn = keyed_permutation(len(domain.train), recipe.seed, domain.name, "difficulty")
    order = [int(index) for index in drawn[: config.prompts]]
    return order, [domain.train[index].key for index in order]


def _valid_rows(document: dict[str, Any], keys: Sequence[str], samples: int) -> list[tuple[str, int]] | None:
    """Return the prompts of a file, if they are the first of `keys`, of at most `samples` right answers."""
    rows = document.get("prompts")
    if not isinstance(rows, list) or len(rows) > len(keys):
        return None
    for row, key in zip(rows, keys, strict=False):
        if not (isinstance(row, list) and len(row) == 2 and row[0] == key and _is_count(row[1], samples)):
            return None
    return [(key, right) for key, right in rows]


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
