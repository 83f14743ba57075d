"""Every field of a recipe with type, default and sentence, for `opd run --help` and shell completion."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from opd.config.base import Config
from opd.config.recipe import Recipe
from opd.config.schema import arms, below, models, tag

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Described:
    """One field, or group of fields, as people are told of it."""

    key: str
    """Dotted, with NAME for keys of the user's own."""
    kind: str
    default: str
    """As the command line takes it; empty for a group and for what has to be given."""
    sentence: str


def described(
    model: type[Config] = Recipe, default: Any = None, prefix: str = "", only: str = ""
) -> Iterator[Described]:
    """Every field below `model` in order; where `type` chooses among models the fields of every choice.

    `default` is the instance that stands in the recipe where nothing is given; `only` names that choice.
    """
    for name, field in model.model_fields.items():
        if name == "type":
            continue  # told with the field that has the choice
        value = getattr(default, name) if isinstance(default, model) else field.get_default()
        inside, free = models(field.annotation), models(below(field.annotation, "NAME"))
        told = field.description or (inside or free)[0].__doc__ or ""
        group = bool(inside or free)
        shown = "" if group or value is PydanticUndefined else _written(value)
        needed = ", has to be given" if value is PydanticUndefined else ""
        kind = f"{_kind(field.annotation)}{only}{needed}"
        yield Described(f"{prefix}{name}", kind, shown, " ".join(told.split()))
        for one in inside:
            where = f" (with type {tag(one)})" if len(inside) > 1 else only
            yield from described(one, value, f"{prefix}{name}.", where)
        for one in free:
            yield from described(one, None, f"{prefix}{name}.NAME.", only)


def listing() -> str:
    """All fields, for a terminal."""
    lines = ["fields of the recipe, each of them an option:"]
    for one in described():
        default = f" [{one.default}]" if one.default else ""
        lines.append(f"  --{one.key}  {one.kind}{default}")
        lines += textwrap.wrap(one.sentence, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _kind(annotation: Any) -> str:
    """`int`, `float or null`, `one of a, b`, `list of str`, `fields`, `fields by NAME`."""
    kinds = dict.fromkeys(_word(arm) for arm in arms(annotation))
    choices = [tag(model) for model in models(annotation) if tag(model) is not None]
    words = ["one of " + ", ".join(map(str, choices))] if len(choices) > 1 else []
    words += [word for word in kinds if not (words and word == "fields")]
    null = type(None) in get_args(annotation)
    return " or ".join([*words, *["null"] * null])


def _word(arm: Any) -> str:
    origin = get_origin(arm)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(arm)))
    if origin in (list, tuple):
        return f"list of {_word(get_args(arm)[0])}"
    if origin is dict:
        inner = arms(get_args(arm)[1])
        return f"{_word(inner[0])} by NAME" if inner else "mapping"
    if isinstance(arm, type) and issubclass(arm, Config):
        return "fields"
    return {Any: "anything"}.get(arm, getattr(arm, "__name__", str(arm)))


def _written(value: Any) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return plain if isinstance(plain, str) else json.dumps(plain)
