import os
import re
import subprocess
import sys
from pathlib import Path

import arrows
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_module_breaks_the_arrows():
    assert len(list(arrows.sources(ROOT))) > 20
    assert arrows.faults(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("opd/train/a.py", "import opd.pipelines.cli"),
        ("opd/train/a.py", "from opd import pipelines"),
        ("opd/models/a.py", "def f():\n    from opd.teachers.schedule import Router"),
        ("teachers/a.py", "from opd.pipelines import cli"),
        ("storage/a.py", "import torch"),
        ("storage/a.py", "from opd.config import Recipe"),
        ("kernels/a.py", "from opd.errors import OpdError"),
        ("kernels/a.py", "import numpy as np"),
        ("kernels/a.py", "import tilelang"),
        ("opd/types.py", "import torch"),
        ("opd/config/a.py", "from opd.models.causal_lm import CausalLM"),
        ("opd/train/a.py", "from kernels.head import Head"),
        ("opd/train/a.py", "from . import b"),
        ("opd/train/a.py", "import pickle"),
        ("opd/data/a.py", "class A:\n    import pyarrow"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert len(arrows.faults(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pipelines/a.py", "from opd.storage.files import FileLock"),
        ("teachers/a.py", "from opd.storage.files import FileLock"),
        ("storage/tensors.py", "import torch"),
        ("kernels/a.py", "def f():\n    import tilelang"),
        ("opd/train/a.py", "from opd.kernels.head import Head"),
        ("opd/models/a.py", "from opd.storage.files import file_digest"),
        ("opd/types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("opd/data/a.py", "def f():\n    import pyarrow.parquet"),
    ],
)
def test_an_allowed_import_passes(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert arrows.faults(tmp_path) == []


def test_no_test_changes_where_modules_are_looked_for():
    """Neither itself nor in what a child process runs: `pythonpath` in `pyproject.toml` says where."""
    changes = re.compile(r"(?m)\bsys\.path\.(insert|append|extend)\(|^sys\.path\.")
    found = [path for path in (ROOT / "tests").rglob("*.py") if changes.search(path.read_text("utf-8"))]
    assert found == []


def test_no_module_changes_where_modules_are_looked_for():
    """With a folder of opd among those places `import megatron` would find opd's."""
    names = ("opd.sandbox.warden", "opd.sandbox.grader", "opd.child")
    code = f"import sys; before = list(sys.path); import {', '.join(names)}; assert sys.path == before"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_folders_are_relative_links_below_opd():
    for folder in arrows.FOLDERS:
        link = ROOT / "opd" / folder
        assert link.is_symlink()
        assert os.readlink(link) == f"../{folder}"
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "opd" / "py.typed").exists()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "modules", ["opd.types, opd.protocols, opd.errors", "opd.config, opd.config.load", "opd.pipelines.cli"]
)
def test_imports_without_torch(modules):
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_opd_is_one_folder_and_never_a_mixture_of_two_installations(tmp_path):
    """Without `opd/__init__.py` every `opd` folder on the path would be a part of the package."""
    (tmp_path / "opd").mkdir()
    (tmp_path / "opd" / "elsewhere.py").touch()
    look = "import opd, importlib.util as u; print(*opd.__path__, u.find_spec('opd.elsewhere'))"
    for paths in ([ROOT, tmp_path], [tmp_path / "nothing", ROOT, tmp_path]):
        done = subprocess.run(
            [sys.executable, "-c", look],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            cwd=tmp_path.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(ROOT / "opd"), "None"]
    for folder in {path.parent for path in arrows.sources(ROOT)} - {ROOT / "kernels"}:
        assert (folder / "__init__.py").is_file(), folder
