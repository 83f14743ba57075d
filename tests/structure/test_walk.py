"""How many files a step walks through: numbers that may fall and not rise."""

from pathlib import Path

import pytest

MOST = {"merge": (65, 8), "grpo": (51, 7)}
"""Files and folders that a step of each kind enters."""


@pytest.mark.parametrize("kind", MOST)
def test_a_step_can_be_followed(kind, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from tests.structure.walk import walk

    walked = walk(kind)
    assert len(walked.files) <= MOST[kind][0], walked.files
    assert len(walked.folders) <= MOST[kind][1], walked.folders
    assert "pipelines/stages/loop.py" in walked.files
