"""Load recipe files and command-line overrides into one validated `Recipe`, and write it as YAML.

Command-line overrides: `--distill.optim.lr 3e-5`, `--seed=1`, and short forms such as `--distill.lr`.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from opd.config.base import FILES, Config, Located
from opd.config.hub_names import hub_name
from opd.config.other_names import former_hint, other_name, other_section
from opd.config.recipe import Recipe, inherit_settings
from opd.config.schema import (
    annotation_at,
    annotation_below,
    config_models,
    dotted_path,
    explain_errors,
    key_paths,
    marked_fields,
    nearest_word,
    type_tag,
    union_members,
    value_at,
)
from opd.config.yaml_reader import MAX_DEPTH, KeyPath, parse_value, read_yaml, write_yaml, yaml_complaint
from opd.errors import ConfigError, short_repr
from opd.redact import hide_recipe_secrets

_log = logging.getLogger(__name__)

_LONGEST = 250
"""Maximum characters of a setting's name."""


def parse_overrides(
    words: Sequence[str], schema: Any, data: Mapping[str, object]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return overrides as one nested mapping, and the option of each path.

    A name that is not a full path stands for the one path that has its parts in order and ends with its last
    part. Raises `ConfigError` for a word that is no option, an unknown or ambiguous name, a missing value, or
    a setting given twice.
    """
    tree: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    paths = list(dict.fromkeys(key_paths(schema, data)))
    for option, text in _split_options(words):
        path = _resolve_path(option, schema, paths)
        value = _parse_option(option, text, annotation_at(schema, path))
        if value == {} and isinstance(old := value_at(data, path), Mapping) and old:
            raise ConfigError(
                f"{option} {{}} changes nothing: what an option gives is added to what the recipe has there;"
                " leave it out, or give what is to change"
            )
        _assign_value(tree, path, value, option, schema)
        for depth in range(len(path)):
            places[path[: depth + 1]] = option
    return tree, places


def _split_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not an option; overrides look like --distill.steps 100")
        option, equals, text = word.partition("=")
        if len(option) > _LONGEST or option.count(".") >= MAX_DEPTH:
            raise ConfigError(f"{option[:60]}... is no option: no recipe has a setting of so long a name")
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"{option} needs a value; write {option} VALUE or {option}=VALUE")
            text = queue.pop(0)
        yield option, text


def _resolve_path(option: str, schema: Any, paths: Sequence[KeyPath]) -> KeyPath:
    parts = tuple(option.removeprefix("--").split("."))
    if annotation_at(schema, parts) is not None:
        return parts
    matches = [path for path in paths if path[-1] == parts[-1] and _in_order(parts, path)]
    if len(matches) > 1:  # a domain's own settings need its name
        matches = [path for path in matches if path[0] != "domains" or path[1] in parts] or matches
        matches = [
            path for path in matches if path[:2] != ("evaluation", "sets") or path[2] in parts
        ] or matches
        matches = [path for path in matches if "critic" not in path or "critic" in parts] or matches
    if len(matches) == 1:
        return matches[0]
    folded = tuple(part.lower().replace("-", "_") for part in parts)
    if not matches and folded != parts and annotation_at(schema, folded) is not None:
        raise ConfigError(f"{option}: a recipe has no such setting; did you mean --{dotted_path(folded)}?")
    if matches:
        names = ", ".join(f"--{dotted_path(path)}" for path in matches)
        raise ConfigError(f"{option} is ambiguous; give one of {names}")
    now = former_hint(parts)
    if now is not None:
        raise ConfigError(f"{option} is no setting; {now}")
    first, dot, _ = option.removeprefix("--").partition(".")
    section = other_section(first) if dot and first not in Recipe.model_fields else None
    if section is not None:
        raise ConfigError(f"{option}: `{first}` {section}")
    siblings = [
        name for model in config_models(annotation_at(schema, parts[:-1])) for name in model.model_fields
    ]
    begins = any(name.startswith(parts[-1]) for name in siblings)  # as in a recipe: `beta` beside `beta1`
    asked = dot and first in Recipe.model_fields and not begins
    elsewhere = other_name(parts[-1], "--") if asked else None
    if elsewhere is not None:
        raise ConfigError(f"{option}: `{parts[-1]}` {elsewhere}")
    raise ConfigError(f"{option}: a recipe has no such setting; {_suggest_setting(parts, paths, schema)}")


def _in_order(parts: KeyPath, path: KeyPath) -> bool:
    remaining = iter(path)
    return all(part in remaining for part in parts)


def _suggest_setting(parts: KeyPath, paths: Sequence[KeyPath], schema: Any) -> str:
    """Suggest the nearest setting: by its full name, or by its first and last parts, as in `distill.lr`. It
    searches `paths`, and the fields below a user-chosen name.
    """
    *parents, last = parts
    siblings = {
        name for model in config_models(annotation_at(schema, parents)) for name in model.model_fields
    }
    close = None if any(path[:-1] == tuple(parents) for path in paths) else nearest_word(last, siblings)
    if close is not None:
        return f"did you mean --{dotted_path((*parents, close))}?"

    def likeness(path: KeyPath) -> float:
        word = dotted_path(parts)
        forms = {
            dotted_path(path),
            dotted_path((path[0], path[-1])),
            path[-1] if len(parts) == 1 else dotted_path(path),
        }
        return max(difflib.SequenceMatcher(None, word, form).ratio() for form in forms)

    return f"did you mean --{dotted_path(max(paths, key=lambda path: (likeness(path), -len(path))))}?"


def _parse_option(option: str, text: str, annotation: Any) -> Any:
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        shown = short_repr(text)
        raise ConfigError(f"{option}: {shown} is not a valid value: {yaml_complaint(error)}") from None
    # `--name 2026` is the text 2026: a field that takes only text never gets a number.
    plain = [arm for arm in union_members(annotation) if isinstance(arm, type) and not config_models(arm)]
    if str in plain and not {int, float, bool} & set(plain) and isinstance(value, bool | int | float):
        return text
    return value


def _assign_value(tree: dict[str, Any], path: KeyPath, value: object, option: str, schema: Any) -> None:
    *parents, last = path
    for depth, key in enumerate(parents, 1):
        inner = tree[key] = _spelled_out(tree.get(key, {}), annotation_at(schema, path[:depth]))
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{option}: another option already sets {key!r} as a whole; keep one of the two"
            )
        tree = inner
    if last in tree:
        annotation = annotation_at(schema, path)
        if isinstance(value, dict) or isinstance(tree[last], dict):
            value, tree[last] = _spelled_out(value, annotation), _spelled_out(tree[last], annotation)
        value = _merge_options(tree[last], value, option)
    tree[last] = value


def _merge_options(one: object, other: object, option: str) -> dict[str, Any]:
    """Merge the values of two options for one mapping. Raises `ConfigError` if both set the same key."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        raise ConfigError(f"{option}: this setting is given twice; keep one of the two")
    both = {key: _merge_options(one[key], other[key], option) for key in one.keys() & other.keys()}
    return {**one, **other, **both}


def load_recipe(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe in `paths`, deep-merged left to right, with `overrides` on top.

    `overrides` are command-line words: `["--distill.lr", "3e-5", "--seed=1"]`. Mappings merge key by key, and
    every other value replaces. A mapping with another `type` replaces the whole mapping. A mapping that sets
    a few keys keeps the local defaults: `distill: {optim: {lr: 3e-5}}` changes only the learning rate. Raises
    `ConfigError` naming file and line, or option, and the dotted key.
    """
    if not paths:
        raise ConfigError("no recipe was given; name at least one YAML file")
    data: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    for path in paths:
        content, lines = read_yaml(Path(path))
        data = merge_values(data, content, Recipe)
        places.update(lines)
    tree, options = parse_overrides(overrides, Recipe, data)
    _tell_what_goes(data, tree, options)
    data = merge_values(data, tree, Recipe)
    places.update(options)
    hide_recipe_secrets(data)
    data = inherit_settings(data)
    try:
        return Recipe.model_validate(fill_defaults(Recipe, data))
    except ValidationError as error:
        raise ConfigError(explain_errors(error, Recipe, data, {(): str(paths[0]), **places})) from None


def _tell_what_goes(data: Mapping[str, Any], tree: Mapping[str, Any], options: Mapping[KeyPath, str]) -> None:
    """Warn if an option chooses another `type`, which drops the settings beside the old one in a file."""
    for path in options:
        schema, old, new = annotation_at(Recipe, path), value_at(data, path), value_at(tree, path)
        old, new = _spelled_out(old, schema), _spelled_out(new, schema)
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)) or not _is_other(old, new, schema):
            continue
        kind = next((model for model in config_models(schema) if type_tag(model) == new["type"]), None)
        fields = kind.model_fields if kind is not None else {}
        lost = [
            dotted_path((*path, key)) for key in old if key != "type" and key in fields and key not in new
        ]
        if lost:
            prefix = dotted_path(path)
            _log.warning(
                "%s: another type begins %s anew, without the %s of before; add --%s where it is to stay",
                options.get((*path, "type"), options[path]),
                prefix,
                ", ".join(name.removeprefix(f"{prefix}.") for name in lost),
                ", --".join(lost),
            )


def _is_other(old: Mapping[str, object], new: Mapping[str, object], schema: Any) -> bool:
    """Return True if `new` is another kind than `old`, among those of `schema`."""
    return len(config_models(schema)) > 1 and "type" in new and new["type"] != old.get("type", new["type"])


def dump_recipe(recipe: Recipe) -> str:
    """Write the recipe with every default as YAML that `load_recipe` reads back to an equal one."""
    return write_yaml(recipe.model_dump(mode="json"))


def absolute_paths(recipe: Recipe) -> Recipe:
    """Make every path of `recipe` absolute, from the current folder. Names on the Hub stay.

    Call it once, when a command starts, because user code may change the folder.
    """
    data, of_models = recipe.model_dump(), model_keys(recipe)

    def absolute_path(text: str, of_model: bool) -> str:
        if of_model and hub_name(text) is not None:
            return text
        path = os.path.expanduser(text) if of_model else text
        is_path = path.strip() and "://" not in path and not path.startswith("~")
        return str(Path(path).absolute()) if is_path else text

    for key in path_keys(recipe):
        replace_at(data, key, lambda text, key=key: text and absolute_path(text, key in of_models))
    return Recipe.model_validate(data)


def replace_at(data: dict[str, Any], path: KeyPath, change: Callable[[Any], object]) -> None:
    """Replace the value at `path` by `change(value)`."""
    *parents, last = path
    for key in parents:
        data = data[key]
    data[last] = change(data[last])


def path_keys(recipe: Recipe) -> list[KeyPath]:
    """The keys of `recipe` whose values are paths of files or folders, or URLs. Values may be missing."""
    fields = marked_fields(recipe, Located)
    return [path for path, mark, value in fields if not mark.files or value.endswith(FILES)]


def model_keys(recipe: Recipe) -> list[KeyPath]:
    """Return the keys of `recipe` for models: folders, URLs, or names on the Hub, if given."""
    return [path for path, mark, _ in marked_fields(recipe, Located) if mark.model]


def given_models(recipe: Recipe) -> list[str]:
    """Return the values of `model_keys` that are set."""
    model = (recipe.model.path, recipe.model.tokenizer, recipe.model.chat_template)
    return [value for value in (*model, *recipe.given_teachers().values()) if value is not None]


def merge_values(old: object, new: object, schema: Any) -> Any:
    """Merge `new` over `old`: mappings key by key, anything else replaced."""
    old, new = _spelled_out(old, schema), _spelled_out(new, schema)
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    if _is_other(old, new, schema):
        return dict(new)
    merged = dict(old)
    for key, value in new.items():
        merged[key] = (
            merge_values(old[key], value, annotation_below(schema, str(key))) if key in old else value
        )
    return merged


def _spelled_out(value: object, schema: Any) -> Any:
    """Expand `ray` to `{type: ray}` if it names one of the alternatives, so other files may add settings."""
    members = config_models(schema)
    is_name = isinstance(value, str) and len(members) > 1 and value in map(type_tag, members)
    return {"type": value} if is_name else value


def fill_defaults(schema: Any, data: object, default: object = None) -> Any:
    """Fill the missing keys of every mapping in `data` from `default`, the default value of its field.

    Pydantic alone would take them from the model's class, so one key in `distill.optim` would silently reset
    the others to another stage's defaults.
    """
    if not isinstance(data, Mapping):
        return data
    # The model for `data`: by its `type`, else the default's, else the only one.
    members = config_models(schema)
    model = members[0] if members else None
    if len(members) > 1:
        wanted = data.get("type", type_tag(default) if isinstance(default, Config) else None)
        model = next((one for one in members if type_tag(one) == wanted), None)
    if model is None:
        value = next((get_args(arm)[1] for arm in union_members(schema) if get_origin(arm) is dict), None)
        return (
            {key: fill_defaults(value, item) for key, item in data.items()}
            if config_models(value)
            else dict(data)
        )
    filled: dict[str, Any] = {}
    if isinstance(default, model):
        filled = {name: getattr(default, name) for name in model.model_fields}
    for key, item in data.items():
        field = model.model_fields.get(key)
        if field is None:
            filled[key] = item
        else:
            filled[key] = fill_defaults(field.annotation, item, filled.get(key, field.default))
    return filled
