"""How names and sentences read: figures that may fall and not rise."""

import pytest
from words import read_figures

MOST = {
    "one-word names of functions, %": 26,
    "names in ten files": 24,
    "what per 1,000 words": 1.5,
    "docstrings that begin with What, %": 2,
    "words of a sentence, median": 13,
    "words of a sentence, 90th percentile": 22,
    "semicolons per 1,000 words": 2,
}


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return read_figures()


@pytest.mark.parametrize("figure", MOST)
def test_names_and_sentences_stay_plain(figures, figure):
    assert figures[figure] <= MOST[figure], "PYTHONPATH=tests/structure python -m words prints them"
