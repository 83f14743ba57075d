"""What a run is given from elsewhere, models and data, by the digests it had when the run began."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opd.config import Recipe

Given = dict[str, dict[str, str]]
"""Key of the recipe -> file, or what is published there -> digest."""


def given_inputs(recipe: Recipe) -> Given:
    """The digest of every file below `recipe`'s own models, tokenizer and data that a stage may read.

    Weights that a folder's `checksums.json` lists are not read for it: who loads them compares them. Raises
    `CheckpointError`, `DataError` or `StorageError` for what cannot be read.
    """
    return {where: _digests(source) for where, source in _sources(recipe)}


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for where in ("path", "tokenizer", "chat_template"):
        source = getattr(recipe.model, where)
        if source is not None:
            yield f"model.{where}", source
    used = dict.fromkeys(name for domain in recipe.domains for name in recipe.teacher_weights(domain))
    for name in used:
        if name in recipe.teachers:
            yield f"teachers.{name}.path", recipe.teachers[name].path
    for name, domain in recipe.domains.items():
        if Path(domain.source).is_file():
            yield f"domains.{name}.source", domain.source


def _digests(source: str) -> dict[str, str]:
    from opd.errors import DataError
    from opd.storage.sealed import file_digest
    from opd.teachers.units import is_published

    try:
        if is_published(source):
            return {"published": _published(source)}
        path = Path(source)
        if path.is_file():
            return {path.name: file_digest(path)}
        return model_digests(path)
    except OSError as error:
        if hasattr(error, "strerror") and error.strerror:
            raise DataError(f"{source} cannot be read ({error.strerror}); check its permissions.") from error
        raise


def _published(url: str) -> str:
    from opd.storage.published import PublishedModel
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter

    if is_adapter(url):
        return PublishedAdapter.open(url).digest
    with PublishedModel.open(url) as model:
        return model.manifest.digest


def model_digests(folder: Path) -> dict[str, str]:
    """File -> digest of what a Hugging Face folder brings, and its base for an adapter of peft's.

    The same as long as the model is the same. Raises `CheckpointError` or `OSError`.
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
    from opd.storage.sealed import file_digest

    base = adapter_base(folder)
    if base is not None:
        own = [name for name in sorted({ADAPTER_WEIGHTS, *LOADED}) if (folder / name).is_file()]
        of_base = {f"base/{name}": digest for name, digest in model_digests(base).items()}
        return {name: file_digest(folder / name) for name in own} | of_base
    check_small_files(folder)
    listed = read_checksums(folder)
    found = {CHECKSUMS: file_digest(folder / CHECKSUMS)} if listed else {}
    tokenizer_only = not any(folder.glob("*.safetensors"))
    names = {*LOADED, *([] if tokenizer_only else weight_files(folder))}
    for name in sorted(names - listed.keys()):
        if (folder / name).is_file():
            found[name] = file_digest(folder / name)
    return found
