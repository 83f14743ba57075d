"""The options of `opd plan`, and which of its answers they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from opd.config.load import load_recipe
from opd.errors import ConfigError

_NUMBERS = {
    "ranks": (int, "how many share the work (default: 1)"),
    "mini-batch": (int, "trajectories of a step (default: what the recipe samples, or 64)"),
    "budget-mb": (
        float,
        "MiB of a device for activations, a micro-batch's data and the next's (default: 16384)",
    ),
    "tflops": (float, "1e12 operations that a device computes in a second (default: 1)"),
    "read-mb": (float, "MiB of data that a device is given in a second (default: 1000)"),
    "overhead-ms": (float, "milliseconds that a micro-batch costs however small it is (default: 10)"),
}
PLAN_OPTIONS = {"--store", "--simulate", *(f"--{name}" for name in _NUMBERS)}
"""All of them take a value."""


def add_options(plan: argparse.ArgumentParser) -> None:
    """Give the command its options beside the recipe."""
    plan.add_argument("--store", type=Path, metavar="FOLDER", help="plan for the trajectories in this store")
    plan.add_argument(
        "--simulate", type=Path, metavar="CLUSTER", help="instead: how long steps of this cluster would take"
    )
    for name, (kind, told) in _NUMBERS.items():
        plan.add_argument(f"--{name}", type=kind, metavar="N", help=told)


def plan_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a plan or a simulation; returns the exit status. Raises `ConfigError` for options that do not go
    together.
    """
    if overrides and not options.recipe:
        raise ConfigError(f"opd plan without a recipe takes no settings of one; remove {overrides[0]}")
    names = [name.replace("-", "_") for name in ("store", *_NUMBERS)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.simulate is not None:
        if options.recipe or given:
            raise ConfigError("opd plan --simulate takes a cluster and nothing else; see examples/cluster")
        from opd.pipelines.plan.simulate.run import print_simulation

        return print_simulation(options.simulate)
    from opd.pipelines.plan.plan import PlanOptions, print_plan

    recipe = load_recipe(options.recipe, overrides) if options.recipe else None
    return print_plan(recipe, PlanOptions(**given))
