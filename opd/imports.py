"""What a recipe names by dotted path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from opd.errors import OpdError


def import_function(path: str, where: str, error: type[OpdError]) -> Any:
    """`import_attribute` of something that can be called; `error` if it cannot."""
    found = import_attribute(path, where, error)
    if not callable(found):
        raise error(f"{where}: {path!r} is a {type(found).__name__} and not callable; name a function.")
    return found


def import_attribute(path: str, where: str, error: type[OpdError]) -> Any:
    """The object at `package.module:name`. `where` is the recipe's key, for the sentence of the `error` that
    is raised if the path has another form, or the module or the name does not exist or fails to import.
    """
    module_name, separator, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # the console script leaves out the folder it is started in
    if not (separator and module_name and name):
        raise error(f"{where}: {path!r} is not of the form `package.module:name`.")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as cause:  # a module's own code may raise anything
        raise error(
            f"{where}: {path!r} cannot be loaded ({type(cause).__name__}: {cause}); check the module, the "
            "name and PYTHONPATH."
        ) from cause
    return found
