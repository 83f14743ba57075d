"""Where in a response the answer stands. Whatever a model writes is read in linear time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence

_THOUGHT = ("<think>", "</think>")
_ANSWERS = "answer|antwort|réponse|reponse|respuesta|resposta|risposta|odpowiedź|ответ|答案|回答|답|정답"
_MARK = re.compile(
    rf"####|\banswer\s+is\b\s*:?|(?<!\w)(?:{_ANSWERS})\s*[:\uff1a]|答案[是为為]", re.IGNORECASE
)
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_DRESS = re.compile(r"<\|[^|<>]{1,40}\|>|</?(?:b|i|em|strong|p|br|code|s|sub|sup)/?>|`")
"""Marks that show how an answer looks, or where a turn ends."""
_TRIES = 8
"""Boxes that may lack their end."""


def extracted(text: str, ways: Sequence[str]) -> str | None:
    """What the first of `ways` finds that finds anything; `None` where none does.

    A model's thoughts are no answer: what stands up to the last `</think>` is left out, and all of a response
    whose `<think>` has no end.
    """
    answer = answered(text)
    for way in ways:
        found = WAYS[way](answer)
        if found is not None and found.strip():
            return found.strip()
    return None


def answered(text: str) -> str:
    """`text` without thoughts."""
    begin, end = _THOUGHT
    if end in text:
        text = text.rpartition(end)[2]
    return text.partition(begin)[0]


def _boxed(text: str) -> str | None:
    """In the last `\\boxed{...}` that has an end."""
    return next((found for _, _, found in boxes(text)), None)


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each `\\boxed{...}` that has an end, from the last to the first."""
    stop, tries = len(text), _TRIES
    while tries:
        start = max(text.rfind("\\boxed", 0, stop), text.rfind("\\fbox", 0, stop))
        if start < 0:
            return
        opened = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
        found = _braced(text, opened.end()) if opened else None
        if opened is None or found is None:
            tries -= 1
        else:
            yield start, opened.end() + len(found) + 1, found
        stop = start


def _braced(text: str, start: int) -> str | None:
    """From `start`, behind a brace, to the brace that closes it."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[start : found.start()]
    return None


def _answer(text: str) -> str | None:
    """In the last `<answer>` tags, or on the line after the last `Answer:`, `answer is` or `####`."""
    before, end, _ = text.rpartition("</answer>")
    if end and "<answer>" in before:
        inner = before.rpartition("<answer>")[2]
        return _answer(inner) or inner
    last = deque(_MARK.finditer(text), maxlen=1)
    if not last:
        return None
    line = text[last[0].end() :].lstrip(" \t*_:").partition("\n")
    said = line[0] if line[0].strip(" *_") else line[2].lstrip().partition("\n")[0]
    return _DRESS.sub("", said).strip(" \t*_").rstrip(" \t*_.,;:。\uff0e✓✔✅")


def _number(text: str) -> str | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return last[0][0].replace(",", "").replace("\u2212", "-") if last else None


def _last_line(text: str) -> str | None:
    return text.strip().rpartition("\n")[2].strip(" \t*_")


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of what stands between lines of three backticks or tildes; the last may lack its
    end.
    """
    found: list[tuple[str, list[str]]] = []
    inside = ""
    for line in text.split("\n"):
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and inside in ("", mark):
            language = (line.strip().strip("`~").split() or [""])[0].lower()
            if not inside or language:
                found.append((language, []))
            inside = mark if not inside or language else ""
        elif inside:
            found[-1][1].append(line)
    return [(language, "\n".join(lines)) for language, lines in found]


def _code(text: str) -> str | None:
    blocks = _blocks(text)
    named = [content for language, content in blocks if language in ("python", "py", "python3")]
    found = named or [content for language, content in blocks if not language]  # such as what it prints
    return found[-1] if found else None


def _json(text: str) -> str | None:
    blocks = [content for language, content in _blocks(text) if language in ("", "json")]
    if blocks:
        return blocks[-1]
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    return text[min(starts) : end + 1] if starts and end > min(starts) else text


WAYS: dict[str, Callable[[str], str | None]] = {
    "whole": lambda text: text,
    "boxed": _boxed,
    "answer": _answer,
    "number": _number,
    "last_line": _last_line,
    "code": _code,
    "json": _json,
}
