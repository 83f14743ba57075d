"""Every run of these tests writes only metrics that the documentation has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from metric_table import undocumented
from recipes import tiny_recipe

import opd.pipelines.run  # noqa: F401 (what the fixture `reports` changes)
from opd.metrics import MetricsWriter
from opd.pipelines.stages.supervised import new_base


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
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two teachers, all of them noise, whose answers have any length."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "sort", "add3")):
        new_base(tiny_recipe(base=None, seed=seed), folder / name)
    return folder
