"""The interface of built-in rewards, the extraction of answers from responses, and their comparison.

A model's text is read in linear time, or in processes that can be killed.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from opd.child import LONGEST, LimitedProcess
from opd.untrusted import convert_decode_errors, read_document

Score = float | dict[str, Any]
"""A number, or `reward` and `feedback`: text that a teacher's prompt may quote."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One full answer, and the label of its row."""

    text: str
    label: Any
    prompt: str = ""
    context: str = ""
    """The model's input: the prompt with its chat template."""


def is_missing(label: object) -> bool:
    """Return True if a row has no label, in the notation of files and tables."""
    return label is None or (isinstance(label, str) and label.strip() in _MISSING)


_MISSING = ("nan", "NaN", "<NA>", "NaT")
"""A table's missing cell as text."""


def written_number(number: int | float) -> str:
    """Write a number as people do, without an exponent: 0.00005, and not 5e-05."""
    return str(number) if isinstance(number, int) else format(Decimal(repr(number)), "f")


@dataclass(frozen=True, slots=True)
class Verifier:
    """The functions of a built-in reward."""

    score: Callable[[Any, Sequence[Answered]], list[Score]]
    """Scores all answers of a batch with its settings: one `Score` each."""
    label_fault: Callable[[Any, Any], str | None]
    """Returns the fault of a label, such as `is missing; give ...`, or None for a good one."""
    require: Callable[[Any], None] = lambda settings: None
    """Raises `MissingExtraError` or `RewardError` if it cannot work with these settings here."""
    seconds: Callable[[Any], float] = lambda settings: 0.0
    """The longest time of one answer, by the reward's own limits."""
    answer: Callable[[Any, str], str | None] = lambda settings, text: extract_answer(text, settings.extract)
    """Returns the answer in a response, for a vote among several, or None if there is none."""


def score_each(score: Callable[[Any, Answered], Score]) -> Callable[[Any, Sequence[Answered]], list[Score]]:
    """Wrap a cheap `score` of one answer to score all in turn."""
    return lambda settings, answers: [score(settings, answer) for answer in answers]


WORKERS = max(1, min(8, os.cpu_count() or 1))
"""Answers that are scored concurrently."""
_MEMORY = 1 << 30
_FEW = 4
"""Answers for which no further process is started."""

One = TypeVar("One")
Result = TypeVar("Result")


