"""Every run of these tests writes only metrics that the documentation has."""

from collections.abc import Mapping
from typing import Any

import pytest
from metric_table import undocumented

import opd.pipelines.run  # noqa: F401 (what the fixture `reports` changes)
from opd.metrics import MetricsWriter


@pytest.fixture(scope="module", autouse=True)
def _metrics_have_rows():
    write = MetricsWriter.write

    def checked(self: MetricsWriter, step: int, metrics: Mapping[str, Any], seconds: float | None = None):
        assert undocumented(list(metrics)) == [], "say in docs/reference/metrics.md what they tell"
        write(self, step, metrics, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", checked)
        yield
