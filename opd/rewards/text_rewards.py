"""`reward: exact`, `f1`, `regex` and `choice`: the answer is a text, compared with the label's.

A regular expression is searched in a process that can be killed. An answer that hedges between letters, or
denies the letter it begins with, is no choice.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from opd.config.rewards import ChoiceReward, ExactReward, F1Reward, RegexReward
from opd.rewards.formulas import WIDE
from opd.rewards.verifier import (
    Answered,
    Score,
    Verifier,
    extract_answer,
    is_missing,
    match_patterns,
    score_each,
    without_thoughts,
    written_number,
)
from opd.rollout.prompts import plain_label

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


_OF_NUMBERS = re.compile(r"((?<=\d)[./:-](?=\d)|(?<![\w.])-(?=\.?\d))")
"""The signs without which 1.5 would be 15, and -5 would be 5."""


def squad_form(text: str) -> str:
    """Return `text` in SQuAD's form: lower case, single blanks, no articles, punctuation in numbers alone."""
    parts = _OF_NUMBERS.split(text.lower())  # every second one is a sign that stays
    plain = "".join(part if index % 2 else part.translate(_PUNCTUATION) for index, part in enumerate(parts))
    return " ".join(_ARTICLES.sub(" ", plain).split())


_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_WHOLE = re.compile(r"([-+]?\d+)\.0")
"""Whole numbers as tables write them: commas between thousands, and the zero of a column of floats."""


def right_answers(label: object) -> list[str]:
    """Return the right answers: a label, or a list. A table's number counts as people write it, too."""
    answers = []
    for one in label if isinstance(label, list) else [label]:
        text = str(one).strip() if isinstance(one, str) else written_number(plain_label(one))
        plain = text.replace(",", "") if _GROUPED.fullmatch(text) else text
        answers += dict.fromkeys(
            [text, plain, _WHOLE.sub(r"\1", plain) if _WHOLE.fullmatch(plain) else plain]
        )
    return answers


def same_number(answer: str, label: object) -> bool:
    """Return True if one of the labels is a number, and the answer equals it."""
    numbers = [one for one in (label if isinstance(label, list) else [label]) if not isinstance(one, str)]
    if not numbers or not _NUMBER.fullmatch(answer) or len(answer) > 400:
        return False
    number = Decimal(answer.replace(",", ""))
    return any(number == Decimal(written_number(plain_label(one))) for one in numbers)


_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d{1,3})?")


def text_fault(settings: object, label: object) -> str | None:
    """Return the fault of a label that no answer can be compared with."""
    many = label if isinstance(label, list) else [label]
    if is_missing(label) or not many:
        return "is missing; give a text, a number, or a list of them"
    for one in many:
        if isinstance(one, float) and not math.isfinite(one):
            return f"is {one}; give a number that is finite, or leave the row out"
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            return f"is a {type(one).__name__}; give a text, a number, or a list of them"
    if not any(right_answers(label)):
        return "is empty; give what is right"
    if getattr(settings, "normalise", "squad") == "squad" and not any(map(squad_form, right_answers(label))):
        return (
            "has articles and signs alone, of which SQuAD's form leaves nothing to compare; take `exact` with"
            " `normalise: none` (`choice` for letters), or leave the row out"
        )
    return None


def exact_score(settings: ExactReward, answer: Answered) -> float:
    """1 or 0."""
    text = extract_answer(answer.text, settings.extract)
    if text is None:
        return 0.0
    if same_number(text, answer.label):
        return 1.0
    form = squad_form if settings.normalise == "squad" else str
    right = set(map(form, right_answers(answer.label))) - {""}  # an answer of signs alone would match it, too
    return float(form(text) in right)


def f1(answer: str, label: str) -> float:
    """F1 of the words, in SQuAD's form. 1 if both have none."""
    words, label_words = squad_form(answer).split(), squad_form(label).split()
    if not words or not label_words:
        return float(words == label_words)
    same = (Counter(words) & Counter(label_words)).total()
    return 2 * same / (len(words) + len(label_words))


def f1_score(settings: F1Reward, answer: Answered) -> float:
    """The best over the labels."""
    text = extract_answer(answer.text, settings.extract)
    # The others equal signs alone.
    wanted = [label for label in right_answers(answer.label) if squad_form(label)]
    return 0.0 if text is None else max(f1(text, label) for label in wanted)


def _has_group(settings: RegexReward) -> bool:
    return settings.pattern is not None and "answer" in re.compile(settings.pattern).groupindex


def pattern_fault(settings: RegexReward, label: Any) -> str | None:
    """Return the fault of a label that must be an expression and is none, or lacks a value for a group."""
    if settings.pattern is not None and not _has_group(settings):
        return None
    wanted = "what the group `answer` has to catch" if settings.pattern else "a regular expression"
    if is_missing(label):
        return f"is missing; give {wanted}, or set the reward's pattern"
    if settings.pattern is not None:
        plain = isinstance(label, str | int | float) and not isinstance(label, bool)
        return None if plain else f"is a {type(label).__name__}; give {wanted}"
    if label == "":
        return "is empty, which every answer matches; give a regular expression, or set the reward's pattern"
    try:
        re.compile(label)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is no regular expression ({str(error)[:100]}); mend it, or set the reward's pattern"
    return None