def side_by_side(work: Callable[[One, int], Result], many: Sequence[One]) -> list[Result]:
    """Return `work(one, number of the worker)` of each, in order. The first error is raised."""
    workers = min(WORKERS, -(-len(many) // _FEW))
    if workers < 2:
        return [work(one, 0) for one in many]
    remaining, lock = list(enumerate(many))[::-1], threading.Lock()
    results: dict[int, Result] = {}

    def run_worker(number: int) -> None:
        while True:
            with lock:
                if not remaining:
                    return
                index, one = remaining.pop()
            results[index] = work(one, number)

    with ThreadPoolExecutor(workers, "reward") as pool:
        for done in [pool.submit(run_worker, number) for number in range(workers)]:
            done.result()
    return [results[index] for index in range(len(many))]


_pools: dict[tuple[int, str, int], LimitedProcess] = {}
_making = threading.Lock()


def compared(module: str, requests: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the result of `module.answer` for each request, in processes that are killed if one takes more
    than `seconds` of processor time or too much memory. The result is empty then, and after any other
    failure.
    """

    def send_request(request: dict[str, Any], number: int) -> dict[str, Any]:
        # A forked process has workers of its own, because it does not share pipes with its parent.
        key = (os.getpid(), module, number)
        with _making:
            if key not in _pools:
                _pools[key] = LimitedProcess(module, _MEMORY)
            worker = _pools[key]
        reply = worker.request_answer(request, seconds)
        if reply is None:
            return {}
        with convert_decode_errors(ValueError):
            result = read_document(reply, LONGEST)
        return result if isinstance(result, dict) else {}

    return side_by_side(send_request, requests)


def match_patterns(
    patterns: Sequence[str],
    texts: Sequence[str],
    groups: Sequence[str | int | None],
    seconds: float,
    *,
    full: bool = False,
    ignore_case: bool = False,
) -> list[dict[str, Any]]:
    """Return for each of `patterns` if it `matches` its text, and the last match's group as `caught`. With
    group None only the former. Empty if the search took more than `seconds`.
    """
    requests = [
        {"pattern": pattern, "text": text, "group": group, "full": full, "ignore_case": ignore_case}
        for pattern, text, group in zip(patterns, texts, groups, strict=True)
    ]
    return compared(__name__, requests, seconds)


def prepare() -> None:
    """Runs in the searching process, which has nothing to import."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the searching process: see `match_patterns`."""
    pattern = re.compile(request["pattern"], re.IGNORECASE if request["ignore_case"] else 0)
    if request["full"]:
        match = pattern.fullmatch(request["text"])
    elif request["group"] is None:
        match = pattern.search(request["text"])
    else:
        last = deque(pattern.finditer(request["text"]), maxlen=1)
        match = last[0] if last else None
    if match is None or request["group"] is None:
        return {"matches": match is not None}
    return {"matches": True, "caught": match[request["group"]]}


_THOUGHT = ("<think>", "</think>")
_ANSWERS = "answer|antwort|réponse|reponse|respuesta|resposta|risposta|odpowiedź|ответ|答案|回答|답|정답"
_MARK = re.compile(
    rf"####|\banswer\s+is\b\s*:?|(?<!\w)(?:{_ANSWERS})\s*[:\uff1a]|答案[是为為]", re.IGNORECASE
)
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_DRESS = re.compile(r"<\|[^|<>]{1,40}\|>|</?(?:b|i|em|strong|p|br|code|s|sub|sup)/?>|`")
"""Marks that show how an answer looks, or where a turn ends."""
_TRIES = 8
"""Most boxes without an end."""


def extract_answer(text: str, methods: Sequence[str]) -> str | None:
    """Return the answer of the first of `methods` that finds one, or None if none does.

    A model's thoughts are no answer. Text up to the last `</think>` is left out, and all of a response whose
    `<think>` has no end.
    """
    answer = without_thoughts(text)
    for method in methods:
        extracted = METHODS[method](answer)
        if extracted is not None and extracted.strip():
            return extracted.strip()
    return None


def without_thoughts(text: str) -> str:
    opening, closing = _THOUGHT
    if closing in text:
        text = text.rpartition(closing)[2]
    return text.partition(opening)[0]


def find_boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and content of each `\\boxed{...}` that has an end, from the last to the first."""
    stop, tries = len(text), _TRIES
    while tries:
        start = max(text.rfind("\\boxed", 0, stop), text.rfind("\\fbox", 0, stop))
        if start < 0:
            return
        opened = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
        content = _braced_text(text, opened.end()) if opened else None
        if opened is None or content is None:
            tries -= 1
        else:
            yield start, opened.end() + len(content) + 1, content
        stop = start


def _braced_text(text: str, start: int) -> str | None:
    """Return the text from `start`, behind a brace, to the brace that closes it."""
    depth = 1
    for sign in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(sign[0], 0)
        if depth == 0:
            return text[start : sign.start()]
    return None


def _marked_answer(text: str) -> str | None:
    """Find the last `<answer>` tags, or the line after the last `Answer:`, `answer is` or `####`."""
    head, end, _ = text.rpartition("</answer>")
    if end and "<answer>" in head:
        inner = head.rpartition("<answer>")[2]
        return _marked_answer(inner) or inner
    last = deque(_MARK.finditer(text), maxlen=1)
    if not last:
        return None
    line = text[last[0].end() :].lstrip(" \t*_:").partition("\n")
    answer = line[0] if line[0].strip(" *_") else line[2].lstrip().partition("\n")[0]
    return _DRESS.sub("", answer).strip(" \t*_").rstrip(" \t*_.,;:。\uff0e✓✔✅")


def _last_number(text: str) -> str | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return last[0][0].replace(",", "").replace("\u2212", "-") if last else None


def _last_line(text: str) -> str | None:
    return text.strip().rpartition("\n")[2].strip(" \t*_")


def _code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of blocks in lines of three backticks or tildes. The last may lack its end."""
    blocks: list[tuple[str, list[str]]] = []
    inside = ""
    for line in text.split("\n"):
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and inside in ("", mark):
            language = (line.strip().strip("`~").split() or [""])[0].lower()
            if not inside or language:
                blocks.append((language, []))
            inside = mark if not inside or language else ""
        elif inside:
            blocks[-1][1].append(line)
    return [(language, "\n".join(lines)) for language, lines in blocks]


def _python_block(text: str) -> str | None:
    blocks = _code_blocks(text)
    python = [content for language, content in blocks if language in ("python", "py", "python3")]
    candidates = python or [content for language, content in blocks if not language]  # such as output
    return candidates[-1] if candidates else None


def _json_block(text: str) -> str | None:
    blocks = [content for language, content in _code_blocks(text) if language in ("", "json")]
    if blocks:
        return blocks[-1]
    starts = [index for index in (text.find("{"), text.find("[")) if index >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    return text[min(starts) : end + 1] if starts and end > min(starts) else text


METHODS: dict[str, Callable[[str], str | None]] = {
    "whole": lambda text: text,
    "boxed": lambda text: next((content for _, _, content in find_boxes(text)), None),
    "answer": _marked_answer,
    "number": _last_number,
    "last_line": _last_line,
    "code": _python_block,
    "json": _json_block,
}
