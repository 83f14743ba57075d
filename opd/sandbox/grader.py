"""The programs in the sandbox: an answer's code, and the tests that call it, in separate processes.

The process with the answer's code never holds the expected results. It gets a call of a function and returns
the result, or gets a standard input and leaves a standard output. Another process (`test`), or the one
outside, compares. So an early exit, an object that equals everything or a changed test harness gains nothing.
Messages between the two are JSON of plain values. Objects of the answer's own classes stay in its process and
are named by a number. Imports only the standard library, and runs with `python -I -S`.
"""

from __future__ import annotations

import atexit
import builtins
import json
import operator
import os
import select
import struct
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import CoroutineType, ModuleType
from typing import Any, BinaryIO

if __name__ == "__main__":  # if imported, no folder of opd may come before packages of its name
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import lockdown  # pyright: ignore[reportMissingImports]

_LONGEST = 1 << 24
OWN = "_answers_own_"
"""Prefix of a built-in name that an answer has redefined."""
SIZE = struct.Struct("<q")
"""Before each output of a program. Below 0 if it failed."""


class Objects:
    """Objects that JSON cannot represent, by number. Their own side holds the objects themselves."""

    def __init__(self, stand_in: Callable[[int], Any] | None = None) -> None:
        self.held: list[Any] = []
        self._stand_in = stand_in
        self._numbers: dict[int, int] = {}
        self._standing: dict[int, Any] = {}

    def pack(self, value: Any) -> Any:
        """Encode `value` for JSON: a plain one as it is, anything else as [kind, ...]."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, RemoteObject):
            return ["own", object.__getattribute__(value, "_number")]
        fields = getattr(type(value), "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            return ["named", type(value).__name__, list(fields), *map(self.pack, value)]
        name = next((name for kind, name in _MANY.items() if isinstance(value, kind)), None)
        if name is not None:
            return [name, *map(self.pack, value)]
        if isinstance(value, dict):
            return ["dict", *([self.pack(k), self.pack(v)] for k, v in value.items())]
        return self._pack_rare(value)

    def _pack_rare(self, value: object) -> Any:
        if isinstance(value, bytes | bytearray):
            return ["bytes", value.hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        for kind, plain in _PLAIN.items():  # of a class of its own, such as an enumeration's
            if isinstance(value, kind):
                return plain(value)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _MADE:
            return ["made", name, *map(self.pack, _MADE[name](value))]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if self._stand_in is not None:
            raise TypeError(f"a {type(value).__name__} cannot be handed to the answer's code")
        if id(value) not in self._numbers:  # a held object keeps its id, so it has one number
            self._numbers[id(value)] = len(self.held)
            self.held.append(value)
        return ["coroutine" if isinstance(value, CoroutineType) else "object", self._numbers[id(value)]]

    def unpack(self, packed: Any) -> Any:
        """Decode the other side's `pack`."""
        if not isinstance(packed, list):
            return packed
        kind, *parts = packed
        if kind == "own":
            return self.held[parts[0]]
        if kind in ("object", "coroutine") and self._stand_in is not None:
            stands = self._standing.setdefault(int(parts[0]), self._stand_in(int(parts[0])))
            return stands if kind == "object" else _await_remote(stands)
        if kind == "module":  # the module of the same name, which compares as usual
            return import_module(parts[0])
        if kind == "dict":
            return {self.unpack(k): self.unpack(v) for k, v in parts}
        if kind == "bytes":
            return bytes.fromhex(parts[0])
        if kind == "named":
            return namedtuple(parts[0], parts[1])(*map(self.unpack, parts[2:]))
        if kind == "made" and parts[0] in _MADE:
            module, _, name = parts[0].rpartition(".")
            rebuilt_class = getattr(import_module(module), name)
            return getattr(rebuilt_class, "fromisoformat", rebuilt_class)(*map(self.unpack, parts[1:]))
        if kind == "complex":
            return complex(*parts)
        return next(of for of, name in _MANY.items() if name == kind)(map(self.unpack, parts))


