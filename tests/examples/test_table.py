"""The tables on the pages are those that the results make."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "page"),
    [
        ("quickstart", "docs/benchmarks.md"),
        ("real_model", "README.md"),
        ("real_model", "examples/real_model/README.md"),
    ],
)
def test_the_page_has_the_table_of_the_results(example: str, page: str) -> None:
    spec = importlib.util.spec_from_file_location("examples_table", ROOT / "examples" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runs = module.load(example)
    files = list((ROOT / "examples" / example / "results").glob("*.json"))
    assert {run["seed"] for run in runs} == {int(file.stem.removeprefix("seed-")) for file in files}
    for file in files:
        assert '"/' not in file.read_text("utf-8"), f"{file.name} tells where its run lay"
    assert "\n".join(module.table(runs)) in (ROOT / page).read_text("utf-8")
