"""Load the evaluation sets of a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from opd.config import Recipe
from opd.data.load import load_domain
from opd.errors import OpdError
from opd.rollout.prompts import Domain


def load_sets(recipe: Recipe) -> dict[str, Domain]:
    """Return every evaluation set of `recipe`, all its prompts held out, none to train on.

    Raises `DataError` for a source that cannot be read or is empty.
    """
    sets = recipe.evaluation.sets
    with naming_set(sets):
        return {
            name: load_domain(name, config, seed=recipe.seed, held_out_prompts=sets[name].prompts)
            for name, config in recipe.of_sets().domains.items()
        }


@contextmanager
def naming_set(names: Collection[str]) -> Iterator[None]:
    """Name evaluation sets in errors. Sets are loaded as domains, so errors would name a domain."""
    try:
        yield
    except OpdError as error:
        message = with_set_names(str(error), names)
        if message == str(error):
            raise
        fault = type(error)(message)
        fault.of_own_code = error.of_own_code
        raise fault from error.__cause__


def with_set_names(text: str, names: Collection[str]) -> str:
    """Replace the names of domains in `text` by those of sets."""
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name)
        text = re.sub(rf"\bdomains\.{pattern}(?=[\s.:,;]|$)", f"evaluation.sets.{name}", text)
        text = re.sub(rf"\bdomain {pattern}(?=[\s.:,;)]|$)", f"evaluation set {name}", text)
        if f"evaluation.sets.{name}" in text:
            text = text.replace("evaluation.prompts_per_domain", f"evaluation.sets.{name}.prompts")
    return text
