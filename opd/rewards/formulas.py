"""Formulas as people and models type them, converted to LaTeX for math-verify, and units."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "\u00d7": r"\times ",
    "÷": r"\div ", "·": r"\cdot ", "\u222a": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ",
    "°": r"^\circ ", "\u2212": "-", "。": ".", "、": ",", "\u2044": "/", "\u200b": "",
}  # fmt: skip
WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
"""Full-width forms of ASCII, as in Chinese and Japanese text."""
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUPERSCRIPT = re.compile(f"[{_RAISED}]+")
_DIGITS = str.maketrans(_RAISED, "0123456789+-")
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|\w))")
_TYPED = str.maketrans({**_SIGNS, **{chr(a): chr(b) for a, b in WIDE.items()}})
_SPACES = "(?:\\\\[,; :]|\\{,\\}|[\u2009\u202f\u00a0~ '])"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SPACES}\d{{3}})+(?!\d)")
_BLANK_SIGN = (
    r"(?:\s|~|\\(?:(?:q?quad|enspace|thinspace|medspace|newline)(?![a-z])|h?phantom\{[^{}]*\}|hspace\*?\{[^{}]*\}"
    r"|[ ,;:!>]|$))"
)
_BEFORE_IT = re.compile(rf"^{_BLANK_SIGN}+")
_BEHIND_IT = re.compile(rf"(?:{_BLANK_SIGN}|,|\\\\)+$")
"""LaTeX white space before a formula, and characters that may trail one."""
_END = 60
_MIXED = re.compile(
    r"(?<![\w.,^_/}])(\d+)(?:\s|\\[ ,]|~)+(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\{(\d+)\}\{(\d+)\})(?![\w./])"
)
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<![\w.,^_])(\d[\d,]*(?:\.\d+)?)(?:\s|\\[, ]|~)*(?:\\text\{{\s*)?({'|'.join(_ZEROS)})\b(?:\s*\}})?",
    re.IGNORECASE,
)
_SHORT_FRACTION = re.compile(r"\\([dt]?)frac\s*(\d)\s*(\d)")
_STARS = re.compile(r"\*\*\s*(?:([-+]?\w+)|\(([^()]*)\))")
_PI = re.compile(r"(?<![\\A-Za-z])[Pp]i(?![A-Za-z])")
_SQRT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|ln|log|exp)(?=\s*\()")
_APART = re.compile(
    r"(?<=[\d)}])\s*(?:\\\\|\\&|\\q?quad\b(?!\s*\\text)|\bvs\.?(?=\s)|\\text\{[^{}]*\b(?:or|and)\b[^{}]*\})\s*"
)
_BLANK = re.compile(r"(?<![\w.^_\\])(\d(?:[\d.,]*\d)?)\s+(?=\d)")
_ASIDE = re.compile(
    r"(?:\\text\{\s*\(\s*(?:or|and)\b[^{}]*\}|\(\s*(?:\\text\{\s*(?:or|and)\b[^{}]*\}|(?:or|and)\b))([^()]*)\)"
)
"""Separators of adjacent answers. Math-verify would add them up, or take the last."""


def signs_to_latex(text: str) -> str:
    """Replace signs of keyboards and other scripts by LaTeX: `√2`, `3½`, `2³`, `４２`."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_DIGITS)}}}", text)
    text = _FRACTION.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])} ", text)
    text = _ROOT.sub(_latex_root, text)
    return text.translate(_TYPED)


def trim_blanks(formula: str) -> str:
    """Strip LaTeX white space around `formula`, and a trailing comma."""
    return _BEFORE_IT.sub("", formula[:-_END] + _BEHIND_IT.sub("", formula[-_END:]))


def _latex_root(match: re.Match[str]) -> str:
    inner = next((part for part in match.groups()[1:] if part is not None), "")
    return f"\\sqrt{'[3]' if match[1] == '∛' else ''}{{{inner}}}"


