"""Measure the accuracy of one model: sampled and greedy, pass@k and maj@k, with intervals.

Some answers of base, teacher and student are stored for comparison. A model answers on the recipe's engine if
that can load it, else on one here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.config import Recipe
from opd.config.evaluation import SamplesConfig
from opd.environments.protocol import EPISODE, is_success
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import check_folder, read_config
from opd.models.sharded import stored_weights
from opd.pipelines.evaluation.statistics import Count, effective_answers, over_prompts, wilson_interval
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import (
    Student,
    Writer,
    load_model,
    make_writer,
    open_engine,
    stop_strings,
    ways_of,
    with_stop_strings,
)
from opd.ranks import Ranks
from opd.rollout.collect import DomainSampling, EncodedPrompt, SamplingEngine
from opd.rollout.engine_pool import LockstepEngine
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.shared_groups import write_shared
from opd.rollout.weight_sync import Weights, sync_weights
from opd.types import Sample, SampleGroup, Status, prompt_text

PROMPTS = 256
"""Maximum held-out prompts of a domain with stored answers."""
CHARACTERS = 1500
"""Maximum characters of a stored prompt, label or answer."""
SHOWN = 3
"""Examples of each kind."""
KINDS = ("wins", "losses", "regressions")
"""Right but the base was wrong. Wrong but the teacher was right. Wrong but the base was right."""


def select_answers(
    samples: Sequence[Sample], text: Callable[[Sample], str], right: Callable[[Sample], bool]
) -> list[dict[str, Any]]:
    """Return the first scored answer to each of the first `PROMPTS` prompts, JSON-able, in their order.

    `text` gives a response as its reward sees it, `right` tells whether it is right. `cut`: the response
    ended at the length limit.
    """
    first = {sample.group_uid: sample for sample in reversed(samples)}
    order = list(dict.fromkeys(sample.group_uid for sample in samples))[:PROMPTS]
    answers = []
    for sample in (first[uid] for uid in order):
        label = sample.label if isinstance(sample.label, str) else json.dumps(sample.label, default=str)
        answers.append(
            {
                "uid": sample.group_uid,
                "prompt": _shorten_text(prompt_text(sample.metadata)),
                "label": _shorten_text(label),
                "text": _shorten_text(text(sample)),
                "right": right(sample),
                "cut": sample.status is Status.TRUNCATED,
            }
        )
    return answers


def _shorten_text(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} \u2026"


def side_by_side(
    answers: dict[str, dict[str, list[Any]]], domains: Sequence[str], teachers: Mapping[str, str]
) -> dict[str, Any]:
    """Return domain -> number of compared prompts, and the count and a few examples of each of `KINDS`.

    `answers`: model -> domain -> result of `select_answers`. `teachers`: domain -> the model that is its
    teacher. An example appears once, under its last kind.
    """
    tables = {}
    for domain in domains:
        sides = {
            side: {answer["uid"]: answer for answer in answers.get(model, {}).get(domain, [])}
            for side, model in (("base", "base"), ("teacher", teachers.get(domain, "")), ("merged", "merged"))
        }
        rows: list[tuple[dict[str, Any], list[str]]] = []
        for uid, merged in sides["merged"].items():
            row = {"prompt": merged["prompt"], "label": merged["label"]}
            for side, by_uid in sides.items():
                answer = by_uid.get(uid)
                row[side] = answer and {key: answer[key] for key in ("text", "right", "cut")}
            rows.append((row, _comparison_types(row)))
        if not rows:
            continue
        tables[domain] = {"compared": len(rows)} | {
            kind: {
                "count": sum(kind in kinds for _, kinds in rows),
                "shown": [row for row, kinds in rows if kinds and kinds[-1] == kind][:SHOWN],
            }
            for kind in KINDS
        }
    return tables


def _comparison_types(row: dict[str, Any]) -> list[str]:
    base, teacher, merged = (row[side] for side in ("base", "teacher", "merged"))
    kinds = []
    if base is not None and merged["right"] and not base["right"]:
        kinds.append("wins")
    if teacher is not None and teacher["right"] and not merged["right"]:
        kinds.append("losses")
    if base is not None and base["right"] and not merged["right"]:
        kinds.append("regressions")
    return kinds


def pass_at(total: int, correct: int, k: int) -> float:
    """Return the chance that one of `k` answers is right.

    They are drawn without replacement from `total`, of which `correct` are right: 1 - C(total - correct, k) /
    C(total, k). This is the unbiased estimate of pass@k (Chen et al. 2021, section 2.1). It is a product of
    `correct` factors in [0, 1], so nothing overflows. Raises `ValueError` unless 0 < k <= total and 0 <=
    correct <= total.
    """
    if not 0 < k <= total or not 0 <= correct <= total:
        raise ValueError(f"pass@{k} of {correct} right among {total} answers is not defined")
    wrong = total - correct
    if wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(wrong + 1, total + 1))


def maj_at(answers: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Return the mean correctness of the commonest of `k` answers.

    The mean is over the `len(answers) // k` disjoint groups of `k`, in the order of the answers. The rest is
    ignored. Answers with the same text are the same. If their verdicts differ, the answer counts by its share
    of right ones. A tie is decided by a fair draw, and this is its expectation. Raises `ValueError` unless 0
    < k <= len(answers).
    """
    if not 0 < k <= len(answers) or len(right) != len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers with {len(right)} verdicts is not defined")
    votes = []
    for start in range(0, len(answers) - k + 1, k):
        verdicts: dict[str, list[bool]] = {}
        for answer, verdict in zip(answers[start : start + k], right[start : start + k], strict=True):
            verdicts.setdefault(answer, []).append(verdict)
        most = max(map(len, verdicts.values()))
        winners = [one for one in verdicts.values() if len(one) == most]
        votes.append(math.fsum(sum(one) / most for one in winners) / len(winners))
    return math.fsum(votes) / len(votes)


