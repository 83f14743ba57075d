"""Every run of these tests writes only metrics that the documentation has; one run is there for all."""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from metric_table import undocumented
from recipes import tiny_recipe

from opd.metrics import MetricsWriter
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage


@pytest.fixture(scope="module", autouse=True)
def _metrics_have_rows():
    write = MetricsWriter.write

    def checked(self: MetricsWriter, step: int, metrics: Mapping[str, Any], seconds: float | None = None):
        assert undocumented(list(metrics)) == [], "say in docs/reference/metrics.md what they tell"
        write(self, step, metrics, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", checked)
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tiny_recipe()` with its base and specialists, made once for all processes: to be read."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    run, recipe = shared / "tiny-run", tiny_recipe()
    with (shared / "tiny-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits, and ends with the file
        if not run.exists():
            with RunFolder.create(shared / "tiny-run-draft", recipe) as folder:
                for stage in ("specialist-sort", "specialist-add3"):
                    run_stage(recipe, folder, stage)
            (shared / "tiny-run-draft").rename(run)
    return run
