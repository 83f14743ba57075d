"""Walks over the configuration models, to find the keys of a recipe for merging, overrides and messages.

The same walk turns pydantic's errors into sentences (file or option, dotted key, fix), and lists every field
with its type, default and sentence, for `opd run --help` and shell completion.
"""

from __future__ import annotations

import difflib
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from opd.config.base import Changes, Config, Located, Own
from opd.config.other_names import former_hint, other_name, other_section
from opd.config.recipe import Recipe
from opd.config.yaml_reader import KeyPath
from opd.errors import ConfigError, short_repr


def union_members(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without `Annotated`, `Union` and `None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return union_members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [arm for argument in get_args(annotation) for arm in union_members(argument)]
    return [] if annotation is NoneType else [annotation]


def config_models(annotation: Any) -> list[type[Config]]:
    """Return the configuration models among the alternatives of an annotation."""
    return [arm for arm in union_members(annotation) if isinstance(arm, type) and issubclass(arm, Config)]


def type_tag(model: type[Config] | Config) -> Any:
    """Return the value of `type` that selects `model` in a union; `None` for a model without one."""
    kind = model if isinstance(model, type) else type(model)
    field = kind.model_fields.get("type")
    if field is None:
        return None
    kinds = get_args(field.annotation)
    return next(iter(kinds), None) if field.is_required() else field.default


def annotation_below(annotation: Any, key: str) -> Any:
    """Return the annotation of `key` in a value of `annotation`; `None` if there can be no such key."""
    annotations = [
        model.model_fields[key].annotation for model in config_models(annotation) if key in model.model_fields
    ]
    for arm in union_members(annotation):
        if get_origin(arm) is dict:
            annotations.append(get_args(arm)[1])
        elif arm is Any:
            annotations.append(Any)
    return Union[tuple(annotations)] if annotations else None  # noqa: UP007 - built at run time


def annotation_at(annotation: Any, path: Iterable[str]) -> Any:
    """Return the annotation at `path`; `None` if no recipe has such a path."""
    for key in path:
        annotation = annotation_below(annotation, key)
        if annotation is None:
            return None
    return annotation


def key_paths(annotation: Any, data: object, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every path of a recipe. Below mappings with free keys, yield those of `data`."""
    keys = {name for model in config_models(annotation) for name in model.model_fields}
    if isinstance(data, Mapping):
        keys |= {str(key) for key in data if annotation_below(annotation, str(key)) is not None}
    for key in sorted(keys):
        yield (*prefix, key)
        inner = data.get(key) if isinstance(data, Mapping) else None
        yield from key_paths(annotation_below(annotation, key), inner, (*prefix, key))


M = TypeVar("M", Changes, Located, Own)


def marked_fields(config: Config, mark: type[M], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, M, Any]]:
    """Yield path, mark and value of every field of `config` with a mark of this kind."""
    for name, field in type(config).model_fields.items():
        value, path = getattr(config, name), (*prefix, name)
        yield from ((path, metadata, value) for metadata in field.metadata if isinstance(metadata, mark))
        inside = value.items() if isinstance(value, dict) else [(None, value)]
        for key, item in inside:
            if isinstance(item, Config):
                yield from marked_fields(item, mark, path if key is None else (*path, key))


def change_at(path: KeyPath) -> Changes | None:
    """Return how a setting of a recipe may change while its run goes on; `None` if it may not."""
    annotation: Any = Recipe
    for index, key in enumerate(path):
        fields = [model.model_fields[key] for model in config_models(annotation) if key in model.model_fields]
        marks = [data for field in fields for data in field.metadata if isinstance(data, Changes)]
        if marks and (marks[0].below or index == len(path) - 1):
            return marks[0]
        annotation = annotation_below(annotation, key)
    return None


def nearest_word(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `word`, ignoring capitals, or `None` if nothing is remotely like it."""
    plain = {one.lower(): one for one in sorted(set(candidates), reverse=True)}
    close = difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.5)
    return plain[close[0]] if close else None


def dotted_path(path: Iterable[str | int]) -> str:
    """Format `("methods", 0)` as `methods[0]`, and `("distill", "steps")` as `distill.steps`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


_SHOWN = 5


def explain_errors(error: ValidationError, schema: Any, data: object, places: Mapping[KeyPath, str]) -> str:
    """Return one sentence per wrong key, joined by semicolons.

    `places` has the location of each key. Its entry for the empty path serves keys without one.
    """
    sentences: dict[str, str] = {}
    errors = error.errors(include_url=False)
    items = [(_error_path(item["loc"], data, missing=item["type"] == "missing"), item) for item in errors]
    messages = {(path, item["msg"]) for path, item in items}
    for path, item in items:
        if path[:1] == ("domains",) and (path[2:], item["msg"]) in messages:
            continue  # inherited from the recipe, which has the same error
        key = dotted_path(path)
        if key not in sentences and not _is_of_other_form(path, item, items):
            words = tuple(str(part) for part in path)
            above = (words[:length] for length in range(len(words), -1, -1))
            location = next(places[prefix] for prefix in above if prefix in places)
            sentences[key] = f"{location}: {_error_sentence(item, path, schema, data)}"
    shown = list(sentences.values())
    suffix = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + suffix


def _is_of_other_form(path: tuple[int | str, ...], item: Any, items: Sequence[tuple[Any, Any]]) -> bool:
    """Return True for an error of another form than the value has, if `items` have one of its own form."""
    return item["type"].endswith("_type") and any(
        one[: len(path)] == path and (len(one) > len(path) or not other["type"].endswith("_type"))
        for one, other in items
    )


def _error_path(loc: tuple[int | str, ...], data: object, *, missing: bool) -> tuple[int | str, ...]:
    """Return `loc` without the names of union members that pydantic adds."""
    path: list[int | str] = []
    for index, part in enumerate(loc):
        inside: Any = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(inside, Mapping) and part in inside:
            data = inside[part]
        elif not (missing and index == len(loc) - 1):
            continue
        path.append(part)
    return tuple(path)


def _error_sentence(item: Any, path: tuple[int | str, ...], schema: Any, data: Any) -> str:
    key, kind = dotted_path(path), item["type"]
    if kind.startswith(_NUMERIC) and is_endless(item["input"]):
        return f"`{key}` is {short_repr(item['input'])}, which is no finite number; give one"
    if kind == "extra_forbidden":
        return _unknown_key(path, schema, data)
    if kind == "missing":
        return f"`{key}` is missing; add it"
    if kind == "value_error":
        text = str(item["msg"]).removeprefix("Value error, ")
        return text if key in ("", text[: len(key)]) else f"`{key}`: {text}"
    if kind == "union_tag_not_found":
        return f"`{key}.type` is missing; add it"
    if kind in ("literal_error", "union_tag_invalid"):
        return _choice_error(item, key)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        value = item["input"]
        tags = [type_tag(model) for model in config_models(annotation_at(schema, map(str, path)))]
        hint = f": write {{type: {value}}}" if isinstance(value, str) and value in tags else ""
        return f"`{key}` is {short_repr(value)}, but takes a mapping of keys to values{hint}"
    message = str(item["msg"]).replace("tuple", "list").replace("Tuple", "List")
    return f"`{key}` is {short_repr(item['input'])}: {message[:1].lower()}{message[1:]}"


_NUMERIC = ("greater_than", "less_than", "float_", "int_", "not_finite", "finite")
"""Prefixes of pydantic's errors of numbers."""


def is_endless(value: object) -> bool:
    """Return True if a value is NaN or infinite, or a word for it in YAML or Python."""
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-").lstrip(".") in ("nan", "inf", "infinity")
    return isinstance(value, float) and not math.isfinite(value)


def _unknown_key(path: tuple[int | str, ...], schema: Any, data: object) -> str:
    now = former_hint(path)
    if now is not None:
        return f"`{dotted_path(path)}` is no setting; {now}"
    *parents, last = (str(part) for part in path)
    parent = annotation_at(schema, parents)
    members = config_models(parent)
    owner = next((model for model in members if last in model.model_fields), None)
    if owner is not None:
        choice = dotted_path((*parents, "type"))
        belongs = f"`{dotted_path(path)}` belongs to type {type_tag(owner)!r}"
        return f"{belongs}; set `{choice}` to it or remove the key"
    names = sorted({name for model in members for name in model.model_fields})
    close = nearest_word(last, names)
    begins = any(name.startswith(last) for name in names)  # `beta` of an optimiser is near its own `beta1`
    nested = _other_within(path, value_at(data, path))
    if nested is not None:
        return nested
    deeper = [inner for inner in key_paths(parent, None) if inner[-1] == last]
    ours = begins or (parents and deeper)
    elsewhere = other_name(dotted_path(path)) or (None if ours else other_name(last))
    if elsewhere is not None:
        return f"`{dotted_path(path)}` {elsewhere}"
    section = other_section(last) if not parents else None
    if section is not None:
        return f"`{last}` {section}"
    if close is None and deeper:
        close = dotted_path(min(deeper, key=len))
    if close is None:
        return f"unknown key `{dotted_path(path)}`; valid keys here are {', '.join(names)}"
    return f"unknown key `{dotted_path(path)}`; did you mean `{dotted_path((*parents, close))}`?"


def value_at(data: object, path: Iterable[str | int]) -> Any:
    """Return the value at `path` in `data`; `None` if there is none."""
    for part in path:
        inside: Any = dict(enumerate(data)) if isinstance(data, list) else data
        data = inside.get(part) if isinstance(inside, Mapping) else None
    return data


def _other_within(path: tuple[str | int, ...], value: object) -> str | None:
    """The sentence for the first and deepest key below `path` of another library; `None` if none is."""
    if not isinstance(value, Mapping):
        return None
    for key, inner in value.items():
        below_it = (*path, str(key))
        sentence, answer = _other_within(below_it, inner), other_name(dotted_path(below_it))
        if sentence is not None:
            return sentence
        if answer is not None:
            return f"`{dotted_path(below_it)}` {answer}"
    return None


def _choice_error(item: Any, key: str) -> str:
    context = item.get("ctx", {})
    if item["type"] == "union_tag_invalid":
        key, value, choices = f"{key}.type", context["tag"], context["expected_tags"]
    else:
        value, choices = item["input"], context["expected"]
    names = [name.strip().strip("'") for name in choices.replace(" or ", ", ").split(",")]
    close = nearest_word(value, names) if isinstance(value, str) else None
    hint = f"; did you mean {close!r}?" if close else ""
    return f"`{key}` is {short_repr(value)}, but must be one of {', '.join(names)}{hint}"


_WIDTH = 100
_LARGE = 20
"""Most fields of a group that the help of the section around it lists."""


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """One field, or group of fields, for display."""

    key: str
    """Dotted, with NAME for user-chosen keys."""
    kind: str
    default: str
    """In the command line's form; empty for a group and for a required field."""
    sentence: str


def describe_fields(
    model: type[Config] = Recipe, default: object = None, prefix: str = "", only: str = ""
) -> Iterator[FieldDescription]:
    """Yield every field below `model` in order. If `type` chooses among models, yield each choice as
    `KEY.type`, and then its fields.

    `default` is the recipe's default instance. `only` names that choice.
    """
    for name, field in model.model_fields.items():
        if name == "type":
            continue  # listed with the field that has the choice
        value = getattr(default, name) if isinstance(default, model) else field.get_default()
        inside, free = (
            config_models(field.annotation),
            config_models(annotation_below(field.annotation, "NAME")),
        )
        text = field.description or (inside or free)[0].__doc__ or ""
        shown = ""
        if not (inside or free) and value is not PydanticUndefined:
            plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            shown = plain if isinstance(plain, str) else json.dumps(plain)
        needed = ", has to be given" if value is PydanticUndefined else ""
        kind = f"{_annotation_kind(field.annotation)}{only}{needed}"
        yield FieldDescription(f"{prefix}{name}", kind, shown, " ".join(text.split()))
        for key, choices in ((f"{prefix}{name}", inside), (f"{prefix}{name}.NAME", free)):
            for one in choices:
                where = only
                if len(choices) > 1:
                    where = f" (with type {type_tag(one)})"
                    yield FieldDescription(
                        f"{key}.type", str(type_tag(one)), "", " ".join((one.__doc__ or "").split())
                    )
                yield from describe_fields(one, value if choices is inside else None, f"{key}.", where)


def sections_listing(used: Iterable[str]) -> str:
    """Return the keys of a recipe at the top, and the fields `used`, with a sentence each, for a terminal."""
    fields = {one.key: one for one in describe_fields()}
    lines = ["sections of the recipe:"]
    lines += _columns([(one.key, one.sentence) for one in fields.values() if "." not in one.key])
    lines += ["", "fields that are often set, each of them an option:"]
    lines += _columns([(f"--{key}", fields[key].sentence) for key in used])
    return "\n".join(lines) + "\n"


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each row: its name, and the first sentence of its text, cut to the width."""
    wide = max(len(name) for name, _ in rows) + 2
    texts = [text.split(". ")[0].removesuffix(".") for _, text in rows]
    return [
        f"  {name:{wide}}{textwrap.shorten(text, _WIDTH - wide, placeholder=' ...')}"
        for (name, _), text in zip(rows, texts, strict=True)
    ]


def fields_listing(section: str | None = None) -> str:
    """Return the fields of the key `section`, for a terminal. Of a large group inside only its name is
    listed. Without a section return every field. Raises `ConfigError` for a key that no recipe has.
    """
    fields = list(describe_fields())
    chosen = [one for one in fields if section is None or f"{one.key}.".startswith(f"{section}.")]
    if not chosen:
        close = nearest_word(str(section), (one.key for one in fields))
        hint = f"did you mean {close}?" if close else "`opd run --help` lists the sections"
        raise ConfigError(f"no recipe has a section or field {short_repr(section)}; {hint}")
    lines = ["fields of the recipe, each of them an option:"]
    listed_above = None
    for one in chosen:
        if listed_above is not None and one.key.startswith(listed_above):
            continue
        inside = sum(other.key.startswith(f"{one.key}.") for other in chosen)
        listed_above = f"{one.key}." if section not in (None, one.key) and inside > _LARGE else None
        default = f" [{one.default}]" if one.default else ""
        lines.append(f"  --{one.key}  {one.kind}{default}")
        lines += textwrap.wrap(one.sentence, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        if listed_above is not None:
            lines.append(f"      {inside} fields: --help {one.key}")
    return "\n".join(lines) + "\n"


def _annotation_kind(annotation: Any) -> str:
    """`int`, `float or null`, `one of a, b`, `list of str`, `fields`, `fields by NAME`."""
    kinds = dict.fromkeys(_type_name(arm) for arm in union_members(annotation))
    choices = [type_tag(model) for model in config_models(annotation) if type_tag(model) is not None]
    words = ["one of " + ", ".join(map(str, choices))] if len(choices) > 1 else []
    words += [word for word in kinds if not (words and word == "fields")]
    null = type(None) in get_args(annotation)
    return " or ".join([*words, *["null"] * null])


def _type_name(arm: Any) -> str:
    origin = get_origin(arm)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(arm)))
    if origin in (list, tuple):
        return f"list of {_type_name(get_args(arm)[0])}"
    if origin is dict:
        inner = union_members(get_args(arm)[1])
        return f"{_type_name(inner[0])} by NAME" if inner else "mapping"
    if isinstance(arm, type) and issubclass(arm, Config):
        return "fields"
    return {Any: "anything"}.get(arm, getattr(arm, "__name__", str(arm)))
