"""`reward: python`: code that passes tests, in a sandbox. The expected results are never in the process that
runs the answer's code.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from opd.config.rewards import PythonReward
from opd.rewards.verifier import Answered, Score, Verifier, extract_answer, is_missing, side_by_side
from opd.sandbox.answers import answer_limits, find_sandbox, run_programs, run_tests
from opd.sandbox.grader import OWN
from opd.sandbox.protocol import Limits
from opd.untrusted import shorten_text

_WANTED = (
    "give tests as code, a list of such, {test, entry_point} or {inputs, outputs} with fn_name for calls"
)


def _run_limits(settings: PythonReward) -> Limits:
    return answer_limits(settings.seconds, settings.memory_mb << 20, settings.output_mb << 20)


def require(settings: PythonReward) -> None:
    """Raise `RewardError` if the sandbox does not work."""
    find_sandbox(settings.sandbox)


def label_fault(settings: PythonReward, label: object) -> str | None:
    """Return the fault of a label without usable tests."""
    if is_missing(label) or label in ("", [], {}):
        return f"is missing; {_WANTED}"
    label = _read_label(label)
    if isinstance(label, dict) and "inputs" in label:
        return _pairs_fault(label, settings.output_mb)
    tests = _code_tests(label)
    if not tests:
        problem = "has no tests" if isinstance(label, dict | list) else f"is a {type(label).__name__}"
        return f"{problem}; {_WANTED}"
    if isinstance(label, dict) and not isinstance(label.get("setup") or "", str):
        return "has a setup that is no text; give the code that runs before each test"
    try:
        with warnings.catch_warnings(action="ignore"):
            sources = [_setup_code(label), *tests]
            for source in sources:
                compile(source, "label", "exec")
            setup, *parsed = map(ast.parse, sources)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"has a test that is no Python ({str(error)[:100]}); mend it"
    absent = _absent_module([setup, *parsed])
    if absent is not None:
        return (
            f"imports {absent}, which is not Python's own, so that no answer passes; leave it out: what an"
            " answer defines is there by its name"
        )
    if not all(_can_decide(one, setup) for one in parsed):
        return (
            "has a test that every answer passes; assert what is expected where it is reached, and call what"
            " asserts it"
        )
    unaskable = _remote_fault([setup, *parsed])
    if unaskable is not None:
        return unaskable
    builtin = next((name for one in parsed if (name := _of_python(one, setup)) is not None), None)
    if builtin is not None:
        return (
            f"tests {builtin}, which is Python's own whatever an answer defines; give fn_name or entry_point"
        )
    return None


def _can_decide(test: ast.Module, setup: ast.Module) -> bool:
    """Return True if a part of `test` can fail: an assertion, an exit or a raised exception."""
    parts = [*ast.walk(test), *ast.walk(setup)]
    if any(_only_prints(part) for part in parts):
        return False
    return _can_fail(test.body, {one.name: _function_bodies(one) for one in parts if isinstance(one, _NAMED)})


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FAILING = re.compile(r"assert.*|main|fail|raises|exit|_exit|quit")
"""Names of functions that raise or exit on a failure, such as unittest's and numpy's."""


def _only_prints(part: ast.AST) -> bool:
    """Return True for a call that prints failures, and goes on."""
    if not isinstance(part, ast.Call):
        return False
    whose = getattr(getattr(part.func, "value", None), "id", "")
    name = _name_of(part)
    leaves = not any(one.arg == "exit" for one in part.keywords)
    return name in ("testmod", "TextTestRunner") or (name == "main" and (whose == "pytest" or not leaves))


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _function_bodies(part: ast.AST) -> list[ast.stmt]:
    """The statements of a function, or of all functions of a class."""
    body: list[ast.stmt] = getattr(part, "body", [])
    if not isinstance(part, ast.ClassDef):
        return body
    return [line for one in body if isinstance(one, _NAMED) for line in _function_bodies(one)]


def _can_fail(body: Sequence[ast.AST], functions: Mapping[str, list[ast.stmt]]) -> bool:
    """Return True if a statement of `body` can fail. `functions`: the tests' own functions, by name."""
    for part in body:
        if isinstance(part, ast.Assert) and _is_open(part.test):
            return True
        if isinstance(part, ast.Raise) or (isinstance(part, ast.Call) and _FAILING.fullmatch(_name_of(part))):
            return True
        is_name = isinstance(part, ast.Name | ast.Attribute)
        name = getattr(part, "id", getattr(part, "attr", "")) if is_name else ""
        others = {key: bodies for key, bodies in functions.items() if key != name}
        if name in functions and _can_fail(functions[name], others):
            return True
        if not isinstance(part, _NAMED) and _can_fail(_reached_nodes(part), functions):
            return True
    return False


