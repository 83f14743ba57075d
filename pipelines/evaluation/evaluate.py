"""The stage that measures every model of a run on held-out prompts, greedy and sampled.

A few answers are kept to be read side by side: what base, teacher and student wrote to a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.errors import CheckpointError
from opd.models.hf_folder import CHECKSUMS, check_folder
from opd.pipelines.evaluation.statistics import Count, wilson
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext, baseline_methods
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import load_model, make_writer, tokenizer_of, ways_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.rollout.collect import EncodedPrompt, Generates, Way
from opd.storage.files import digest_of, file_digest, read_sealed, write_sealed
from opd.types import Sample, Status

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


def prompt_accuracy(
    engine: Generates,
    data: DomainSet,
    prompts: list[EncodedPrompt],
    way: Way,
    *,
    seed: int,
    samples: int = 1,
    confidence: float = 0.95,
    look: Look = lambda samples: None,
) -> Accuracy:
    """Accuracy on `prompts` of one domain, `samples` responses each.

    The noise depends on (seed, prompt, sample) alone, so that two models meet the same draws. `look` is given
    the scored responses.
    """
    groups = way.generate(engine, prompts, samples, way.sampling, seed)
    responses = [sample for group in groups for sample in group.samples]
    data.rewards.score(responses)
    look(responses)
    correct = sum((s.reward or 0.0) > CORRECT_ABOVE for s in responses)
    interval = wilson(Count(correct, len(responses)), confidence)
    length = float(np.mean([s.trainable_tokens for s in responses]))
    return Accuracy(correct, len(responses), correct / len(responses), interval.low, interval.high, length)


def evaluate_model(
    engine: Generates, data: DomainSet, recipe: Recipe, teacher: Path | None = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Sampled and greedy accuracy on every domain, as the results file holds them, and a few of the sampled
    answers there (`answers.keep`); of a `teacher` in its folder, which may end its responses elsewhere.
    """
    config = recipe.evaluation
    ways = {greedy: ways_of(recipe, data.tokenizer, greedy, teacher) for greedy in (False, True)}
    domains: dict[str, Any] = {}
    kept: dict[str, list[Any]] = {}
    for domain in recipe.domains:
        row: dict[str, Any] = {}
        seen: list[Sample] = []
        prompts = data.held_out(domain, config.prompts_per_domain, "evaluate")
        for name, greedy, samples in (("sampled", False, config.samples_per_prompt), ("greedy", True, 1)):
            found = asdict(
                prompt_accuracy(
                    engine,
                    data,
                    prompts,
                    ways[greedy][domain],
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


def evaluated_models(context: StageContext) -> dict[str, Path]:
    """Name -> folder of every model to measure: base, every teacher, merged, baselines."""
    recipe = context.recipe
    models = {"base": context.model("base")}
    for teacher in recipe.taught():
        models[teacher_model(recipe, teacher)] = whole_teacher(context, teacher)
    models["merged"] = context.model("merged")
    found = {path.name for path in (context.folder.path / "baselines").glob("[!.]*")}
    for name in sorted(found | set(baseline_methods(recipe))):
        models[name] = context.model(name)
    return models


def teacher_model(recipe: Recipe, teacher: str) -> str:
    """What the evaluation calls a teacher: `specialist:NAME` if this run trains it, else `teacher:NAME`."""
    return f"{'teacher' if teacher in recipe.given_teachers() else 'specialist'}:{teacher}"


def domains_of(recipe: Recipe, model: str) -> list[str]:
    """The domains that a model answers for: a teacher its own, any other all of them."""
    return recipe.taught().get(_teacher(model), []) or list(recipe.domains)


def best_teachers(recipe: Recipe, measured: Mapping[str, Any]) -> dict[str, str]:
    """Domain -> the model, of its measured teachers, that is right most often there."""
    best: dict[str, str] = {}
    for domain in recipe.domains:
        names = [teacher_model(recipe, name) for name, own in recipe.taught().items() if domain in own]
        known = [name for name in names if name in measured]
        if known:
            best[domain] = max(known, key=lambda name: measured[name][domain]["sampled"]["accuracy"])
    return best


def evaluate(context: StageContext) -> dict[str, Any]:
    """Measure every model that is there; what a killed attempt measured is kept."""
    recipe = context.recipe
    models = {name: path for name, path in evaluated_models(context).items() if path.exists()}
    if not models:
        raise CheckpointError(
            f"{context.folder.path} holds no model to evaluate; train one first (`opd run RECIPE --resume`)."
        )
    identities = {name: _identity(context, path) for name, path in models.items()}
    known = _read(context.folder)
    # A model that was made again since is measured again, and all are once the code that measures changed.
    found = {name: known[name] for name, of in identities.items() if known.get(name, {}).get("model") == of}
    for name in found:
        check_folder(models[name])  # what is told of a model is told of what is there
    tokenizer = tokenizer_of(recipe, next(iter(models.values())))
    data = DomainSet.open(recipe, tokenizer)
    for done, (name, path) in enumerate(models.items(), start=1):
        if name not in found:
            # A teacher from elsewhere may have another configuration, so every model gets its own engine.
            engine = make_writer(recipe, load_model(recipe, path, tokenizer=tokenizer), tokenizer)
            domains, kept = evaluate_model(engine, data, recipe, path if _teacher(name) else None)
            answers = _to_keep(recipe, name, kept)
            found[name] = {"model": identities[name], "domains": domains, "answers": answers}
            write_sealed(measurements(context.folder), {"models": found})
        context.progress(
            done, len(models), f"{name}: {_mean(recipe, name, found[name]['domains']):.1%} sampled"
        )
    return {
        "steps": len(models),
        "student_tokens": 0,
        "phases": {},
        "counters": {},
    }


def _teacher(model: str) -> str:
    """The teacher that a model is, or nothing."""
    kind, _, name = model.partition(":")
    return name if kind in ("specialist", "teacher") else ""


def _mean(recipe: Recipe, model: str, rows: Mapping[str, Any]) -> float:
    """Mean sampled accuracy over `domains_of` the model, as the tables show it."""
    return fmean(rows[domain]["sampled"]["accuracy"] for domain in domains_of(recipe, model))


def measured(folder: RunFolder) -> dict[str, Any]:
    """Name -> accuracies of every model measured so far; empty before the first."""
    return {name: entry["domains"] for name, entry in _read(folder).items()}


def kept_answers(folder: RunFolder) -> dict[str, Any]:
    """Name -> domain -> answers of the models that are compared answer by answer."""
    return {name: entry.get("answers", {}) for name, entry in _read(folder).items()}


def _to_keep(recipe: Recipe, name: str, answers: dict[str, list[Any]]) -> dict[str, Any]:
    """Of a teacher those on its own domains, of a baseline none."""
    if not _teacher(name) and name not in ("base", "merged"):
        return {}
    return {domain: answers[domain] for domain in domains_of(recipe, name)}


def measurements(folder: RunFolder) -> Path:
    """The file of `measured`."""
    return folder.stage("evaluate") / "models.json"


def _read(folder: RunFolder) -> dict[str, Any]:
    path = measurements(folder)
    if not path.exists():
        return {}
    return read_sealed(path, f"delete {path.parent} to measure the models again")["models"]


def _identity(context: StageContext, path: Path) -> str:
    """What changes when another model lies at `path`, or rewards are others; models from elsewhere are
    compared by the run itself.
    """
    changes = context.folder.code_changes
    return _model_identity(context, path) + (f" {digest_of(changes)}" if changes else "")


def _model_identity(context: StageContext, path: Path) -> str:
    if not path.resolve().is_relative_to(context.folder.path.resolve()):
        return "given"
    if not (path / CHECKSUMS).is_file():
        raise CheckpointError(f"{path / CHECKSUMS} is missing; restore it, or delete {path} to leave it out.")
    return file_digest(path / CHECKSUMS)
