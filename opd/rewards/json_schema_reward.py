"""`reward: json_schema`: the answer is JSON of a form, by jsonschema, in a process that can be killed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal, getcontext
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import urlsplit

from opd.config.rewards import JSONSchemaReward
from opd.errors import MissingExtraError, RewardError
from opd.rewards.verifier import Answered, Score, Verifier, compared, extract_answer, is_missing
from opd.untrusted import safe_excerpt, shorten_text


def require(settings: JSONSchemaReward) -> None:
    """Raise `MissingExtraError` without jsonschema, `RewardError` for a definition that is no schema."""
    from importlib.util import find_spec

    if find_spec("jsonschema") is None:
        raise MissingExtraError("the reward json_schema", "verifiers")
    wrong = None if settings.definition is None else _schema_fault(settings.definition)
    if wrong is not None:
        raise RewardError(f"the definition of the reward json_schema {wrong}.")


def _label_schema(label: object) -> Any:
    """Return the schema of a label, also from JSON text or from a chat completion's wrapper."""
    schema = json.loads(label) if isinstance(label, str) else label
    for name, sibling in (("json_schema", "type"), ("schema", "name")):
        if isinstance(schema, dict) and isinstance(schema.get(name), dict) and sibling in schema:
            schema = schema[name]
    return schema


def _schema_fault(schema: dict[str, Any]) -> str | None:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema.get("$schema", ""), str):
        return "has a $schema that is no text; give the URL of a version of JSON schema, or leave it out"
    try:
        validator_for(schema).check_schema(schema)
        return _unchecked_fault(schema)
    except (SchemaError, RecursionError) as error:
        return f"is no JSON schema ({' '.join(str(getattr(error, 'message', error))[:100].split())}); mend it"


def _unchecked_fault(schema: dict[str, Any]) -> str | None:
    """Return the fault of a valid schema that an answer could not violate, or never meet."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    kind = validator_for(schema)
    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    waiting = [(root, REGISTRY.resolver_with_root(root))]
    in_place: dict[int, list[int]] = {}  # schemas that apply to the same value
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        if not isinstance(contents, Mapping) or id(contents) in in_place:
            continue
        wrong = _unknown_word(contents, kind)
        if wrong is not None:
            return wrong
        below = in_place[id(contents)] = [id(one) for one in _of_same_value(contents)]
        for word in ("$ref", "$dynamicRef"):
            if isinstance(contents.get(word), str):
                try:
                    resolved = resolver.lookup(contents[word])
                except (Unresolvable, ValueError):
                    target = safe_excerpt(contents[word])
                    return f"refers to {target}, which is not in it; nothing is fetched: put it there"
                below.append(id(resolved.contents))
        waiting += [(one, resolver.in_subresource(one)) for one in resource.subresources()]
    try:
        TopologicalSorter(in_place).prepare()
    except CycleError:
        return "refers to itself without an end; mend its $ref"
    if schema.keys() & kind.VALIDATORS.keys():
        return None
    return "takes every JSON; say what fits, such as its type or its required properties"


def _unknown_word(schema: Mapping[str, Any], kind: Any) -> str | None:
    """Return a fault for a word that is nearly one of JSON schema's, or a format that nothing here checks."""
    words = {*kind.VALIDATORS, *_TELLING}
    for word in schema:
        near = difflib.get_close_matches(word, words, 1, 0.8) if word not in words else []
        # Next to the word itself, a similar one is another tool's, as tsType.
        if near and near[0] not in schema:
            return f"has {safe_excerpt(word)}, which is no word of JSON schema; write {near[0]}"
    name = schema.get("format")
    if isinstance(name, str) and name not in _ANY_TEXT and name not in _format_checks(kind).checkers:
        return f"asks for the format {safe_excerpt(name)}, which is not checked here; say it by a `pattern`"
    return None


_TELLING = (
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$comment", "$defs",
    "$vocabulary", "definitions", "title", "description", "default", "example", "examples", "readOnly",
    "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema", "then", "else",
    "minContains", "maxContains", "tsType",
)  # fmt: skip
"""Words that check nothing by themselves."""


