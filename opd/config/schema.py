"""Which keys a recipe may have: a walk over the configuration models, for merging, overrides and messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from opd.config.base import Config
from opd.config.yaml_reader import KeyPath


def arms(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, with `Annotated`, `Union` and `None` taken away."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return arms(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [arm for argument in get_args(annotation) for arm in arms(argument)]
    return [] if annotation is NoneType else [annotation]


def models(annotation: Any) -> list[type[Config]]:
    """The configuration models among the alternatives of an annotation."""
    return [arm for arm in arms(annotation) if isinstance(arm, type) and issubclass(arm, Config)]


def tag(model: type[Config] | Config) -> Any:
    """The value of `type` that selects `model` in a union; `None` for a model without one."""
    kind = model if isinstance(model, type) else type(model)
    field = kind.model_fields.get("type")
    if field is None:
        return None
    return get_args(field.annotation)[0] if field.is_required() else field.default


def below(annotation: Any, key: str) -> Any:
    """The annotation of `key` in a value of `annotation`; `None` if there can be no such key."""
    found = [model.model_fields[key].annotation for model in models(annotation) if key in model.model_fields]
    for arm in arms(annotation):
        if get_origin(arm) is dict:
            found.append(get_args(arm)[1])
        elif arm is Any:
            found.append(Any)
    return Union[tuple(found)] if found else None  # noqa: UP007 - built at run time


def follow(annotation: Any, path: Iterable[str]) -> Any:
    """The annotation at `path`; `None` if no recipe has such a path."""
    for key in path:
        annotation = below(annotation, key)
        if annotation is None:
            return None
    return annotation


def key_paths(annotation: Any, data: Any, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every path a recipe may have; below mappings with free keys, those that `data` has."""
    keys = {name for model in models(annotation) for name in model.model_fields}
    if isinstance(data, Mapping):
        keys |= {str(key) for key in data if below(annotation, str(key)) is not None}
    for key in sorted(keys):
        yield (*prefix, key)
        inner = data.get(key) if isinstance(data, Mapping) else None
        yield from key_paths(below(annotation, key), inner, (*prefix, key))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or `None` where nothing is remotely like it."""
    close = difflib.get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.5)
    return close[0] if close else None


def dotted(path: Iterable[str | int]) -> str:
    """`("methods", 0)` is `methods[0]`, `("distill", "steps")` is `distill.steps`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
