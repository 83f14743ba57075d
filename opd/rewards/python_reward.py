"""`reward: python`: code that passes tests, in a sandbox. What the tests expect is never in the process that
runs the answer's code.
"""

from __future__ import annotations

import ast
import keyword
import warnings
from collections.abc import Sequence
from typing import Any

from opd.config.rewards import PythonReward
from opd.rewards.extract import extracted
from opd.rewards.sandbox import Limits, find_sandbox, run_programs, run_tests
from opd.rewards.verifier import Answered, Score, Verifier, is_missing, side_by_side

_WANTED = (
    "give tests as code, a list of such, {test, entry_point} or {inputs, outputs} with fn_name for calls"
)


def _limits(settings: PythonReward) -> Limits:
    return Limits(settings.seconds, settings.memory_mb << 20, settings.output_mb << 20)


def require(settings: PythonReward) -> None:
    """Raise `RewardError` where the sandbox does not work."""
    find_sandbox(settings.sandbox)


def label_fault(settings: PythonReward, label: Any) -> str | None:
    """A label that holds no tests."""
    if is_missing(label) or label in ("", [], {}):
        return f"is missing; {_WANTED}"
    if isinstance(label, dict) and "inputs" in label:
        return _pairs_fault(label, settings.output_mb)
    tests = _tests(label)
    if not tests:
        what = "has no tests" if isinstance(label, dict | list) else f"is a {type(label).__name__}"
        return f"{what}; {_WANTED}"
    if isinstance(label, dict) and not isinstance(label.get("setup") or "", str):
        return "has a setup that is no text; give the code that runs before each test"
    for test in [*tests, _setup(label)]:
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(test, "label", "exec")
                nothing = test in tests and _does_nothing(ast.parse(test))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"has a test that is no Python ({str(error)[:100]}); mend it"
        if nothing:
            return "has a test that does nothing, which every answer passes; give one that can fail"
    return None


def _does_nothing(test: ast.Module) -> bool:
    """Whether there is nothing but comments, `pass` and values that nobody looks at."""
    return all(isinstance(getattr(one, "value", one), ast.Pass | ast.Constant) for one in test.body)


def _pairs_fault(label: dict[str, Any], most: int) -> str | None:
    inputs, outputs, name = label.get("inputs"), label.get("outputs"), label.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return "has not as many outputs as inputs; give a list of each"
    if not inputs:
        return f"is missing; {_WANTED}"
    if name is None:
        if not all(isinstance(one, str) for one in (*inputs, *outputs)):
            return "has inputs that are no texts; give what a program reads, or fn_name"
        if any(len(one.encode(errors="replace")) > most << 20 for one in (*inputs, *outputs)):
            return f"has an input or output of more than {most} MiB; raise the reward's output_mb"
        broken = any("\ud800" <= sign <= "\udfff" for one in (*inputs, *outputs) for sign in one)
        return (
            "has half a character in an input or output, which no program can read; mend it"
            if broken
            else None
        )
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return f"has the fn_name {str(name)[:40]!r}; give the name of a function"
    lists = all(isinstance(one, list) for one in inputs)
    return None if lists else "has inputs that are no lists of arguments; give one for each call"


def _tests(label: Any) -> list[str]:
    """The tests that are code; none where the label has another form."""
    if isinstance(label, str):
        return [label]
    if isinstance(label, list):
        return list(label) if all(isinstance(one, str) for one in label) else []
    if not isinstance(label, dict):
        return []
    if isinstance(label.get("test"), str) and isinstance(label.get("entry_point"), str):
        return [f"{label['test']}\n\ncheck({label['entry_point']})\n"]
    return _tests(label.get("tests"))


def _setup(label: Any) -> str:
    return str(label.get("setup") or "") if isinstance(label, dict) else ""


def passed(settings: PythonReward, answer: Answered) -> list[bool]:
    """Whether each test of the label passes."""
    label, limits = answer.label, _limits(settings)
    source = extracted(answer.text, settings.extract)
    pairs = isinstance(label, dict) and "inputs" in label
    count = len(label["inputs"]) if pairs else len(_tests(label))
    if source is None:
        return [False] * count
    sandbox = find_sandbox(settings.sandbox)
    if not pairs:
        return run_tests(sandbox, source, _tests(label), _setup(label), limits)
    if label.get("fn_name"):
        calls = [
            {"call": label["fn_name"], "arguments": arguments, "expected": expected}
            for arguments, expected in zip(label["inputs"], label["outputs"], strict=True)
        ]
        return run_tests(sandbox, source, calls, "", limits)
    written = run_programs(sandbox, source, label["inputs"], limits)
    return [
        given is not None and _lines(given) == _lines(wanted)
        for given, wanted in zip(written, label["outputs"], strict=True)
    ]


def _lines(text: str) -> list[str]:
    """Without blanks at the end of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def score(settings: PythonReward, answers: Sequence[Answered]) -> list[Score]:
    """1 where all tests pass, else 0 or, with `partial`, the share that does."""

    def run(answer: Answered, number: int) -> Score:
        results = passed(settings, answer)
        return sum(results) / len(results) if settings.partial else float(all(results))

    return side_by_side(run, answers)


def longest(settings: PythonReward) -> float:
    """Seconds that one answer can take, but for the number of its inputs."""
    return _limits(settings).wall


VERIFIER = Verifier(score, label_fault, require, longest)
