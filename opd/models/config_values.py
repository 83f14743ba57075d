"""Checks of config.json values that no model can use, named by key before transformers fails on them, and the
matching of patterns in an adapter_config.json.

The process that matches imports this module, so the top of it imports no library of models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opd.child import LONGEST, LimitedProcess
from opd.errors import ModelError
from opd.models.quantisation import KEYS, quantisation_of, unread_format
from opd.untrusted import read_document, safe_excerpt

_MOST_LAYERS = 10_000
_TYPES = ("bfloat16", "float16", "float32", "float64")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_OWN_ROPES = ("default", "su", "mrope", "ntk_alpha", "xdrope", "axial")
"""Types of rotary positions that families compute themselves."""
_ROPES = ("rope_parameters", "rope_scaling")


def refuse_values(described: Mapping[str, object], where: str | Path) -> None:
    """Raise `ModelError` for an unusable value of the configuration `described`, or of one inside it.

    `where` is its file or field.
    """
    from transformers.activations import ACT2FN

    quantisation_of(described, where)
    for form in _nested_configs(described):
        for key in KEYS[1:] if form is described else KEYS:
            method = form.get(key)
            if method:
                kind = method.get("quant_method") if isinstance(method, dict) else None
                raise unread_format(str(kind or key), where)
            if method is not None:
                raise ModelError(
                    f"{where} says {key} {safe_excerpt(method)}, which says nothing; take the key out."
                )
    nested = described.get("text_config")
    for form in (described, nested if isinstance(nested, dict) else {}):
        layers = form.get("num_hidden_layers")  # building the list of so many would never end
        if isinstance(layers, int | float) and layers > _MOST_LAYERS:
            raise ModelError(f"{where} says num_hidden_layers {layers:.6g}; no model has so many: mend it.")
        for key in ("dtype", "torch_dtype"):
            name = form.get(key)
            if isinstance(name, str) and name not in _TYPES:
                raise ModelError(
                    f"{where} says {key} {safe_excerpt(name)}; write {', '.join(_TYPES[:2])} or {_TYPES[2]}."
                )
        for key in _ACTIVATIONS:
            name = form.get(key)
            if isinstance(name, str) and name not in ACT2FN:
                raise _unknown_value(key, name, ACT2FN, where)
        for rope in _rope_configs(form):
            _refuse_rope(rope, where)


def _nested_configs(described: Mapping[str, object]) -> Iterator[Mapping[str, Any]]:
    yield described
    for inner in described.values():
        if isinstance(inner, dict):
            yield from _nested_configs(inner)


def _rope_configs(form: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield each description of rotary positions, one for all layers or one by kind of layer."""
    for key in _ROPES:
        ropes = form.get(key)
        if isinstance(ropes, dict):
            yield ropes
            yield from (one for one in ropes.values() if isinstance(one, dict))
    if "rope_theta" in form:
        yield {"rope_theta": form["rope_theta"]}


def _refuse_rope(rope: Mapping[str, object], where: str | Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", rope.get("type"))
    kinds = {*_OWN_ROPES, *ROPE_INIT_FUNCTIONS}
    if isinstance(kind, str) and kind not in kinds:
        raise _unknown_value("rope_type", kind, kinds, where)
    for key in ("rope_theta", "factor"):
        number = rope.get(key)
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, int | float) or not number > 0
        ):
            raise ModelError(
                f"{where} says {key} {safe_excerpt(number)} of its positions; write a number above 0."
            )
    for key in ("short_factor", "long_factor") if kind in ("longrope", "su") else ():
        if not isinstance(rope.get(key), list):
            raise ModelError(f"{where} says rope_type {kind} without the list {key}; copy the file again.")


def _unknown_value(key: str, name: str, choices: Iterable[str], where: str | Path) -> ModelError:
    near = difflib.get_close_matches(name, list(choices), 1, 0.6)
    mend = f"write {near[0]}" if near else "copy the file again, or mend it"
    return ModelError(f"{where} says {key} {safe_excerpt(name)}, which transformers does not know; {mend}.")


_NAME = re.compile(r"[\w.]*")
_MOST = 10_000
"""Maximum patterns of an adapter, about one per layer."""
_SECONDS, _MEMORY = 5.0, 1 << 29


def match_patterns(patterns: list[str], layers: list[str]) -> dict[str, str]:
    """Return the first of `patterns` that matches the end of each layer's name. Layers without a match are
    left out. Raises `ValueError` with the reason for an invalid regular expression, or one that takes too
    long.
    """
    if len(patterns) > _MOST:
        raise ValueError(f"there are {len(patterns):,} patterns where {_MOST:,} are read")
    if all(_NAME.fullmatch(pattern) for pattern in patterns):
        return _match_layers(patterns, layers)
    process = LimitedProcess(__name__, _MEMORY)
    try:
        reply = process.request_answer({"patterns": patterns, "layers": layers}, _SECONDS)
    finally:
        process.close()
    if reply is None:
        raise ValueError(f"its patterns take more than {_SECONDS:g} seconds")
    document = read_document(reply, LONGEST)
    if "error" in document:
        raise ValueError(str(document["error"]))
    return {str(layer): patterns[int(index)] for layer, index in document["matched"].items()}


def _match_layers(patterns: Iterable[str], layers: Iterable[str]) -> dict[str, str]:
    expressions = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    matches = {}
    for layer in layers:
        first = next((one for one, expression in expressions.items() if expression.match(layer)), None)
        if first is not None:
            matches[layer] = first
    return matches


def prepare() -> None:
    """Nothing to import; runs in the matching process."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the index of the pattern that matches each layer; runs in the matching process."""
    try:
        matches = _match_layers(request["patterns"], request["layers"])
    except (re.error, RecursionError, OverflowError) as error:
        return {"error": f"a pattern is no regular expression ({str(error)[:100]})"}
    return {"matched": {layer: request["patterns"].index(one) for layer, one in matches.items()}}