def _of_same_value(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas inside `schema` that apply to the same value."""
    inside = [schema[word] for word in ("not", "if", "then", "else") if word in schema]
    for word in ("allOf", "anyOf", "oneOf"):
        inside += schema.get(word, [])
    return [*inside, *schema.get("dependentSchemas", {}).values()]


def _format_checks(kind: Any) -> Any:
    """jsonschema's checks of formats that need no other package, and a check of date and time."""
    from jsonschema import FormatChecker

    checker = FormatChecker(())
    checks = {"date-time": _is_moment, "time": _is_time, "uri": _is_uri, "duration": _is_duration}
    checker.checkers = {
        **kind.FORMAT_CHECKER.checkers,
        **{name: (check, ValueError) for name, check in checks.items()},
    }
    return checker


_ANY_TEXT = (
    "password", "binary", "byte", "path", "file-path", "directory-path", "json-string", "int32", "int64",
    "float", "double",
)  # fmt: skip
"""Formats that programs add for people, or for types that imply them."""


def _is_uri(value: object) -> bool:
    """Return True if a text is an address with a scheme, by RFC 3986."""
    if not isinstance(value, str):
        return True
    return _URI.fullmatch(value) is not None and bool(urlsplit(value).netloc or urlsplit(value).path)


def _is_duration(value: object) -> bool:
    """Return True if a text is a duration of ISO 8601, such as P1DT12H."""
    return not isinstance(value, str) or _DURATION.fullmatch(value) is not None


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*")
_DURATION = re.compile(
    r"-?P(?=[\dT])(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)", re.ASCII
)


def _is_moment(value: object) -> bool:
    """Return True if a text is a date and time of RFC 3339, or if the value is no text."""
    if not isinstance(value, str):
        return True
    return _MOMENT.fullmatch(value) is not None and bool(datetime.fromisoformat(value))


def _is_time(value: object) -> bool:
    """Return True if a text is a time of RFC 3339, which has a zone, or if the value is no text."""
    return not isinstance(value, str) or _is_moment(f"1970-01-01T{value}")


_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def label_fault(settings: JSONSchemaReward, label: object) -> str | None:
    """Return the fault of a label that is no schema, if each row has its own."""
    if settings.definition is not None:
        return None
    if is_missing(label):
        return "is missing; give a JSON schema, or set the reward's definition"
    try:
        schema = _label_schema(label)
    except (ValueError, RecursionError):
        return "is no JSON; give a JSON schema, or set the reward's definition"
    if not isinstance(schema, dict):
        return f"is a {type(schema).__name__}; give a JSON schema, or set the reward's definition"
    return _schema_fault(schema)


def score(settings: JSONSchemaReward, answers: Sequence[Answered]) -> list[Score]:
    """1 if the answer fits the schema, `parses` if it is JSON, else 0. Feedback is the first violation."""
    requests = [
        {
            "text": extract_answer(answer.text, settings.extract) or "",
            "schema": settings.definition if settings.definition is not None else _label_schema(answer.label),
        }
        for answer in answers
    ]
    results = compared(__name__, requests, settings.seconds)
    return [
        1.0
        if one.get("fits") is True
        else {
            "reward": settings.parses * (one.get("json") is True),
            "feedback": str(one.get("fault", "The check took too long.")),
        }
        for one in results
    ]


def prepare() -> None:
    """Import the library in the checking process."""
    answer({"text": "{}", "schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"}})


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the checking process. Returns whether the text is JSON and fits, and its fault. Numbers are
    decimal, so 0.3 is a multiple of 0.1.
    """
    from jsonschema.validators import extend, validator_for
    from jsonschema_specifications import REGISTRY

    getcontext().prec = _DIGITS
    try:
        value = _parse_decimal(request["text"])
    except (ValueError, RecursionError) as error:
        return {"json": False, "fault": f"The answer is no JSON: {error}"[:_MOST_FAULT]}
    try:
        kind = validator_for(request["schema"])
        exact = extend(kind, type_checker=kind.TYPE_CHECKER.redefine("integer", _is_whole))
        schema = _parse_decimal(json.dumps(request["schema"]))
        checker = exact(schema, registry=REGISTRY, format_checker=_format_checks(kind))
        if checker.is_valid(value):
            return {"json": True, "fits": True}
        fault = next(checker.iter_errors(value), None)  # the first alone: each quotes what is wrong
        text = "" if fault is None else f"{fault.json_path}: {fault.message}"
        text = re.sub(r"Decimal\('([^']*)'\)", r"\1", text)
        return {"json": True, "fits": False, "fault": shorten_text(text, _MOST_FAULT)}
    except Exception:  # a reference to a missing schema: nothing is fetched
        return {"json": True, "fits": False, "fault": "The answer does not fit the schema."}


_MOST_FAULT = 1000
"""Characters of a violation."""
_DIGITS = 10_000
"""Digits of the longest number that is compared exactly."""


def _parse_decimal(text: str) -> Any:
    """Parse `text` as JSON, with every number that is not whole as a `Decimal`."""
    return json.loads(
        text, parse_constant=_no_constant, parse_float=_parse_fraction, parse_int=_parse_integer
    )


def _parse_fraction(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        raise ValueError(f"the exponent of {text[:100]} is too large") from None


def _parse_integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= 4000 else Decimal(text)  # `int` has a limit


def _is_whole(_: object, value: object) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


KINDS = {"json_schema": Verifier(score, label_fault, require, lambda settings: settings.seconds)}