def as_latex(formula: str) -> str:
    """A formula by itself as LaTeX: `3 1/2` is 7/2, `2**3` is 8, `1 234` is 1234, `5 dollars` are 5. Adjacent
    values without a sign become a list, so that they are not read as one number.
    """
    text = trim_blanks(signs_to_latex(formula).strip().removesuffix("."))
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _SCALE.sub(
        lambda match: f"{Decimal(match[1].replace(',', '')).scaleb(_ZEROS[match[2].lower()]):f}", text
    )
    text = _SHORT_FRACTION.sub(r"\\\1frac{\2}{\3}", text)
    text = _MIXED.sub(_mixed_number, text)
    text = _STARS.sub(lambda match: f"^{{{match[1] or match[2]}}}", text)
    text = _SQRT.sub(r"\\sqrt{\1}", _PI.sub(r"\\pi ", text))
    text = _FUNCTION.sub(r"\\\1", text)
    quantity = number_and_unit(text)
    if quantity is not None and quantity[1] != "%":  # 5 and 0.05 may be meant
        return quantity[0]
    if "\\begin" not in text:
        text = _BLANK.sub(r"\1, ", _APART.sub(", ", _ASIDE.sub(r", \1", text)))
        if text.count("|") == 1:  # two of them are an absolute value
            text = text.replace("|", ",")
    return text


def _mixed_number(match: re.Match[str]) -> str:
    integer, *parts = (part for part in match.groups() if part is not None)
    return f"({integer}+\\frac{{{parts[0]}}}{{{parts[1]}}})" if int(parts[0]) < int(parts[1]) else match[0]


_MODULO = re.compile(r"\\(?:text|mathrm|textrm|operatorname)\s*\{\s*mod\s*\}|\\[pb]?mod|\bmod\b")
_RESIDUE = re.compile(
    r"\s*(?:[a-z]?\s*(?:\\equiv|≡|=)\s*)?(\d+)\s*(?:\(?\s*mod\s*(?:\{\s*([1-9]\d*)\s*\}|([1-9]\d*))\s*\)?\s*)?"
)


def same_residue(one: str, other: str) -> bool | None:
    """Return True if both are one number modulo another, such as `15 \\pmod{17}`. One of them may leave out
    the modulus. `None` if neither has a modulus, or one is no such number.
    """
    if max(len(one), len(other)) > 200:
        return None
    plain = [_MODULO.sub("mod", re.sub(_BLANK_SIGN, " ", text)) for text in (one, other)]
    matches = [_RESIDUE.fullmatch(text) for text in plain]
    numbers = [(int(each[1]), int(each[2] or each[3] or 0)) for each in matches if each is not None]
    moduli = {modulus for _, modulus in numbers if modulus}
    if len(numbers) < 2 or not moduli:
        return None
    (first, m), (second, n), modulus = *numbers, max(moduli)
    if m and n:
        return m == n and (first - second) % modulus == 0
    return first == second < modulus


