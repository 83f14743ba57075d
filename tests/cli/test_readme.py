"""The commands under "How to use it" on the first page, in order, on a recipe that takes seconds."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from recipes import write_recipe

from opd.pipelines.cli import main

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[list[str]]:
    section = (ROOT / "docs" / "index.md").read_text("utf-8").split("\n## How to use it\n")[1]
    block = re.search(r"```bash\n(cp .*?)```", section, re.DOTALL)
    assert block
    return [shlex.split(line, comments=True) for line in block[1].splitlines()]


@pytest.mark.slow
def test_the_first_pages_commands_work_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy, *lines = commands()
    assert copy[::2] == ["cp", "recipe.yaml"]
    assert (ROOT / copy[1]).is_file()
    write_recipe(tmp_path / "recipe.yaml", baselines={"methods": []})
    assert len(lines) > 8
    for line in lines:
        assert line[0] == "opd"
        assert main(line[1:]) == 0, line
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    shutil.rmtree(tmp_path / "runs")
