"""Compute the digests of a run's external models, data and code, and of later changes of the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.config.base import Own
from opd.config.rewards import FunctionReward
from opd.config.schema import marked_fields

Given = dict[str, dict[str, str]]
"""Key of the recipe -> file, or published name -> digest."""


def input_digests(recipe: Recipe) -> Given:
    """Return the digest of every file of `recipe`'s own models, tokenizer, data and code that a stage may
    read.

    Weights in a folder's `checksums.json` are not read here, because their loader compares them. Raises
    `CheckpointError`, `DataError` or `StorageError` for unreadable files, and `SandboxError` for a missing
    image.
    """
    digests = {where: _source_digests(where, source) for where, source in _input_sources(recipe)}
    # The images in which environments' tools run.
    scored = {f"domains.{name}": domain for name, domain in recipe.domains.items()}
    scored |= {f"evaluation.sets.{name}": one for name, one in recipe.of_sets().domains.items()}
    for where, config in scored.items():
        if config.environment is not None and config.environment.container_image is not None:
            from opd.sandbox.containers import digest_of_image

            image = config.environment.container_image
            digests[f"{where}.environment.params.sandbox.image"] = {image: digest_of_image(image)}
    code = {where: _code_digests(path) for where, path in user_code(recipe).items()}
    return digests | {where: files for where, files in code.items() if files}


def user_functions(recipe: Recipe) -> dict[str, tuple[str, Sequence[str]]]:
    """Return key of the recipe -> (dotted path, its arguments) of the user's own functions, except rewards. A
    function that domains and sets inherit from the recipe appears once.
    """
    functions = {
        ".".join(key): (path, mark.takes)
        for key, mark, path in marked_fields(recipe, Own)
        if path is not None
    }
    same = functions.get("rollout.generate")
    return {
        key: function
        for key, function in functions.items()
        if function != same or key == "rollout.generate" or not key.endswith(".rollout.generate")
    }


def user_code(recipe: Recipe) -> dict[str, str]:
    """Return key of the recipe -> dotted path of all the user's own code."""
    paths = {where: path for where, (path, _) in user_functions(recipe).items()}
    sources = {f"domains.{name}": domain for name, domain in recipe.domains.items()}
    sources |= {f"evaluation.sets.{name}": config for name, config in recipe.of_sets().domains.items()}
    for where, config in sources.items():
        if isinstance(config.reward, FunctionReward):
            paths[f"{where}.reward"] = config.reward.path
        if config.environment is not None and config.environment.user_code is not None:
            paths[f"{where}.environment"] = config.environment.user_code
        kind, _, task = config.source.partition(":")
        if kind == "procedural" and ":" in task:
            paths[f"{where}.source"] = task
    return paths


def with_changes(digests: Given, changes: Sequence[Mapping[str, Any]]) -> Given:
    """Return `digests` after `changes` of code: {"files": {key: {file: {"was": digest, "is": digest}}}}.
    `key` is a key of the recipe. A digest is `None` for a file that did not or does not exist.
    """
    now = {where: dict(files) for where, files in digests.items()}
    for change in changes:
        for where, files in change["files"].items():
            for name, sides in files.items():
                now[where].pop(name, None)
                if sides["is"] is not None:
                    now[where][name] = sides["is"]
    return now


def changed_files(change: Mapping[str, Any]) -> str:
    """Format files as `rewards.py (domains.a.reward, domains.b.reward), helper.py (domains.a.reward)`."""
    keys: dict[str, list[str]] = {}
    for where, files in change["files"].items():
        for name in files:
            keys.setdefault(name, []).append(where)
    return ", ".join(f"{name} ({', '.join(of)})" for name, of in keys.items())


def _code_digests(path: str) -> dict[str, str]:
    from opd.errors import DataError
    from opd.imports import source_files
    from opd.storage.files import file_digest

    try:
        return {name: file_digest(file) for name, file in source_files(path).items()}
    except OSError as error:
        raise DataError(f"the code of {path} cannot be read ({error}); check its permissions.") from error


def _input_sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for where in ("path", "tokenizer", "chat_template"):
        source = getattr(recipe.model, where)
        if source is not None:
            yield f"model.{where}", source
    teachers = recipe.given_teachers()
    for name in recipe.used_teachers():
        if name in teachers:
            yield f"teachers.{name}.path", teachers[name]
        if (tokenizer := recipe.teacher_tokenizer(name)) is not None:
            yield f"teachers.{name}.tokenizer", tokenizer
    files = {f"domains.{name}.source": domain.source for name, domain in recipe.domains.items()}
    files |= {
        f"evaluation.sets.{name}.source": config.source for name, config in recipe.evaluation.sets.items()
    }
    for name, sft in recipe.demonstration_settings().items():
        files[f"domains.{name}.sft.source" if name else "sft.source"] = sft.source
    yield from ((where, source) for where, source in files.items() if Path(source).is_file())


def _source_digests(where: str, source: str) -> dict[str, str]:
    from opd.errors import DataError
    from opd.storage.files import file_digest
    from opd.teachers.skeleton import is_published

    try:
        if is_published(source) and not where.endswith(".tokenizer"):  # whose loader refuses a URL
            from opd.storage.published import PublishedModel
            from opd.teachers.published_adapter import PublishedAdapter, is_adapter

            if is_adapter(source):
                return {"published": PublishedAdapter.open(source).digest}
            with PublishedModel.open(source) as model:
                return {"published": model.manifest.digest}
        path = Path(source)
        if path.is_file():
            return {path.name: file_digest(path)}
        digests = model_digests(path)
        _refuse_damaged(path, digests)
        return digests
    except OSError as error:
        if error.strerror:
            raise DataError(f"{source} cannot be read ({error.strerror}); check its permissions.") from error
        raise


def _refuse_damaged(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise `CheckpointError` for a file from the Hub that does not match its name in the cache. Large files
    are stored under their sha256, the others under git's sha1.
    """
    from opd.config.hub_names import cached_name
    from opd.errors import CheckpointError
    from opd.models.hub import digest_like

    for name, digest in digests.items() if cached_name(folder) is not None else ():
        blob = (folder / name).resolve()
        computed = digest if len(blob.name) == len(digest) else digest_like(blob, blob.name)
        if blob.parent.name == "blobs" and blob.name != computed:
            raise CheckpointError(
                f"{folder / name} is not what the Hub gave; delete {blob}, and the command fetches it again"
            )


def model_digests(folder: Path) -> dict[str, str]:
    """Return file -> digest of a Hugging Face folder's files, and its base's for an adapter of peft's.

    The result is the same as long as the model is. Raises `CheckpointError` or `OSError`.
    """
    from opd.models.hf_folder import (
        ADAPTER_WEIGHTS,
        CHECKSUMS,
        LOADED,
        adapter_base,
        check_small_files,
        read_checksums,
        weight_files,
    )
    from opd.storage.files import file_digest

    base = adapter_base(folder)
    if base is not None:
        names = [name for name in sorted({ADAPTER_WEIGHTS, *LOADED}) if (folder / name).is_file()]
        of_base = {f"base/{name}": digest for name, digest in model_digests(base).items()}
        return {name: file_digest(folder / name) for name in names} | of_base
    check_small_files(folder)
    listed = read_checksums(folder)
    digests = {CHECKSUMS: file_digest(folder / CHECKSUMS)} if listed else {}
    tokenizer_only = not any(folder.glob("*.safetensors"))
    wanted = {*LOADED, *([] if tokenizer_only else weight_files(folder))}
    for name in sorted(wanted - listed.keys()):
        if (folder / name).is_file():
            digests[name] = file_digest(folder / name)
    return digests