_NAMES = {
    "m": "metre meter metres meters", "cm": "centimetre centimeter centimetres centimeters",
    "mm": "millimetre millimeter millimetres millimeters",
    "km": "kilometre kilometer kilometres kilometers", "in": "inch inches", "ft": "foot feet",
    "mi": "mile miles", "yd": "yard yards", "g": "gram grams gramme grammes",
    "kg": "kilogram kilograms kilo kilos", "mg": "milligram milligrams", "lb": "lbs pound pounds",
    "s": "sec secs second seconds", "min": "mins minute minutes", "h": "hr hrs hour hours",
    "day": "days", "week": "weeks", "month": "months", "year": "yr years", "litre": "liter litres liters",
    "ml": "millilitre milliliter millilitres milliliters", "%": "percent \\%",
    "°": "degree degrees ^\\circ ^{\\circ}",
    "$": "\\$ dollar dollars usd", "€": "euro euros eur \\euro", "£": "gbp \\pounds", "¥": "yen jpy \\yen",
    "₹": "rupee rupees inr", "cent": "cents ¢", "kelvin": "", "joule": "joules",
    "newton": "newtons", "watt": "watts",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
"""Spelling of a unit -> the unit."""
_NUMBER = r"[-+]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|[-+]?\s*\\[dt]?frac\{\d+\}\{\d+\}"
_BEFORE = re.compile(
    rf"([-+]?)\s*(\\\$|[$€£¥₹]|\\(?:euro|pounds|yen)(?![a-z])|(?:USD|EUR|GBP|JPY|INR)\b)\s*({_NUMBER})"
)
_WORD = r"[A-Za-z]+(?:\^?\{?[23]\}?)?"
_BEHIND = re.compile(
    rf"({_NUMBER})(?:{_BLANK_SIGN}*(\\?%|\^\\circ|\^\{{\\circ\}}|[$€£¥₹¢]|\\\$)"
    rf"|{_BLANK_SIGN}+({_WORD}(?:\s*/\s*{_WORD})?)"
    rf"|{_BLANK_SIGN}*\\(?:text|mathrm|textrm|operatorname)\{{\s*([^{{}}]*?)\s*\}}(\^\{{?[23]\}}?)?)"
)


def number_and_unit(formula: str) -> tuple[str, str] | None:
    """Return number and unit of a formula that is one: `5 cm`, `\\$5`, `5\\%`. `None` for other formulas."""
    text = formula.strip()
    unit_first = _BEFORE.fullmatch(text)
    if unit_first is not None:
        return f"{unit_first[1]}{unit_first[3]}", unit_of(unit_first[2])
    unit_last = _BEHIND.fullmatch(text)
    if unit_last is None:
        return None
    unit = next((part for part in unit_last.groups()[1:] if part), "")
    name = unit_of(unit)
    if not is_known(name):  # math-verify knows many other words, and `5 x` is five times x
        return None
    return unit_last[1], name + (unit_last[5] or "")


def unit_of(spelled: str) -> str:
    """One spelling of each unit: `meters` is `m`. Another word stays itself."""
    return "/".join(_UNITS.get(part.strip().lower(), part.strip().lower()) for part in spelled.split("/"))


_PROSE = re.compile(r"(?<!\\)\b[^\W\d_]{3,}\b")
_OTHER = re.compile(
    r"\\(?!text|textbf|mathrm|textrm|\$|%|[ ,;:!()]|[dt]?frac)|[=^_<>|≤≥≠√π]|n['\u2019]t\b|\b(?:not?|nor"
    r"|never|none|or|and|vs|but|except|between|from|least|most|more|less|fewer|greater|smaller|larger|than|over|under|above"
    r"|below|about|around|nearly|almost|times|half|third|quarter|twice|double|triple|dozen|score|squared|cubed"
    r"|root|power|plus|minus|negative|divided|multiplied|modulo|mod|pi|sqrt|sin|cos|tan|ln|log|exp|infinity"
    r"|undefined|hundred|thousand|million|billion|trillion|wrong|incorrect|false|untrue|invalid|either|neither|maybe"
    r"|perhaps|possibly|if|unless|excluding|without|base|octal|binary|hexadecimal)\b",
    re.IGNORECASE,
)
"""Signs and words that give a phrase another meaning than the number in it."""
_ALONE = re.compile(rf"(?<![\w.,/^_])(?:\\\$|[$€£¥₹])?\s?(?:{_NUMBER})(?![\w/^_]|[.,]\d)")


def in_prose(phrase: str) -> str | None:
    """The one number of a phrase in words, with its unit if that is known: `18 dollars per day`, `Tom has 15
    apples`. `None` for a formula, and for a phrase with several numbers or with words that change one.
    """
    if (
        not _PROSE.search(phrase)
        or _OTHER.search(phrase)
        or number_and_unit(signs_to_latex(phrase).strip()) is not None
    ):
        return None
    plain = re.sub(r"\\(?:text(?:bf)?|mathrm|textrm)\s*\{([^{}]*)\}", r" \1 ", phrase)
    plain = _SHORT_FRACTION.sub(r"\\\1frac{\2}{\3}", re.sub(r"\$([^$]*)\$|\\[()]", r" \1 ", plain))
    numbers = list(_ALONE.finditer(plain))
    if len(numbers) != 1 or re.search(r"\d", plain[: numbers[0].start()] + plain[numbers[0].end() :]):
        return None
    number, suffix = numbers[0][0].strip(), plain[numbers[0].end() :]
    unit = re.match(rf"\s*(?:{_WORD}|\\?%)", suffix)
    return (
        f"{number} {unit[0].strip()}" if unit and number_and_unit(f"{number} {unit[0].strip()}") else number
    )


_RELATION = re.compile(r"\s*(\\(?:leq?|geq?|neq?|lt|gt)(?![a-z])|<=?|>=?|!=)")


def is_open(formula: str) -> bool:
    """Return True if a formula is a relation without a left side: `<5` is no 5."""
    return _RELATION.match(signs_to_latex(formula)) is not None


_DENIES = re.compile(
    r"\\(?:neg|lnot)(?![a-z])|¬|\\not(?=\s*[\d{(])|\\bar\s*\{?\d|n['\u2019]t\b"
    r"|\b(?:not|never|nor|neither|wrong|incorrect|false|untrue|invalid)\b",
    re.IGNORECASE,
)


def is_denied(formula: str) -> bool:
    """Return True if a formula denies a number: `6 \\text{ is wrong}`, `\\neg 6`."""
    return _DENIES.search(formula) is not None and re.search(r"\d", formula) is not None


_INNER = re.compile(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}")


def list_brackets(formula: str) -> str | None:
    """`(` around a list in order or an interval, `{` around a set, `,` for a list without either. `None` if
    it is no list of values.
    """
    text = re.sub(_JOINTS, ",", as_latex(formula))
    text = re.sub(rf"\\(?:left|right)(?![a-z])|\\(?=[{{}}])|{_BLANK_SIGN}", "", text)
    if "\\" in text.replace("\\frac", "").replace("\\pi", "").replace("\\sqrt", "") or "=" in text:
        return None
    for kind, opening, closing in (("(", "([", ")]"), ("{", "{", "}")):
        if "," in text and text[0] in opening and text[-1] in closing:
            return kind
    for _ in range(_DEPTH):
        text = _INNER.sub("", text)
    return "," if "," in text else None


_JOINTS = re.compile(r"\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|;")
_DEPTH = 8


def other_units(one: str, other: str) -> bool:
    """Return True if both formulas are numbers with known units, and the units differ."""
    quantities = [
        number_and_unit(signs_to_latex(formula).strip().removesuffix(".")) for formula in (one, other)
    ]
    units = [each[1].replace("{", "").replace("}", "") for each in quantities if each is not None]
    return len(units) == 2 and units[0] != units[1] and all(is_known(unit) for unit in units)


def is_known(unit: str) -> bool:
    """Return True if `unit` is one of the units here, or a quotient or power of them."""
    return all(re.sub(r"\^?[23]$", "", part) in _NAMES for part in unit.split("/"))


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


def normalise_notation(text: str) -> str:
    """Rewrite degrees within functions of angles as radians, and repeating decimals as fractions. Use one
    notation for the empty set and for a tuple. Remove colours and frames of a single line.
    """
    for sign, instead in _PLAIN:
        text = sign.sub(instead, text)
    text = _ALIGNED.sub(_single_line, text)
    text = _LETTERS.sub(lambda match: re.sub(r"\s*(?:,?\s*\band\b|,)\s*", ", ", match[1]), text)
    return _TURNED.sub(_angle_radians, _REPEATING.sub(_repeating_fraction, text))


def _single_line(match: re.Match[str]) -> str:
    inner = re.sub(r"(?<!\\)&", "", match[2])
    return match[0] if match[1] == "array" and inner != match[2] else inner


def _repeating_fraction(match: re.Match[str]) -> str:
    """0.1 and a repeating 6 is (16 - 1) / 90."""
    integer, fixed, period = match[1], match[2], match[3] or match[4]
    upper = int(integer + fixed + period) - int(integer + fixed)
    return f"\\frac{{{upper}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _angle_radians(match: re.Match[str]) -> str:
    inner = match[4] if match[4] is not None else match[5]
    if not _ANGLE.search(inner):
        return match[0]
    turned = _ANGLE.sub(lambda angle: rf"\frac{{{angle[1]}\pi}}{{180}}", inner)
    return f"\\{match[1]}{(match[2] or '').replace(' ', '')}({turned})"


_REMARK = re.compile(
    r"(?<=[^\s(\[{+*/=<>^_,;-])(?:\s|\\[ ,]){1,4}(?:\\text\{\s*)?"
    r"(?:\(((?:[^()\n]|\([^()\n]{0,60}\)){0,200})\)|\[([^][\n]{0,200})\])(?:\s*\})?"
)
_REMARK_IN_TEXT = re.compile(r"\s*\\text\{\s*\(([^(){}\n]{0,200})\)\s*\}")
_WORDS = re.compile(
    r"(?<![\\\w])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac|pmod|bmod|mod|min|max|gcd|lcm)\b)[^\W\d_]{3,}\b"
    r"|(?<![\\\w])(?:as|is|of|at|by|in|so|to)\b"
)
"""A word. A bracket in a formula holds none."""
_CHANGES = re.compile(
    r"\b(?:or|maybe|perhaps|possibl[ey]|alternative\w*|otherwise|could|might|may|either|neither|nor|no|not|never"
    r"|cannot|wrong\w*|incorrect\w*|false|untrue|invalid|unsure|uncertain|guess\w*|also|but|unless|if|mod|modulo"
    r"|base|octal|binary|hex\w*|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|so|thus|hence|therefore"
    r"|total|answer|result|final|actually|correction|rather|instead|percent|factorial|squared|cubed|negative"
    r"|except|excluding|versus|vs|error|mistake)\b|n['\u2019]t\b|\?|%"
    r"|^\s*(?:and|plus|minus|times|over|divided|multiplied|to|half|third|quarter|double|twice|triple|less|more)\b",
    re.IGNORECASE,
)
"""Words that make a remark another answer, or change the value before it."""


def without_remarks(text: str) -> str:
    """Remove bracketed explanations behind an answer: `42 (6 boxes of 7)`. A unit in brackets is the
    answer's. Brackets of a formula stay, and brackets that give another answer.
    """
    return _REMARK.sub(_drop_remark, _REMARK_IN_TEXT.sub(_drop_remark, text))


def _drop_remark(match: re.Match[str]) -> str:
    remark = next((part for part in match.groups() if part is not None), "").strip()
    unit = re.sub(r"^in\s+", "", remark)
    if unit and is_known(unit_of(unit)):
        return f" {unit}"
    is_one = not remark or (_WORDS.search(remark) or re.search(r"(?<![<>!])=", remark))
    return "" if is_one and not _CHANGES.search(remark) else match[0]


_OR = re.compile(
    r"\\(?:text|mathrm|textrm)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])|\u2228|\$?\s*\bor\b\s*\$?", re.IGNORECASE
)
_MOST = 6
_LESS = {"<": ")", "lt": ")", "<=": "]", "leq": "]", "le": "]", "leqslant": "]"}
_MORE = {">": ")", "gt": ")", ">=": "]", "geq": "]", "ge": "]", "geqslant": "]"}
"""A sign -> the end of an interval there."""
_OPENS = {")": "(", "]": "["}
_SIDE = r"\s*([^<>=,()]{1,60}?)\s*"
_BOUND = r"(<=?|>=?|\\(?:leqslant|leq|le|lt|geqslant|geq|ge|gt)(?![a-z]))"
_VARIABLE = r"\s*([a-zA-Z])\s*"
_FROM_TWO = re.compile(f"{_SIDE}{_BOUND}{_VARIABLE}{_BOUND}{_SIDE}")
_VARIABLE_FIRST = re.compile(f"{_VARIABLE}{_BOUND}{_SIDE}")
_VARIABLE_LAST = re.compile(f"{_SIDE}{_BOUND}{_VARIABLE}")
_INTERVAL = re.compile(r"\s*(?:\\left)?[(\[][^()\[\],]{1,60},[^()\[\],]{1,60}(?:\\right)?[)\]]\s*")


def interval_union(formula: str) -> str | None:
    """The union of intervals that a formula of several inequalities defines: `x<3 \\text{ or } x>5`. `None`
    for a formula of another form, or of two variables.
    """
    parts = _OR.split(signs_to_latex(formula).strip().strip("$"))
    if not 2 <= len(parts) <= _MOST:
        return None
    intervals = [_parse_interval(part.strip().strip("$")) for part in parts]
    variables = {each[0] for each in intervals if each is not None and each[0]}
    if None in intervals or len(variables) > 1:
        return None
    return "\\cup ".join(each[1] for each in intervals if each is not None)


def _parse_interval(part: str) -> tuple[str, str] | None:
    """Variable and interval of an inequality. An interval has no variable and stays itself."""
    if _INTERVAL.fullmatch(part):
        return "", part
    two, one, other = (form.fullmatch(part) for form in (_FROM_TWO, _VARIABLE_FIRST, _VARIABLE_LAST))
    if two is not None:
        return _make_interval(two[3], two[1], two[2], two[4], two[5])
    if one is not None and one[2].lstrip("\\") in _LESS:
        return _make_interval(one[1], "-\\infty", "<", one[2], one[3])
    if one is not None:
        return _make_interval(one[1], "\\infty", ">", one[2], one[3])
    if other is None:
        return None
    if other[2].lstrip("\\") in _LESS:
        return _make_interval(other[3], other[1], other[2], "<", "\\infty")
    return _make_interval(other[3], other[1], other[2], ">", "-\\infty")


def _make_interval(variable: str, left: str, first: str, second: str, right: str) -> tuple[str, str] | None:
    """Interval of `left first variable second right`. `None` if the two signs differ in direction."""
    signs = [first.lstrip("\\"), second.lstrip("\\")]
    if all(sign in _LESS for sign in signs):
        return variable, f"{_OPENS[_LESS[signs[0]]]}{left},{right}{_LESS[signs[1]]}"
    if all(sign in _MORE for sign in signs):
        return variable, f"{_OPENS[_MORE[signs[1]]]}{right},{left}{_MORE[signs[0]]}"
    return None
