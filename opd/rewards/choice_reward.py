"""`reward: choice`: the letter of a multiple choice.

What hedges between letters, or denies the one that it begins with, chooses none.
"""

from __future__ import annotations

import re
import string
from typing import Any

from opd.config.rewards import ChoiceReward
from opd.rewards.extract import answered, extracted
from opd.rewards.formulas import WIDE
from opd.rewards.verifier import Answered, Verifier, each, is_missing
from opd.rollout.prompts import plain_label

_FORM = re.compile(r"\\(?:text|math)[a-z]*\s*\{|\\boxed\s*\{|\\(?:bf|rm|it)\b")
_CALLED = r"(?i:(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|answer|letter)\b(?:\s+is\b)?)?"
_END = r"(?![^\W_]|['\u2019\-][^\W_]|\+\+|#)"
"""Behind a letter that is no part of a word, and of no name such as C++."""
_LEAD = (
    r"(?:(?i:therefore|thus|so|hence|consequently|accordingly|clearly|obviously|definitely|then)\b[\W_]*"
    r"|(?:因此|所以|故)?(?:正确)?(?:答案)?(?:应该?)?(?:选择|选|是|为)\s*)?"
)
"""Words before a letter that only lead to it."""
_LETTER = re.compile(rf"[\W_]*{_LEAD}{_CALLED}[\W_]*(?:([A-Z])|([a-z])(?=\W*$|[).:])){_END}")
_LABEL = re.compile(rf"[\W_]*{_CALLED}[\W_]*([A-Za-z])[\W_]*")
_ALONE = re.compile(rf"(?<![\w'\u2019\-])([A-Z]){_END}")

_NEXT = re.compile(
    r"[\W_]*(?:\b(?:or|and)\b|[,/;&|、或和与及])[\W_]*(?i:option\s+|choice\s+)?([A-Za-z])(?![\w'\u2019])"
)
"""Behind a letter: another one that may be meant as well."""
_LETTERS_ALONE = re.compile(r"(?:[\W_]*[A-Z](?![^\W_]))+[\W_]*")
_NOT = r"(?:not|never|n['\u2019]t|wrong|incorrect|false|excluded|ruled\s+out|cannot)"
_DENIED = re.compile(
    rf"[\W_]*(?:(?:is|was|are|can|seems|looks)\s*(?:clearly\s+|also\s+)?)?{_NOT}\b", re.IGNORECASE
)
"""Behind a letter: that it is not the answer."""
_DENIES = re.compile(rf"\b{_NOT}\b|n['\u2019]t\b|\bexcept\b", re.IGNORECASE)
_GOES_ON = re.compile(
    r"\s+(?:because|since|as|is|was|are|seems|looks|must|should|would|by|due|for|from|and|or|with|which)\b"
)
_SPEAKS = re.compile(r"\s+(?:must|should|would|was)\b")
"""Behind an I that is no letter of a choice."""
_WORD = re.compile(r"\s+[a-z]")
"""Behind a letter: a word of its own sentence, which makes A an article and B a name (`B vitamins`)."""
_SAYS = re.compile(
    r"(?i:\b(?:is|be|it['\u2019]s|choose|chose|pick|select|say|believe|think|leaves|with|option|choice|answer)"
    r"(?:[\s,]+(?:therefore|thus|then|hence|clearly|obviously|definitely))?[\s,]+(?:option\s+|choice\s+)?)"
    rf"[^\w\s]*([A-Z]){_END}[\W_]*$"
)
"""A sentence that ends with a letter."""
_PRAISES = re.compile(
    rf"(?<![\w'\u2019\-])([A-Z]){_END}\W*\s+(?:is|must be|looks)\s+(?:the\s+)?(?:correct|right|best)\b"
)
_BESIDES = re.compile(
    r"[\s,;(]+(?:and\s+|but\s+)?(?:not|rather\s+than|instead\s+of)\s+(?:option\s+|choice\s+)?[*(]*[A-Z][\W_]*$"
)
"""At the end: a letter that is not the one before it."""
_FENCED = re.compile(
    r"^[ \t]*(```|~~~)(?:te?xt|plaintext|markdown)?[ \t]*\n([^\w\n]{0,9}[A-Za-z][^\w\n]{0,9})\n\s*\1[ \t]*$",
    re.M,
)
"""A block of code that holds one letter."""
_TAIL = 60
_ITEM = re.compile(r"[\W_]*([A-Z])\s*[).:]")


