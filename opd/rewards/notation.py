"""Notation that math-verify drops or takes for something else, in notation that it reads."""

from __future__ import annotations

import re

from opd.rewards.formulas import is_known, typed, unit_of

_DEGREE = (
    r"(?:\s{0,3}\^\s{0,3}(?:\\circ(?![a-z])|\{\s{0,3}\\circ\s{0,3}\})|\s{0,3}°|\s{0,3}\\degree(?![a-z])"
    r"|\s{0,3}(?:\\text\{\s{0,3}degrees?\s{0,3}\}|degrees?\b))"
)
_ANGLE = re.compile(
    rf"(\d+(?:\.\d+)?|\\[dt]?frac\{{\d+\}}\{{\d+\}}|(?<!\\)\b[a-zA-Z]|\\[a-z]+|\([^()]{{1,40}}\)){_DEGREE}"
)
_TURNED = re.compile(
    r"(?<![A-Za-z\\])\\?(sin|cos|tan|cot|sec|csc)(?![a-z])(\s{0,3}\^\s{0,3}(?:\d|\{\d{1,9}\}))?\s{0,3}"
    rf"(?:\\left)?(?:([({{])((?:[^(){{}}]|\{{[^{{}}]{{0,40}}\}}|\([^()]{{0,40}}\)){{1,80}}?)(?:\\right)?[)}}]|({_ANGLE.pattern}))"
)
"""A function of an angle, and the angle: all in brackets, or one with its sign."""
_REPEATING = re.compile(
    r"(?<![\w.,])(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot|overbar)\s*(?:\{(\d{1,30})\}|(\d))(?!\d)"
)
_COLOUR = re.compile(r"\\(?:color(?:box)?|textcolor)(?![a-z])\s*(?:\[[^][]{0,20}\])?\s*\{[^{}]{0,40}\}")
_ALIGNED = re.compile(
    r"\\begin\{((?:align(?:ed|at)?|gather(?:ed)?|split|equation)\*?|array)\}(?:\{[clr|]*\})?"
    r"((?:(?!\\\\|\\begin|\\end).){1,400}?)\\end\{\1\}",
    re.DOTALL,
)
"""One line of a formula that could have several."""
_LETTERS = re.compile(
    r"\\(?:text(?:bf|rm)?|mathrm|mathbf)\s*\{\s*((?:[A-Z]|\d+)(?:\s*(?:,|\band\b|,\s*and\b)\s*(?:[A-Z]|\d+))+)\s*\}"
)
_PLAIN = [
    (re.compile(r"\\varnothing(?![a-z])"), r"\\emptyset "),
    (re.compile(r"\\langle(?![a-z])"), "("),
    (re.compile(r"\\rangle(?![a-z])"), ")"),
    (re.compile(r"(?<![\w#&\\])\\?#(?=\d)"), ""),
    (_COLOUR, ""),
]


def renoted(text: str) -> str:
    """`text` with degrees within functions of angles as radians, repeating decimals as fractions, one
    notation for the empty set and for a tuple, and without colours and frames of a single line.
    """
    for sign, instead in _PLAIN:
        text = sign.sub(instead, text)
    text = _ALIGNED.sub(_line, text)
    text = _LETTERS.sub(lambda found: re.sub(r"\s*(?:,?\s*\band\b|,)\s*", ", ", found[1]), text)
    return _TURNED.sub(_radians, _REPEATING.sub(_fraction, text))


def _line(found: re.Match[str]) -> str:
    inner = re.sub(r"(?<!\\)&", "", found[2])
    return found[0] if found[1] == "array" and inner != found[2] else inner


def _fraction(found: re.Match[str]) -> str:
    """0.1 and a 6 without end is (16 - 1) / 90."""
    whole, before, again = found[1], found[2], found[3] or found[4]
    upper = int(whole + before + again) - int(whole + before)
    return f"\\frac{{{upper}}}{{{'9' * len(again)}{'0' * len(before)}}}"


def _radians(found: re.Match[str]) -> str:
    inner = found[4] if found[4] is not None else found[5]
    if not _ANGLE.search(inner):
        return found[0]
    turned = _ANGLE.sub(lambda angle: rf"\frac{{{angle[1]}\pi}}{{180}}", inner)
    return f"\\{found[1]}{(found[2] or '').replace(' ', '')}({turned})"


