"""Write the report: one self-contained HTML file with a run's results and their limits.

`load` reads a run folder, at once or as it is written, into the records of `results`. `verdict`
turns numbers into sentences and the closing summary of a command. `tables` and `figures` select the content,
`charts` draws, `page` fills `templates/`. `comparison` compares several runs, and `live_page` shows them
while they train. To add a chart, add a `Panel` to a function of `figures`.
"""

from __future__ import annotations

from pathlib import Path

from opd.pipelines.report.load import drawing_errors, load_run
from opd.storage.files import write_atomic

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the run's results, metrics and configuration. Returns its path.

    Sections whose stages have not run are left out. Raises `RunFolderError` if the folder has nothing to
    report or a file in it cannot be read.
    """
    from opd.pipelines.report.page import render_report  # matplotlib would add to the start of every process

    run_dir = Path(run_dir)
    with drawing_errors(run_dir):
        page = render_report(load_run(run_dir))
    target = run_dir / "report.html"
    write_atomic(target, page.encode())
    return target
