"""Damage to any file of a run folder is found, mended or harmless: never other results without a word.

docs/reference/damage.md says what becomes of each kind. With `--full` every cell is tried, and
OPD_REWRITE_DAMAGE=1 writes the tables anew; by default some of those that are not harmless.
"""

import os
import shutil
from pathlib import Path

import pytest
from damage import (
    COLUMNS,
    FOUND,
    GOOD,
    REWARDS,
    ROWS,
    Scene,
    changes,
    column_of,
    differences,
    files_of,
    fingerprint,
    outcome,
)
from damaged_runs import MEASURED, finish, make_recipe, stop_in_merge, stop_while_measuring

from opd.pipelines.cli import main

pytestmark = pytest.mark.reports
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "damage.md"
LETTERS = {"found": "F", "mended": "M", "harmless": "H"}
DECODE_STEPS = 28
"""After them the merge has two checkpoints, a response that has ended, and others in flight."""
DISK = {"storage": {"trajectories": "disk"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the rewards of the runs, which are looked for where one starts."""
    folder, before = tmp_path_factory.mktemp("damage"), Path.cwd()
    (folder / "damage_rewards.py").write_text(REWARDS)
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def finished(place) -> Scene:
    for seed in (0, 1):
        finish(make_recipe(place / f"recipe-{seed}.yaml", seed), place / f"finished-{seed}")
    truth = fingerprint(place / "finished-0")
    return Scene("finished", place / "finished-0", place / "finished-1", place / "recipe-0.yaml", truth)


@pytest.fixture(scope="module")
def stopped(place, finished) -> Scene:
    for seed in (0, 1):
        stop_in_merge(place / f"stopped-{seed}", seed, DECODE_STEPS)
    folders = place / "stopped-0", place / "stopped-1"
    truth = merged(folders[0], finished.recipe, place / "merged")
    return Scene("stopped", *folders, finished.recipe, truth, "stopped stage|published", "distill")


@pytest.fixture(scope="module")
def stored(place) -> Scene:
    """Stopped, with the responses of the merge on disk."""
    recipe = make_recipe(place / "recipe-stored.yaml", **DISK)
    for seed in (0, 1):
        stop_in_merge(place / f"stored-{seed}", seed, DECODE_STEPS, **DISK)
    folders = place / "stored-0", place / "stored-1"
    truth = merged(folders[0], recipe, place / "merged-from-disk")
    return Scene("stored", *folders, recipe, truth, "trajectories|token log|locks", "distill")


@pytest.fixture(scope="module")
def measured(place) -> Scene:
    """Stopped while a specialist measures its prompts; another one has measured its own."""
    recipe = make_recipe(place / "recipe-measured.yaml", **MEASURED)
    for seed in (0, 1):
        stop_while_measuring(place / f"measured-{seed}", seed)
    folders = place / "measured-0", place / "measured-1"
    truth = merged(folders[0], recipe, place / "after-measuring", "run")
    return Scene("measured", *folders, recipe, truth, "difficulty")


def merged(stopped: Path, recipe: Path, copy: Path, command: str = "distill") -> dict[str, str]:
    """What a run that was stopped ends as."""
    shutil.copytree(stopped, copy)
    assert main([command, str(recipe), "--out", str(copy), "--resume"]) == 0
    return fingerprint(copy)


def cells_of(scene: Scene):
    """(row, column, file, damage) of everything that is done to the files of a scene."""
    for row, names in files_of(scene).items():
        for name in names:
            for kind, damage in changes(scene, scene.folder / name):
                yield row, column_of(kind), f"{kind} of {name}", name, damage


def table(found: dict[tuple[str, str], set[str]]) -> str:
    """The outcomes by row and column, as Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        if any(known == row for known, _ in found):
            cells = ["".join(sorted(found.get((row, column), set()), key="FMH".index)) for column in COLUMNS]
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def marks(scene: str) -> tuple[str, str]:
    return f"<!-- damage: {scene} -->\n", f"\n<!-- end of damage: {scene} -->"


def written(scene: str) -> str:
    """The table of docs/reference/damage.md."""
    start, end = marks(scene)
    return PAGE.read_text("utf-8").partition(start)[2].partition(end)[0]


def expected(scene: str) -> dict[tuple[str, str], str]:
    rows = [line.strip("|").split("|") for line in written(scene).splitlines()[2:]]
    return {
        (row[0].strip(), column): cell.strip()
        for row in rows
        for column, cell in zip(COLUMNS, row[1:], strict=True)
    }


def some(scene: Scene, step: int):
    """One cell of every row, of another column each."""
    by_row: dict[str, list] = {}
    for cell in cells_of(scene):
        by_row.setdefault(cell[0], []).append(cell)
    for number, cells in enumerate(by_row.values()):
        yield cells[(step * number) % len(cells)]


def try_all(scene: Scene, cells, copy: Path) -> dict[tuple[str, str], set[str]]:
    """The outcomes of cells; fails, naming them, if some are not good."""
    found: dict[tuple[str, str], set[str]] = {}
    faults = []
    for row, column, what, name, damage in cells:
        end, said = outcome(scene, name, damage, scene.command, copy)
        if end not in GOOD:
            faults.append(f"{scene.name}: {what}: {end}\n{said}")
        elif column in COLUMNS:  # not for root: "unreadable"
            found.setdefault((row, column), set()).add(LETTERS[end])
    assert not faults, "\n".join(faults)
    return found


@pytest.mark.slow
def test_a_stopped_run_ends_as_an_undisturbed_one(finished, stopped):
    """As far as `opd distill` makes it: baselines and measurements are not of a merge."""
    models = {name: digest for name, digest in stopped.truth.items() if name != "results.json"}
    assert any(name.startswith("merged/") for name in models)
    assert differences(models, {name: finished.truth.get(name) for name in models}) == []


@pytest.mark.slow
def test_one_cell_of_every_row_of_a_finished_run(finished, tmp_path):
    known = expected("finished")
    unread = {row for row in ROWS if all(known.get((row, column), "") in ("", "H") for column in COLUMNS)}
    cells = [cell for cell in some(finished, 5) if cell[0] not in unread]
    assert len(cells) > 8
    for cell, letters in try_all(finished, cells, tmp_path / "run").items():
        assert letters <= set(known.get(cell) or "FMH"), cell


@pytest.mark.slow
def test_the_files_of_a_stage_that_was_stopped(stopped, tmp_path):
    known, kinds = expected("stopped"), {"bit flip", "another run's"}
    cells = [cell for cell in some(stopped, 3) if cell[0].startswith("stopped")]
    cells += [c for c in cells_of(stopped) if c[3].endswith("in_flight.safetensors") and c[1] in kinds][1:3]
    for cell, letters in try_all(stopped, cells, tmp_path / "run").items():
        assert letters <= set(known.get(cell) or "FMH"), cell


@pytest.mark.long
@pytest.mark.slow
def test_a_difficulty_that_was_measured(measured, tmp_path):
    known = expected("measured")
    cells = [cell for cell in cells_of(measured) if cell[1] == "a field changed"]
    assert len(cells) == 2, "of a stage that is done, and of one that was stopped"
    for cell, letters in try_all(measured, cells, tmp_path / "run").items():
        assert letters <= set(known.get(cell) or "FMH"), cell


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["finished", "stopped", "stored", "measured"])
def test_every_kind_of_damage_to_every_kind_of_file(request, name, tmp_path):
    """And the table of docs/reference/damage.md says what becomes of it."""
    scene = request.getfixturevalue(name)
    found = table(try_all(scene, cells_of(scene), tmp_path / "run"))
    if os.environ.get("OPD_REWRITE_DAMAGE"):
        start, end = marks(name)
        text = PAGE.read_text("utf-8")
        PAGE.write_text(text.replace(start + written(name) + end, start + found + end), "utf-8")
    assert found == written(name), f"{PAGE.name} says otherwise; write it anew with OPD_REWRITE_DAMAGE=1"


def swap(one: str, other: str):
    def act(run: Path, scene: Scene) -> None:
        (run / one).rename(run / "aside")
        (run / other).rename(run / one)
        (run / "aside").rename(run / other)

    return act


def theirs(*names: str):
    def act(run: Path, scene: Scene) -> None:
        for name in names:
            shutil.rmtree(run / name)
            shutil.copytree(scene.other / name, run / name)

    return act


def gone(*names: str):
    def act(run: Path, scene: Scene) -> None:
        for name in names:
            shutil.rmtree(run / name)

    return act


FOLDERS = {
    "two specialists": swap("specialists/sort", "specialists/add3"),
    "two stages": swap("stages/specialist-sort", "stages/specialist-add3"),
    "another run's specialist": theirs("specialists/sort"),
    "another run's specialist and its stage": theirs("specialists/sort", "stages/specialist-sort"),
    "another run's checkpoints": theirs("stages/merge/checkpoints"),
    "a model that is gone": gone("specialists/add3"),
    "a baseline that is gone": gone("baselines/average"),
    "a stage that is gone": gone("stages/baseline-average"),
    "measurements that are gone": gone("stages/evaluate"),
}


REPEATED = {"another run's checkpoints", "a stage that is gone", "measurements that are gone"}
"""What costs the work of a stage."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what in REPEATED)) for what in FOLDERS]
)
def test_whole_folders_that_are_not_what_they_were(finished, tmp_path, what):
    def damage(target: Path) -> None:
        FOLDERS[what](target.parent, finished)

    end, said = outcome(finished, "config.json", damage, "run", tmp_path / "run")
    assert end in GOOD, said


READ = {
    "results.json": "a field changed",
    "config.json": "a field changed",
    "stages/merge/metrics.jsonl": "bit flip, middle",
    "stages/merge/done.json": "deleted",
}
"""What a report reads, and a kind of damage."""


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_report_reads_what_was_written_or_stops(finished, tmp_path, name):
    damage = dict(changes(finished, finished.folder / name))[READ[name]]
    end, said = outcome(finished, name, damage, "report", tmp_path / "run")
    assert end == FOUND, said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stages/evaluate/models.json", "merged/config.json"])
def test_an_evaluation_reads_what_was_written_or_stops(finished, tmp_path, name):
    damage = dict(changes(finished, finished.folder / name))["a field changed"]
    end, said = outcome(finished, name, damage, "evaluate", tmp_path / "run")
    assert end == FOUND, said


@pytest.mark.slow
def test_a_report_of_a_stage_in_progress_reads_its_metrics_or_stops(stopped, tmp_path, capsys):
    """A last line that was cut is no damage; anything before it is."""
    shutil.copytree(stopped.folder, tmp_path / "run")
    metrics = tmp_path / "run" / "stages" / "merge" / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + whole[:40])
    assert main(["report", str(tmp_path / "run")]) == 0
    metrics.write_bytes(whole.replace(b'"grad_norm": ', b'"grad_norm": 1', 1))
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "metrics.jsonl:1: this line or one before it is not what was written" in capsys.readouterr().err
