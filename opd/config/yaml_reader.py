"""Reads and writes the YAML of recipes and clusters: 1.2 core schema, no repeated keys, each with its line.

PyYAML speaks YAML 1.1, in which `3e-5` is text, `no` is false and `1:30` is ninety. None of it applies here.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.errors import ConfigError, short_repr

KeyPath = tuple[str, ...]


MAX_BYTES = 512 * 1024
MAX_DEPTH = 64
"""Maximum nesting of mappings and lists, with aliases expanded."""
MAX_VALUES = 20_000
"""Maximum keys and values of one document, with aliases expanded."""
MAX_TEXT = 100_000
"""Maximum characters of one text."""
MAX_DIGITS = 100
"""Maximum characters of one number."""


class _LimitError(yaml.MarkedYAMLError):
    """Valid YAML that no recipe needs, refused before anything is built from it."""


class _RefusedError(yaml.MarkedYAMLError):
    """Valid YAML with content that no recipe may have."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Limit recursion and memory while reading."""
        self._depth += 1
        self._values += 1
        mark = self.peek_event().start_mark
        if self._depth > MAX_DEPTH:
            raise _LimitError(problem=f"more than {MAX_DEPTH} levels inside each other", problem_mark=mark)
        if self._values > MAX_VALUES:
            raise _LimitError(problem=f"more than {MAX_VALUES:,} keys and values", problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


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
_TAG = "tag:yaml.org,2002:"
_FORMS = {_TAG + tag: re.compile(f"(?:{pattern})\\Z") for tag, pattern, _ in _RESOLVERS}
"""Patterns of each tag's values, for everything that is not text."""
_KINDS = {
    yaml.ScalarNode: {_TAG + "str", *_FORMS},
    yaml.SequenceNode: {_TAG + "seq"},
    yaml.MappingNode: {_TAG + "map"},
}
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""Characters without a place in UTF-8 or in file names."""
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _tag, _FORMS[_TAG + _tag], _first)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings `_Loader` would not read back as strings."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        return True


def read_yaml(path: Path, kind: str = "recipe") -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Read a file of this `kind`. Return its content, and the location of each key as `FILE:LINE`.

    Raises `ConfigError` if the file cannot be read, is not YAML, repeats a key, is not a mapping or is empty.
    """
    text = _read_text(path, kind)
    try:
        data, places = _build_value(text, str(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = getattr(error, "position", None)  # of a character that YAML does not allow
        place = str(path)
        if mark is not None:
            place = f"{path}:{mark.line + 1}"
        elif position is not None:
            place = f"{path}:{text.count(chr(10), 0, position) + 1}"
        raise ConfigError(f"{place}: {yaml_complaint(error)}") from None
    if data is None or data == {}:
        raise ConfigError(
            f"{path}: the {kind} is empty; write lines of the form `KEY: VALUE`, or leave the file out"
        )
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: a {kind} is a mapping of keys to values, not a {type(data).__name__};"
            " write lines of the form `KEY: VALUE`"
        )
    return data, places


def parse_value(text: str) -> Any:
    """Parse the YAML value in `text`. Raises `yaml.YAMLError` (see `complaint`)."""
    return _build_value(text, "")[0]


def yaml_complaint(error: yaml.YAMLError) -> str:
    """Return the fault of a document, with the fix, in one line."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    reason = " ".join(str(problem).split())
    if isinstance(error, _RefusedError):
        return reason
    if isinstance(error, _LimitError):
        return f"{reason}; write less"
    advice = next(advice for pattern, advice in _WAYS_OUT if re.search(pattern, reason))
    return f"not valid YAML: {reason.removeprefix('but ')}; {advice}"


_QUOTES = "put the text in quotes"
_WAYS_OUT = (
    ("mapping values are not allowed", "put a text that holds `: ` in quotes, or mend the indentation"),
    ("'\\\\t' that cannot start", "indent with blanks, without tabs"),
    ("cannot start any token", f"{_QUOTES} that begins with this sign"),
    ("undefined alias|alphabetic or numeric", f"{_QUOTES} that begins with * or &"),
    ("unexpected end of stream", "close the quotes that were opened"),
    ("',' or '[]}]'", "close the bracket, and put a text that holds brackets or commas in quotes"),
    (
        "escape (character|sequence)",
        r"write \\ for a backslash between double quotes, or use single quotes",
    ),
    (
        "(keys|entries) are not allowed",
        "begin a list or mapping on a line of its own, or put the text in quotes",
    ),
    ("expected the node content", f"give a value, and {_QUOTES} that begins with a bracket or a comma"),
    (
        "another document|document start",
        "keep one document: one line `---` at most, none of `...`, none with %",
    ),
    ("special characters", "take the control sign out"),
    ("for merging", "give `<<` the alias of a mapping, as in `<<: *NAME`"),
    ("chomping|indentation indicator|a line break", "begin the text on the line below the sign | or >"),
    ("<block end>", "mend the indentation, or put the whole text in quotes"),
    ("tag|'>'|'!'", f"{_QUOTES} that begins with !"),
    ("YAML document|a digit|directive|%", "take the line that begins with % out"),
    ("", "mend it there, or put the text in quotes"),
)
"""PyYAML's problems, with their fixes."""


def write_yaml(data: Mapping[str, object]) -> str:
    """Write `data` as YAML that `read_yaml` reads back unchanged; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _read_text(path: Path, kind: str) -> str:
    content = None
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and path.is_relative_to("/dev")):
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {kind} file; check the path") from None
    except OSError as error:
        raise ConfigError(f"{path}: the {kind} cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{path}: the {kind} cannot be read ({error}); check the path") from None
    if content is None:
        raise ConfigError(f"{path}: the {kind} cannot be read: it is no file; give the path of a YAML file")
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: the {kind} has more than {MAX_BYTES:,} bytes; is it the right file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: the {kind} cannot be read as UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None


def _build_value(text: str, file: str) -> tuple[Any, dict[KeyPath, str]]:
    """Return the value in `text` and the places of its keys. Nothing is built that `_check_node` refuses."""
    loader = _Loader(text)
    places: dict[KeyPath, str] = {}
    try:
        try:
            node = loader.get_single_node()
        except (ValueError, OverflowError):  # of `chr`
            mark = loader.get_mark()
            raise _RefusedError(
                problem=r"\U in double quotes names no character; use single quotes", problem_mark=mark
            ) from None
        if node is None:
            return None, places
        _measure_node(node, {})
        _check_node(node, (), file, places)
        return loader.construct_document(node), places
    finally:
        loader.dispose()


def _measure_node(node: yaml.Node, sizes: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return (values, levels) of `node` with aliases expanded. `sizes` caches those of earlier nodes, and
    `None` for its parents. It recurses to the depth of the text, because an alias follows its anchor.
    """
    if id(node) in sizes:
        size_levels = sizes[id(node)]
        if size_levels is None:
            raise _refuse_node(node, "an alias stands inside what it means; take it out there")
        return size_levels
    sizes[id(node)] = None
    values, levels = 1, 1
    for child in _child_nodes(node):
        size, depth = _measure_node(child, sizes)
        values, levels = values + size, max(levels, depth + 1)
    if values > MAX_VALUES or levels > MAX_DEPTH:
        limit = f"{MAX_VALUES:,} keys and values" if values > MAX_VALUES else f"{MAX_DEPTH} levels"
        raise _LimitError(problem=f"more than {limit} with aliases written out", problem_mark=node.start_mark)
    sizes[id(node)] = values, levels
    return values, levels


def _child_nodes(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_node(node: yaml.Node, path: KeyPath, file: str, places: dict[KeyPath, str]) -> None:
    """Raise for content that no recipe may have. Add the location of each key to `places`."""
    if node.tag not in _KINDS.get(type(node), ()):
        shown = "!" + str(node.tag).removeprefix(_TAG).removeprefix("!")
        raise _refuse_node(node, f"the tag {short_repr(shown)} has no meaning here; leave it out")
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _check_node(child, (*path, str(index)), file, places)
    elif isinstance(node, yaml.MappingNode):
        _check_mapping(node, path, file, places)


def _check_mapping(node: yaml.MappingNode, path: KeyPath, file: str, places: dict[KeyPath, str]) -> None:
    keys: set[str] = set()
    for key, value in node.value:
        line = f"{file}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise _refuse_node(key, "a key is a list or a mapping; write a single word")
        if key.tag == _TAG + "merge":
            _check_node(value, path, file, {})
            continue
        _check_node(key, path, file, {})
        if key.tag != _TAG + "str":
            raise _refuse_node(key, f"the key {key.value!r} is not text; put it in quotes")
        if node.flow_style and ":" in key.value and not (key.style or value.value):
            raise _refuse_node(key, f"{short_repr(key.value)} has no value; put a blank after its colon")
        if key.value in keys:
            raise _refuse_node(key, f"the key {short_repr(key.value)} appears twice; keep one")
        keys.add(key.value)
        places[(*path, key.value)] = line
        _check_node(value, (*path, key.value), file, places)


def _check_scalar(node: yaml.ScalarNode) -> None:
    text, name = node.value, node.tag.removeprefix(_TAG)
    if node.tag in _FORMS and not _FORMS[node.tag].match(text):
        raise _refuse_node(
            node, f"{short_repr(text)} is tagged as {name} and is none; mend the value or the tag"
        )
    if name in ("int", "float") and len(text) > MAX_DIGITS:
        raise _refuse_node(node, f"a number of {len(text)} characters; give one of {MAX_DIGITS} at most")
    if len(text) > MAX_TEXT:
        raise _refuse_node(node, f"a text of {len(text):,} characters; give one of {MAX_TEXT:,} at most")
    unwritable = _UNWRITABLE.search(text)
    if unwritable:
        raise _refuse_node(node, f"a text holds the character U+{ord(unwritable[0]):04X}; take it out")


def _refuse_node(node: yaml.Node, problem: str) -> _RefusedError:
    return _RefusedError(problem=problem, problem_mark=node.start_mark)
