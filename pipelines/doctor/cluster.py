"""What the doctor can tell of `launch: ray`: whether its cluster can be joined from here, or started here.

Importable without torch, as `checks.py` is.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec

from opd.config import RayLaunch, Recipe
from opd.errors import ConfigError
from opd.pipelines.doctor.checks import Finding, attempt

TITLE = "launch"


def check_cluster(recipe: Recipe) -> list[Finding]:
    """Address, port and GPUs of a run on Ray; nothing without Ray, which `check_extras` reports."""
    if not isinstance(recipe.launch, RayLaunch) or find_spec("ray") is None:
        return []
    if recipe.launch.address is None:
        return attempt(TITLE, partial(_check_own, recipe, recipe.launch))
    return attempt(TITLE, partial(_check_there, recipe.launch.address, recipe.launch))


def _check_there(address: str, launch: RayLaunch) -> list[Finding]:
    """A cluster that is there already. A job's own is seen from inside the job alone."""
    from opd.pipelines.launch.ray.cluster import probe, resolved

    if address == "auto" and not os.environ.get("RAY_ADDRESS"):
        detail = "launch.address is auto, and RAY_ADDRESS is not set here; a Ray job has it"
        return [Finding("warning", TITLE, detail)]
    there = resolved(launch)
    probe(there)
    return [Finding("ok", TITLE, f"the Ray cluster at {there} answers")]


def _check_own(recipe: Recipe, launch: RayLaunch) -> list[Finding]:
    """One that the run starts on this machine, which has no other GPUs than this one."""
    from opd.pipelines.launch.ray.cluster import BundleLayout, needed, require_free

    if launch.port is not None:
        require_free(launch.port)
    asked = BundleLayout.of(needed(recipe), recipe.train.ranks or 1, recipe.servers).total.get("GPU", 0.0)
    if asked:
        from torch.cuda import device_count

        if asked > (there := device_count()):
            raise ConfigError(
                f"launch asks for {asked:g} GPUs in all, and this machine, where the run starts its cluster,"
                f" has {there}; lower launch.ROLE.gpus or servers.NAME.count, or give launch.address."
            )
    return [Finding("ok", TITLE, "a Ray cluster of its own, on this machine")]
