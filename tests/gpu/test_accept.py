"""The acceptance of a GPU runs whole on a machine without one, at tiny sizes, and says what it must."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import accept, long, merge, models, pack, training
from tests.gpu.clock import Place
from tests.gpu.rows import ABSENT, ERROR, FAILS, MEASURED, MISSED, OK, STOPPED, Bound, Sheet, table

SCRIPT = Path(__file__).with_name("accept.sh")
LONGER = ["distill", "teachers", "sync"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], check=False, capture_output=True, text=True, env=found
    )


def dry(path: Path, *arguments: str) -> tuple[dict, str]:
    """The report of an accepted dry run, and what it printed."""
    done = run("--dry", "--json", str(path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["accepted"]
    assert report["machine"]["dry"]
    assert {one["state"] for one in report["sections"].values()} == {"done"}
    return report, done.stdout


def rows_of(report: dict, section: str) -> dict[str, dict]:
    return {row["name"]: row for row in report["sections"][section]["rows"]}


FIRST, SECOND = ["ceilings", "kernels", "training"], ["engine", "streamed", "tests", "quickstart"]


@pytest.mark.long
@pytest.mark.slow
def test_the_first_sections_run_dry(tmp_path):
    assert [*FIRST, *SECOND] == list(accept.ONE)
    report, said = dry(tmp_path / "report.json", "--only", *FIRST)
    kernels = rows_of(report, "kernels")
    for temperature in ("1.0", "0.7"):
        at = f"64 x 16 x 256, T {temperature}"
        for name in ("auto", "chunked"):
            assert kernels[f"{at}: {name}, 16 tokens a chunk"]["verdict"] == OK
        assert kernels[f"{at}: full logits"]["numbers"]["over matmuls"] > 0
        for rival in ("liger", "cut-cross-entropy"):
            assert any(name.startswith(f"{at}: {rival}") for name in kernels)
    assert list(rows_of(report, "training")) == ["float32", "bfloat16 over float32", "bfloat16"]
    assert said.splitlines()[-1].startswith("accepted;")


@pytest.mark.long
@pytest.mark.slow
def test_the_other_sections_run_dry(tmp_path):
    report, said = dry(tmp_path / "report.json", "--only", *SECOND)
    engine = rows_of(report, "engine")
    assert list(engine) == ["0.6B, 4 requests", "0.6B, mixed lengths", "0.6B, weight sync"]
    assert engine["0.6B, mixed lengths"]["numbers"]["mixed read over held"] > 1.5
    (streamed,) = rows_of(report, "streamed").values()
    assert streamed["bounds"] == [
        "over the floor <= 1.15",
        "in turn over the longer <= 1.15",
        "error <= 0.02",
    ]
    assert streamed["numbers"]["error"] == 0
    assert rows_of(report, "tests")["pytest -m gpu"]["numbers"]["passed"] == 1
    assert list(rows_of(report, "quickstart"))[:2] == ["opd run", "base"]
    assert "over the floor <= 1.15" in said


@pytest.mark.long
@pytest.mark.slow
def test_the_studies_run_dry(tmp_path):
    report, _ = dry(tmp_path / "report.json", "--only", *accept.APART)
    (step,) = rows_of(report, "merge").values()
    numbers = step["numbers"]
    shares = [numbers[f"{phase} share"] for phase in merge.PHASES] + [numbers["elsewhere share"]]
    assert sum(shares) == pytest.approx(1)
    assert numbers["status"] == 0
    assert numbers["tokens/s"] > 0
    assert list(rows_of(report, "sizes")) == [
        f"{size}, {name}" + ", adapters" * adapters for size, name, adapters, _ in training.SIZES
    ]
    policy = rows_of(report, "policy")
    assert [row["verdict"] for row in policy.values()] == [MEASURED, OK, OK]
    assert [row["numbers"]["fused"] for row in rows_of(report, "long").values()] == [1, 0, 1]
    (mixed,) = rows_of(report, "mixed_lengths").values()
    assert mixed["numbers"]["mean length"] < 8


def test_a_long_sequences_operations_are_two_products_of_each_pair():
    sequence = long.LongSequence.drawn(8, (2, 1, 3), 5, torch.device("cpu"), torch.float32)
    assert sequence.teraflop == pytest.approx(2 * 2 * 3 * 2 * 36 / 1e12)


def test_a_steps_numbers_are_those_of_its_rows():
    rows = [{"time": 10.0 * step + (step == 3)} for step in range(1, 6)]
    for row in rows:
        row |= {"time/rollout": 5.0, "time/score": 1.0, "time/train": 2.0, "time/sync": 1.0}
    flop = {"rollout": 10.0, "score": 10.0, "train": 60.0}
    found = merge.step_numbers(rows, flop, (3, 7, 4), 100.0)
    assert found["step s"] == 10
    assert found["tokens/s"] == 4
    assert found["written tokens/s"] == pytest.approx(28 / 5)
    assert found["train of the product"] == pytest.approx(0.3)
    assert found["of the product"] == pytest.approx(0.08)
    assert found["elsewhere share"] == pytest.approx(0.1)


def test_a_steps_operations_are_those_of_the_counted_example():
    # 0.6B, 16 samples of 128 + 384 tokens: 21.65 of the layers, 1.68 of attention, 7.65 of the head.
    config = models.config("0.6B", Place(torch.device("cpu"), dry=False))
    assert models.layer_weights(config) == 440_401_920
    found = merge.teraflop(config, (128, 384, 16))
    assert found["train"] == pytest.approx(21.65 + 1.68 + 7.65, rel=2e-3)
    assert found["score"] == pytest.approx(21.65 / 3 + 1.68 / 3.5, rel=2e-3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("only", [["vocabulary"], LONGER])
def test_what_needs_several_gpus_runs_dry_on_two_ranks(tmp_path, only):
    report, _ = dry(tmp_path / "report.json", "--ranks", "2", "--only", *only)
    for section in only:
        assert len(rows_of(report, section)) == (1 if section == "distill" else 2)


@pytest.mark.long
def test_a_section_that_runs_over_its_time_stops_no_other_and_is_not_accepted(tmp_path):
    path = tmp_path / "report.json"
    done = run("--dry", "--only", "kernels", "ceilings", "--limit", "kernels=0.01", "--json", str(path))
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(path.read_text())
    states = {name: one["state"] for name, one in report["sections"].items()}
    assert states == {"kernels": "over time", "ceilings": "done"}
    assert report["refused"] == ["kernels"]
    assert done.stdout.splitlines()[-1].startswith("refused: kernels;")


@pytest.mark.parametrize(
    ("value", "dried", "bound", "expected"),
    [
        (1.1, False, Bound("x", most=1.15), OK),
        (1.2, False, Bound("x", most=1.15), FAILS),
        (1.2, True, Bound("x", most=1.15), MISSED),
        (1.2, True, Bound("x", most=1.15, timed=False), FAILS),
        (0.9, False, Bound("x", least=1.0), FAILS),
        (float("nan"), False, Bound("x", most=1.15), FAILS),
        (float("nan"), False, Bound("x", least=1.0), FAILS),
        (None, False, Bound("x", most=1.15), FAILS),
        (3.0, False, None, MEASURED),
    ],
)
def test_a_bound_that_is_not_met_refuses_a_gpu_and_on_a_dry_run_only_if_no_clock_said_so(
    tmp_path, value, dried, bound, expected
):
    sheet = Sheet(tmp_path / "rows", dried)
    sheet.row("a row", {"x": value}, *([bound] if bound else []))
    (row,) = sheet.rows()
    assert row.verdict == expected
    found = {"state": "done", "rows": [vars(row)]}
    assert accept.refused(found) == (expected == FAILS)


def test_what_ours_and_what_others_raise_is_in_the_table(tmp_path):
    sheet = Sheet(tmp_path / "rows", dry=False)
    for name, kind in (("mine", sheet.ours), ("theirs", sheet.rival)):
        with kind(name):
            raise ValueError("no such thing")
    sheet.absent("another", "No module named another")
    sheet.row("last", {"ms": 1.25})
    rows = sheet.rows()
    assert [row.verdict for row in rows] == [ERROR, STOPPED, ABSENT, MEASURED]
    assert accept.refused({"state": "done", "rows": [vars(rows[0])]})
    assert not accept.refused({"state": "done", "rows": [vars(row) for row in rows[1:]]})
    for state, kept in (("over time", rows[1:]), ("failed", rows[1:]), ("not reached", []), ("done", [])):
        assert accept.refused({"state": state, "rows": [vars(row) for row in kept]})
    said = table("a section", rows)
    assert "ERROR         mine" in said
    assert "ValueError: no such thing" in said
    assert "measured      last     ms 1.25" in said


def test_all_sections_fit_into_one_command_on_a_lent_machine():
    for sections in (accept.ONE, accept.SEVERAL):
        assert sum(section.seconds for section in sections.values()) <= accept.TOTAL < 600


def test_what_is_packed_is_what_the_project_needs_beside_torch():
    found = pack.wanted("3.12")
    assert {"transformers", "pydantic", "pydantic-core", "safetensors", "numpy", "pytest"} <= found.keys()
    assert not {"torch", "triton", "tilelang", "exceptiongroup"} & found.keys()
    assert all(found.values())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments", [["--only", "ceilings"], pytest.param(["--ranks", "2"], marks=pytest.mark.long)]
)
def test_without_a_gpu_it_says_so_in_one_sentence(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "no CUDA device; --dry" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_is_missing_is_named_with_how_to_get_it(tmp_path):
    done = run("--dry", SITE=str(tmp_path))
    assert done.returncode == 2
    assert f"accept.sh pack {tmp_path}" in done.stderr
    alone = tmp_path / "python"
    alone.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    alone.chmod(0o755)
    done = run("--dry", PYTHON=str(alone))
    assert done.returncode == 2
    assert "has no torch" in done.stderr
    done = run("--dry", "--only", "sync")
    assert done.returncode == 2
    assert "need --ranks N" in done.stderr