def _is_open(condition: ast.expr) -> bool:
    """Return True if the assertion can be false."""
    if isinstance(condition, ast.Tuple):
        return not condition.elts
    return not isinstance(condition, ast.Constant) or not condition.value


def _reached_nodes(part: ast.AST) -> list[ast.AST]:
    """The parts of `part` that run, and whose failures are not hidden."""
    if isinstance(part, ast.If) and isinstance(part.test, ast.Constant):
        return list(part.body if part.test.value else part.orelse)
    if isinstance(part, ast.Try):
        for handler in part.handlers:
            name = getattr(handler.type, "id", None)
            everything = handler.type is None or name in ("Exception", "BaseException", "AssertionError")
            if everything and all(isinstance(one, ast.Pass | ast.Continue) for one in handler.body):
                return [*part.orelse, *part.finalbody]
    return list(ast.iter_child_nodes(part))


def _of_python(test: ast.Module, setup: ast.Module) -> str | None:
    """Return the built-in function that a test calls, if it uses no name that an answer could define."""
    parts = [*ast.walk(test), *ast.walk(setup)]
    loads = [one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    defined = {one.id for one in parts if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    defined |= {one.name for one in parts if isinstance(one, _NAMED)} | {
        one.arg for one in parts if isinstance(one, ast.arg)
    }
    defined |= {(one.asname or one.name).partition(".")[0] for one in parts if isinstance(one, ast.alias)}
    called = [_name_of(one) for one in ast.walk(test) if isinstance(one, ast.Call)]
    if any(name not in defined and not hasattr(builtins, name) for name in loads):
        return None
    return next((name for name in called if hasattr(builtins, name)), None)


def _remote_fault(parsed: Sequence[ast.Module]) -> str | None:
    """Return the reason why no answer can pass tests, because its code runs in another process."""
    parts = [part for one in parsed for part in ast.walk(one)]
    if any(isinstance(part, ast.Call) and _name_of(part) == "redirect_stdout" for part in parts):
        return "reads what answers print by redirect_stdout, and that goes elsewhere; give inputs and outputs"
    caught = _caught_exception(parts)
    if caught is not None:
        return (
            f"catches {caught}, an exception of the answer's own, which comes from another process as"
            " RuntimeError; catch Exception"
        )
    if _hands_function(parts):
        return (
            "hands an answer a function, which stays where the tests are, so that no answer passes; hand over"
            " plain values, or a name that the answer defines"
        )
    kind = _kind_handed(parts)
    if kind is not None:
        return (
            f"hands an answer objects of its class {kind}, which stay where the tests are; say in the"
            " prompt that the answer defines the class, and leave it out of the tests"
        )
    return None


def _kind_handed(parts: Sequence[ast.AST]) -> str | None:
    """Return a class of the tests whose objects are passed to an answer."""
    kinds = {part.name for part in parts if isinstance(part, ast.ClassDef)}
    defined = {part.name for part in parts if isinstance(part, _NAMED)} | set(vars(builtins))
    objects = {
        name.id: _name_of(part.value)
        for part in parts
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call)
        for name in part.targets
        if isinstance(name, ast.Name) and _name_of(part.value) in kinds
    }
    for call in (part for part in parts if isinstance(part, ast.Call) and _name_of(part) not in defined):
        for one in call.args:
            kind = _name_of(one) if isinstance(one, ast.Call) else objects.get(getattr(one, "id", ""))
            if kind in kinds:
                return kind
    return None


def _hands_function(parts: Sequence[ast.AST]) -> bool:
    """Return True if tests pass a function or an iterator of their own to the answer's code."""
    functions = {one.name for one in parts if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    answers = _names_of_answers(parts)
    for call in (part for part in parts if isinstance(part, ast.Call) and _calls_answer(part.func, answers)):
        arguments = [*call.args, *(one.value for one in call.keywords)]
        for one in (item for value in arguments for item in _flat_items(value)):
            if isinstance(one, ast.Lambda | ast.GeneratorExp):
                return True
            if not isinstance(one, ast.Name) or one.id in answers:
                continue
            if one.id in functions or callable(getattr(builtins, one.id, None)):
                return True
    return False


def _calls_answer(called: ast.expr, answers: set[str]) -> bool:
    """Return True if `called` is a function of the answer's, or a method of an object that it makes."""
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
        kind = called.value.func
        return isinstance(kind, ast.Name) and kind.id in answers and kind.id[:1].isupper()
    return isinstance(called, ast.Name) and called.id in answers


def _flat_items(value: ast.expr) -> list[ast.expr]:
    """`value`, or the items in it if it is a list, a tuple or a dictionary."""
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return [one for item in value.elts for one in _flat_items(item)]
    if isinstance(value, ast.Dict):
        return [one for item in value.values for one in _flat_items(item)]
    return [value]


def _names_of_answers(parts: Sequence[ast.AST]) -> set[str]:
    """Names that tests call and do not define, and names of parameters that receive them."""
    defined = _defined_names(parts) | set(vars(builtins))
    if "*" in defined:
        return set()
    called = [part for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)]
    answers = {_name_of(one) for one in called} - defined
    loaded = {one.id for one in parts if isinstance(one, ast.Name)} - defined
    functions = {one.name: one.args.args for one in parts if isinstance(one, ast.FunctionDef)}
    for call in called:
        for one, parameter in zip(call.args, functions.get(_name_of(call), []), strict=False):
            if isinstance(one, ast.Name) and (one.id in loaded or one.id.startswith(OWN)):
                answers.add(parameter.arg)
    return answers


def _defined_names(parts: Sequence[ast.AST]) -> set[str]:
    """Names that tests define or import."""
    defined = {one.name for one in parts if isinstance(one, _NAMED)}
    defined |= {one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    defined |= {one.arg for one in parts if isinstance(one, ast.arg)}
    return defined | {one.asname or one.name for one in parts if isinstance(one, ast.alias)}


def _caught_exception(parts: Sequence[ast.AST]) -> str | None:
    """Return an exception that tests catch, but neither define, import nor have from Python."""
    defined = _defined_names(parts) | set(vars(builtins))
    kinds = [part.type for part in parts if isinstance(part, ast.ExceptHandler)]
    calls = [part for part in parts if isinstance(part, ast.Call) and part.args]
    catching = ("assertRaises", "assertRaisesRegex", "suppress")
    kinds += [call.args[0] for call in calls if _name_of(call) in catching]
    each = [one for kind in kinds for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    names = [one.id for one in each if isinstance(one, ast.Name) and one.id not in defined]
    return names[0] if names and "*" not in defined else None


def _absent_module(parsed: Sequence[ast.Module]) -> str | None:
    """Return a module that tests import and that is not in the standard library."""
    for part in (part for one in parsed for part in ast.walk(one)):
        names = [one.name for one in part.names] if isinstance(part, ast.Import) else []
        if isinstance(part, ast.ImportFrom):
            names = [part.module or ""]
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                return name
    return None


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
        if any("\ud800" <= sign <= "\udfff" for one in (*inputs, *outputs) for sign in one):
            return "has half a character in an input or output, which no program can read; mend it"
        return None
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return f"has the fn_name {str(name)[:40]!r}; give the name of a function"
    lists = all(isinstance(one, list) for one in inputs)
    return None if lists else "has inputs that are no lists of arguments; give one for each call"


def _read_label(label: object) -> Any:
    """Return `label`, or the list or object that it is the JSON text of, as in tables."""
    if isinstance(label, str) and label.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):  # also a list as Python prints it
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return read(label)
    return label


def _code_tests(label: object) -> list[str]:
    """Return the tests that are code, or none if the label has another form."""
    if isinstance(label, str):
        return [label]
    if isinstance(label, list):
        return list(label) if all(isinstance(one, str) for one in label) else []
    if not isinstance(label, dict):
        return []
    if isinstance(label.get("test"), str) and isinstance(label.get("entry_point"), str):
        name = label["entry_point"]
        return [f"{label['test']}\n\ncheck({OWN if hasattr(builtins, name) else ''}{name})\n"]
    return _code_tests(_read_label(label.get("tests", label.get("test_list"))))


def _setup_code(label: object) -> str:
    return str(label.get("setup") or "") if isinstance(label, dict) else ""


def run_label(settings: PythonReward, answer: Answered) -> tuple[list[bool], str]:
    """Return for each test of the label whether it passes, and what is wrong with the first that does not."""
    label, limits = _read_label(answer.label), _run_limits(settings)
    source = extract_answer(answer.text, settings.extract)
    pairs = isinstance(label, dict) and "inputs" in label
    tests = label["inputs"] if pairs else _code_tests(label)
    if source is None:
        return [False] * len(tests), "There is no code."
    sandbox = find_sandbox(settings.sandbox)
    errors: list[str] = []
    if pairs and not label.get("fn_name"):
        written = run_programs(sandbox, source, label["inputs"], limits)
        fails = "none: it ended with an error, or took too long"
        told = (
            f"Input:\n{_shorten(text)}\nExpected output:\n{_shorten(wanted)}\nOutput:\n"
            f"{fails if output is None else _shorten(output)}"
            for text, wanted, output in zip(label["inputs"], label["outputs"], written, strict=True)
        )
        passed = [
            output is not None and _stripped_lines(output) == _stripped_lines(wanted)
            for output, wanted in zip(written, label["outputs"], strict=True)
        ]
    elif pairs:
        wrapped = all(isinstance(one, list) and len(one) == 1 for one in label["outputs"])
        calls = [
            {
                "call": label["fn_name"],
                "arguments": arguments,
                "expected": [expected, *(expected if wrapped else [])],
            }
            for arguments, expected in zip(label["inputs"], label["outputs"], strict=True)
        ]
        passed = run_tests(sandbox, source, calls, "", limits, errors)
        told = (
            f"{one['call']}({_shorten(', '.join(map(repr, one['arguments'])))}) has to return"
            f" {_shorten(repr(one['expected'][-1]))}."
            for one in calls
        )
    else:
        passed = run_tests(sandbox, source, tests, _setup_code(label), limits, errors)
        told = (f"This test fails:\n{_shorten(one)}" for one in tests)
    if all(passed):
        return passed, ""
    first = next(text for text, is_right in zip(told, passed, strict=True) if not is_right)
    return passed, "\n".join([first, *errors])


def _shorten(text: str) -> str:
    """`text` as feedback shows it: the rest of the feedback has room beside it."""
    return shorten_text(text, 3000)


def _stripped_lines(text: str) -> list[str]:
    """Lines of `text`, without trailing blanks and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def score(settings: PythonReward, answers: Sequence[Answered]) -> list[Score]:
    """1 if all tests pass, else 0, or with `partial` their share. Feedback is the first test that fails."""

    def score_answer(answer: Answered, number: int) -> Score:
        passed, feedback = run_label(settings, answer)
        reward = sum(passed) / len(passed) if settings.partial else float(all(passed))
        return {"reward": reward, "feedback": feedback} if feedback else reward

    return side_by_side(score_answer, answers)


KINDS = {"python": Verifier(score, label_fault, require, lambda settings: _run_limits(settings).seconds)}
