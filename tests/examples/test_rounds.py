"""The study of rounds: its tables are of its results."""

import json
from pathlib import Path

from loaded import load_example

from opd.metrics import MetricsWriter

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "rounds"


def test_the_readme_has_the_tables_of_the_results():
    written = "\n".join(load_example("rounds/study.py").tables())
    assert written in (FOLDER / "README.md").read_text("utf-8"), "run study.py --table, and put it there"


def test_the_tables_have_every_arm(tmp_path, monkeypatch):
    study = load_example("rounds/study.py")
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    arm = {"base": 0.2, "specialist:sort": 0.9, "specialist:add3": 0.8, "merged": 0.7, "tokens": 5000}
    starts = {name: {"start": 0.4, "end": 0.8, "tokens": None} for name in study.STARTS}
    starts["base"] = {"end": 0.7, "tokens": 1200}
    for seed, merged in enumerate((0.75, 0.65)):
        found = {"one": arm, "two": arm | {"merged": merged}, "first round of two": arm, "starts": starts}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(found))
    lines = study.tables()
    assert "| two | 20.0 (0.0) | 85.0 (0.0) | 70.0 (7.1) | 5 |" in lines
    assert "Two rounds minus one, by seed, points: +5.0, -5.0" in lines
    assert "| base | 20.0 (0.0) | 1200, 1200 | 70.0 (0.0) |" in lines
    assert "| ties | 40.0 (0.0) | never, never | 80.0 (0.0) |" in lines


def test_tokens_are_counted_to_the_first_point_that_is_there(tmp_path):
    folder = tmp_path / "stages" / "merge"
    folder.mkdir(parents=True)
    writer = MetricsWriter(folder)
    for step, share in enumerate((0.2, None, 0.6, 0.9)):
        curve = {} if share is None else {"accuracy/sort": share, "accuracy/add3": share + 0.1}
        writer.write(step + 1, {"tokens/student": 100 * step, **curve})
    writer.close()
    study = load_example("rounds/study.py")
    assert study.tokens_to_reach(tmp_path, 0.64) == 200
    assert study.tokens_to_reach(tmp_path, 0.99) is None
