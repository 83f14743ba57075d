"""`reward: math`: mathematical equality, by math-verify, in processes that can be killed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any

from opd.config.rewards import MathReward
from opd.errors import MissingExtraError
from opd.rewards.formulas import (
    as_latex,
    in_prose,
    interval_union,
    is_denied,
    is_open,
    list_brackets,
    normalise_notation,
    number_and_unit,
    other_units,
    same_residue,
    signs_to_latex,
    trim_blanks,
    without_remarks,
)
from opd.rewards.verifier import (
    Answered,
    Score,
    Verifier,
    compared,
    extract_answer,
    find_boxes,
    is_missing,
    without_thoughts,
    written_number,
)
from opd.rollout.prompts import plain_label

_MOST = 4000
"""Most characters of a formula, and of the end of a response that is searched for one."""


def require(settings: MathReward) -> None:
    """Raise `MissingExtraError` without math-verify."""
    from importlib.util import find_spec

    if find_spec("math_verify") is None or find_spec("latex2sympy2_extended") is None:
        raise MissingExtraError("the reward math", "verifiers")


def label_text(label: object) -> str:
    """Return the formula of a label: GSM8K's text after `####`, a box's content, or all of it."""
    text = label.rpartition("####")[2] if isinstance(label, str) else written_number(plain_label(label))
    text = normalise_notation(text)
    return _strip_delimiters(extract_answer(text, ["boxed"]) or text)


def _strip_delimiters(formula: str) -> str:
    """Remove math delimiters around `formula`. A currency sign stays."""
    text = formula.strip()
    is_money = text.count("$") == 1 and number_and_unit(signs_to_latex(text)) is not None
    return trim_blanks(text if is_money else text.strip("$"))


_POWER = re.compile(r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+))[eE]([-+]?\d{1,3})")
"""A number with an exponent, as programs write it."""
_PRINTED = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e([-+]\d{2,3})(?!\w)")
"""A number with an exponent in a text, as Python prints it."""
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:_\d{3})+(?:\.\d+)?")


def possible_readings(formula: str) -> list[str]:
    """Return a formula's possible meanings: 5e-5 is 0.00005 to a program, and 5 times e, less 5, in
    mathematics.
    """
    if (intervals := interval_union(formula)) is not None:
        return [intervals]
    formula = as_latex(formula)
    text = _strip_delimiters(formula)
    if _GROUPED.fullmatch(text):
        return [text.replace("_", "")]
    if (power := _POWER.fullmatch(text)) is None:
        return [_as_power(formula)]
    number = format(Decimal(f"{power[1].replace(',', '')}e{power[2]}"), "f")
    return [number] if _PRINTED.fullmatch(text.lstrip("+-")) else [number, formula]


def _as_power(text: str) -> str:
    """Rewrite numbers that Python prints with an exponent in mathematical notation."""
    return _PRINTED.sub(lambda one: f"{one[1]} \\cdot 10^{{{int(one[2])}}}", text)


_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}(?:[T ].*)?|\d{1,2}/\d{1,2}/\d{4}")


def label_fault(settings: MathReward, label: object) -> str | None:
    """Return the fault of a label that is no number and no formula."""
    if is_missing(label) or isinstance(label, bool) or not isinstance(label, str | int | float):
        problem = "is missing" if is_missing(label) else f"is a {type(label).__name__}"
        return f"{problem}; give a number, or a formula as text"
    if isinstance(label, float) and not math.isfinite(label):
        return f"is {label}; give a number that is finite, or leave the row out"
    text = label_text(label)
    if _DATE.fullmatch(text):
        return f"is {text!r}, a date, of which a formula makes a difference; take `exact`"
    if text in ("None", "null"):
        return f"is {text!r}, which is no formula; give a number or a formula, or leave the row out"
    try:
        small = 0 < abs(Decimal(possible_readings(text)[0])) < Decimal(5).scaleb(-settings.digits - 1)
    except ArithmeticError:
        small = False
    if small:
        return f"is {text[:40]}, which is 0 to {settings.digits} places; raise the reward's digits"
    if not text or len(text) > _MOST:
        return f"{'has more than 4000 characters' if text else 'is empty'}; give a number or a formula"
    return None


def score(settings: MathReward, answers: Sequence[Answered]) -> list[Score]:
    """1 or 0 each. 0 if no answer is found, or if comparing takes too long."""
    formulas = [_extract_formula(settings, answer.text) for answer in answers]
    scores: list[Score] = [0.0] * len(answers)
    requests = {
        index: {"answer": text, "label": label_text(answers[index].label), "digits": settings.digits}
        for index, text in enumerate(formulas)
        if text is not None
    }
    results = compared(__name__, list(requests.values()), settings.seconds)
    for index, one in zip(requests, results, strict=True):
        scores[index] = float(one.get("equal") is True)
    return scores


def _extract_formula(settings: MathReward, text: str) -> str | None:
    """Return the answer in a form that math-verify finds."""
    text = _OR_ELSE.sub(" or ", _DENIED.sub(" ", normalise_notation(text)))
    for method in settings.extract:
        formula = _side_by_side(text) if method == "boxed" else extract_answer(text, [method])
        if formula is not None and method in ("whole", "last_line"):
            return _in_text(formula[-_MOST:])
        if formula is not None and method == "answer":
            formula = _OR.sub(" or ", _SENTENCE.split(formula, maxsplit=1)[0])
        if formula is not None:
            plain = without_remarks(formula[:_MOST])
            return _in_a_box(in_prose(plain) or plain) if len(formula) <= _MOST else None
    return None


def _side_by_side(text: str) -> str | None:
    """Return the last box's content, as a list with boxes right before it: two boxes are two answers."""
    answer, contents, next_start = without_thoughts(text), [], 0
    for start, end, content in islice(find_boxes(answer), _FEW):
        is_apart = next_start - end > _JOINT or _BETWEEN.fullmatch(answer, end, next_start) is None
        if contents and is_apart:
            break
        next_start, base = start, _SUBSCRIPT.match(answer, end)
        content = f"{content.strip()}{base[0] if base else ''}"
        if content and content not in contents:
            contents.append(content)
    return ", ".join(contents[::-1]) or None


