"""Domain specialists by GRPO, merged into one model by multi-teacher on-policy distillation."""

import logging
from importlib.metadata import PackageNotFoundError, version

# As a library opd logs nothing by itself. Give this logger a handler to see its records.
logging.getLogger("opd").addHandler(logging.NullHandler())


def installed_version() -> str:
    """Return the version of the installed distribution, or `(not installed)`: a checkout runs without one."""
    try:
        return version("opd")
    except PackageNotFoundError:
        return "(not installed)"
