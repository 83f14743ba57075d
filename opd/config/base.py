"""Base class, markers and checks of all configuration models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

_LONGEST = 100
"""Maximum bytes of a name. Folders of stages and temporary files append to it."""


def check_name(name: str) -> str:
    """`name` if it can name a folder, part of a metric and part of a sample's uid. Raises `ValueError`."""
    wrong = None
    if name in ("mean", "std", "floor"):
        wrong = "it is the name of a metric"
    elif not name or name.startswith((".", "-")):
        wrong = "names are not empty and do not begin with a dot or a dash"
    elif any(sign in name for sign in "/\\:+") or any(not c.isprintable() or c.isspace() for c in name):
        wrong = "names have no / \\ : + and no blanks or signs that cannot be printed"
    elif len(name.encode("utf-8", "surrogatepass")) > _LONGEST:
        wrong = f"names have at most {_LONGEST} bytes"
    if wrong is not None:
        raise ValueError(f"{name[:_LONGEST]!r} cannot be a name: {wrong}; choose another")
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""Name of a domain, a teacher or a group of servers."""


_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


def is_url(text: str) -> bool:
    """Return True if `text` is the URL of a server, to which paths can be added."""
    return _URL.fullmatch(text) is not None


_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)(.*)", re.DOTALL)


def check_slashes(text: str) -> str:
    """Return `text`, a folder or the URL of a store. Raises `ValueError` for `s3:/bucket`, which would be a
    folder of that name.
    """
    if (short := _ONE_SLASH.fullmatch(text)) is not None:
        protocol, path = short.groups()
        raise ValueError(
            f"{text} has one slash after {protocol}:, where a URL has two; write {protocol}://{path}, or"
            f" ./{text} for a folder of that name"
        )
    return text


Place = Annotated[str, AfterValidator(check_slashes)]
"""A folder, or the URL of a store."""


GENERATE = ("engine", "prompts", "group_size", "sampling", "seed")
GROUP = ("group",)
POLICY_LOSS = ("logprobs", "old_logprobs", "advantages", "config")
DIVERGENCE = ("micro", "student", "view")
BATCH = ("batch",)
"""Arguments of each kind of user function, in this order."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Marks a field, in `Annotated`, that may change from a checkpoint of a run on, with
    `--accept-changed-settings`. Every step reads it again, and nothing on disk depends on it.
    """

    what: Literal["rate", "stream", "aside", "drawn", "judged"] = "rate"
    """`rate`: later weights change. `stream`: the same, but at 0 there is nothing to train on, and a stage
    may not cross 0 in its middle. `aside`: only measurements, storage or waiting change. `drawn`: responses
    change. `judged`: their rewards change.
    """
    below: bool = True
    """The mark covers everything inside the field too."""


FILES = (".jsonl", ".parquet")
"""Suffixes of data files."""


@dataclass(frozen=True, slots=True)
class Located:
    """Marks a field, in `Annotated`, as the path of a file or folder, or a URL."""

    model: bool = False
    """It is a model, and may have a name on the Hub."""
    files: bool = False
    """It is a path only if it ends like a data file, and otherwise a name."""


@dataclass(frozen=True, slots=True)
class Own:
    """Marks a field, in `Annotated`, as the dotted path of a user's function."""

    takes: tuple[str, ...]
    """Its arguments."""


_IN_ORDER = ("command",)
"""Lists that may repeat a value."""


class Config(BaseModel):
    """Strict and frozen: an unknown key is an error, a value never changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    ceiling: ClassVar[float] = 1e9
    """No number is larger than any setting can mean, whatever the bounds of its own field; the seed and
    mappings that somebody else reads are not bounded."""
    floor: ClassVar[float] = 1e-30
    """No number but 0 is smaller: in float32, in which steps compute, it would soon be 0, or its inverse
    infinite. With the same exceptions."""

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, data: object) -> Any:
        """Refuse truth values for numbers: `steps: true` would be one step."""
        if not isinstance(data, Mapping):
            return data
        numbers = {
            name
            for name, field in cls.model_fields.items()
            if (kinds := _annotation_types(field.annotation)) & {int, float} and not kinds & {bool, Any}
        }
        return {name: _bools_as_text(value) if name in numbers else value for name, value in data.items()}

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_the_impossible(cls, value: object, info: ValidationInfo) -> Any:
        if isinstance(value, list) and info.field_name not in _IN_ORDER:
            twice = next((one for index, one in enumerate(value) if one in value[:index]), None)
            if twice is not None:
                raise PydanticCustomError(
                    "twice", "it names {one} twice; leave one of them out", {"one": repr(twice)}
                )
        free = info.field_name == "seed" or "Any" in str(cls.model_fields[info.field_name or ""].annotation)
        for number in _field_numbers(value):
            if isinstance(number, float) and not math.isfinite(number):
                raise PydanticCustomError("not_finite", "every number of a recipe is finite; give another")
            if abs(number) > cls.ceiling and not free:
                most = f"{cls.ceiling:,.0f}"
                raise PydanticCustomError(
                    "too_large", "no setting can mean more than {most}; give less", {"most": most}
                )
            if 0 < abs(number) < cls.floor and not free:
                raise PydanticCustomError(
                    "too_small",
                    "no setting can mean so little; give 0 or at least {least}",
                    {"least": cls.floor},
                )
        return value


def _annotation_types(annotation: Any) -> set[Any]:
    inside = get_args(annotation)
    return {kind for part in inside for kind in _annotation_types(part)} if inside else {annotation}


def _bools_as_text(value: object) -> Any:
    """Replace truth values in `value` by words, also in a list or mapping."""
    if isinstance(value, dict):
        return {key: _bools_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bools_as_text(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _field_numbers(value: object) -> list[int | float]:
    """Return the numbers of a field: itself, or those of a list, tuple or mapping."""
    if isinstance(value, list | tuple | dict):
        inside = value.values() if isinstance(value, dict) else value
        return [number for item in inside for number in _field_numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []
