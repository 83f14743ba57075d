"""The documentation is built as it is published: a dead link, page or object is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs", reason="needs MkDocs: .venv/bin/python -m pip install 'opd[docs]'")
pytest.importorskip("mkdocstrings", reason="needs mkdocstrings: .venv/bin/python -m pip install 'opd[docs]'")

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_what_is_made_from_the_code(site):
    fields = (site / "reference" / "fields" / "index.html").read_text("utf-8")
    for path in ("distill.optim.lr", "teachers.NAME.path", "rollout.log.fsync", "launch.trainer.cpus"):
        assert f"<code>{path}</code>" in fields
    assert "opd-kl-coef" in (site / "reference" / "other_names" / "index.html").read_text("utf-8")
    assert "OPD, full vocabulary" in (site / "benchmarks" / "index.html").read_text("utf-8")
    assert "generated:" not in fields


def test_the_site_needs_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert not [tag for tag in ("fonts.googleapis", "unpkg.com", "cdn.") if tag in text], page
