"""Turns pydantic's errors into sentences that name the file or option, the dotted key and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from opd.config.schema import dotted, follow, key_paths, models, nearest, tag
from opd.config.yaml_reader import KeyPath

_SHOWN = 5


def explain(error: ValidationError, schema: Any, data: Any, places: Mapping[KeyPath, str]) -> str:
    """One sentence per wrong key, joined by semicolons.

    `places` says where each key was written; its entry for the empty path serves keys nobody wrote.
    """
    sentences: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _path(item["loc"], data, missing=item["type"] == "missing")
        key = dotted(path)
        if key not in sentences:
            sentences[key] = f"{_place(path, places)}: {_sentence(item, path, schema, data)}"
    shown = list(sentences.values())
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more


def _path(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> tuple[int | str, ...]:
    """`loc` without the names of union members that pydantic puts into it."""
    path: list[int | str] = []
    for index, part in enumerate(loc):
        inside: Any = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(inside, Mapping) and part in inside:
            data = inside[part]
        elif not (missing and index == len(loc) - 1):
            continue
        path.append(part)
    return tuple(path)


def _place(path: tuple[int | str, ...], places: Mapping[KeyPath, str]) -> str:
    words = tuple(str(part) for part in path)
    return next(places[words[:length]] for length in range(len(words), -1, -1) if words[:length] in places)


def _sentence(item: Any, path: tuple[int | str, ...], schema: Any, data: Any) -> str:
    key, kind = dotted(path), item["type"]
    if kind == "extra_forbidden":
        return _unknown(path, schema, data)
    if kind == "missing":
        return f"`{key}` is missing; add it"
    if kind == "value_error":
        text = str(item["msg"]).removeprefix("Value error, ")
        return text if key in ("", text[: len(key)]) else f"`{key}`: {text}"
    if kind == "union_tag_not_found":
        return f"`{key}.type` is missing; add it"
    if kind in ("literal_error", "union_tag_invalid"):
        return _choice(item, key)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"`{key}` is {item['input']!r}, but takes a mapping of keys to values"
    return f"`{key}` is {_short(item['input'])}: {_lower(str(item['msg']))}"


def _unknown(path: tuple[int | str, ...], schema: Any, data: Any) -> str:
    *parents, last = (str(part) for part in path)
    parent = follow(schema, parents)
    members = models(parent)
    owner = next((model for model in members if last in model.model_fields), None)
    if owner is not None:
        choice = dotted((*parents, "type"))
        return f"`{dotted(path)}` belongs to type {tag(owner)!r}; set `{choice}` to it or remove the key"
    here = sorted({name for model in members for name in model.model_fields})
    close = nearest(last, here)
    if close is None:
        deeper = [inner for inner in key_paths(parent, None) if inner[-1] == last]
        close = dotted(min(deeper, key=len)) if deeper else None
    if close is None:
        return f"unknown key `{dotted(path)}`; valid keys here are {', '.join(here)}"
    return f"unknown key `{dotted(path)}`; did you mean `{dotted((*parents, close))}`?"


def _choice(item: Any, key: str) -> str:
    context = item.get("ctx", {})
    if item["type"] == "union_tag_invalid":
        key, given, choices = f"{key}.type", context["tag"], context["expected_tags"]
    else:
        given, choices = item["input"], context["expected"]
    names = [name.strip().strip("'") for name in choices.replace(" or ", ", ").split(",")]
    close = nearest(given, names) if isinstance(given, str) else None
    hint = f"; did you mean {close!r}?" if close else ""
    return f"`{key}` is {_short(given)}, but must be one of {', '.join(names)}{hint}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
