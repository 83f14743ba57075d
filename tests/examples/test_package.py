"""What is released: wheel and sdist hold the whole package and nothing else, and say what it is."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCES = ("opd", "kernels", "pipelines", "storage", "teachers", "docs", "examples")
BUILD = "from setuptools import build_meta as b; print(b.build_sdist({0!r}), b.build_wheel({0!r}))"


def build(checkout: Path, out: Path) -> tuple[Path, Path]:
    """Paths of the sdist and the wheel that are made from `checkout`."""
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(str(out))], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    sdist, wheel = done.stdout.split()[-2:]
    return out / sdist, out / wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("release") / "checkout"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, checkout / name)
    return build(checkout, checkout.parent / "dist")


def package() -> set[str]:
    """Files of the package, through its links: all but the maps of folders."""
    found = set()
    for folder, _, names in os.walk(ROOT / "opd", followlinks=True):
        if "__pycache__" not in folder:
            found |= {
                str((Path(folder) / name).relative_to(ROOT)) for name in names if not name.endswith(".md")
            }
    return found


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name.partition("/plugin/")[0]}


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if re.fullmatch(r"opd-[^/]+/METADATA", one))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.check
def test_the_wheel_holds_the_package_and_nothing_else(built):
    assert contents(built[1]) == package()


@pytest.mark.check
def test_the_sdist_makes_the_same_wheel(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        assert not [one.name for one in archive.getmembers() if one.issym() or one.islnk()]
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    wheel = build(folder, tmp_path / "dist")[1]
    assert wheel.name == built[1].name
    assert contents(wheel) == package()
    assert metadata(wheel).as_string() == metadata(built[1]).as_string()


@pytest.mark.check
def test_the_metadata_says_what_it_is(built):
    said = metadata(built[1])
    assert (said["Name"], said["Version"]) == ("opd", PROJECT["version"])
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert len(said["Summary"]) < 120
    assert "Programming Language :: Python :: 3.11" in said.get_all("Classifier")
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


@pytest.mark.check
def test_the_description_needs_no_other_page(built):
    """An index of packages shows it alone: a relative link or image would lead nowhere."""
    text = metadata(built[1]).get_payload()
    assert text.strip() == (ROOT / "docs" / "install.md").read_text("utf-8").strip()
    assert re.findall(r"\]\(", text) == []


def test_every_extra_is_in_the_table():
    table = (ROOT / "docs" / "install.md").read_text("utf-8").partition("| extra |")[2].partition("\n\n")[0]
    first = " ".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9-]+)`", first)) == set(PROJECT["optional-dependencies"])


def test_the_newest_version_of_the_changelog_is_that_of_the_package():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"(?m)^## \[?([^\]\s]+)\]?(?: - (\d{4}-\d\d-\d\d))?$", text)
    assert versions[0] == ("Unreleased", "")
    assert versions[1][0] == PROJECT["version"]
    assert all(date for _, date in versions[1:])


@pytest.mark.check
def test_without_the_checkout_the_quick_start_is_there(built, tmp_path):
    """The wheel alone, in a folder of its own: the recipe that it brings is one that it reads."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "site", built[1]], check=True)

    def opd(*words: str) -> str:
        code = "import sys, opd; from opd.pipelines.cli import main; print(opd.__file__); sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        where, _, said = done.stdout.partition("\n")
        assert Path(where).is_relative_to(tmp_path)
        return said

    assert opd("--version") == f"opd {PROJECT['version']}\n"
    recipe = opd("example", "quickstart")
    assert recipe == (ROOT / "examples" / "quickstart" / "recipe.yaml").read_text("utf-8")
    (tmp_path / "recipe.yaml").write_text(recipe, "utf-8")
    assert "name: quickstart" in opd("run", "recipe.yaml", "--dry-run")
