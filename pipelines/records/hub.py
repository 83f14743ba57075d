"""Fetch a recipe's names on the Hub into local folders and files, each of one commit.

A run records its commits (`hub` in inputs.json and results.json). A resumed run gets the same ones, whatever
the branch holds by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from opd.config import Recipe
from opd.config.base import Located
from opd.config.hub_names import HubName, hub_name
from opd.config.load import KeyPath, replace_at
from opd.config.schema import marked_fields
from opd.errors import ConfigError, OpdError
from opd.pipelines.records.run_folder import HubRecord, RunFolder, refuse_existing
from opd.progress import Progress

_MIB = 2**20
_COMMITS = "OPD_HUB_COMMITS"
"""The commits that the parent passes to a run's ranks. They find no other commit, and send no requests."""


def fetch_recipe(
    recipe: Recipe, path: Path | None = None, *, resume: bool = False, weights: bool = True
) -> tuple[Recipe, HubRecord]:
    """Return `recipe` with local paths for its names on the Hub, and the record of their commits.

    `path`: the run folder. With `resume` the commits of its run are used, without a request to the Hub if all
    of their files are here. Without `weights` only models' small files are fetched. Raises `ModelError`,
    `CheckpointError` or `StorageError` if something is not available. Raises `RunFolderError` before any
    download if the folder holds another run.
    """
    names = hub_names(recipe)
    if not names:
        return recipe, {}
    commits: HubRecord = json.loads(os.environ.get(_COMMITS, "{}"))
    files: Mapping[str, Collection[str]] = {where: () for where in commits}
    if not commits and path is not None:
        if resume:
            run = RunFolder.attach(path)
            commits, files = run.hub_record, run.input_files
        else:
            refuse_existing(path)
    from opd.models.hub import fetch_from_hub

    data, record = recipe.model_dump(), {}
    with Progress() as progress:
        for key, (value, name) in names.items():
            where, stage = ".".join(key), str(name)
            entry = commits.get(where, {})
            commit = entry.get("commit") if entry.get("asked") == value else None
            whole = weights and where.endswith("path")
            report = partial(_report_bytes, progress, stage)
            progress.begin_stage(stage)
            try:
                fetched = fetch_from_hub(name, commit, weights=whole, files=files.get(where), report=report)
            except OpdError as error:
                raise type(error)(f"{where}: {error}") from error
            if commit is None:
                progress.finish_stage(stage, f"is commit {fetched.commit}")
            record[where] = {"asked": value, "commit": fetched.commit}
            replace_at(data, key, lambda _, path=str(fetched.path): path)
    return Recipe.model_validate(data), record


def _report_bytes(progress: Progress, stage: str, done: int, total: int) -> None:
    progress.update_stage(stage, done // _MIB, max(1, total // _MIB), "MiB")


def hub_names(recipe: Recipe) -> dict[KeyPath, tuple[str, HubName]]:
    """Return key of `recipe` -> its value, and the name on the Hub. Teachers of no domain are left out.

    Raises `ConfigError` for a `hf://` that names nothing of its kind.
    """
    used = recipe.used_teachers()
    names: dict[KeyPath, tuple[str, HubName]] = {}
    for key, mark, value in sorted(marked_fields(recipe, Located), key=lambda one: one[1].files):
        is_unused = key[0] == "teachers" and key[1] not in used
        if value is None or is_unused or not (mark.model or mark.files):
            continue
        name, of_data = hub_name(value), mark.files
        if name is not None and (name.file is not None) == of_data:
            names[key] = (value, name)
        elif value.startswith("hf://"):
            form = "hf://datasets/org/name@revision/FILE" if of_data else "org/name@revision"
            subject = "nothing" if name is None else "no file of a data set" if of_data else "no model"
            raise ConfigError(f"{'.'.join(key)}: {value!r} names {subject} on the Hub; write {form}")
    return names


def rank_variables(record: HubRecord) -> dict[str, str]:
    """Return the environment of a rank, so that `fetched` gives it its parent's commits."""
    return {_COMMITS: json.dumps(record)} if record else {}
