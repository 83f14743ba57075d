"""Prompts of a procedural task: distinct strings of digits, split by their hash."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from opd.config.data import DomainConfig
from opd.data.hashing import fraction, raw_stream
from opd.data.procedural import tasks as _built_in  # noqa: F401 - registers the tasks
from opd.data.procedural.task import ALPHABET, TASKS, DigitTask
from opd.data.prompts import Domain, Prompt
from opd.errors import DataError
from opd.imports import import_attribute

_MAX_DIGITS = 18  # a string of digits is drawn as one 64-bit number


def exact_match(completion: str, label: Any) -> float:
    """1 if the completion is the label, character for character, else 0."""
    return 1.0 if completion == label else 0.0


def load_procedural(
    task_name: str, name: str, config: DomainConfig, *, seed: int, held_out_prompts: int
) -> Domain:
    """`config.prompts` training and `held_out_prompts` held-out prompts of a task, which is a registered name
    or the dotted path `package.module:Class` of a `DigitTask`.

    A string of digits is held out by its own hash, in every task and with every seed: no run ever trains on
    another run's evaluation prompts, and no specialist on another domain's. Raises `DataError` for an unknown
    task or parameter, or if the strings are too short for that many prompts.
    """
    task = _find(task_name, name)
    length = _digits(name, config)
    strings = _Strings(length, config.held_out, seed)
    train, held_out = strings.draw(name, config.prompts, held_out_prompts)

    def prompts(chosen: list[str]) -> list[Prompt]:
        return [Prompt.of(task.prompt(digits), task.right(digits), name) for digits in chosen]

    return Domain(
        name, prompts(train), prompts(held_out), exact_match, task.demonstration, ALPHABET, [task.tag]
    )


def _find(task_name: str, domain: str) -> DigitTask:
    if ":" in task_name:
        return _own_task(task_name, domain)
    if task_name not in TASKS:
        near = difflib.get_close_matches(task_name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(TASKS))}."
        raise DataError(f"domains.{domain}.source: there is no procedural task {task_name!r}; {hint}")
    return TASKS[task_name]()


def _own_task(path: str, domain: str) -> DigitTask:
    """A task outside this package, by the dotted path of its class."""
    where = f"domains.{domain}.source"
    task = import_attribute(path, where, DataError)
    if not (isinstance(task, type) and issubclass(task, DigitTask)) or not hasattr(task, "name"):
        raise DataError(f"{where}: {path} is no DigitTask with a name; decorate the class with `register`.")
    return task()


def _digits(domain: str, config: DomainConfig) -> int:
    unknown = sorted(config.params.keys() - {"digits"})
    if unknown:
        raise DataError(
            f"domains.{domain}.params: unknown parameter {unknown[0]!r}; procedural tasks take `digits` only."
        )
    digits = config.params.get("digits", 8)
    if not isinstance(digits, int) or isinstance(digits, bool) or not 2 <= digits <= _MAX_DIGITS:
        raise DataError(
            f"domains.{domain}.params.digits is {digits!r}; give a whole number from 2 to {_MAX_DIGITS}."
        )
    return digits


class _Strings:
    """Distinct strings of digits in a seeded order, dealt to two piles by their hash."""

    def __init__(self, length: int, held_out_share: float, seed: int) -> None:
        self._length = length
        self._share = held_out_share
        self._seed = seed

    def draw(self, domain: str, train: int, held_out: int) -> tuple[list[str], list[str]]:
        """`train` and `held_out` strings; `DataError` if there are not as many."""
        piles: tuple[list[str], list[str]] = ([], [])
        wanted = (train, held_out)
        for digits in self._distinct():
            pile = int(fraction(digits) < self._share)
            if len(piles[pile]) < wanted[pile]:
                piles[pile].append(digits)
            if len(piles[0]) >= train and len(piles[1]) >= held_out:
                return piles
        raise DataError(
            f"domains.{domain}: with {self._length} digits there are {len(piles[0])} of {train} training and "
            f"{len(piles[1])} of {held_out} held-out prompts; raise params.digits, or lower prompts or "
            "evaluation.prompts_per_domain."
        )

    def _distinct(self) -> Iterator[str]:
        total = 10**self._length
        if total <= 1_000_000:
            order = raw_stream("digits", self._length, self._seed).random_raw(total).argsort(kind="stable")
            yield from (f"{number:0{self._length}d}" for number in order.tolist())
            return
        stream = raw_stream("digits", self._length, self._seed)
        seen: set[int] = set()
        # Sparse: collisions are rare, and half of all strings is more than any run asks for.
        while len(seen) < total // 2:
            for number in (stream.random_raw(4096) % total).tolist():
                if number not in seen:
                    seen.add(number)
                    yield f"{number:0{self._length}d}"
