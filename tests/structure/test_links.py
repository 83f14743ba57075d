"""Every relative link of every page leads to a file, and to a heading that is there."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[[^\]\[]*\]\(([^()\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def pages() -> list[Path]:
    """Those that git keeps; in a folder that was unpacked without it, all but those of installed packages."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name]
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(ROOT / path for path in found if not {".venv", "node_modules", "build"} & set(path.parts))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of `page`."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead(page: Path, text: str) -> list[str]:
    """The relative links of `text`, which stands in `page`, that lead nowhere."""
    found = []
    for target in (match[1] or match[2] for match in LINK.finditer(without_code(text))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / unquote(path) if path else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in headings(place)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(page):
    assert dead(page, page.read_text("utf-8")) == []


def test_a_dead_link_is_found():
    text = "[a](requirements) ![b](none.png) [c](README.md#no-such) [d](#use)"
    text += " `[e](gone)` [f](https://a.b/c) [g](.ci)"
    assert dead(ROOT / "README.md", text) == ["requirements", "none.png", "README.md#no-such", "#use"]
