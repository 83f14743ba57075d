"""What the site takes from the code when it is built, in place of `<!-- generated: NAME -->` on a page.

One source of each: the fields are those of the configuration models, with their own sentences; the quick
start's table is that of its results.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined, to_json

from opd.config import Recipe
from opd.config.base import Config
from opd.config.schema import models

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
MARK = re.compile(r"<!-- generated: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return MARK.sub(lambda found: PARTS[found[1]](), markdown)


def fields() -> str:
    """A section for each key at the top of a recipe, with a table of every field below it."""
    lines = ["## The top of a recipe", "", Recipe.__doc__ or "", "", *_table(Recipe, "", deep=False)]
    shown: dict[Any, str] = {}
    for name, field in Recipe.model_fields.items():
        if _models_of(field.annotation):
            path = name + _key(field.annotation)
            lines += ["", f"## {name}", "", *_sections(field.annotation, path, shown)]
    return "\n".join(lines)


def _sections(annotation: Any, path: str, shown: dict[Any, str]) -> Iterator[str]:
    """The tables of every model that may stand at `path`, and of those inside that have alternatives; of what
    was shown before only where.
    """
    found = tuple(_models_of(annotation))
    if len(found) > 1 and found in shown:
        yield from ("", f"`{path}`: as [`{shown[found]}`](#{_anchor(shown[found])}).", "")
        return
    shown[found] = path
    if len(found) > 1:
        yield from ("", f"### {path} {{#{_anchor(path)}}}", "")
    for model in found:
        if len(found) > 1:
            yield from ("", f"**`{{type: {_tag(model)}}}`**", "")
        yield from (_sentence(model.__doc__), "")
        if set(model.model_fields) != {"type"}:
            yield from (*_table(model, path + "."), "")
        for name, inside in _alternatives(model, path + "."):
            yield from _sections(inside, name, shown)


def _anchor(path: str) -> str:
    return path.replace(".", "-").replace("_", "-")


def _tag(model: type[Config]) -> str | None:
    """`type` of a model that is one of several; some have it without a default."""
    field = model.model_fields.get("type")
    return None if field is None else str(get_args(field.annotation)[0])


def _alternatives(model: type[Config], prefix: str) -> Iterator[tuple[str, Any]]:
    """Fields below `model` whose value may be one of several models, in sections of their own."""
    for name, field in model.model_fields.items():
        inside = list(_models_of(field.annotation))
        if len(inside) > 1:
            yield prefix + name, field.annotation
        elif inside:
            yield from _alternatives(inside[0], f"{prefix}{name}.")


def _table(model: type[Config], prefix: str, deep: bool = True) -> Iterator[str]:
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    yield from _rows(model, prefix, deep, model)


def _rows(model: type[Config], prefix: str, deep: bool, values: Any) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inside = list(_models_of(field.annotation))
        given = field.get_default(call_default_factory=True) if values is model else getattr(values, name)
        if name == "type":
            continue
        if deep and len(inside) == 1 and isinstance(given, Config):
            yield from _rows(inside[0], f"{prefix}{name}.", deep, given)
            continue
        says = _sentence(field.description) or (_sentence(inside[0].__doc__) if inside else "")
        yield f"| `{prefix}{name}` | {_type(field.annotation)} | {_default(given)} | {says} |"
        if deep and len(inside) == 1:
            yield from _rows(inside[0], f"{prefix}{name}{_key(field.annotation)}.", deep, inside[0])


def _models_of(annotation: Any) -> list[type[Config]]:
    """The models that a value, or each value of a mapping with free keys, may be."""
    below = [get_args(arm)[1] for arm in _arms(annotation) if get_origin(arm) is dict]
    return models(annotation) + [model for one in below for model in models(one)]


def _key(annotation: Any) -> str:
    return ".NAME" if any(get_origin(arm) is dict for arm in _arms(annotation)) else ""


def _arms(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [arm for one in get_args(annotation) for arm in _arms(one)]
    return [get_args(annotation)[0]] if get_origin(annotation) is Annotated else [annotation]


def _type(annotation: Any) -> str:
    names = []
    for arm in _arms(annotation):
        origin, inside = get_origin(arm), get_args(arm)
        if arm is NoneType:
            names.append("`null`")
        elif origin is Literal:
            names += [f"`{value}`" for value in inside]
        elif origin in (Union, UnionType, Annotated):
            names.append(_type(arm))
        elif isinstance(arm, type) and issubclass(arm, Config):
            names.append("mapping" if _tag(arm) is None else f"`{{type: {_tag(arm)}}}`")
        elif origin in (list, dict):
            kind = "list of" if origin is list else "mapping to"
            names.append(f"{kind} {_type(inside[-1])}")
        else:
            names.append(PLAIN.get(arm, "anything"))
    return ", ".join(dict.fromkeys(names))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Config):
        return "as below" if _tag(type(value)) is None else f"`{{type: {_tag(type(value))}}}`"
    return f"`{to_json(value).decode()}`"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def quickstart() -> str:
    """The quick start over the seeds whose results are kept."""
    place = ROOT / "examples" / "quickstart" / "table.py"
    spec = importlib.util.spec_from_file_location("quickstart_table", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join(module.table(module.load()))


PARTS = {"fields": fields, "quickstart": quickstart}
