"""Command-line overrides: `--distill.optim.lr 3e-5`, `--seed=1`, and short forms such as `--distill.lr`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from opd.config.schema import arms, dotted, follow, key_paths, models
from opd.config.yaml_reader import MAX_DEPTH, KeyPath, complaint, parse_value
from opd.errors import ConfigError

_LONGEST = 250
"""Characters of the name of a setting."""


def parse_overrides(
    words: Sequence[str], schema: Any, data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Overrides as one nested mapping, and the option each path came from.

    A name that is not a full path stands for the one path that has its parts in order and ends with its last
    part. Raises `ConfigError` for a word that is no option, an unknown or ambiguous name, a missing value, or
    a setting that is given twice.
    """
    tree: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    paths = list(dict.fromkeys(key_paths(schema, data)))
    for option, text in _options(words):
        path = _resolve(option, schema, paths)
        _assign(tree, path, _value(option, text, follow(schema, path)), option)
        for depth in range(len(path)):
            places[path[: depth + 1]] = option
    return tree, places


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
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


def _resolve(option: str, schema: Any, paths: Sequence[KeyPath]) -> KeyPath:
    given = tuple(option.removeprefix("--").split("."))
    if follow(schema, given) is not None:
        return given
    found = [path for path in paths if path[-1] == given[-1] and _in_order(given, path)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"--{dotted(path)}" for path in found)
        raise ConfigError(f"{option} is ambiguous; give one of {names}")
    raise ConfigError(f"{option}: a recipe has no such setting; {_suggestion(given, paths)}")


def _in_order(parts: KeyPath, path: KeyPath) -> bool:
    rest = iter(path)
    return all(part in rest for part in parts)


def _suggestion(given: KeyPath, paths: Sequence[KeyPath]) -> str:
    """The nearest setting: by its full name, or by its first and last parts, as in `distill.lr`."""

    def likeness(path: KeyPath) -> float:
        word = dotted(given)
        forms = {dotted(path), dotted((path[0], path[-1])), path[-1] if len(given) == 1 else dotted(path)}
        return max(difflib.SequenceMatcher(None, word, form).ratio() for form in forms)

    return f"did you mean --{dotted(max(paths, key=lambda path: (likeness(path), -len(path))))}?"


def _value(option: str, text: str, annotation: Any) -> Any:
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        shown = repr(text) if len(text) <= 60 else f"{text[:57]!r}..."
        raise ConfigError(f"{option}: {shown} is not a valid value: {complaint(error)}") from None
    # `--name 2026` is the text 2026: a field that takes only text never gets a number.
    plain = [arm for arm in arms(annotation) if isinstance(arm, type) and not models(arm)]
    if str in plain and not {int, float, bool} & set(plain) and isinstance(value, bool | int | float):
        return text
    return value


def _assign(tree: dict[str, Any], path: KeyPath, value: Any, option: str) -> None:
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{option}: another option already sets {key!r} as a whole; keep one of the two"
            )
    if last in tree:
        value = _union(tree[last], value, option)
    tree[last] = value


def _union(one: Any, other: Any, option: str) -> dict[str, Any]:
    """What two options say of one mapping. Raises `ConfigError` where both set the same key."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        raise ConfigError(f"{option}: this setting is given twice; keep one of the two")
    both = {key: _union(one[key], other[key], option) for key in one.keys() & other.keys()}
    return {**one, **other, **both}