def regex_score(settings: RegexReward, answers: Sequence[Answered]) -> list[Score]:
    """1 or 0 each. 0 if nothing is found, or if the search takes too long."""
    group = "answer" if _has_group(settings) else None
    results = match_patterns(
        [answer.label if settings.pattern is None else settings.pattern for answer in answers],
        [extract_answer(answer.text, settings.extract) or "" for answer in answers],
        [group] * len(answers),
        settings.seconds,
        full=settings.full,
        ignore_case=settings.ignore_case,
    )
    if group is None:
        return [float(one.get("matches") is True) for one in results]
    scores: list[Score] = []
    for one, answer in zip(results, answers, strict=True):
        caught = str(one.get("caught") or "").strip()
        right = caught in right_answers(answer.label) or same_number(caught, answer.label)
        scores.append(float(one.get("matches") is True and right))
    return scores


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
"""Behind a letter: a denial that it is the answer."""
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


def leading_letter(text: str, choices: int, *, prose: bool = False) -> str | None:
    """Return the letter that `text` begins with. A small letter must stand alone or before a bracket. In
    `prose` a letter before a small word does not count.
    """
    text = _FORM.sub("", text[:200])
    match = _LETTER.match(text)
    letter = _valid_letter(match[1] or match[2], choices) if match else None
    if match is None or letter is None:
        return None
    suffix = text[match.end() :]
    goes_on = _GOES_ON.match(suffix) and not (letter == "I" and _SPEAKS.match(suffix))
    word = _WORD.match(suffix) and not goes_on and (prose or letter in "AI")
    if word or _DENIED.match(suffix):
        return None
    following = _NEXT.match(suffix)
    others = {following[1].upper()} if following else set()
    if _LETTERS_ALONE.fullmatch(suffix):
        others |= set(_ALONE.findall(suffix))
    names_another = any(one != letter and one in string.ascii_uppercase[:choices] for one in others)
    return None if names_another else letter


def _valid_letter(letter: str, choices: int) -> str | None:
    return letter.upper() if letter.upper() in string.ascii_uppercase[:choices] else None


def _label_letter(label: object, choices: int) -> str | None:
    """Return the letter of a label: a number from 0, or a single letter in any notation."""
    label = plain_label(label)
    if isinstance(label, str) and re.fullmatch(r"\d+(\.0+)?", label.strip()):
        label = int(label.strip().partition(".")[0]) if len(label) < 20 else -1
    if isinstance(label, int) and not isinstance(label, bool):
        return string.ascii_uppercase[label] if 0 <= label < choices else None
    match = (
        _LABEL.fullmatch(_FORM.sub("", label[:200]).translate(WIDE).strip())
        if isinstance(label, str)
        else None
    )
    return _valid_letter(match[1], choices) if match else None


def choice_fault(settings: ChoiceReward, label: object) -> str | None:
    """Return the fault of a label that is none of the choices."""
    if is_missing(label):
        return "is missing; give the letter of the right choice, or its number from 0"
    if _label_letter(label, settings.choices) is None:
        most = settings.choices - 1
        last = string.ascii_uppercase[most]
        return f"is {str(label)[:40]!r}; give a letter from A to {last}, or a number from 0 to {most}"
    return None


def choice_score(settings: ChoiceReward, answer: Answered) -> float:
    """1 or 0."""
    letter = chosen_letter(settings, answer.text)
    return float(letter is not None and letter == _label_letter(answer.label, settings.choices))


def chosen_letter(settings: ChoiceReward, text: str) -> str | None:
    """Return the letter that a response chooses, or None if it chooses none."""
    text = _FENCED.sub(r"\2", text.translate(WIDE))
    for method in settings.extract:
        answer = extract_answer(text, [method])
        if answer is None or (method == "last_line" and _ends_list(text)):
            continue
        answer = f"{answer[:-_TAIL]}{_BESIDES.sub('', answer[-_TAIL:])}"
        letter = leading_letter(answer, settings.choices, prose=method in ("last_line", "whole"))
        letter = letter or _in_sentence(answer, settings.choices)
        if letter is not None:
            return letter
    return None


def _in_sentence(text: str, choices: int) -> str | None:
    """The letter of `I think it is C` or `So C is correct`: the only one named, with no denial."""
    text = _FORM.sub("", text)[-200:]
    letters = {one for one in _ALONE.findall(text) if one in string.ascii_uppercase[:choices]}
    match = _SAYS.search(text) or _PRAISES.search(text)
    if match is None or _DENIES.search(text) or letters - {match[1], "I", "A"}:
        return None
    return _valid_letter(match[1], choices)


def _ends_list(text: str) -> bool:
    """Return True if the last line is one of a list of the choices, which chooses none."""
    lines = [line for line in without_thoughts(text).strip().split("\n")[-8:] if line.strip()]
    items = [_ITEM.match(line) for line in lines[-2:]]
    first, last = (item[1] if item else "" for item in items) if len(items) == 2 else ("", "")
    return bool(first and last) and ord(last) == ord(first) + 1


KINDS = {
    "choice": Verifier(score_each(choice_score), choice_fault, answer=chosen_letter),
    "exact": Verifier(score_each(exact_score), text_fault),
    "f1": Verifier(score_each(f1_score), text_fault),
    "regex": Verifier(regex_score, pattern_fault, seconds=lambda settings: settings.seconds),
}
