"""The stage that measures every model of a run on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.errors import CheckpointError
from opd.models.hf_folder import CHECKSUMS, check_folder
from opd.pipelines.evaluation.accuracy import evaluate_model
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext, baseline_methods
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import load_model, make_writer, tokenizer_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.storage.sealed import digest_of, file_digest, read_sealed, write_sealed


def evaluated_models(context: StageContext) -> dict[str, Path]:
    """Name -> folder of every model to measure: base, each domain's (main) teacher, merged, baselines."""
    recipe = context.recipe
    models = {"base": context.model("base")}
    for domain in recipe.domains:
        models[f"specialist:{domain}"] = whole_teacher(context, recipe.main_teacher(domain))
    models["merged"] = context.model("merged")
    found = {path.name for path in (context.folder.path / "baselines").glob("[!.]*")}
    for name in sorted(found | set(baseline_methods(recipe))):
        models[name] = context.model(name)
    return models


def evaluate(context: StageContext) -> dict[str, Any]:
    """Measure every model that is there; what a killed attempt measured is kept."""
    recipe = context.recipe
    models = {name: path for name, path in evaluated_models(context).items() if path.exists()}
    if not models:
        raise CheckpointError(f"{context.folder.path} holds no model to evaluate; train one first.")
    identities = {name: _identity(context, path) for name, path in models.items()}
    known = _read(context.folder)
    # A model that was made again since is measured again, and all are once the code that measures changed.
    found = {name: known[name] for name, of in identities.items() if known.get(name, {}).get("model") == of}
    for name in found:
        check_folder(models[name])  # what is told of a model is told of what is there
    tokenizer = tokenizer_of(recipe, next(iter(models.values())))
    data = DomainSet.open(recipe, tokenizer, context.note)
    for done, (name, path) in enumerate(models.items(), start=1):
        if name not in found:
            # A teacher from elsewhere may have another configuration, so every model gets its own engine.
            engine = make_writer(recipe, load_model(recipe, path, tokenizer=tokenizer), tokenizer)
            domains, kept = evaluate_model(engine, data, recipe, _teacher(name, path))
            found[name] = {"model": identities[name], "domains": domains, "answers": _to_keep(name, kept)}
            write_sealed(measurements(context.folder), {"models": found})
        accuracies = [row["sampled"]["accuracy"] for row in found[name]["domains"].values()]
        context.progress(done, len(models), f"{name}: {sum(accuracies) / len(accuracies):.1%} sampled")
    return {
        "steps": len(models),
        "student_tokens": 0,
        "phases": {},
        "counters": {},
    }


def _teacher(name: str, path: Path) -> Path | None:
    return path if name.startswith("specialist:") else None


def measured(folder: RunFolder) -> dict[str, Any]:
    """Name -> accuracies of every model measured so far; empty before the first."""
    return {name: entry["domains"] for name, entry in _read(folder).items()}


def kept_answers(folder: RunFolder) -> dict[str, Any]:
    """Name -> domain -> answers of the models that are compared answer by answer."""
    return {name: entry.get("answers", {}) for name, entry in _read(folder).items()}


def _to_keep(name: str, answers: dict[str, list[Any]]) -> dict[str, Any]:
    """Of a specialist those on its own domain, of a baseline none."""
    kind, _, domain = name.partition(":")
    if kind == "specialist":
        return {domain: answers[domain]}
    return answers if name in ("base", "merged") else {}


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
