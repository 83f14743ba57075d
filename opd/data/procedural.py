"""Generated prompts: digit tasks for a character model, and `reasoning-gym`'s for text.

A digit task has one right rule and one consistent wrong rule close to it. Its prompts are distinct strings of
digits, split by their hash. Add one here, or register your own. From the library come generators and
verifiers.
"""

from __future__ import annotations

import difflib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from opd.config.recipe import DomainConfig
from opd.errors import DataError, needs_extra, reason_of
from opd.imports import import_attribute
from opd.rollout.prompts import Domain, Prompt, hash_fraction, raw_stream

ALPHABET = "0123456789="

TASKS: dict[str, type[DigitTask]] = {}
"""Name -> task. A recipe names it after `procedural:`."""


class DigitTask(ABC):
    """Maps a string of digits to another. All tasks share the same strings; a tag tells them apart. The
    prompt is `<sort>31415926=` and the answer `11234569`.
    """

    name: str

    @property
    def tag(self) -> str:
        """First token of a prompt."""
        return f"<{self.name}>"

    @abstractmethod
    def right(self, digits: str) -> str:
        """Return the right answer."""

    @abstractmethod
    def wrong_rule(self, digits: str) -> str:
        """The answer of an algorithm near the right one, a habit for reinforcement learning to break."""

    def corrupt(self, answer: str, rng: np.random.Generator) -> str:
        """Replace one to three digits of `answer` by other digits, so the result always differs."""
        count = min(int(rng.integers(1, 4)), len(answer))
        digits = list(answer)
        for index in rng.choice(len(answer), size=count, replace=False):
            digits[index] = str((int(digits[index]) + int(rng.integers(1, 10))) % 10)
        return "".join(digits)

    def prompt(self, digits: str) -> str:
        """Return the prompt's text."""
        return f"{self.tag}{digits}="

    def digits(self, prompt: str) -> str:
        """Return the digits of a prompt's text."""
        return prompt.removeprefix(self.tag).removesuffix("=")

    def demonstration(self, prompt: str, rng: np.random.Generator, right: float, wrong_rule: float) -> str:
        """Return an answer to a prompt's text: right with probability `right`, by the wrong rule with
        `wrong_rule`, else corrupted.
        """
        digits = self.digits(prompt)
        draw = rng.random()
        if draw < right:
            return self.right(digits)
        if draw < right + wrong_rule:
            return self.wrong_rule(digits)
        return self.corrupt(self.right(digits), rng)


def register(name: str) -> Callable[[type[DigitTask]], type[DigitTask]]:
    """Decorate a class, which becomes `procedural:NAME`. Raises `ValueError` if the name is taken."""

    def add(task: type[DigitTask]) -> type[DigitTask]:
        if name in TASKS:
            raise ValueError(f"a procedural task {name!r} is registered already; choose another name")
        task.name = name
        TASKS[name] = task
        return task

    return add


def _map_digits(digits: str, offset: int, sign: int = 1) -> str:
    """Map every digit `d` to `(offset + sign * d) mod 10`."""
    return "".join(str((offset + sign * int(digit)) % 10) for digit in digits)


@register("sort")
class Sort(DigitTask):
    """Ascending; the wrong rule sorts descending."""

    def right(self, digits: str) -> str:
        return "".join(sorted(digits))

    def wrong_rule(self, digits: str) -> str:
        return "".join(sorted(digits, reverse=True))


@register("reverse")
class Reverse(DigitTask):
    """Back to front; the wrong rule leaves the string as it is."""

    def right(self, digits: str) -> str:
        return digits[::-1]

    def wrong_rule(self, digits: str) -> str:
        return digits


@register("add3")
class Add3(DigitTask):
    """Three more, modulo 10, on every digit; the wrong rule adds two."""

    def right(self, digits: str) -> str:
        return _map_digits(digits, 3)

    def wrong_rule(self, digits: str) -> str:
        return _map_digits(digits, 2)


@register("rotate")
class Rotate(DigitTask):
    """Left by two places; the wrong rule moves by one."""

    def right(self, digits: str) -> str:
        return digits[2:] + digits[:2]

    def wrong_rule(self, digits: str) -> str:
        return digits[1:] + digits[:1]


