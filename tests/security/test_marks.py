"""Text of others in a page and on a terminal: it is shown and does nothing."""

from __future__ import annotations

import importlib.util
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import render
from opd.progress import Progress

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a' onload='alert(1)",
    "</title><base href=//x>",
]  # fmt: skip


def synthetic() -> Any:
    path = Path(__file__).parents[1] / "report" / "conftest.py"
    spec = importlib.util.spec_from_file_location("report_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Elements(HTMLParser):
    """Every tag of a page and every name of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.count = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def elements(folder: Path, names: list[str], sign: str) -> Elements:
    """Of the page of a run with these domains, and with `sign` in every other text of its files."""
    data = synthetic()
    sampled = {
        "base": (0.2, 0.2, 0.2, 0.2),
        "merged": (0.9, 0.9, 0.9, 0.9),
        f"own{sign}": (0.5, 0.5, 0.5, 0.5),
    }
    sampled |= {f"specialist:{name}": (0.8,) * 4 for name in names}
    results = data.results(sampled, names)
    results |= {"name": f"run{sign}", "version": f"1{sign}", "created": f"now{sign}"}
    results["machine"] = {key: f"{value}{sign}" for key, value in results["machine"].items()}
    results["counters"] = {f"counter{sign}": 1}
    for model in results["models"]:
        model["settings"] = {f"scale{sign}": f"0.5{sign}"}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    config = {"name": f"x{sign}", "domains": {name: {"teacher": name} for name in names}, "seed": sign}
    (folder / "config.json").write_text(json.dumps(config))
    rows = data.metrics("merge", 30)
    for row in rows:
        row |= {f"kl/{name}": 0.1 for name in names} | {f"reward/{name}": 0.5 for name in names}
    data.write_lines(folder / "stages" / "merge" / "metrics.jsonl", rows)
    found = Elements()
    found.feed(render(load_run(folder)))
    return found


def test_no_text_of_a_run_becomes_part_of_the_page(tmp_path):
    plain = elements(tmp_path / "plain", ["a", "b", "c", "d"], "x")
    hostile = elements(tmp_path / "hostile", HOSTILE, HOSTILE[1] + HOSTILE[0])
    assert hostile.count > 50
    assert hostile.tags <= plain.tags
    assert hostile.attributes <= plain.attributes
    assert not {name for name in hostile.attributes if name.startswith("on")}


def test_what_is_printed_moves_no_cursor():
    """Whatever a model, a reward or a server has written."""
    said = io.StringIO()
    progress = Progress(Console(file=said, width=200), seconds_between_lines=0.0)
    text = "\x1b[2J\x1b]0;title\x07\x9b2Jgone\r\b\u202eabc"
    progress.note(text)
    progress.update("merge", 1, 2, text)
    progress.finish("merge", text)
    assert all(sign.isprintable() or sign == "\n" for sign in said.getvalue())
    assert "\\x1b[2J" in said.getvalue()
