"""From recipe files and command-line overrides to one validated `Recipe`, and back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from opd.config.base import Config
from opd.config.explain import explain
from opd.config.overrides import parse_overrides
from opd.config.recipe import Recipe
from opd.config.schema import arms, below, models, tag
from opd.config.yaml_reader import KeyPath, read_yaml, write_yaml
from opd.errors import ConfigError
from opd.redact import learn


def load_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `paths`, deep-merged left to right, with `overrides` on top.

    `overrides` are command-line words: `["--distill.lr", "3e-5", "--seed=1"]`. Mappings merge key by key,
    every other value replaces; a mapping that chooses another `type` replaces the whole mapping. A mapping
    that sets a few keys keeps the defaults of the place it stands in: `distill: {optim: {lr: 3e-5}}` changes
    nothing but the learning rate. Raises `ConfigError` naming file and line, or option, and the dotted key.
    """
    if not paths:
        raise ConfigError("no recipe was given; name at least one YAML file")
    data: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    for path in paths:
        content, lines = read_yaml(Path(path))
        data = merge(data, content, Recipe)
        places.update(lines)
    tree, options = parse_overrides(overrides, Recipe, data)
    data = merge(data, tree, Recipe)
    places.update(options)
    learn(data)
    try:
        return Recipe.model_validate(complete(Recipe, data))
    except ValidationError as error:
        raise ConfigError(explain(error, Recipe, data, {(): str(paths[0]), **places})) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that `load_recipe` reads back to an equal one."""
    return write_yaml(recipe.model_dump(mode="json"))


def located(recipe: Recipe) -> Recipe:
    """`recipe` with every path in it absolute, seen from the current folder.

    Done once, where a command starts: code of the user's own may go to another folder.
    """
    data = recipe.model_dump()
    for *parents, last in path_keys(recipe):
        holder = data
        for key in parents:
            holder = holder[key]
        given = holder[last]
        if given and given.strip() and "://" not in given and not given.startswith("~"):
            holder[last] = str(Path(given).absolute())
    return Recipe.model_validate(data)


def path_keys(recipe: Recipe) -> list[KeyPath]:
    """The keys of `recipe` whose values, if there are any, are paths of files or folders, or URLs."""
    files = [
        name for name, domain in recipe.domains.items() if domain.source.endswith((".jsonl", ".parquet"))
    ]
    return [
        ("run_dir",),
        ("storage", "published"),
        *(("model", key) for key in ("path", "tokenizer", "chat_template")),
        *(("teachers", name, "path") for name in recipe.teachers),
        *(("domains", name, "source") for name in files),
        *([("rollout", "engine", "folder")] if recipe.rollout.engine.type == "sglang" else []),
    ]


def merge(left: Any, right: Any, schema: Any) -> Any:
    """`right` laid over `left`: mappings key by key, anything else replaced."""
    left, right = _spelled_out(left, schema), _spelled_out(right, schema)
    if not (isinstance(left, Mapping) and isinstance(right, Mapping)):
        return right
    members = models(schema)
    if len(members) > 1 and "type" in right and right["type"] != left.get("type", right["type"]):
        return dict(right)
    merged = dict(left)
    for key, value in right.items():
        merged[key] = merge(left[key], value, below(schema, str(key))) if key in left else value
    return merged


def _spelled_out(value: Any, schema: Any) -> Any:
    """`ray` as `{type: ray}`, where that is one of the alternatives: other files may add settings to it."""
    members = models(schema)
    known = isinstance(value, str) and len(members) > 1 and value in map(tag, members)
    return {"type": value} if known else value


def complete(schema: Any, data: Any, default: Any = None) -> Any:
    """`data` with the missing keys of every mapping taken from `default`, the value its field has unset.

    Pydantic alone would take them from the model's class, so that one key in `distill.optim` would silently
    reset the others to another stage's defaults.
    """
    if not isinstance(data, Mapping):
        return data
    model = _member(schema, data, default)
    if model is None:
        value = next((get_args(arm)[1] for arm in arms(schema) if get_origin(arm) is dict), None)
        return {key: complete(value, item) for key, item in data.items()} if models(value) else dict(data)
    filled: dict[str, Any] = {}
    if isinstance(default, model):
        filled = {name: getattr(default, name) for name in model.model_fields}
    for key, item in data.items():
        field = model.model_fields.get(key)
        if field is None:
            filled[key] = item
        else:
            filled[key] = complete(field.annotation, item, filled.get(key, field.default))
    return filled


def _member(schema: Any, data: Mapping[str, Any], default: Any) -> type[Config] | None:
    """The model that `data` is meant for: by its `type`, else the default's, else the only one."""
    members = models(schema)
    if len(members) <= 1:
        return members[0] if members else None
    wanted = data.get("type", tag(default) if isinstance(default, Config) else None)
    return next((model for model in members if tag(model) == wanted), None)