def _in_text(text: str) -> str:
    """Put a text's answer into a box, if the text is a formula alone or ends with two answers."""
    if len(text) <= _SHORT and "\n" not in text:
        text = without_remarks(text)
        alone = in_prose(text) if _WORDS.search(signs_to_latex(text)) else text
        if alone is not None:
            return _in_a_box(alone)
    values = _values_at_end(text[-_SHORT:])
    if len(values) > 1:
        return _in_a_box(", ".join(values))
    end = list(_LAST.finditer(text[-_SHORT:]))[-1:]
    two = _TWO.search(text[-_SHORT:][: end[0].start()]) if end else None
    if two is not None:
        return _in_a_box(f"{two[1]}, {end[0][0]}")
    return (
        _SIGNED.sub(lambda one: f"${signs_to_latex(one[0])}$", text)
        if "$" not in text
        else signs_to_latex(text)
    )


def _values_at_end(text: str) -> list[str]:
    """Return the adjacent values at the end of a text, each a formula with its own delimiters: `$5$ $6$`."""
    values, next_start = {}, len(text)
    for one in list(_SPAN.finditer(text))[::-1]:
        value = _VALUE.fullmatch(next(part for part in one.groups() if part is not None))
        if value is None or (values and _BETWEEN.fullmatch(text, one.end(), next_start) is None):
            break
        if values and value[1] not in values.values():
            break
        values[value[2].strip()] = value[1]
        next_start = one.start()
    return list(values)[::-1]


_JOINT, _FEW, _SHORT = 30, 8, 200
_BETWEEN = re.compile(
    r"(?:[\s$.,;:/|\uff0c\u3001]|\b(?:or|and|oder|und|ou|et|o|y|maybe|perhaps|possibly|vs)\b|或|和)*"
)
"""Separators between boxes that are adjacent answers."""
_WORDS = re.compile(
    r"(?<!\\)\b(?!(?:or|and|vs|pi|sqrt|sin|cos|tan|ln|log|exp)\b)[^\W\d_]{2,}|\$.*\S.*\$.|\\[(\[]"
)
"""Words and signs that a formula alone does not contain."""
_LAST = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_TWO = re.compile(
    r"(\d[\d.,/]*)[\s$*,;]*(?:[a-zA-Z%]{1,12}[\s,;]{1,3})?(?:\b(?:or|and|vs\.?|oder|und|ou|et)\b|或|和)\s*(?:(?:maybe|perhaps|possibly|even)\s+)?[$*]*$"
)
_SIGNED = re.compile(r"[\w.^{}()/*+-]*[√∛π∞⁰¹²³⁴-⁹¼-¾⅐-⅞][^\s。\uff0c,]*(?<![.!?])")
"""A formula in a text, with signs that math-verify does not find there."""
_SPAN = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.{1,80}?)\\\)|\\\[(.{1,80}?)\\\]", re.DOTALL)
_VALUE = re.compile(r"\s*(?:([a-zA-Z])\s*=)?(\s*-?(?=[^=]*\d)[^=+\-<>,]+)")
"""A variable's name if there is one, and a value that is no step of a calculation."""
_RIGHT = r"(?:(?:the|a)\s{1,3})?(?:right|correct|true|valid|answer|solution|it)"
_DENIED = re.compile(
    r"\b(?:answer|it)\s+(?:is\s+(?:not|never)|isn['\u2019]t|can(?:not|['\u2019]t|\s+not)\s+be)\s+\S+"
    r"|(?:[,;]\s?|\b)(?:not|anything\s{1,3}but)\s{1,3}\$?[-+]?\d[\d.,/]*\$?"
    r"|(?:\\boxed\{[^{}]{1,60}\}|(?<![\d.,/])\d[\d.,/]*)\$?(?:\\text\{)?\s{1,3}(?:isn['\u2019]t\s{1,3}"
    rf"{_RIGHT}|(?:is|was|would\s{{1,3}}be)\s{{1,3}}(?:wrong|incorrect|false|invalid|not\s{{1,3}}{_RIGHT}))\b",
    re.IGNORECASE,
)
"""An answer that is named and denied."""
_OR_ELSE = re.compile(
    r"(?:(?:</answer>)?[,;.]?\s{1,3}or|(?<=[\d)}\]$*%])[,;.]?\s{1,3}(?:alternatively|otherwise|possibly|perhaps"
    r"|maybe|but\s{1,3}it\s{1,3}(?:could|may|might)\s{1,3}be)),?\s{1,3}(?=\S)"
    r"(?:(?:else|it|it['\u2019]s|that|this|the|my|final|answer|result|value|is|was|could|may|might|be|equals|maybe"
    r"|perhaps|possibly|even|also|just|rather|i|we|think|get|[a-z]|=)[:,]?\s{1,3}){0,8}(?:<answer>)?(?=[-+]?[\d$\\])",
    re.IGNORECASE,
)
"""Begins another answer, in a sentence of its own."""
_OR = re.compile(r"[;,]\s*or\s")
"""Begins another answer, which math-verify would take instead."""
_BASE = re.compile(r"(?<![\w_])\w+_\{?(\d{1,2})\}?(?!\w)")
"""A number in another base than ten. Math-verify drops the base."""
_SUBSCRIPT = re.compile(r"\s*_(?:\{[^{}]{1,40}\}|\w)")
_NUMBERED = re.compile(
    r"(?<![\w.])\d+\s{0,2}_(?!\{?(?:10|\\text\{ten\})\}?(?!\w))(?:\{[^{}]*\}|\d{1,2}|[a-z])(?!\w)"
)
"""A number with a subscript that is another base than ten."""
_SENTENCE = re.compile(r"(?<=[\w)}\]$%*])(?:\.[*_]*\s|。)")
"""End of a sentence, if its line goes on."""


