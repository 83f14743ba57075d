"""Reads and writes the YAML of recipes and clusters: 1.2 core schema, no repeated keys, each with its line.

PyYAML speaks YAML 1.1, in which `3e-5` is text, `no` is false and `1:30` is ninety; none of it is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.errors import ConfigError

KeyPath = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}


_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)",
        list("-+0123456789."),
    ),
    ("merge", "<<", ["<"]),
)
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings `_Loader` would not read back as strings."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(path: Path, kind: str = "recipe") -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Content of a file of this `kind`, and where each key stands as `FILE:LINE`.

    Raises `ConfigError` if the file cannot be read, is not YAML, repeats a key or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {kind} file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the {kind} cannot be read as UTF-8 text ({error})") from None
    places: dict[KeyPath, str] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, places
            _locate(node, (), path, places)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(f"{_place(path, error)}: not valid YAML: {_reason(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a {kind} is a mapping of keys to values, not a {type(data).__name__}")
    return data, places


def parse_value(text: str) -> Any:
    """The YAML value written in `text`. Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(data: Mapping[str, Any]) -> str:
    """`data` as YAML that `read_yaml` reads back unchanged; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _locate(node: yaml.Node, path: KeyPath, file: Path, places: dict[KeyPath, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        line = f"{file}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key must be a single word")
        if key.tag.endswith(":merge"):
            continue
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{line}: the key {key.value!r} is not text; put it in quotes")
        if key.value in seen:
            raise ConfigError(f"{line}: the key {key.value!r} appears twice; keep one")
        seen.add(key.value)
        places[(*path, key.value)] = line
        _locate(value, (*path, key.value), file, places)


def _place(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _reason(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())
