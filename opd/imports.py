"""Code of the user's own, by dotted path: loaded, called with what is promised, its faults in a sentence."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opd.errors import OpdError
from opd.streams import streams_kept

GENERATE = ("engine", "prompts", "group_size", "sampling", "seed")
GROUP = ("group",)
POLICY_LOSS = ("logprobs", "old_logprobs", "advantages", "config")
DIVERGENCE = ("micro", "student", "view")
BATCH = ("batch",)
"""What each kind of function is called with, in this order."""


def import_function(path: str, where: str, error: type[OpdError], takes: Sequence[str] = ()) -> Any:
    """`import_attribute` of something that can be called; `error` if it cannot, or, where `takes` names the
    positional arguments it will be given, if it cannot be called with as many.
    """
    found = import_attribute(path, where, error)
    if not callable(found):
        raise error(f"{where}: {path!r} is a {type(found).__name__} and not callable; name a function.")
    if takes:
        check_signature(found, path, where, error, takes)
    return found


def check_signature(found: Any, path: str, where: str, error: type[OpdError], takes: Sequence[str]) -> None:
    """Raise `error` unless `found` can be called with as many positional arguments as `takes` names."""
    try:
        signature = inspect.signature(found)
    except Exception:  # compiled functions have none; the first call tells
        return
    try:
        signature.bind(*takes)
    except TypeError as cause:
        raise error(
            f"{where}: {path}{signature} is called with ({', '.join(takes)}), which does not fit ({cause});"
            " change its parameters."
        ) from None


@contextlib.contextmanager
def calling(what: str, error: type[OpdError]) -> Iterator[None]:
    """Around a call of the user's own code, `what`: anything it raises becomes one sentence of `error`.

    Whatever its values do when they are read counts as its own, too: look at them inside. An exit is no end
    of the command. An `OpdError`, which what it calls may raise, passes as it is, and so do a want of memory
    and Ctrl-C.
    """
    try:
        with streams_kept():
            yield
    except (OpdError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as cause:
        if type(cause).__name__ == "OutOfMemoryError":  # torch's, without importing it
            raise
        raise error(f"{what} {raised(cause)}; mend it.") from cause


def raised(cause: BaseException) -> str:
    """`raised KeyError: 'a' (my_code.py:12)`: what, and the innermost line of the user's own."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [
        f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.filename and not is_of_opd(f.filename)
    ]
    at = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"raised {type(cause).__name__}: {told(cause)}{at}"


def told(value: object, form: Callable[[Any], str] = str) -> str:
    """`form(value)` on one line; what the user's own makes of itself may raise, too."""
    try:
        return " ".join(str.__str__(form(value)).split())
    except KeyboardInterrupt:
        raise
    except BaseException:  # of `__str__` or `__repr__`
        return f"a {type(value).__name__} that cannot be shown"


def is_of_opd(file: str) -> bool:
    """Whether `file` is part of this package: `opd/rollout/x.py`, or `pipelines/x.py` behind its link."""
    here = os.path.dirname(os.path.abspath(__file__))
    links = [
        os.path.realpath(os.path.join(here, name)) for name in ("pipelines", "teachers", "storage", "kernels")
    ]
    return os.path.realpath(file).startswith(
        tuple(root + os.sep for root in (os.path.realpath(here), *links))
    )


def import_attribute(path: str, where: str, error: type[OpdError]) -> Any:
    """The object at `package.module:name`. `where` is the recipe's key, for the sentence of the `error` that
    is raised if the path has another form, or the module or the name does not exist or fails to import.
    """
    module_name, separator, name = path.partition(":")
    with contextlib.suppress(FileNotFoundError):  # where code of the user's own has gone may be no more
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # the console script leaves out the folder it is started in
    if not (separator and module_name and name):
        raise error(f"{where}: {path!r} is not of the form `package.module:name`.")
    try:
        with streams_kept():
            found: Any = importlib.import_module(module_name)
            for part in name.split("."):
                found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # a module's own code may raise anything, and exit
        raise error(
            f"{where}: {path!r} cannot be loaded ({type(cause).__name__}: {told(cause)}); check the module,"
            " the name and PYTHONPATH."
        ) from cause
    return found
