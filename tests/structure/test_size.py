"""The source does not grow by itself: every folder has a ceiling.

Raise one only for what a user gains, and say in CHANGELOG.md what that is; lower it when files go.
"""

from collections import Counter
from pathlib import Path

import pytest
from arrows import module_name, sources

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = {
    "": (3_950, 18),
    "config": (6_700, 23),
    "data": (1_950, 7),
    "environments": (4_600, 18),
    "kernels": (4_200, 15),
    "megatron": (2_000, 8),
    "models": (10_050, 31),
    "pipelines": (26_300, 97),
    "rewards": (2_800, 10),
    "sandbox": (2_950, 11),
    "rollout": (11_750, 38),
    "served": (2_100, 11),
    "storage": (8_150, 23),
    "teachers": (5_800, 19),
    "train": (6_950, 26),
}
"""Folder of `opd` -> lines and files at most."""


def folder_of(path: Path) -> str:
    """`rollout` for `opd.rollout.engine_pool`, `` for modules of `opd` itself."""
    parts = module_name(path, ROOT).split(".")[1:]
    return parts[0] if len(parts) > 1 or (path.name == "__init__.py" and parts) else ""


@pytest.fixture(scope="module")
def sizes() -> dict[str, tuple[int, int]]:
    lines, files = Counter(), Counter()
    for path in sources(ROOT):
        lines[folder_of(path)] += len(path.read_text("utf-8").splitlines())
        files[folder_of(path)] += 1
    return {folder: (lines[folder], files[folder]) for folder in files}


def test_every_folder_has_a_ceiling(sizes):
    assert sizes.keys() == CEILINGS.keys()


@pytest.mark.parametrize("folder", CEILINGS)
def test_no_folder_is_above_its_ceiling(sizes, folder):
    (lines, files), (most_lines, most_files) = sizes[folder], CEILINGS[folder]
    assert lines <= most_lines, f"{folder or 'opd'}/ has {lines} lines: take out as many as you put in"
    assert files <= most_files, f"{folder or 'opd'}/ has {files} files"


@pytest.mark.parametrize("folder", CEILINGS)
def test_a_ceiling_is_near(sizes, folder):
    (lines, files), (most_lines, most_files) = sizes[folder], CEILINGS[folder]
    assert most_lines - lines < 300, f"lower the ceiling of {folder or 'opd'}/ to {lines} lines"
    assert most_files - files < 4, f"lower the ceiling of {folder or 'opd'}/ to {files} files"
