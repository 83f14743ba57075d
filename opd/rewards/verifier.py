"""What the file of a built-in reward gives, and the processes in which answers are compared."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from opd.foreign import decoding, read_document
from opd.limited import LONGEST, LimitedProcess
from opd.rewards.extract import extracted

Score = float | dict[str, float]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, whole, and the label of its row."""

    text: str
    label: Any
    prompt: str = ""
    """What was asked, as the data has it."""
    context: str = ""
    """What the model has read: the prompt with its chat template."""


def is_missing(label: Any) -> bool:
    """Whether a row has no label, as files and tables have it."""
    return label is None or (isinstance(label, str) and label.strip() in _MISSING)


_MISSING = ("nan", "NaN", "<NA>", "NaT")
"""What a table's missing cell is as text."""


def written_number(number: int | float) -> str:
    """A number as people write it, without an exponent: 0.00005, and not 5e-05."""
    return str(number) if isinstance(number, int) else format(Decimal(repr(number)), "f")


def nothing_to_require(settings: Any) -> None:
    """The `require` of a reward that needs nothing."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the file of a built-in reward gives."""

    score: Callable[[Any, Sequence[Answered]], list[Score]]
    """With its settings, all answers of a batch: one number or parts each."""
    label_fault: Callable[[Any, Any], str | None]
    """With its settings, what a label has to be and is not: `is missing; give ...`. `None` for a good one."""
    require: Callable[[Any], None] = nothing_to_require
    """Raises `MissingExtraError` or `RewardError` where it cannot work with these settings here."""
    seconds: Callable[[Any], float] = lambda settings: 0.0
    """The longest that one answer may take, by the reward's own limits."""
    answer: Callable[[Any, str], str | None] = lambda settings, text: extracted(text, settings.extract)
    """With its settings, the answer that stands in a response, for a vote among several; `None` where none
    does."""


def each(score: Callable[[Any, Answered], Score]) -> Callable[[Any, Sequence[Answered]], list[Score]]:
    """The `score` of a reward that takes no time: one answer after the other."""
    return lambda settings, answers: [score(settings, answer) for answer in answers]


WORKERS = max(1, min(8, os.cpu_count() or 1))
"""Answers that are looked at side by side."""
_MEMORY = 1 << 30
_FEW = 4
"""Answers for which no further process is started."""

One = TypeVar("One")
Result = TypeVar("Result")


def side_by_side(work: Callable[[One, int], Result], many: Sequence[One]) -> list[Result]:
    """`work(one, number of the worker)` of each; in order. The first error is raised."""
    workers = min(WORKERS, -(-len(many) // _FEW))
    if workers < 2:
        return [work(one, 0) for one in many]
    rest, lock = list(enumerate(many))[::-1], threading.Lock()
    found: dict[int, Result] = {}

    def take(number: int) -> None:
        while True:
            with lock:
                if not rest:
                    return
                place, one = rest.pop()
            found[place] = work(one, number)

    with ThreadPoolExecutor(workers, "reward") as pool:
        for done in [pool.submit(take, number) for number in range(workers)]:
            done.result()
    return [found[place] for place in range(len(many))]


_pools: dict[tuple[int, str, int], LimitedProcess] = {}
_making = threading.Lock()


def _process(module: str, number: int) -> LimitedProcess:
    """This process's own: a forked one does not share pipes with its parent."""
    key = (os.getpid(), module, number)
    with _making:
        if key not in _pools:
            _pools[key] = LimitedProcess(module, _MEMORY)
        return _pools[key]


def compared(module: str, requests: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """What `answer` of `module` says of each request, in processes that are ended where one takes more than
    `seconds` of processor time or too much memory; an empty answer then, and for whatever else goes wrong.
    """

    def ask(request: dict[str, Any], number: int) -> dict[str, Any]:
        said = _process(module, number).ask(request, seconds)
        if said is None:
            return {}
        with decoding(ValueError):
            found = read_document(said, LONGEST)
        return found if isinstance(found, dict) else {}

    return side_by_side(ask, requests)