CORRECT_ABOVE = 0.5
"""A response is right above this reward (checkers answer 0 or 1), an episode by `environment.success`."""
EPISODES = 8
"""Stored single episodes of each domain."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Number and share of right answers."""

    correct: int
    total: int
    accuracy: float
    low: float
    """Lower end of the interval, which is over prompts."""
    high: float
    mean_length: float
    """Tokens that the model generated."""
    worth: float | None = None
    """Number of independent answers that these are worth. `None` with one answer a prompt: all."""


@dataclass(frozen=True, slots=True)
class EvaluationPrompts:
    """Prompts to measure models on: the domains' held-out ones, or evaluation sets.

    Args:
        prompts: Name -> number of prompts.
        samples: Name -> number of answers to each, and their statistics.
    """

    recipe: Recipe
    data: DomainSet
    prompts: Mapping[str, int]
    samples: Mapping[str, SamplesConfig]
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that share the prompts, each with its own engine."""


def prompt_accuracy(
    engine: SamplingEngine,
    data: DomainSet,
    prompts: list[EncodedPrompt],
    domain: DomainSampling,
    *,
    seed: int,
    ranks: Ranks | None = None,
) -> Accuracy:
    """Return the accuracy on `prompts` of one domain, one response each, with an interval of 95 %.

    The noise depends on (seed, prompt, sample) alone. So two models, and any number of `ranks` that share the
    prompts, get the same draws.
    """
    return accuracy_of(sample_answers(engine, data, prompts, domain, seed, ranks=ranks))


def held_out_accuracy(
    student: Student, data: DomainSet, domains: Sequence[str], count: int
) -> dict[str, float]:
    """Return `accuracy/DOMAIN` of the first `count` held-out prompts of `domains`, for a learning curve."""
    return {
        f"accuracy/{domain}": prompt_accuracy(
            student.evaluator,
            data,
            data.held_out(domain, count, "evaluate"),
            student.ways[domain],
            seed=student.recipe.seed,
            ranks=student.ranks,
        ).accuracy
        for domain in domains
    }


def sample_answers(
    engine: SamplingEngine,
    data: DomainSet,
    prompts: list[EncodedPrompt],
    domain: DomainSampling,
    seed: int,
    samples: int = 1,
    ranks: Ranks | None = None,
) -> list[SampleGroup]:
    """Return `samples` scored responses to each of `prompts`, all of one domain. The result is the same on
    all `ranks`. Each rank's `engine` generates its share.
    """
    ranks = ranks or Ranks()
    groups = write_shared(
        ranks,
        prompts,
        lambda mine: domain.generate(engine, mine, samples, domain.sampling, seed),
        engine=engine if isinstance(engine, LockstepEngine) else None,
    )
    data.rewards.score_shared(ranks, [sample for group in groups for sample in group.samples])
    return groups


def accuracy_of(groups: Sequence[SampleGroup], confidence: float = 0.95) -> Accuracy:
    """Return the accuracy of scored responses, the same number of each group."""
    verdicts = [[is_right(sample) for sample in group.samples] for group in groups]
    correct, each = sum(map(sum, verdicts)), len(verdicts[0])
    size = (
        effective_answers([sum(group_verdicts) / each for group_verdicts in verdicts], each)
        if each > 1
        else None
    )
    count = Count(correct, each * len(verdicts), size)
    interval = wilson_interval(count, confidence)
    length = float(np.mean([s.trainable_tokens for group in groups for s in group.samples]))
    return Accuracy(correct, count.total, count.accuracy, interval.low, interval.high, length, size)


def is_right(sample: Sample) -> bool:
    """Return whether a scored response is right."""
    return is_success(sample, CORRECT_ABOVE)


def measure_model(
    engine: SamplingEngine,
    evaluation: EvaluationPrompts,
    teacher: Path | None = None,
    taught: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return sampled and greedy accuracy on all prompts of `evaluation`, and a few sampled answers
    (`select_answers`). Both are in the format of the results file, without unknown values. A `teacher` in its
    folder may have other stop tokens. It answers the prompts that it reads in the domains that are `taught`
    by it.
    """
    recipe, data, ranks = evaluation.recipe, evaluation.data, evaluation.ranks
    confidence, seed = recipe.evaluation.confidence, recipe.seed
    sampling = ways_of(recipe, data.tokenizer, False, teacher)
    greedy = ways_of(recipe, data.tokenizer, True, teacher)
    rows: dict[str, Any] = {}
    answers: dict[str, list[Any]] = {}
    for name in recipe.domains:
        config = evaluation.samples[name]
        prompts = data.held_out(name, evaluation.prompts[name], "evaluate")
        if name in taught:
            prompts = [prompt.for_teacher() for prompt in prompts]
        each = config.samples_per_prompt
        groups = sample_answers(engine, data, prompts, sampling[name], seed, each, ranks)
        likeliest = sample_answers(engine, data, prompts, greedy[name], seed, ranks=ranks)
        accuracies = [asdict(accuracy_of(one, confidence)) for one in (groups, likeliest)]
        sampled_row, greedy_row = (
            {key: value for key, value in one.items() if value is not None and key != "mean_length"}
            for one in accuracies
        )
        samples = [sample for group in groups for sample in group.samples]
        rows[name] = {
            "sampled": sampled_row,
            "mean_length": accuracies[0]["mean_length"],
            "greedy": greedy_row,
            "lengths": length_quantiles(samples),
        }
        rows[name] |= several_answer_metrics(groups, config, data.rewards.read_answers, confidence)
        if statistics := episode_statistics(samples):
            rows[name]["episodes"] = statistics
        answers[name] = select_answers(samples, data.rewards.readable_text, is_right)
    return rows, answers


