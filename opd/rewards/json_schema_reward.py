"""`reward: json_schema`: the answer is JSON of a form, by jsonschema, in a process that can be ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config.rewards import JSONSchemaReward
from opd.errors import MissingExtraError, RewardError
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Score, Verifier, compared, is_missing


def require(settings: JSONSchemaReward) -> None:
    """Raise `MissingExtraError` without jsonschema, `RewardError` for a definition that is no schema."""
    from importlib.util import find_spec

    if find_spec("jsonschema") is None:
        raise MissingExtraError("the reward json_schema", "verifiers")
    wrong = None if settings.definition is None else _fault(settings.definition)
    if wrong is not None:
        raise RewardError(f"the definition of the reward json_schema {wrong}.")


def _schema(label: Any) -> Any:
    return json.loads(label) if isinstance(label, str) else label


def _fault(schema: dict[str, Any]) -> str | None:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema.get("$schema", ""), str):
        return "has a $schema that is no text; give the URL of a version of JSON schema, or leave it out"
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        return f"is no JSON schema ({' '.join(str(getattr(error, 'message', error))[:100].split())}); mend it"
    return None


def label_fault(settings: JSONSchemaReward, label: Any) -> str | None:
    """A label that is no schema, where each row has its own."""
    if settings.definition is not None:
        return None
    if is_missing(label):
        return "is missing; give a JSON schema, or set the reward's definition"
    try:
        schema = _schema(label)
    except (ValueError, RecursionError):
        return "is no JSON; give a JSON schema, or set the reward's definition"
    if not isinstance(schema, dict):
        return f"is a {type(schema).__name__}; give a JSON schema, or set the reward's definition"
    return _fault(schema)


def score(settings: JSONSchemaReward, answers: Sequence[Answered]) -> list[Score]:
    """1 where it fits, `parses` where it is JSON, else 0."""
    requests = [
        {
            "text": extracted(answer.text, settings.extract) or "",
            "schema": settings.definition if settings.definition is not None else _schema(answer.label),
        }
        for answer in answers
    ]
    said = compared(__name__, requests, settings.seconds)
    return [1.0 if one.get("fits") is True else settings.parses * (one.get("json") is True) for one in said]


def prepare() -> None:
    """In the process that checks."""
    answer({"text": "{}", "schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"}})


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that checks: whether it is JSON, and whether it fits."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        value = json.loads(asked["text"], parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return {"json": False}
    kind = validator_for(asked["schema"])
    try:
        return {"json": True, "fits": kind(asked["schema"], registry=REGISTRY).is_valid(value)}
    except Exception:  # a reference to what is not there: nothing is fetched
        return {"json": True, "fits": False}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


VERIFIER = Verifier(score, label_fault, require, lambda settings: settings.seconds)
