"""Other libraries' options: true of the recipe, the documentation's table, what the command line answers."""

from pathlib import Path

import pytest

from opd.config import Recipe
from opd.config.load import parse_overrides
from opd.config.other_names import ROWS, table
from opd.config.schema import follow
from opd.errors import ConfigError
from opd.pipelines.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "other_names.md"
NAMES = [name for row in ROWS for name in row.names()]


def test_every_answer_is_a_field_of_a_recipe():
    for row in ROWS:
        for field in row.here:
            assert follow(Recipe, field.split(".")) is not None, field


def test_the_documentation_has_the_table():
    assert "\n".join(table()) in PAGE.read_text("utf-8")


def test_no_name_is_there_twice_or_means_something_here():
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        with pytest.raises(ConfigError):
            parse_overrides([f"--{name}", "1"], Recipe, {})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.here[0])
def test_the_command_line_answers_with_the_field(row, capsys):
    for name in row.names():
        for words in ([f"--{name}", "1"], [f"--{name}=1"], [f"{name}=1"], [f"--{name}"]):
            assert main(["run", *words, "recipe.yaml"]) == 2
            said = capsys.readouterr().err
            assert f"--{row.here[0]}" in said
            assert said.count("\n") == 1