def letter(text: str, choices: int, *, prose: bool = False) -> str | None:
    """The letter that `text` begins with; a small one where it stands alone or before a bracket. In `prose`
    none is that a small word follows.
    """
    text = _FORM.sub("", text[:200])
    found = _LETTER.match(text)
    said = _known(found[1] or found[2], choices) if found else None
    if found is None or said is None:
        return None
    rest = text[found.end() :]
    goes_on = _GOES_ON.match(rest) and not (said == "I" and _SPEAKS.match(rest))
    word = _WORD.match(rest) and not goes_on and (prose or said in "AI")
    return None if word or _DENIED.match(rest) or _hedges(said, rest, choices) else said


def _hedges(said: str, rest: str, choices: int) -> bool:
    """Whether what follows a letter names another one beside it."""
    after = _NEXT.match(rest)
    others = {after[1].upper()} if after else set()
    if _LETTERS_ALONE.fullmatch(rest):
        others |= set(_ALONE.findall(rest))
    return any(one != said and one in string.ascii_uppercase[:choices] for one in others)


def _known(said: str, choices: int) -> str | None:
    return said.upper() if said.upper() in string.ascii_uppercase[:choices] else None


def _of_label(label: Any, choices: int) -> str | None:
    """The letter of a label: a number from 0, or a letter, however it is written, and nothing else."""
    label = plain_label(label)
    if isinstance(label, str) and re.fullmatch(r"\d+(\.0+)?", label.strip()):
        label = int(label.strip().partition(".")[0]) if len(label) < 20 else -1
    if isinstance(label, int) and not isinstance(label, bool):
        return string.ascii_uppercase[label] if 0 <= label < choices else None
    found = (
        _LABEL.fullmatch(_FORM.sub("", label[:200]).translate(WIDE).strip())
        if isinstance(label, str)
        else None
    )
    return _known(found[1], choices) if found else None


def label_fault(settings: ChoiceReward, label: Any) -> str | None:
    """A label that is none of the choices."""
    if is_missing(label):
        return "is missing; give the letter of the right choice, or its number from 0"
    if _of_label(label, settings.choices) is None:
        most = settings.choices - 1
        last = string.ascii_uppercase[most]
        return f"is {str(label)[:40]!r}; give a letter from A to {last}, or a number from 0 to {most}"
    return None


def score(settings: ChoiceReward, answer: Answered) -> float:
    """1 or 0."""
    said = chosen(settings, answer.text)
    return float(said is not None and said == _of_label(answer.label, settings.choices))


def chosen(settings: ChoiceReward, text: str) -> str | None:
    """The letter that a response chooses; `None` where none is found."""
    text = _FENCED.sub(r"\2", text.translate(WIDE))
    for way in settings.extract:
        found = extracted(text, [way])
        if found is None or (way == "last_line" and _lists(text)):
            continue
        found = f"{found[:-_TAIL]}{_BESIDES.sub('', found[-_TAIL:])}"
        said = letter(found, settings.choices, prose=way in ("last_line", "whole"))
        said = said or _in_sentence(found, settings.choices)
        if said is not None:
            return said
    return None


def _in_sentence(text: str, choices: int) -> str | None:
    """The letter of `I think it is C` or `So C is correct`: the only one named, and nothing is denied."""
    text = _FORM.sub("", text)[-200:]
    named = {one for one in _ALONE.findall(text) if one in string.ascii_uppercase[:choices]}
    found = _SAYS.search(text) or _PRAISES.search(text)
    if found is None or _DENIES.search(text) or named - {found[1], "I", "A"}:
        return None
    return _known(found[1], choices)


def _lists(text: str) -> bool:
    """Whether the last line is one of a list of the choices, which chooses none."""
    lines = [line for line in answered(text).strip().split("\n")[-8:] if line.strip()]
    items = [_ITEM.match(line) for line in lines[-2:]]
    first, last = (item[1] if item else "" for item in items) if len(items) == 2 else ("", "")
    return bool(first and last) and ord(last) == ord(first) + 1


VERIFIER = Verifier(each(score), label_fault, answer=chosen)