_MANY: dict[Any, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_PLAIN: dict[Any, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_MADE: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (str(value),),
    "datetime.date": lambda value: (value.isoformat(),),
    "datetime.time": lambda value: (value.isoformat(),),
    "datetime.datetime": lambda value: (value.isoformat(),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "collections.deque": lambda value: (list(value),),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
}
"""Classes of the standard library, encoded by the arguments that rebuild their objects."""


_CHANGED = (list, dict, set)
"""Arguments that a function may change. Their new contents are returned, too."""


def _remote_method(does: str, result: Callable[[Any], Any] | None = None, answers_only: bool = False) -> Any:
    """Build a method that runs in the answer's process. `result`: converts the value to a plain one.
    `answers_only`: takes only objects of the answer's.
    """

    def method(self: RemoteObject, *others: Any) -> Any:
        value = _call_remote(self, does, *(map(_of_the_answer, others) if answers_only else others))
        return value if result is None else result(value)

    return method


class RemoteObject:
    """An object of the answer's, as the tests see it. Its methods run in the answer's process, except those
    by which it could judge itself. It equals only objects of the answer's, and its contents are searched
    here.
    """

    def __init__(self, number: int, send_call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_send_call", send_call)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _call_remote(self, "call", *arguments, **keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and bool(_call_remote(self, "eq", other))

    def __contains__(self, wanted: Any) -> bool:
        return any(wanted == item for item in self)

    def __iter__(self) -> Iterator[Any]:
        iterator = _call_remote(self, "iter")
        while True:
            has_item, item = _call_remote(iterator, "next")
            if not has_item:
                return
            yield item

    def __next__(self) -> Any:
        has_item, item = _call_remote(self, "next")
        if not has_item:
            raise StopIteration
        return item

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and bool(_call_remote(self, "isinstance", instance))

    def __exit__(self, *raised: object) -> None:
        """End the block. An error of the test is not passed on, so the answer cannot hide it."""
        _call_remote(self, "exit")

    __getattr__, __getitem__, __enter__, __neg__ = map(_remote_method, ("get", "getitem", "enter", "neg"))
    __setattr__, __setitem__, __mul__, __abs__ = map(_remote_method, ("set", "setitem", "mul", "abs"))
    __add__, __sub__ = _remote_method("add", answers_only=True), _remote_method("sub", answers_only=True)
    __lt__, __le__, __ge__, __gt__ = (
        _remote_method(does, bool, answers_only=True) for does in ("lt", "le", "ge", "gt")
    )
    __len__, __int__, __float__ = (
        _remote_method("len", int),
        _remote_method("int", int),
        _remote_method("float", float),
    )
    __bool__, __str__, __repr__ = (
        _remote_method("bool", bool),
        _remote_method("str", str),
        _remote_method("repr", str),
    )
    __hash__ = _remote_method("hash", hash)


def _of_the_answer(other: object) -> Any:
    if not isinstance(other, RemoteObject):
        raise TypeError("an object of the answer's is compared with another of its own alone")
    return other


def _call_remote(remote: RemoteObject, *words: Any, **keywords: Any) -> Any:
    send_call = object.__getattribute__(remote, "_send_call")
    return send_call(object.__getattribute__(remote, "_number"), *words, **keywords)


async def _await_remote(coroutine: RemoteObject) -> Any:
    """Stand for a coroutine of the answer's in the tests. It runs in the answer's process when awaited."""
    return _call_remote(coroutine, "await")


def _run_coroutine(coroutine: Any) -> Any:
    asyncio = import_module("asyncio")
    if not _LOOPS:  # one for all, because objects shared by coroutines belong to it
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0].run_until_complete(coroutine)


_LOOPS: list[Any] = []
_STOP = object()


def _next_item(value: Any) -> tuple[bool, Any]:
    item = next(value, _STOP)
    return (False, None) if item is _STOP else (True, item)


_DOES: dict[str, Callable[..., Any]] = {
    "call": lambda value, *arguments, **keywords: value(*arguments, **keywords),
    "get": getattr, "set": setattr, "eq": lambda a, b: a == b, "hash": hash, "iter": iter,
    "next": _next_item, "len": len, "bool": bool, "str": str, "repr": repr,
    "getitem": lambda value, key: value[key], "lt": lambda a, b: a < b, "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b, "ge": lambda a, b: a >= b, "neg": lambda value: -value, "abs": abs, "int": int,
    "float": float, "enter": lambda value: value.__enter__(),
    "exit": lambda value: value.__exit__(None, None, None), "setitem": operator.setitem,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "await": _run_coroutine,
    "isinstance": lambda kind, value: isinstance(value, kind),
}  # fmt: skip


def serve(job: Mapping[str, Any]) -> None:
    """Run the answer's code, send its names, then serve the tests' calls until they end."""
    requests, replies = os.fdopen(job["read"], "rb"), os.fdopen(job["write"], "wb")
    objects = Objects()
    sys.modules["answer"] = ModuleType("answer")  # dataclasses look here for the names of a class
    space = vars(sys.modules["answer"])
    space["__builtins__"] = vars(builtins) | _usual_names()
    fault = ""
    try:
        exec(compile(job["source"], "answer.py", "exec", dont_inherit=True), space)
    except BaseException as error:  # names defined before the error can still be called
        space.pop("__builtins__", None)
        fault = _error_text(error)
    names = {name: value for name, value in space.items() if not name.startswith("__")}
    _send_line(replies, {name: objects.pack(value) for name, value in names.items()} | {_FAULT: fault})
    while line := requests.readline(_LONGEST):
        number, does, arguments, keywords = json.loads(line)
        try:
            values = [objects.unpack(one) for one in arguments]
            value = _DOES[does](objects.held[number], *values, **{k: objects.unpack(v) for k, v in keywords})
            changed = [objects.pack(one) if isinstance(one, _CHANGED) else None for one in values]
            answer = {"value": objects.pack(value), "changed": changed}
        except BaseException as error:
            answer = {"raised": _kind_name(error), "text": _plain_text(error)[:MOST_ERROR]}
        _send_line(replies, answer)


_FAULT = "the code's own error"
"""Key beside the names that the answer's code defined. It is no identifier, so it is no name."""
MOST_ERROR = 500
"""Characters of an error."""


def _kind_name(error: BaseException) -> str:
    try:
        return str(type(error).__name__)
    except BaseException:  # the answer's own class
        return "Exception"


def _plain_text(error: BaseException) -> str:
    try:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except BaseException:  # the answer's own class
        return ""


def _error_text(error: BaseException) -> str:
    return f"{_kind_name(error)}: {_plain_text(error)}"[:MOST_ERROR]


def _usual_names() -> dict[str, Any]:
    """Names that judges of programming tasks import before an answer."""
    names: dict[str, Any] = {}
    for name in ("typing", "collections"):
        module = import_module(name)
        names |= {one: getattr(module, one) for one in module.__all__}
    for name in ("bisect", "collections", "functools", "heapq", "itertools", "math", "re", "string"):
        names[name] = import_module(name)
    return names


def _send_line(pipe: BinaryIO, message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


class AnswerEndedError(BaseException):
    """The answer's process has ended, or its reply is too long. No test that expects an exception has it."""


class AnswerProcess:
    """The process with the answer's code, as the tests see it."""

    def __init__(self, read: int, write: int) -> None:
        self._replies, self._requests = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._objects = Objects(lambda number: RemoteObject(number, self.request_call))
        self._same: dict[Any, Any] = {}
        self.fault = ""
        """The error that ended the code, if one did."""

    def answer_names(self) -> dict[str, Any]:
        """Return the names that the code defined. Built-in names are not replaced: `all` keeps its meaning,
        and so does `__builtins__`, where tests would look for it. The answer's versions are stored behind
        `OWN`.
        """
        names = {}
        try:
            packed = json.loads(self._read_line())
        except AnswerEndedError as ended:
            packed = {_FAULT: str(ended)}
        self.fault = str(packed.pop(_FAULT, ""))[:MOST_ERROR]
        for name, value in packed.items():
            with suppress(Exception):  # a module that is not here
                if name.isidentifier() and not name.startswith("__"):
                    names[f"{OWN}{name}" if hasattr(builtins, name) else name] = self._objects.unpack(value)
        return names

    def _read_line(self) -> bytes:
        line = self._replies.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise AnswerEndedError("The code ended early, took too long, or made too large a value.")
        return line

    def request_call(self, number: int, does: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of a call there. Raises its exception, if that is a built-in one."""
        packed = [self._objects.pack(one) for one in arguments]
        with suppress(BrokenPipeError):  # then there is no reply
            _send_line(
                self._requests,
                [number, does, packed, [[k, self._objects.pack(v)] for k, v in keywords.items()]],
            )
        reply = json.loads(self._read_line())
        if "raised" in reply:
            kind: Any = getattr(builtins, str(reply["raised"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _ENDS):
                kind = RuntimeError  # an exception that ends a loop of the test's would skip its comparisons
            raise kind(str(reply.get("text")))
        for one, packed_change in zip(arguments, reply["changed"], strict=True):
            if packed_change is None or not isinstance(one, _CHANGED):
                continue
            contents = self._objects.unpack(packed_change)
            if type(contents) is type(one) and contents != one:
                one.clear()
                (one.extend if isinstance(one, list) else one.update)(contents)
        value = self._objects.unpack(reply["value"])
        # A member of an enumeration of numbers or texts arrives as one, and tests compare it by `is`.
        short = type(value) is int or (type(value) is str and len(value) < _SHORT)
        return self._same.setdefault(value, value) if short else value


_SHORT = 200
_ENDS = (StopIteration, StopAsyncIteration)


def test(job: Mapping[str, Any]) -> None:
    """Run each test by itself, and write `1` or `0` for it when it has ended. Then write the error of the
    code, or of the first test that fails.
    """
    verdicts = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    answer = AnswerProcess(job["read"], job["write"])
    names, fault = answer.answer_names(), answer.fault
    for one in job["tests"]:
        try:
            _run_test(one, names, job["setup"])
            passed = True
        except BaseException as error:  # an assertion, or an answer that has ended
            # unittest's `main` leaves on success and on failure.
            passed = isinstance(error, SystemExit) and not error.code
            told = str(error) if isinstance(error, AnswerEndedError) else _error_text(error)
            fault = fault or ("" if passed else told)
        verdicts.write(b"1" if passed else b"0")
    verdicts.write(fault.encode(errors="replace"))


def _run_test(one: Any, names: Mapping[str, Any], setup: str) -> None:
    """Raise unless the test passes."""
    sys.modules["__main__"] = ModuleType("__main__")  # unittest looks here for tests
    space = vars(sys.modules["__main__"])
    space.update(names)
    if isinstance(one, str):
        exec(compile(setup, "setup.py", "exec", dont_inherit=True), space)
        exec(compile(one, "tests.py", "exec", dont_inherit=True), space)
        return
    function: Any = space.get(f"{OWN}{one['call']}", space.get(one["call"]))
    if function is None:
        function = getattr(space["Solution"](), one["call"])
    result = _to_json(function(*one["arguments"]))
    if not any(result == expected for expected in one["expected"]):  # some tables put each output into a list
        raise AssertionError(f"it returned {json.dumps(result)}")


def _to_json(value: object) -> Any:
    """Convert to JSON's form: a tuple to a list, a key to a text."""
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    return value


def programs(job: Mapping[str, Any]) -> None:
    """Run the code once for each input, as a program of its own. Writes size and output for each."""
    outputs = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for text in job["inputs"]:
        input_file, output_file = os.memfd_create("input"), os.memfd_create("output")
        os.write(input_file, str(text).encode())
        os.lseek(input_file, 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            _run_program(job, input_file, output_file)
        ends = os.pidfd_open(child)
        waiting = select.poll()
        waiting.register(ends, select.POLLIN)
        if not waiting.poll(1000 * job["seconds"]):
            os.kill(child, 9)
        os.close(ends)
        succeeded = os.waitpid(child, 0)[1] == 0
        size = min(os.fstat(output_file).st_size, job["output"])
        outputs.write(SIZE.pack(size if succeeded else -1))
        if succeeded:
            outputs.write(os.pread(output_file, size, 0))
        os.close(input_file)
        os.close(output_file)


def _run_program(job: Mapping[str, Any], input_file: int, output_file: int) -> None:
    status = 1
    try:
        os.dup2(input_file, 0)
        os.dup2(output_file, 1)
        os.closerange(3, 64)
        confine()
        builtins.exit = builtins.quit = sys.exit  # normally made by `site`
        sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
        exec(compile(job["source"], "answer.py", "exec", dont_inherit=True), {"__name__": "__main__"})
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # as at Python's exit: threads first, then exit functions
        atexit._run_exitfuncs()
        status = 0
    except SystemExit as leaves:
        status = 0 if leaves.code in (None, 0) else 1
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


def confine() -> None:
    """Apply the last restrictions before untrusted code."""
    if not lockdown.refuse_calls():
        lockdown.limit_processes()


def main() -> None:
    """Do the job in the descriptor that the last word names, confined as the job says."""
    with os.fdopen(int(sys.argv.pop()), "rb") as file:  # the tested code may read the words of its program
        job = json.load(file)
    sys.set_int_max_str_digits(0)  # processor time is limited anyway
    lockdown.confine(job)
    if job["mode"] != "programs":  # programs are confined after their start
        confine()
    {"serve": serve, "test": test, "programs": programs}[job["mode"]](job)


if __name__ == "__main__":
    main()