def several_answer_metrics(
    groups: Sequence[SampleGroup],
    config: SamplesConfig,
    answers: Callable[[Sequence[Sample]], list[str]],
    confidence: float,
) -> dict[str, Any]:
    """Return pass@k and maj@k of scored responses, by k. Empty if the recipe has none."""
    each = config.samples_per_prompt
    verdicts = [[is_right(sample) for sample in group.samples] for group in groups]
    metrics: dict[str, Any] = {}
    if each > 1:
        metrics |= {"prompts": len(groups), "samples_per_prompt": each}
    if config.pass_at:
        metrics["pass_at"] = {}
    for k in config.pass_at:
        values = [pass_at(each, sum(group_verdicts), k) for group_verdicts in verdicts]
        metrics["pass_at"][str(k)] = over_prompts(values, each // k, confidence)._asdict()
    if config.maj_at:
        texts = [answers(group.samples) for group in groups]
        metrics["maj_at"] = {}
    for k in config.maj_at:
        values = [
            maj_at(group_verdicts, right, k) for group_verdicts, right in zip(texts, verdicts, strict=True)
        ]
        metrics["maj_at"][str(k)] = over_prompts(values, each // k, confidence)._asdict()
    return metrics


def episode_statistics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return means and endings of episodes, and the first of a few prompts. Empty for single answers."""
    played = [(sample, sample.metadata[EPISODE]) for sample in samples if sample.metadata.get(EPISODE)]
    if not played:
        return {}
    episodes = [episode for _, episode in played]
    first = {sample.group_uid: (sample, episode) for sample, episode in reversed(played)}
    rows = [first[uid] for uid in dict.fromkeys(sample.group_uid for sample, _ in played)][:EPISODES]
    names = ("turns", "reward", "calls", "broken_calls")
    return {
        "count": len(episodes),
        **{name: float(np.mean([episode[name] or 0.0 for episode in episodes])) for name in names},
        "ended": {why: sum(one["ended"] == why for one in episodes) for why in ("done", "turns", "tokens")},
        "shown": [
            {"prompt": _shorten_text(prompt_text(sample.metadata)), "right": is_right(sample)}
            | {name: episode[name] for name in ("turns", "ended", "rewards", "calls", "broken_calls")}
            for sample, episode in rows
        ],
    }


def length_quantiles(samples: Sequence[Sample]) -> dict[str, float]:
    """Return quantiles of response lengths in generated tokens, and the share of truncated responses."""
    lengths = np.array([sample.trainable_tokens for sample in samples])
    low, middle, high = np.quantile(lengths, (0.1, 0.5, 0.9)).tolist()
    cut = float(np.mean([sample.status is Status.TRUNCATED for sample in samples]))
    return {"p10": low, "p50": middle, "p90": high, "max": float(lengths.max()), "cut": cut}


HERE = "embedded"
_TELLS_NOTHING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of a configuration that do not change the function of the weights."""


@dataclass(slots=True)
class EvaluationEngines:
    """Engines for one model after the other.

    Args:
        context: The stage, whose helpers hold the recipe's engine if it is elsewhere.
        tokenizer: The run's.
        student: Folder of a model of the student's form, which engines elsewhere begin with.
    """

    context: StageContext
    tokenizer: PreTrainedTokenizerBase
    student: Path
    _elsewhere: FaultTolerantRollout | None = None
    """The recipe's engine, if that is not in this process."""
    _here: Writer | None = None
    """The engine of `engine_with` otherwise."""
    _form: dict[str, Any] = field(default_factory=dict)
    _version: int = 0

    @property
    def engine_name(self) -> str:
        """Name of the recipe's engine in the results."""
        recipe = self.context.recipe
        if self.context.helpers is None:
            return HERE
        kind = recipe.rollout.engine.type
        return "ray" if kind == "torch" else kind

    def engine_for(self, path: Path) -> tuple[Writer, dict[str, str]]:
        """Return an engine with the model in `path`, and its entry in the results.

        The entry has the `engine`, and the reason if that is not the recipe's. Raises `RolloutError` if the
        recipe's engine does not hold the weights it got.
        """
        recipe = self.context.recipe
        if self.context.helpers is None:
            return self._open_embedded(path), {"engine": HERE}
        model = load_model(recipe, path, tokenizer=self.tokenizer, empty=True)
        if not self._form:
            student = model if path == self.student else load_model(recipe, self.student, empty=True)
            self._form = _weight_form(self.student, student)
        form = _weight_form(path, model)
        other = next((key for key in {**self._form, **form} if self._form.get(key) != form.get(key)), None)
        if other is not None:
            why = f"{other} is not the student's, so {self.engine_name} cannot hold it"
            return self._open_embedded(path), {"engine": HERE, "engine_why": why}
        check_folder(path)  # the weights must match their digests
        return self.engine_with(stored_weights(model)), {"engine": self.engine_name}

    def engine_with(self, weights: Weights) -> Writer:
        """Return an engine with `weights`, of the student's form, in place of the previous ones. It is the
        recipe's or one here. Raises `RolloutError` if it does not hold the weights it got.
        """
        recipe, helpers, engine = self.context.recipe, self.context.helpers, self._elsewhere or self._here
        if engine is None and helpers is None:
            model = load_model(recipe, self.student, tokenizer=self.tokenizer)
            self._here = engine = make_writer(recipe, model, self.tokenizer)
        elif engine is None and helpers is not None:
            stops = stop_strings(recipe, self.tokenizer)
            self._elsewhere = engine = FaultTolerantRollout(helpers.open_engines(self.student), stops=stops)
        assert engine is not None
        self._version = max(self._version, engine.policy_version) + 1
        sync_weights(engine, weights, self._version)
        return engine

    def _open_embedded(self, path: Path) -> Writer:
        """Open an engine in this process, shared with the other ranks."""
        recipe = self.context.recipe
        engine = open_engine(recipe, path, self.context.ranks, self.tokenizer)
        return with_stop_strings(recipe, engine, self.tokenizer)


def _weight_form(path: Path, model: CausalLM) -> dict[str, Any]:
    """Return the common form of models with exchangeable weights: setting or tensor -> value."""
    config = read_config(path).to_dict()
    settings = {f"its {key}": value for key, value in config.items() if key not in _TELLS_NOTHING}
    return settings | {f"its tensor {name}": tuple(tensor.shape) for name, tensor in model.weights()}
