"""The report: one self-contained HTML file that says what a run achieved, and what it does not show.

`load` reads the run folder, `verdict` puts numbers into sentences, `tables` (answers side by side too) and
`figures` choose what is shown, `charts` draws, `page` puts it together. `verdict` also has what a command
says at its end, `comparison` sets several runs beside each other. `live` reads a run that is being written,
`live_page` shows it with the same charts. To add a chart, add a `Panel` to a function
of `figures`.
"""

from __future__ import annotations

from pathlib import Path

from opd.foreign import visible
from opd.pipelines.report.load import load_run
from opd.redact import redact
from opd.storage.files import write_atomic

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the run's results, metrics and configuration; returns its path.

    Sections whose stages have not run are left out. Raises `RunFolderError` if the folder holds nothing to
    report or a file in it cannot be read.
    """
    from opd.pipelines.report.page import render  # matplotlib would add to the start of every process

    run_dir = Path(run_dir)
    page = render(load_run(run_dir))
    target = run_dir / "report.html"
    write_atomic(target, visible(redact(page)).encode())
    return target
