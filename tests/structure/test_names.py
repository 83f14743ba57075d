"""One name, one meaning; and modules that can be imported one after another."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import arrows
import pytest

ROOT = Path(__file__).resolve().parents[2]


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, by their names."""
    return {
        arrows.module_name(path, ROOT): ast.parse(path.read_text(encoding="utf-8"))
        for path in arrows.sources(ROOT)
    }


@pytest.mark.check
def test_no_two_modules_have_a_class_of_one_name():
    found = defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


@cache
def needs() -> dict[str, set[str]]:
    """Of each module those that importing it imports, itself left out; not what a function imports."""
    known, found = trees(), {}
    for module, tree in known.items():
        named = {name for name, top in arrows.imports(tree) if top}
        found[module] = {name if name in known else name.rpartition(".")[0] for name in named} & known.keys()
        found[module].discard(module)
    return found


@pytest.mark.check
def test_no_imports_run_in_a_circle():
    try:
        TopologicalSorter(needs()).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


MOST_IMPORTED = {"distill": 179, "grpo": 176}
"""Modules that a stage needs whatever the recipe says. A kind, a back end or a command is imported by whoever
opens it.
"""


@pytest.mark.check
@pytest.mark.parametrize("stage", MOST_IMPORTED)
def test_a_stage_imports_what_it_always_needs(stage: str):
    found, waiting = set(), [f"opd.pipelines.stages.{stage}"]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += needs()[module]
    assert len(found) <= MOST_IMPORTED[stage], sorted(found)
    assert "opd.pipelines.stages.loop" in found
