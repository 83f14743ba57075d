"""Text of others in a page, a model card and on a terminal: it is shown and does nothing."""

import io
import json
import logging
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tiny
import yaml
from recipes import tiny_recipe
from rich.console import Console

from opd.models.checkpoint import escape_markdown, model_card
from opd.pipelines.check import examine
from opd.pipelines.check.checks import Finding
from opd.pipelines.check.examine import print_diagnosis
from opd.pipelines.commands.exit_status import one_line
from opd.pipelines.records.cards import Cards
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.report.comparison import compare_runs
from opd.pipelines.report.verdict import closing_summary
from opd.progress import Progress
from opd.rollout.prompts import Prompt
from opd.storage.files import read_sealed, write_sealed

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a' onload='alert(1)",
    "</title><base href=//x>",
]  # fmt: skip
ODD = [
    "$\\frac{x$", "a$_$b", "a\ud800", "a\0b", "\x1b[2J\x1b]0;title\x07\x9b", "a\u202ebc\u2066",
    "a\r\r# b\r\r<script>", "\u6570\u5b66", "\ufffe\U0010ffff", "", " ",
]  # fmt: skip
"""What a library that draws, a file or a terminal may take for more than text."""
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
    data = tiny.conftest_of("report")
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
    found.feed(write_report(folder).read_text("utf-8"))
    return found


def test_no_text_of_a_run_becomes_part_of_the_page(tmp_path):
    plain = elements(tmp_path / "plain", ["a", "b", "c", "d"], "x")
    hostile = elements(tmp_path / "hostile", HOSTILE, HOSTILE[1] + HOSTILE[0])
    assert hostile.count > 50
    assert hostile.tags <= plain.tags
    assert hostile.attributes <= plain.attributes
    assert not {name for name in hostile.attributes if name.startswith("on")}


def test_a_page_may_do_nothing_but_be_drawn(tmp_path):
    """Whatever a browser finds in it."""
    elements(tmp_path / "run", list("abcd"), "x")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    compare_runs([tmp_path / "run", tmp_path / "other"], tmp_path / "compare.html")
    for page in (tmp_path / "run" / "report.html", tmp_path / "compare.html"):
        head = page.read_text("utf-8").partition("</head>")[0]
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', head)
        assert "default-src 'none'" in policy
        assert "script" not in policy


@pytest.mark.some(1)
@pytest.mark.parametrize("sign", ODD)
def test_every_page_is_drawn_whatever_things_are_called(tmp_path, sign):
    elements(tmp_path / "run", [f"{sign}{number}" for number in range(4)], sign)
    shutil.copytree(tmp_path / "run", tmp_path / f"other{sign}".replace("\0", "").replace("\ud800", "\udcff"))
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    said = [compare_runs(folders, tmp_path / "compare.html"), closing_summary(tmp_path / "run")]
    said += [
        (tmp_path / "run" / "report.html").read_text("utf-8"),
        (tmp_path / "compare.html").read_text("utf-8"),
    ]
    assert not [text for text in said if ACTS.search(text)]


PROMPTS = [
    "\r\r# Mine\r\r", "\n\n# Mine\n\n<script>", "`</code><script>", "\n```\n# Mine", "| a |\n|---|",
    "\x1b[2J", "\u202e", "\u2028# Mine", "\n---\nlicense: x\n---\n", "a" * 100_000, "\U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("chat", [False, True])
def test_a_model_card_holds_only_its_own_sections(text, chat):
    content = [{"role": "user", "content": text, "name": None}] if chat else text
    prompt = Prompt.from_content(content, "x", "math")
    cards = Cards(tiny_recipe(), RunFolder(Path("/x"), None), {"math": prompt})
    used = cards.usage_sections(Path(f"/models/{text[:20]}"), ["math"])
    card = {"about": text, "base_model": text, **used, "teachers": {text: {"model": text, "teaches": text}}}
    written = model_card(
        text, {**card, "recipe": escape_markdown(text), "settings": {text: [{"a": f"\n{text}"}]}}
    )
    front, body = written.removeprefix("---\n").split("\n---\n", 1)
    assert set(yaml.safe_load(front)) == {"library_name", "pipeline_tag", "base_model", "tags"}
    assert [line for line in body.splitlines() if line.startswith("#")][1:] == [
        "## Prompt format", "## Loading", "## Teachers", "## Settings", "## Base model", "## Recipe",
    ]  # fmt: skip
    (code,) = re.findall(r"^```python\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    assert compile(code, "card", "exec")
    outside = re.sub(r"^(````*)\w+\n.*?^\1$|`[^`\n]*`", "", body, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside
    assert not ACTS.search(written)
    assert len(used["loading"]) < 6000


def test_half_a_character_of_a_label_comes_back_from_a_record(tmp_path):
    """Labels and answers of the user's own code are in what a stage leaves; a path may be in no encoding."""
    document = {"label": "a\ud800", "path": "/x/\udcff", "\udfff": "\U0001f600"}
    write_sealed(tmp_path / "done.json", document)
    assert read_sealed(tmp_path / "done.json", "mend it") == document


@pytest.mark.parametrize(
    "text", ["[/x]", "[red]", "[link=http://x]a[/link]", "\x1b[2J", "\u202e", "[" * 5000]
)
def test_the_doctors_table_shows_marks_as_they_are(monkeypatch, text):
    said = io.StringIO()
    found = [Finding("error", f"domain {text}", f"the answer was {text!s}")]
    monkeypatch.setattr(examine, "run_checks", lambda *_, **__: found)
    print_diagnosis(
        tiny_recipe(name=text[:100]), Console(file=said, force_terminal=True, color_system=None, width=10**5)
    )
    assert one_line(f"the answer was {text}") in said.getvalue()
    assert not ACTS.search(said.getvalue())


def test_what_is_printed_moves_no_cursor():
    """Whatever a model, a reward or a server has written."""
    said = io.StringIO()
    text = "\x1b[2J\x1b]0;title\x07\x9b2Jgone\r\b\u202eabc"
    with Progress(Console(file=said, width=200), seconds_between_lines=0.0) as progress:
        logging.getLogger("opd.test").info(text)
        progress.update_stage("merge", 1, 2, text)
        progress.finish_stage("merge", text)
    assert all(sign.isprintable() or sign == "\n" for sign in said.getvalue())
    assert "\\x1b[2J" in said.getvalue()
