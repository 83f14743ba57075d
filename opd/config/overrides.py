"""Command-line overrides: `--distill.optim.lr 3e-5`, `--seed=1`, and short forms such as `--distill.lr`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from opd.config.schema import arms, dotted, follow, key_paths, models
from opd.config.yaml_reader import KeyPath, parse_value
from opd.errors import ConfigError


def parse_overrides(
    words: Sequence[str], schema: Any, data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Overrides as one nested mapping, and the option each path came from.

    A name that is not a full path stands for the one path that has its parts in order and ends with its last
    part. Raises `ConfigError` for a word that is no option, an unknown or ambiguous name, or a missing value.
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
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{option}: {text!r} is not a valid value: {reason}") from None
    # `--name 2026` is the text 2026: a field that takes only text never gets a number.
    plain = [arm for arm in arms(annotation) if isinstance(arm, type) and not models(arm)]
    if str in plain and not {int, float, bool} & set(plain) and isinstance(value, bool | int | float):
        return text
    return value


def _assign(tree: dict[str, Any], path: KeyPath, value: Any, option: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{option}: another option already sets {key!r} as a whole; keep one of the two"
            )
    if isinstance(tree.get(path[-1]), dict) and isinstance(value, dict):
        value = {**tree[path[-1]], **value}
    tree[path[-1]] = value
