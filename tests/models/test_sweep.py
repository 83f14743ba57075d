"""The table of families is what the sweep finds, and names what the installed transformers has."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_types

SWEEP = Path(__file__).with_name("sweep.py")
KINDS = (
    "llama", "gpt2", "gemma2", "deepseek_v3", "mixtral", "gemma3",
    "opt", "bloom", "mamba", "bert", "doge", "diffllama",
)  # fmt: skip
"""One of each form: what is right, and each way to be refused."""


def told(line: dict[str, Any]) -> dict[str, Any]:
    """A line without numbers."""
    return {key: "right" if isinstance(one, dict) and "right" in one else one for key, one in line.items()}


def swept(types: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Lines of the data as they come out now, by type."""
    command = [sys.executable, str(SWEEP), *types, "--rows"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["type"]: told(line) for line in lines}


def test_the_page_says_what_the_data_says():
    assert families.written() == families.page(*families.read()), f"write it anew: {families.REWRITE}"


def test_the_data_names_every_causal_type():
    """A release of transformers with others changes the table."""
    known = {name: line["class"] for name, line in families.read()[1].items()}
    assert known == tiny_types.causal_types(), (
        f"another transformers: write the table anew: {families.REWRITE}"
    )


def test_the_data_is_of_the_locked_transformers():
    locked = (families.ROOT / ".ci" / "requirements" / "core.txt").read_text("utf-8")
    version = families.read()[0]
    assert re.search(rf"^transformers=={re.escape(version)}\b", locked, re.MULTILINE), families.REWRITE


@pytest.mark.slow
def test_one_of_each_kind_gives_what_the_table_says():
    lines = families.read()[1]
    found = swept(KINDS)
    assert found == {name: told(lines[name]) for name in KINDS}, f"write the table anew: {families.REWRITE}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_type_gives_what_the_table_says():
    lines = families.read()[1]
    found = swept(tuple(lines))
    assert found == {name: told(line) for name, line in lines.items()}, families.REWRITE
