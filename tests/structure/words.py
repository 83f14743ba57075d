"""How the code and the pages read, in numbers.

    PYTHONPATH=tests/structure python -m words

Of the source: how many functions have a one-word name, how many names are defined in ten files and more, and
how often docstrings say "what" or begin with What, Whether, How, Of or Where. Of the pages (Markdown, but for
the changelog): words in a sentence, and semicolons. Code, tables and links are left out.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from arrows import sources
from test_links import pages

ROOT = Path(__file__).resolve().parents[2]
OPENINGS = {"what", "whether", "how", "of", "where"}
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*#]")


def read_figures() -> dict[str, float]:
    """Return each figure under its name."""
    names: defaultdict[str, set[Path]] = defaultdict(set)
    functions = one_word = 0
    docs: list[str] = []
    for path in sources(ROOT):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.strip("_")
                names[name].add(path)
                functions, one_word = functions + 1, one_word + ("_" not in name)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docs += filter(None, [ast.get_docstring(node)])
    openings = Counter(first.group(1).lower() for doc in docs if (first := re.match(r"\W*([A-Za-z']+)", doc)))
    words = sum(len(re.findall(r"[a-z]+(?:'[a-z]+)?", doc.lower())) for doc in docs)
    return {
        "one-word names of functions, %": 100 * one_word / functions,
        "names in ten files": sum(len(files) >= 10 for files in names.values()),
        "what per 1,000 words": 1000 * sum(len(re.findall(r"\b[Ww]hat\b", doc)) for doc in docs) / words,
        "docstrings that begin with What, %": 100 * sum(openings[word] for word in OPENINGS) / len(docs),
    } | _page_figures()


def _page_figures() -> dict[str, float]:
    texts = [page.read_text("utf-8") for page in pages() if page.name != "CHANGELOG.md"]
    sentences = [sentence for text in texts for sentence in _SENTENCE.split(_plain(text))]
    counted = [(len(re.findall(r"[A-Za-z']+", sentence)), sentence.count(";")) for sentence in sentences]
    lengths = sorted(words for words, _ in counted if words >= 4)
    semicolons = sum(count for words, count in counted if words >= 4)
    return {
        "words of a sentence, median": lengths[len(lengths) // 2],
        "words of a sentence, 90th percentile": lengths[int(0.9 * len(lengths))],
        "semicolons per 1,000 words": 1000 * semicolons / sum(lengths),
    }


def _plain(page: str) -> str:
    page = re.sub(r"```.*?```", "", page, flags=re.S)
    page = re.sub(r"`[^`]*`", " X ", page)
    page = re.sub(r"<[^>]+>", " ", page)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    return re.sub(r"^\|.*$", "", page, flags=re.M)


if __name__ == "__main__":
    for figure, value in read_figures().items():
        print(f"{figure:<45}{value:8.1f}")
