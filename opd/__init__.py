"""Domain specialists by GRPO, merged into one model by multi-teacher on-policy distillation."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed distribution, or that there is none: a checkout runs without."""
    try:
        return version("opd")
    except PackageNotFoundError:
        return "(not installed)"
