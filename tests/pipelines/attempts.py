"""A base to begin from, and an attempt at a stage that ends early, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.config import Recipe
from opd.metrics import MetricsWriter
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage


class StoppedError(Exception):
    """What ends an attempt."""


def made_base(path: Path, recipe: Recipe) -> Path:
    """The folder of the base of a run at `path`: warmed up as `recipe` says, or made from noise."""
    with RunFolder.create(path, recipe) as folder:
        run_stage(recipe, folder, "base")
    return path / "base"


def stop(recipe: Recipe, folder: RunFolder, stage: str, after: int) -> None:
    """An attempt that ends before the line of the step beyond `after` is written."""
    write = MetricsWriter.write

    def stopping(writer: MetricsWriter, step: int, *given: Any) -> None:
        if step > after:
            raise StoppedError
        write(writer, step, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", stopping)
        with pytest.raises(StoppedError):
            run_stage(recipe, folder, stage)
