"""Measure every model of a run, greedy and sampled, on held-out prompts and evaluation sets.

Evaluation prompts in the training data are counted. A few answers of base, teacher and student are stored for
comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.config import Recipe
from opd.data.contamination import ContaminationIndex, messages_text, text_of, training_texts
from opd.data.demonstrations import iter_demonstrations
from opd.errors import CheckpointError
from opd.models.hf_folder import CHECKSUMS, check_folder
from opd.pipelines.evaluation.measure import EvaluationEngines, EvaluationPrompts, measure_model
from opd.pipelines.evaluation.prompt_sets import load_sets, naming_set
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.stage_names import of_round, split_round
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.sft import evaluation_questions, is_held_out
from opd.pipelines.stages.student import load_own_tokenizer, tokenizer_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.progress import set_activity
from opd.ranks import Ranks
from opd.rollout.prompts import Domain
from opd.storage.files import digest_of, file_digest, read_sealed, write_sealed

_log = logging.getLogger(__name__)


def find_contamination(
    recipe: Recipe, domains: Mapping[str, Domain], sets: Mapping[str, Domain]
) -> dict[str, Any]:
    """Compare the held-out prompts of each domain and set with the training texts. Returns `ngram`, the
    number of training texts (`texts`), and the result of `ContaminationIndex.report_matches`
    (`found`). Empty if the recipe has no comparison.
    """
    config = recipe.evaluation.contamination
    if config is None:
        return {}
    held_out = {
        name: domain.held_out[: recipe.evaluation.prompts_per_domain] for name, domain in domains.items()
    }
    held_out |= {name: domain.held_out for name, domain in sets.items()}
    with set_activity("comparing evaluation prompts with what is trained on"):
        index = ContaminationIndex(
            {name: [text_of(p) for p in prompts] for name, prompts in held_out.items()}, config.ngram
        )
        for name, domain in domains.items():
            for text, where in training_texts(domain.train, name):
                index.compare_text(text, where)
        evaluated = evaluation_questions(domains)
        for name, sft in recipe.demonstration_settings().items():
            for row in iter_demonstrations(sft.source, name or None, set()):
                if not is_held_out(row, sft, evaluated):
                    answer = row.completion
                    if answer is None:
                        answer = messages_text(row.messages or [])
                    index.compare_text(text_of(row.prompt), row.prompt.where, answer)
    return {"ngram": config.ngram, "texts": index.seen, "found": index.report_matches()}


def teacher_model(recipe: Recipe, teacher: str) -> str:
    """Return a teacher's evaluation name: `specialist:NAME` if this run trains it, else `teacher:NAME`."""
    return f"{'teacher' if teacher in recipe.given_teachers() else 'specialist'}:{teacher}"


def domains_of(recipe: Recipe, model: str) -> list[str]:
    """Return the domains of a model: a teacher's own, all for any other."""
    return recipe.teacher_domains().get(_teacher_name(model), []) or list(recipe.domains)


def best_teachers(recipe: Recipe, measured: Mapping[str, Any]) -> dict[str, str]:
    """Return domain -> the measured teacher with the highest accuracy there."""
    best: dict[str, str] = {}
    for domain in recipe.domains:
        names = [
            teacher_model(recipe, name)
            for name, taught in recipe.teacher_domains().items()
            if domain in taught
        ]
        measured_names = [name for name in names if name in measured]
        if measured_names:
            best[domain] = max(measured_names, key=lambda name: measured[name][domain]["sampled"]["accuracy"])
    return best


