"""`.ci/requirements/` against `pyproject.toml`: versions within the bounds, hashes, no index by name."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = {"core": [], **PROJECT["optional-dependencies"]}
LINE = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<hashes>( --hash=sha256:[0-9a-f]{64})*)")


def pins(name: str) -> dict[str, str]:
    """Name -> version of every package that `.ci/requirements/NAME.txt` installs."""
    text = (ROOT / ".ci" / "requirements" / f"{name}.txt").read_text("utf-8")
    found: dict[str, str] = {}
    for line in re.sub(r" \\\n +", " ", text).splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r ").removesuffix(".txt"))
        elif not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, f"{name}: {line}"
            assert match["hashes"] or name == "torch", f"{name}: {match['name']} has no hash"
            found[match["name"]] = match["version"]
    return found


def asked_for(extra: str) -> list[Requirement]:
    """What `opd[extra]` needs directly, with the extras that it names of `opd` itself."""
    wanted = [Requirement(text) for text in EXTRAS[extra]]
    return [
        one
        for need in wanted
        for one in (
            [more for name in need.extras for more in asked_for(name)] if need.name == "opd" else [need]
        )
    ]


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_locked_is_what_the_package_asks_for(extra):
    locked = pins(extra) | pins("torch")
    for need in [*map(Requirement, PROJECT["dependencies"]), *asked_for(extra)]:
        version = locked.get(canonicalize_name(need.name))
        assert version, f"{extra}.txt lacks {need.name}: write it anew with .ci/lock"
        assert need.specifier.contains(version), f"{extra}.txt has {need.name} {version}: run .ci/lock"


def test_the_files_agree_so_that_extras_can_be_added_to_one_environment():
    versions: dict[str, set[str]] = {}
    for extra in EXTRAS:
        for name, version in pins(extra).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_nothing_names_an_index():
    for path in (ROOT / ".ci" / "requirements").iterdir():
        text = path.read_text("utf-8")
        assert "://" not in text, path
        assert not re.search(r"^\s*-(?!r )(?!-hash=)", text, re.MULTILINE), path
