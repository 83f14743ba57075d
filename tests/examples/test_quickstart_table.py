"""The README's table of the quick start is the one that its results make."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_the_table_of_the_results():
    path = ROOT / "examples" / "quickstart" / "table.py"
    spec = importlib.util.spec_from_file_location("quickstart_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seeds = module.load()
    assert set(seeds) == {int(file.stem.removeprefix("seed-")) for file in module.RESULTS.glob("*.json")}
    for file in module.RESULTS.glob("*.json"):
        assert '"/' not in file.read_text("utf-8"), f"{file.name} tells where its run lay"
    assert "\n".join(module.table(seeds)) in (ROOT / "README.md").read_text("utf-8")
