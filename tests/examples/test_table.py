"""The tables on the pages are those that the results make."""

import shutil
from pathlib import Path

import pytest
from loaded import load_example

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "page"),
    [
        ("quickstart", "docs/benchmarks.md"),
        ("real_model", "examples/real_model/README.md"),
        ("five_tasks", "examples/five_tasks/README.md"),
    ],
)
def test_the_page_has_the_table_of_the_results(example: str, page: str) -> None:
    module = load_example("table.py")
    runs = module.load(example)
    files = list((ROOT / "examples" / example / "results").glob("*.json"))
    assert {run["seed"] for run in runs} == {int(file.stem.removeprefix("seed-")) for file in files}
    for file in files:
        assert '"/' not in file.read_text("utf-8"), f"{file.name} tells where its run lay"
    text = (ROOT / page).read_text("utf-8")
    for lines in (
        (module.table(runs), module.kept(runs)) if example == "five_tasks" else (module.table(runs),)
    ):
        assert "\n".join(lines) in text


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [("agents/table.py", "agents", []), ("table.py", "real_model", ["real_model"])],
)
def test_what_lies_beside_the_runs_is_left_out(tmp_path, monkeypatch, capsys, name, folder, words):
    """The printed command names `runs/agents*`, which the example's own inputs are among."""
    module, made = load_example(name), ROOT / "examples" / folder / "results" / "seed-0.json"
    results = tmp_path / folder / "results"
    runs = [tmp_path / "run", tmp_path / "run-data"]
    for one in (results, *runs):
        one.mkdir(parents=True)
    shutil.copy(made, runs[0] / "results.json")
    where, value = ("EXAMPLES", tmp_path) if words else ("RESULTS", results)
    monkeypatch.setattr(module, where, value)
    monkeypatch.setattr("sys.argv", ["table", *words, *map(str, runs)])
    module.main()
    said = capsys.readouterr()
    assert f"{runs[1]} is no finished run and is left out" in said.err
    assert said.out.startswith("| ")
    assert [path.name for path in results.glob("*.json")] == ["seed-0.json"]