def evaluate_models(context: StageContext) -> dict[str, Any]:
    """Measure every existing model. A killed attempt's measurements are reused. Several ranks share the
    prompts, each with its own engine. The first rank stores the results.
    """
    recipe, ranks = context.recipe, context.ranks
    measured: dict[str, Any] = {}
    ready: dict[str, Any] = {}
    ranks.main_first(
        lambda: ready.update(_prepare_models(context, measured)) if ranks.is_main else None,
        "the models that are measured",
    )
    ready = ranks.gather_json(ready, "the models that are measured")[0]
    models = {name: Path(path) for name, path in ready["models"].items()}
    tokenizer = tokenizer_of(recipe, next(iter(models.values())))
    domains, sets = evaluation_prompts(recipe, tokenizer, ranks)
    path = measurements_path(context.folder)
    contamination = read_measurements(context.folder).get("contamination")
    if contamination is None and ranks.is_main:
        of_sets = {} if sets is None else sets.data.domains
        contamination = find_contamination(recipe, domains.data.domains, of_sets)
        write_sealed(path, {"models": measured, "contamination": contamination})
    student = models.get("base") or models.get("merged") or next(iter(models.values()))
    engines = EvaluationEngines(context, tokenizer, student)
    for done, (name, folder) in enumerate(models.items(), start=1):
        if name not in ready["found"]:
            teacher = folder if _teacher_name(name) else None
            taught = recipe.teacher_domains().get(_teacher_name(name), [])
            prompts, of_sets, opened = domains, sets, engines
            if (own := recipe.teacher_tokenizer(_teacher_name(name))) is not None:
                prompts = _own_prompts(domains, folder, own)
                of_sets = None if sets is None else _own_prompts(sets, folder, own)
                its_context = replace(context, recipe=prompts.recipe, helpers=None)
                opened = EvaluationEngines(its_context, prompts.data.tokenizer, folder)
            engine, engine_entry = opened.engine_for(folder)
            rows, answers = measure_model(engine, prompts, teacher, taught)
            entry = {"model": ready["identities"][name], "domains": rows}
            entry |= {"answers": _select_answers(recipe, name, answers)} | engine_entry
            if of_sets is not None:
                with naming_set(of_sets.prompts):
                    entry["sets"], answers = measure_model(engine, of_sets, teacher)
                entry["answers"] |= answers if split_round(name)[0] in COMPARED else {}
            measured[name] = entry
            if ranks.is_main:
                write_sealed(path, {"models": measured, "contamination": contamination})
        if ranks.is_main:
            mean = _mean_accuracy(recipe, name, measured[name]["domains"])
            context.progress(done, len(models), f"{name}: {mean:.1%} sampled")
    return {"steps": len(models), "student_tokens": 0, "phases": {}, "counters": {}}


def measure_round(context: StageContext) -> dict[str, Any]:
    """Measure all models so far, and the gain of the last round: by how much the mean held-out accuracy of
    its student over the domains is above that of the model it started from.
    """
    result, number = evaluate_models(context), context.round
    measured = measured_accuracies(context.folder)
    start = of_round("merged", number - 1) if number > 1 else "base"
    student, before = (
        fmean(row["sampled"]["accuracy"] for row in measured[name].values())
        for name in (of_round("merged", number), start)
    )
    gain, least = round(student - before, 9), context.recipe.min_round_gain or 0.0  # they are counts
    ends = (
        f"less than min_round_gain {least:g}, so it is the last" if gain < least else "so another may follow"
    )
    _log.info("round %d gained %+.4f of mean held-out accuracy, %s", number, gain, ends)
    return result | {"gain": gain}


def _own_prompts(prompts: EvaluationPrompts, folder: Path, tokenizer: str) -> EvaluationPrompts:
    """Return the same `prompts` for the teacher in `folder`, with a `tokenizer` of its own."""
    recipe = with_own_tokens(prompts.recipe, folder, tokenizer)
    domains = {name: replace(one, train=[]) for name, one in prompts.data.domains.items()}
    own = load_own_tokenizer(prompts.recipe, tokenizer)
    return replace(prompts, recipe=recipe, data=DomainSet.open(recipe, own, domains))


def with_own_tokens(recipe: Recipe, folder: Path, tokenizer: str) -> Recipe:
    """Return the recipe by which the teacher in `folder`, with a `tokenizer` of its own, is measured. A
    prompt that is too long for it loses its beginning, because all models are measured on the same prompts.
    """
    changes = {"path": str(folder), "tokenizer": tokenizer, "chat_template": None}
    rollout = recipe.rollout.model_copy(update={"stop_ids": [], "model_stop_ids": True})
    model = recipe.model.model_copy(update=changes)
    cut = {"long_prompts": "truncate"}
    domains = {name: one.model_copy(update=cut) for name, one in recipe.domains.items()}
    same = {"tokenizer": None}  # as its model's
    teachers = {
        name: one.model_copy(update=same) if one.tokenizer else one for name, one in recipe.teachers.items()
    }
    return recipe.model_copy(
        update={"model": model, "rollout": rollout, "domains": domains, "teachers": teachers}
    )