@register("complement")
class Complement(DigitTask):
    """Nine minus each digit; the wrong rule takes them from ten, modulo 10."""

    def right(self, digits: str) -> str:
        return _map_digits(digits, 9, sign=-1)

    def wrong_rule(self, digits: str) -> str:
        return _map_digits(digits, 10, sign=-1)


@register("swap_halves")
class SwapHalves(DigitTask):
    """Second half first; the wrong rule swaps neighbours."""

    def right(self, digits: str) -> str:
        half = len(digits) // 2
        return digits[half:] + digits[:half]

    def wrong_rule(self, digits: str) -> str:
        return "".join(digits[i : i + 2][::-1] for i in range(0, len(digits), 2))


@register("parity")
class Parity(DigitTask):
    """1 for every odd digit, 0 for every even one; the wrong rule marks digits from five up."""

    def right(self, digits: str) -> str:
        return "".join(str(int(digit) % 2) for digit in digits)

    def wrong_rule(self, digits: str) -> str:
        return "".join(str(int(digit) // 5) for digit in digits)


@register("running_sum")
class RunningSum(DigitTask):
    """Sum of the digits so far, modulo 10; the wrong rule sums each digit and its left neighbour only."""

    def right(self, digits: str) -> str:
        return "".join(str(total % 10) for total in accumulate(map(int, digits)))

    def wrong_rule(self, digits: str) -> str:
        neighbours = "0" + digits[:-1]
        return "".join(str((int(a) + int(b)) % 10) for a, b in zip(neighbours, digits, strict=True))


@register("unique")
class Unique(DigitTask):
    """Each digit the first time it appears, so answers differ in length; the wrong rule drops only a digit
    that repeats the one just before it."""

    def right(self, digits: str) -> str:
        return "".join(dict.fromkeys(digits))

    def wrong_rule(self, digits: str) -> str:
        return "".join(d for i, d in enumerate(digits) if i == 0 or digits[i - 1] != d)


_MAX_DIGITS = 18  # a string of digits is drawn as one 64-bit number


def exact_match(completion: str, label: object) -> float:
    """1 if the completion is the label, character for character, else 0."""
    return 1.0 if completion == label else 0.0


def load_procedural(
    task_name: str, name: str, config: DomainConfig, *, seed: int, held_out_prompts: int
) -> Domain:
    """Load `config.prompts` training and `held_out_prompts` held-out prompts of a task. Its name is
    registered, or the dotted path `package.module:Class` of a `DigitTask`.

    A string's own hash decides if it is held out, in every task and with every seed. So no run trains on
    another run's evaluation prompts, and no specialist on another domain's. Raises `DataError` for an unknown
    task or parameter, or if the strings are too short for that many prompts.
    """
    task = _find_task(task_name, name)
    unknown = sorted(config.params.keys() - {"digits"})
    if unknown:
        raise DataError(
            f"domains.{name}.params: unknown parameter {unknown[0]!r}; procedural tasks take `digits` only."
        )
    length = config.params.get("digits", 8)
    if not isinstance(length, int) or isinstance(length, bool) or not 2 <= length <= _MAX_DIGITS:
        raise DataError(
            f"domains.{name}.params.digits is {length!r}; give a whole number from 2 to {_MAX_DIGITS}."
        )
    wanted = (config.prompts, held_out_prompts)
    piles: tuple[list[str], list[str]] = ([], [])
    for digits in _distinct_strings(length, seed):
        pile = int(hash_fraction(digits) < config.held_out)
        if len(piles[pile]) < wanted[pile]:
            piles[pile].append(digits)
        if len(piles[0]) >= wanted[0] and len(piles[1]) >= wanted[1]:
            break
    else:
        raise DataError(
            f"domains.{name}: with {length} digits there are {len(piles[0])} of {wanted[0]} training and "
            f"{len(piles[1])} of {wanted[1]} held-out prompts; raise params.digits, or lower prompts or "
            "evaluation.prompts_per_domain."
        )

    train, held_out = (
        [Prompt.from_content(task.prompt(digits), task.right(digits), name) for digits in strings]
        for strings in piles
    )
    return Domain(name, train, held_out, exact_match, task.demonstration, ALPHABET, [task.tag])


def _find_task(task_name: str, domain: str) -> DigitTask:
    if ":" in task_name:
        where, path = f"domains.{domain}.source", task_name
        task = import_attribute(path, where, DataError)
        if not (isinstance(task, type) and issubclass(task, DigitTask)) or not hasattr(task, "name"):
            raise DataError(
                f"{where}: {path} is no DigitTask with a name; decorate the class with `register`."
            )
        return task()
    if task_name not in TASKS:
        near = difflib.get_close_matches(task_name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(TASKS))}."
        raise DataError(f"domains.{domain}.source: there is no procedural task {task_name!r}; {hint}")
    return TASKS[task_name]()


def _distinct_strings(length: int, seed: int) -> Iterator[str]:
    """Yield distinct strings of `length` digits in an order by `seed`."""
    total = 10**length
    if total <= 1_000_000:
        order = raw_stream("digits", length, seed).random_raw(total).argsort(kind="stable")
        yield from (f"{number:0{length}d}" for number in order.tolist())
        return
    stream = raw_stream("digits", length, seed)
    drawn: set[int] = set()
    # Sparse: collisions are rare, and half of all strings is more than any run needs.
    while len(drawn) < total // 2:
        for number in (stream.random_raw(4096) % total).tolist():
            if number not in drawn:
                drawn.add(number)
                yield f"{number:0{length}d}"


_MOST_TRIES = 2000
"""A task counts as exhausted after this many consecutive entries without a new prompt."""


def load_reasoning_gym(
    task: str, name: str, config: DomainConfig, *, seed: int, held_out_prompts: int
) -> Domain:
    """Distinct questions of a reasoning-gym task, held out by a hash of the question, with its own verifier.

    `config.params` are the task's own arguments, `chat: true` for a user message instead of plain text, and
    `full_marks: true` to score an answer 0 that the verifier does not give 1, such as a nearly right one. A
    label is `{"answer": ..., "index": ...}`, because the verifier generates the entry of that index again. A
    task with few different questions gives fewer training prompts than requested. Raises `DataError` for an
    unknown task or argument, or if nothing is left to train or to evaluate on, and `MissingExtraError`
    without the library.
    """
    params = dict(config.params)
    chat, full_marks = (bool(params.pop(key, False)) for key in ("chat", "full_marks"))
    wanted = (config.prompts, held_out_prompts)
    dataset = _create_dataset(task, name, params | {"seed": seed, "size": _MOST_TRIES * (sum(wanted) + 1)})
    piles: tuple[dict[str, Prompt], dict[str, Prompt]] = ({}, {})
    newest = index = 0
    while index - newest < _MOST_TRIES and any(len(p) < n for p, n in zip(piles, wanted, strict=True)):
        entry = dataset[index]
        question = str(entry["question"])
        pile = int(hash_fraction(question) < config.held_out)
        if question not in piles[pile] and len(piles[pile]) < wanted[pile]:
            content = [{"role": "user", "content": question}] if chat else question
            piles[pile][question] = Prompt.from_content(
                content, {"answer": entry["answer"], "index": index}, name
            )
            newest = index
        index += 1
    if len(piles[0]) < min(1, config.prompts) or len(piles[1]) < min(1, held_out_prompts):
        raise DataError(
            f"domains.{name}: reasoning-gym task {task!r} has only {len(piles[0])} training and "
            f"{len(piles[1])} held-out questions with these params; make them harder or change held_out."
        )
    entry_at = functools.lru_cache(maxsize=4096)(dataset.__getitem__)

    def check(completion: str, label: Any) -> float:
        score = float(dataset.score_answer(completion.strip(), entry_at(label["index"])))
        return score if score == 1 or not full_marks else 0.0  # 1 by rounding is not full marks

    return Domain(name, list(piles[0].values()), list(piles[1].values()), check)


def _create_dataset(task: str, name: str, params: dict[str, Any]) -> Any:
    with needs_extra(f"the source reasoning-gym:{task}", "reasoning-gym"):
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see the library's gallery for its tasks."
        raise DataError(f"domains.{name}.source: there is no reasoning-gym task {task!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(task, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"domains.{name}.params do not fit reasoning-gym task {task!r}: {reason_of(error)}."
        ) from error