def _in_a_box(formula: str) -> str:
    return f"\\boxed{{{_strip_delimiters(formula)}}}"


def prepare() -> None:
    """Import the library in the comparing process."""
    import logging

    import math_verify

    logging.disable()
    math_verify.verify(
        _parse_formula(math_verify, "\\boxed{1}"), _parse_formula(math_verify, "\\boxed{\\frac{2}{2}}")
    )


def _parse_formula(library: Any, text: str) -> Any:
    # Its own limit needs the main thread and a signal of its own. Here the process has a limit.
    return library.parse(text, parsing_timeout=None)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the comparing process. Returns whether answer and label are equal."""
    import math_verify

    library: Any = math_verify
    label, text = request["label"], request["answer"]
    boxed = extract_answer(text, ["boxed"])
    is_boxed = boxed is not None and _in_a_box(boxed) == text
    response: str = boxed if boxed is not None and is_boxed else text
    congruent = same_residue(label, response)
    if congruent is not None:
        return {"equal": congruent}
    if _differ_in_form(label, response, is_whole=is_boxed):
        return {"equal": False}
    right = [_parse_formula(library, _in_a_box(one)) for one in possible_readings(label)]
    # Math-verify searches a text that is no box.
    readings = map(_in_a_box, possible_readings(response)) if is_boxed else [_as_power(response)]
    parsed = [_parse_formula(library, one) for one in readings]
    verify = partial(
        library.verify,
        float_rounding=request["digits"],
        timeout_seconds=None,
        allow_set_relation_comp=True,
    )
    pairs = ((label, response) for label in right for response in parsed)
    return {
        "equal": any(bool(verify(*pair)) and not _differ_tiny(*pair, request["digits"]) for pair in pairs)
    }


def _differ_in_form(label: str, response: str, is_whole: bool) -> bool:
    """Return True if the form of the answer rules it out, whatever its value: another unit or base, a denial,
    a relation without a left side, or a list without the label's order. `is_whole`: all of the text is the
    answer, so math-verify need not search it.
    """
    bases = [set(_BASE.findall(one)) for one in (label, response)]
    if all(bases) and bases[0] != bases[1]:
        return True
    other_base = not bases[0] and _NUMBERED.search(response) is not None
    if is_whole and (other_base or (is_denied(response) and not is_denied(label))):
        return True
    unordered = (list_brackets(label), list_brackets(response)) in (("(", ","), ("(", "{"), ("{", "("))
    return unordered or other_units(label, response) or is_open(label) != is_open(response)


def _differ_tiny(right: Sequence[Any], answer: Sequence[Any], digits: int) -> bool:
    """Return True if both are so small that they are equal only to `digits` places: 2^-98 is not 2^-99."""
    numbers = []
    for parsed in (right, answer):
        number = next((one for one in parsed if getattr(one, "is_number", False)), None)
        if number is None or not getattr(number, "is_real", False):
            return False
        numbers.append(abs(number.evalf(20)))
    least, most = sorted(numbers)
    return bool(0 < least < 10.0**-digits and most - least > most * 10.0**-digits)


KINDS = {"math": Verifier(score, label_fault, require, lambda settings: settings.seconds)}
