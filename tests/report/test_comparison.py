"""Several runs beside each other."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from watched import without_waiting

from opd.errors import ConfigError, RunFolderError
from opd.pipelines.report.comparison import Runs, compare_runs

from .conftest import SAMPLED, RunMaker, results

CONFIG = {
    "name": "synthetic",
    "seed": 0,
    "distill": {"steps": 10, "optim": {"lr": 0.1}},
    "runtime": {"threads": 1},
}


@pytest.fixture
def several(make_run: RunMaker, tmp_path: Path):
    """`several({merged shares, config changes}, ...)`: run folders a, b, ..."""

    def make(*changes: tuple[tuple[float, ...], dict]) -> list[Path]:
        whole = make_run(results(), stages=["merge"])
        folders = []
        for name, (merged, config) in zip("abcdefgh", changes, strict=False):
            shutil.copytree(whole, tmp_path / name)
            data = results(SAMPLED | {"merged": merged})
            (tmp_path / name / "results.json").write_text(json.dumps(data))
            (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | config))
            folders.append(tmp_path / name)
        return folders

    return make


def test_seeds_of_one_recipe_have_a_mean_and_a_deviation(several) -> None:
    shares = [(0.9, 0.9, 0.9), (0.92, 0.92, 0.92), (0.94, 0.94, 0.94)]
    runs = Runs.read(several(*((share, {"seed": seed}) for seed, share in enumerate(shares))))
    assert runs.verdict().startswith("These are one recipe under several seeds. a cannot be told from b")
    rows = {row[0]: row[1:] for row in runs.accuracy()}
    assert rows["Merged student"] == ["90.0", "92.0", "94.0", "92.0 (2.0)"]
    assert rows["Base"] == ["20.0", "20.0", "20.0", "20.0 (0.0)"]
    assert runs.settings() == [["seed", "0", "1", "2"]]
    assert runs.domains()[0] == ["sort", "90.0", "92.0", "94.0", "92.0 (2.0)"]


def test_what_differs_is_named_and_what_says_nothing_is_not(several) -> None:
    other = {"distill": {"steps": 10, "optim": {"lr": 0.2}}, "runtime": {"threads": 2}, "name": "other"}
    runs = Runs.read(several(((0.9, 0.9, 0.9), {}), ((0.6, 0.6, 0.6), other)))
    assert runs.settings() == [["distill.optim.lr", "0.1", "0.2"]]
    assert (
        "runs of different settings, which no mean is taken over. a is ahead of b: +30.0 points ("
        in runs.verdict()
    )


def test_nested_settings_are_told_field_by_field_and_specialists_only_where_one_was_trained(several) -> None:
    teachers = {"a": {"type": "local", "options": {"path": "/x", "layers": 3}}}
    other = {"teachers": teachers, "specialist": {"steps": 3}}
    folders = several(((0.9,) * 3, {"specialist": {"steps": 2}}), ((0.9,) * 3, other))
    teacher = [
        ["teachers.a.type", "-", "local"],
        ["teachers.a.options.path", "-", "/x"],
        ["teachers.a.options.layers", "-", "3"],
    ]
    assert sorted(Runs.read(folders).settings()) == sorted([*teacher, ["specialist.steps", "2", "3"]])
    for folder in folders:
        data = json.loads((folder / "results.json").read_text())
        data["stages"] = [stage for stage in data["stages"] if stage["name"] == "merge"]
        (folder / "results.json").write_text(json.dumps(data))
    assert sorted(Runs.read(folders).settings()) == sorted(teacher)


def test_means_are_taken_over_seeds_and_not_over_settings(several) -> None:
    told = [(0.9, 0, 0.1), (0.6, 0, 0.2), (0.92, 1, 0.1), (0.7, 0, 0.3), (0.62, 1, 0.2)]
    runs = Runs.read(several(*(((x, x, x), {"seed": seed, "distill": {"lr": lr}}) for x, seed, lr in told)))
    assert runs.head("")[6:] == ["mean (sd) of a, c", "mean (sd) of b, e"]
    rows = {row[0]: row[1:] for row in runs.accuracy()}
    assert rows["Merged student"][5:] == ["91.0 (1.4)", "61.0 (1.4)"]
    assert "no mean is taken over unless they differ in the seed alone" in runs.verdict()
    one_by_one = Runs(runs.names[:2], runs.runs[:2])
    assert one_by_one.head("x") == ["x", "a", "b"]
    assert all(len(row) == 3 for row in [*one_by_one.accuracy(), *one_by_one.domains()])
    assert "which no mean is taken over. a is" in one_by_one.verdict()


REFUSED = """
import sys
from opd.pipelines.cli import main
print(main(sys.argv[1:]), sorted({"torch", "matplotlib", "transformers"} & set(sys.modules)))
"""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "words", [["{a}"], ["{a}", "{a}"], ["{a}", "no"], ["{a}", "{b}", "--out", "no/x.html"]]
)
def test_arguments_are_checked_before_anything_is_imported(several, words, tmp_path: Path) -> None:
    a, b = several(*[((0.9, 0.9, 0.9), {})] * 2)
    given = [word.format(a=a, b=b) for word in words]
    result = subprocess.run(
        [sys.executable, "-c", REFUSED, "compare", *given],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "2 []\n", result.stderr
    assert without_waiting(result.stderr).count("\n") == 1


@pytest.mark.parametrize("count", [0, 1])
def test_one_run_has_nothing_to_be_compared_with(several, count: int) -> None:
    folders = several(*[((0.9, 0.9, 0.9), {})] * 2)[:count] * 2
    with pytest.raises(ConfigError, match="two or more different run folders"):
        Runs.read(folders)


def test_a_run_without_a_merge_is_named(several, tmp_path: Path) -> None:
    folders = several(*[((0.9, 0.9, 0.9), {})] * 2)
    (folders[1] / "results.json").write_text(json.dumps(results({"base": (0.1, 0.1, 0.1)})))
    with pytest.raises(RunFolderError, match=r"b has no evaluated merge to compare"):
        Runs.read(folders)
    with pytest.raises(RunFolderError, match="there is no run folder"):
        Runs.read([folders[0], tmp_path / "nowhere"])


def test_nothing_but_a_page_is_written_over(several, tmp_path: Path) -> None:
    folders = several(*[((0.9, 0.9, 0.9), {})] * 2)
    (tmp_path / "recipe.yaml").write_text("name: mine")
    with pytest.raises(RunFolderError, match=r"recipe\.yaml is there already and is no page"):
        compare_runs(folders, tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").read_text() == "name: mine"


def test_the_command_prints_a_table_and_writes_a_page(several, tmp_path: Path, ends) -> None:
    folders = several(((0.9, 0.9, 0.9), {}), ((0.6, 0.6, 0.6), {"seed": 1, "note": "<script>"}))
    page = tmp_path / "page.html"
    said = ends(0, ["compare", *map(str, folders), "--out", str(page)]).out
    assert "Merged student" in said
    assert said.rstrip().endswith(f"page  {page}")
    html = page.read_text()
    assert "<script" not in html
    assert html.count('role="img"') == 1
    assert "<td>90.0</td><td>60.0</td></tr>" in html, "no mean over different settings"
    assert compare_runs(folders, page) == said.rstrip("\n")