_REMARK = re.compile(
    r"(?<=[^\s(\[{+*/=<>^_,;-])(?:\s|\\[ ,]){1,4}(?:\\text\{\s*)?"
    r"(?:\(((?:[^()\n]|\([^()\n]{0,60}\)){0,200})\)|\[([^][\n]{0,200})\])(?:\s*\})?"
)
_REMARK_IN_TEXT = re.compile(r"\s*\\text\{\s*\(([^(){}\n]{0,200})\)\s*\}")
_SAID = re.compile(
    r"(?<![\\\w])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac|pmod|bmod|mod|min|max|gcd|lcm)\b)[^\W\d_]{3,}\b"
    r"|(?<![\\\w])(?:as|is|of|at|by|in|so|to)\b"
)
"""A word, of which a bracket in a formula has none."""
_CHANGES = re.compile(
    r"\b(?:or|maybe|perhaps|possibl[ey]|alternative\w*|otherwise|could|might|may|either|neither|nor|no|not|never"
    r"|cannot|wrong\w*|incorrect\w*|false|untrue|invalid|unsure|uncertain|guess\w*|also|but|unless|if|mod|modulo"
    r"|base|octal|binary|hex\w*|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|so|thus|hence|therefore"
    r"|total|answer|result|final|actually|correction|rather|instead|percent|factorial|squared|cubed|negative"
    r"|except|excluding|versus|vs|error|mistake)\b|n['\u2019]t\b|\?|%"
    r"|^\s*(?:and|plus|minus|times|over|divided|multiplied|to|half|third|quarter|double|twice|triple|less|more)\b",
    re.IGNORECASE,
)
"""What makes a remark say another answer, or another value of the one before it."""


def without_remarks(text: str) -> str:
    """`text` without what stands in brackets behind an answer and explains it: `42 (6 boxes of 7)`.

    A unit in brackets is the answer's; brackets of a formula, and what gives another answer, stay.
    """
    return _REMARK.sub(_remark, _REMARK_IN_TEXT.sub(_remark, text))


def _remark(found: re.Match[str]) -> str:
    said = next((part for part in found.groups() if part is not None), "").strip()
    unit = re.sub(r"^in\s+", "", said)
    if unit and is_known(unit_of(unit)):
        return f" {unit}"
    is_one = not said or (_SAID.search(said) or re.search(r"(?<![<>!])=", said))
    return "" if is_one and not _CHANGES.search(said) else found[0]


_OR = re.compile(
    r"\\(?:text|mathrm|textrm)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])|\u2228|\$?\s*\bor\b\s*\$?", re.IGNORECASE
)
_MOST = 6
_LESS = {"<": ")", "lt": ")", "<=": "]", "leq": "]", "le": "]", "leqslant": "]"}
_MORE = {">": ")", "gt": ")", ">=": "]", "geq": "]", "ge": "]", "geqslant": "]"}
"""A sign and how an interval ends there."""
_OPENS = {")": "(", "]": "["}
_SIDE = r"\s*([^<>=,()]{1,60}?)\s*"
_BOUND = r"(<=?|>=?|\\(?:leqslant|leq|le|lt|geqslant|geq|ge|gt)(?![a-z]))"
_VARIABLE = r"\s*([a-zA-Z])\s*"
_FROM_TWO = re.compile(f"{_SIDE}{_BOUND}{_VARIABLE}{_BOUND}{_SIDE}")
_BEFORE = re.compile(f"{_VARIABLE}{_BOUND}{_SIDE}")
_BEHIND = re.compile(f"{_SIDE}{_BOUND}{_VARIABLE}")
_INTERVAL = re.compile(r"\s*(?:\\left)?[(\[][^()\[\],]{1,60},[^()\[\],]{1,60}(?:\\right)?[)\]]\s*")


def union(formula: str) -> str | None:
    """The union of intervals that a formula of several inequalities says: `x<3 \\text{ or } x>5`.

    `None` for what is no such formula: one of another form, or of two variables.
    """
    parts = _OR.split(typed(formula).strip().strip("$"))
    if not 2 <= len(parts) <= _MOST:
        return None
    found = [_interval(part.strip().strip("$")) for part in parts]
    variables = {each[0] for each in found if each is not None and each[0]}
    if None in found or len(variables) > 1:
        return None
    return "\\cup ".join(each[1] for each in found if each is not None)


def _interval(part: str) -> tuple[str, str] | None:
    """Variable and interval of an inequality; of an interval, no variable and itself."""
    if _INTERVAL.fullmatch(part):
        return "", part
    two, one, other = (form.fullmatch(part) for form in (_FROM_TWO, _BEFORE, _BEHIND))
    if two is not None:
        return _between(two[3], two[1], two[2], two[4], two[5])
    if one is not None and one[2].lstrip("\\") in _LESS:
        return _between(one[1], "-\\infty", "<", one[2], one[3])
    if one is not None:
        return _between(one[1], "\\infty", ">", one[2], one[3])
    if other is None:
        return None
    if other[2].lstrip("\\") in _LESS:
        return _between(other[3], other[1], other[2], "<", "\\infty")
    return _between(other[3], other[1], other[2], ">", "-\\infty")


def _between(variable: str, left: str, first: str, second: str, right: str) -> tuple[str, str] | None:
    """Of `left first variable second right`; `None` where the two signs do not point the same way."""
    signs = [first.lstrip("\\"), second.lstrip("\\")]
    if all(sign in _LESS for sign in signs):
        return variable, f"{_OPENS[_LESS[signs[0]]]}{left},{right}{_LESS[signs[1]]}"
    if all(sign in _MORE for sign in signs):
        return variable, f"{_OPENS[_MORE[signs[1]]]}{right},{left}{_MORE[signs[0]]}"
    return None
