"""Domain specialists by GRPO, merged into one model by multi-teacher on-policy distillation."""

import logging
from importlib.metadata import PackageNotFoundError, version

# As a library it says nothing by itself: whoever wants its records gives this logger a handler.
logging.getLogger("opd").addHandler(logging.NullHandler())


def installed_version() -> str:
    """The version of the installed distribution, or that there is none: a checkout runs without."""
    try:
        return version("opd")
    except PackageNotFoundError:
        return "(not installed)"
