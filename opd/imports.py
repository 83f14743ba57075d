"""Import the user's code by dotted path, list its source files and check its signature."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from opd.config.base import POLICY_LOSS
from opd.errors import OpdError
from opd.user_code import confine_user_code, describe_error, is_of_opd

OFFERED: dict[tuple[str, ...], tuple[str, ...]] = {POLICY_LOSS: ("bounds",)}
"""Arguments that a function also gets by name, if it has such a parameter."""


def import_function(path: str, where: str, error: type[OpdError], takes: Sequence[str] = ()) -> Any:
    """Import a callable. Raises `error` if it is none, or if it cannot be called with as many positional
    arguments as `takes` names.
    """
    function = import_attribute(path, where, error)
    if not callable(function):
        raise error(f"{where}: {path!r} is a {type(function).__name__} and not callable; name a function.")
    if takes:
        check_signature(function, path, where, error, takes)
    return function


def check_signature(
    function: Any, path: str, where: str, error: type[OpdError], takes: Sequence[str]
) -> None:
    """Raise `error` unless `function` accepts as many positional arguments as `takes` names, besides its
    `optional_arguments`.
    """
    try:
        signature = inspect.signature(function)
    except Exception:  # compiled functions have none: the first call shows it
        return
    try:
        signature.bind(*takes, **{name: name for name in optional_arguments(function, takes)})
    except TypeError as cause:
        raise error(
            f"{where}: {path}{signature} is called with ({', '.join(takes)}), which does not fit ({cause});"
            " change its parameters."
        ) from None


def optional_arguments(function: Any, takes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of arguments that `function`, a function called with `takes`, also gets by name."""
    try:
        parameters = inspect.signature(function).parameters
    except Exception:  # see `check_signature`
        return ()
    return tuple(name for name in OFFERED.get(tuple(takes), ()) if name in parameters)


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Disable garbage collection while a command starts and imports large libraries. They make hundreds of
    thousands of objects, all of which stay. Searching them for garbage, now and later, takes a fifth of a
    short run's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_attribute(path: str, where: str, error: type[OpdError]) -> Any:
    """Return the object at `package.module:name`. `where` is the recipe's key, for the sentence of `error`.
    Raises `error` if the path has another form, or the module or the name does not exist or fails to import.
    """
    module_name, separator, name = path.partition(":")
    _see_this_folder()
    if not (separator and module_name and name):
        raise error(f"{where}: {path!r} is not of the form `package.module:name`.")
    try:
        with confine_user_code(f"{where} {path}"):
            value: Any = importlib.import_module(module_name)
            for part in name.split("."):
                value = getattr(value, part)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # a module's own code may raise anything, and exit
        raise error(
            f"{where}: {path!r} cannot be loaded ({describe_error(cause)}); check the module, the name and"
            " PYTHONPATH."
        ) from cause
    return value


def _see_this_folder() -> None:
    """Also find modules in the folder the command starts in, which the console script leaves out."""
    with contextlib.suppress(FileNotFoundError):  # the current folder may be gone: user code can remove it
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())


def source_files(path: str) -> dict[str, Path]:
    """Return `folder/module.py` -> file for all source files of the code at `package.module:name`.

    These are its module, the packages around it and, by their import statements, the user's modules that they
    import. Nothing is run. Files of opd and of installed packages are left out, except the named module.
    """
    _see_this_folder()
    first = path.partition(":")[0]
    files: dict[str, Path] = {}
    waiting, names = [first], set()
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        spec = _find_spec(name)
        if spec is None or spec.origin is None or not spec.has_location or is_of_opd(spec.origin):
            continue
        is_users = name.partition(".")[0] not in sys.stdlib_module_names and not _INSTALLED & set(
            Path(spec.origin).parts
        )
        file, package = Path(spec.origin), spec.submodule_search_locations is not None
        if (is_users or name == first) and file.is_file():
            around = name if package else name.rpartition(".")[0]
            files[f"{around}.".replace(".", "/").lstrip("/") + file.name] = file
            waiting += [around, *_imported_names(file, around)] if is_users else []
    return files


_INSTALLED = {"site-packages", "dist-packages"}


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of the module `name`. Unlike `importlib.util.find_spec` it runs no parent package."""
    spec: ModuleSpec | None = None
    places, full_name = None, ""
    for part in name.split("."):
        full_name = f"{full_name}.{part}" if full_name else part
        spec = None
        for finder in sys.meta_path:
            with contextlib.suppress(Exception):  # a finder of some library
                spec = finder.find_spec(full_name, places)
            if spec is not None:
                break
        if spec is not None and spec.origin is not None:
            places = spec.submodule_search_locations
        else:  # maybe a folder without `__init__.py`: a finder asks its parent package for its path
            places = [str(Path(folder) / part) for folder in (sys.path if places is None else places)]
        if places is None:
            return spec if full_name == name else None
    return spec


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield names of possible modules that the source `file` in `package` imports, anywhere in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # compiled, or not importable
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