def _prepare_models(context: StageContext, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the existing models (base, every teacher, merged, baselines), JSON-able, and fill `measured`
    with their previous results.

    Raises `CheckpointError` if there is none, or if a measured model has changed.
    """
    recipe = context.recipe
    paths = {"base": context.checked_model("base")}
    for number in range(1, recipe.rounds + 1):
        its_context = replace(context, stage=of_round("merge", number))
        for teacher in recipe.teacher_domains():
            if teacher not in recipe.student_teachers():  # it is measured as `merged`
                name = of_round(teacher_model(recipe, teacher), number)
                paths[name] = whole_teacher(its_context, teacher)
        paths[of_round("merged", number)] = context.checked_model(of_round("merged", number))
    baselines = {path.name for path in (context.folder.path / "baselines").glob("[!.]*")}
    for name in sorted(baselines | set(recipe.baseline_methods)):
        paths[name] = context.checked_model(name)
    models = {name: path for name, path in paths.items() if path.exists()}
    if not models:
        raise CheckpointError(
            f"{context.folder.path} holds no model to evaluate; train one first (`opd run RECIPE --resume`)."
        )
    identities = {name: _measurement_identity(context, path) for name, path in models.items()}
    earlier = read_measurements(context.folder).get("models", {})
    # A model that was made again is measured again. All are, if the measuring code changed.
    for name, identity in identities.items():
        if earlier.get(name, {}).get("model") == identity:
            measured[name] = earlier[name]
            check_folder(models[name])  # results must belong to the files
    texts = {name: str(path) for name, path in models.items()}
    return {"models": texts, "identities": identities, "found": list(measured)}


def evaluation_prompts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None
) -> tuple[EvaluationPrompts, EvaluationPrompts | None]:
    """Return the domains' held-out prompts, and those of the evaluation sets, if any. `ranks` share them."""
    evaluation, names, ranks = recipe.evaluation, list(recipe.domains), ranks or Ranks()
    prompts = dict.fromkeys(names, evaluation.prompts_per_domain)
    data = DomainSet.open(recipe, tokenizer)
    domains = EvaluationPrompts(recipe, data, prompts, dict.fromkeys(names, evaluation), ranks)
    if not evaluation.sets:
        return domains, None
    of_sets, loaded = recipe.of_sets(), load_sets(recipe)
    with naming_set(evaluation.sets):
        data = DomainSet.open(of_sets, tokenizer, loaded)
    prompts = {name: config.prompts for name, config in evaluation.sets.items()}
    return domains, EvaluationPrompts(of_sets, data, prompts, evaluation.sets, ranks)


COMPARED = ("base", "merged")
"""Models whose answers are stored, beside the teachers' on their own domains."""


def _teacher_name(model: str) -> str:
    """Return the name of the teacher, or an empty string if the model is none."""
    kind, _, name = split_round(model)[0].partition(":")
    return name if kind in ("specialist", "teacher") else ""


def _mean_accuracy(recipe: Recipe, model: str, rows: Mapping[str, Any]) -> float:
    """Return the mean sampled accuracy over the model's `domains_of`, as in the tables."""
    return fmean(rows[domain]["sampled"]["accuracy"] for domain in domains_of(recipe, model))


def measured_accuracies(folder: RunFolder) -> dict[str, Any]:
    """Return name -> accuracies of every model measured so far. Empty before the first."""
    models = read_measurements(folder).get("models", {})
    return {name: entry["domains"] for name, entry in models.items()}


def _select_answers(recipe: Recipe, name: str, answers: dict[str, list[Any]]) -> dict[str, Any]:
    """Select the answers to store: a teacher's on its own domains, a baseline's none."""
    if not _teacher_name(name) and split_round(name)[0] not in COMPARED:
        return {}
    return {domain: answers[domain] for domain in domains_of(recipe, name)}


def measurements_path(folder: RunFolder) -> Path:
    """Return the file of all measurements of the run's models."""
    return folder.stage_folder("evaluate") / "models.json"


def read_measurements(folder: RunFolder) -> dict[str, Any]:
    """Return the stored measurements, empty before the first.

    `models`: name -> `domains` and, if the run has evaluation sets, `sets` (accuracies), `answers` of the
    compared models by domain or set, `engine` of the answers, and `engine_why` if that is not the recipe's.
    `contamination`: the result of `find_contamination`.
    """
    path = measurements_path(folder)
    if not path.exists():
        return {}
    return read_sealed(path, f"delete {path.parent} to measure the models again")


def _measurement_identity(context: StageContext, path: Path) -> str:
    """Return a string that changes with the model at `path`, the rewards or the sampling. The run itself
    compares models from elsewhere.
    """
    identity = "given"
    if path.resolve().is_relative_to(context.folder.path.resolve()):
        checksums = path / CHECKSUMS
        if not checksums.is_file():
            raise CheckpointError(f"{checksums} is missing; restore it, or delete {path} to leave it out.")
        identity = file_digest(checksums)
    settings = [asdict(one) for one in context.folder.setting_changes if one.changes_measurement]
    changes = [*context.folder.code_changes, *settings]
    return identity + (f" {digest_of(changes)}" if changes else "")
