"""The study of FP8: its page has the table of its results."""

import json
from pathlib import Path

from loaded import load_example

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "quantised"


def test_the_page_has_the_table_of_the_results():
    study, page = load_example("quantised/study.py"), (FOLDER / "README.md").read_text("utf-8")
    seeds = [json.loads(path.read_text("utf-8")) for path in sorted(study.RESULTS.glob("seed-*.json"))]
    assert len(seeds) == 3
    assert "\n".join(study.table(seeds)) in page, "run study.py --seeds, and put its table into the README"
