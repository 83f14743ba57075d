"""Trackers beside metrics.jsonl, each in its own offline mode: what they hold after a kill and a resume."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipes import tiny_recipe

from opd import sinks
from opd.errors import ConfigError, MissingExtraError
from opd.metrics import MetricsWriter, read_metrics
from opd.pipelines.check.checks import check_sinks
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext

ATTEMPTS = """
import logging, os, sys
from pathlib import Path
logging.basicConfig()
from opd.metrics import MetricsWriter
stage, sink, killed = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "killed"
with MetricsWriter(stage, sinks=[sink], run="my run") as writer:
    start = 0 if killed else 2
    writer.truncate(start)
    for step in range(start + 1, 4 if killed else 6):
        writer.write(step, {"reward/a": step / 2, "reward/a/part": 1.0, "entropy": 0.1}, float(step))
    if killed:
        writer._sinks.close()  # what a library holds back is its own
        os._exit(9)
"""


def attempts(stage: Path, sink: str) -> None:
    """Steps 1 to 3, a kill after the checkpoint of step 2, and steps 3 to 5."""
    pytest.importorskip(sink, reason=f"{sink} is not installed")
    for words, status in (("killed", 9), ("resumed", 0)):
        command = [sys.executable, "-c", ATTEMPTS, str(stage), sink, words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        assert done.returncode == status, done.stderr
        assert "the sink" not in done.stderr + done.stdout, done.stderr
        assert done.stdout == ""  # where results are printed
    assert [row["step"] for row in read_metrics(stage / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def _environment() -> dict[str, str]:
    """Without a network: every address is refused by a proxy that is not there."""
    own = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))
    }
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return own | nowhere | {"HF_HUB_OFFLINE": "1"}


VALUES = {step: step / 2 for step in range(1, 6)}


@pytest.mark.slow
def test_mlflow_holds_every_step_once(tmp_path):
    attempts(tmp_path / "run" / "stages" / "merge", "mlflow")
    (folder,) = (tmp_path / "run" / "sinks" / "mlflow").glob("*/*/metrics")
    found = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    assert sorted(found) == ["entropy", "reward.a", "reward.a.part", "time"]
    assert [line.split()[1:3] for line in found["reward.a"]] == [[str(v), str(k)] for k, v in VALUES.items()]


@pytest.mark.slow
def test_trackio_holds_every_step_once(tmp_path):
    attempts(tmp_path / "run" / "stages" / "merge", "trackio")
    (database,) = (tmp_path / "run" / "sinks" / "trackio").glob("*.db")
    rows = (
        sqlite3.connect(database)
        .execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        .fetchall()
    )
    assert {step: json.loads(metrics)["reward/a"] for _, step, metrics in rows} == VALUES
    assert len(rows) == 5
    assert {name.split()[:2] == ["my", "run/merge"] for name, *_ in rows} == {True}


@pytest.mark.slow
def test_wandb_holds_every_step_once(tmp_path):
    attempts(tmp_path / "run" / "stages" / "merge", "wandb")
    code = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data, place=7):  # LevelDB's log format, behind a header of its own
    parts = []
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        _, size, kind = struct.unpack_from("<IHB", data, place) if room >= 7 else (0, 0, 0)
        if kind == 0:
            place += room
            continue
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []

for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            print(json.dumps(["run", record.run.run_id, record.run.display_name]))
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            print(json.dumps(["step", json.loads(items["_step"]), json.loads(items["reward/a"])]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run" / "sinks" / "wandb")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert {step: value for kind, step, value in said if kind == "step"} == VALUES
    assert len([kind for kind, *_ in said if kind == "step"]) == 5
    assert len({(one, name) for kind, one, name in said if kind == "run"}) == 1  # two attempts, one run


class Broken:
    """A sink that fails where it is told to, and says what it was given."""

    def __init__(self, at: str) -> None:
        self.at, self.given, self.closed = at, [], 0

    def __call__(self, place: sinks.MetricsTarget, step: int) -> Broken:
        self.given.append((place.stage_title, step))
        return self._or("open")

    def _or(self, what: str) -> Broken:
        if what == self.at:
            raise RuntimeError("no route to https://me:a-secret-pw@host/x")
        return self

    def write(self, step: int, row: Any) -> None:
        self.given.append(step)
        self._or("write")

    def close(self) -> None:
        self.closed += 1
        self._or("close")


@pytest.fixture
def _kinds(monkeypatch):
    monkeypatch.setattr(sinks, "KINDS", dict(sinks.KINDS))


@pytest.mark.usefixtures("_kinds")
@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_a_sink_that_fails_is_one_warning_and_the_other_goes_on(at, tmp_path, caplog):
    broken, sound = Broken(at), Broken("")
    sinks.KINDS["broken"] = sinks.SinkKind(broken, "json")
    sinks.KINDS["sound"] = sinks.SinkKind(sound, "json")
    with MetricsWriter(tmp_path / "stages" / "s", sinks=["broken", "sound"], run="r") as writer:
        for step in (1, 2, 3):
            writer.write(step, {"a": 1.0})
    assert sound.given == [("r/s", 1), 1, 2, 3]
    assert broken.given == {"open": [("r/s", 1)], "write": [("r/s", 1), 1]}.get(at, sound.given)
    assert bool(broken.closed) == (at != "open")
    (said,) = caplog.messages
    assert said.startswith("the sink broken was not ")
    assert "a-secret-pw" not in said
    assert len(read_metrics(tmp_path / "stages" / "s" / "metrics.jsonl")) == 3


@pytest.mark.usefixtures("_kinds")
def test_no_step_comes_twice_and_a_damaged_note_costs_no_run(tmp_path):
    sound, stage = Broken(""), tmp_path / "stages" / "s"
    sinks.KINDS["sound"] = sinks.SinkKind(sound, "json")

    def given(*steps: int) -> list[Any]:
        sound.given.clear()
        with MetricsWriter(stage, sinks=["sound"]) as writer:
            writer.truncate(steps[0] - 1)
            for step in steps:
                writer.write(step, {"a": 1.0})
        return [step for step in sound.given if isinstance(step, int)]

    assert given(1, 2, 3) == [1, 2, 3]
    note = json.loads((stage / "sinks.json").read_text())
    assert note["steps"] == {"sound": 3}
    assert given(2, 3, 4) == [4]
    assert json.loads((stage / "sinks.json").read_text()) == note | {"steps": {"sound": 4}}
    for damage in (
        b"",
        b"\xff",
        b"[]",
        b'{"id": "../../x", "steps": {}}',
        b'{"id": 1, "steps": {"sound": "x"}}',
    ):
        (stage / "sinks.json").write_bytes(damage)
        assert given(5) == [5]
        assert json.loads((stage / "sinks.json").read_text())["id"] != note["id"]
    (stage / "sinks.json").unlink()
    (stage / "sinks.json").symlink_to(tmp_path / "elsewhere")
    assert given(6) == [6]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_a_recipe_names_them_and_the_doctor_looks_for_them(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    recipe = tiny_recipe(base=None, runtime={"sinks": ["tensorboard", "wandb"]})
    monkeypatch.setitem(sys.modules, "wandb", None)
    (found,) = check_sinks(recipe)
    assert (found.level, found.title) == ("error", "sink wandb")
    assert "opd[wandb]" in found.detail
    recipe = tiny_recipe(base=None, runtime={"sinks": ["tensorboard"], "tensorboard": True})
    assert check_sinks(recipe) == []
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        context = StageContext.open(recipe, folder, "merge", lambda *said: None)
        context.metrics.write(1, {"a": 1.0})
        context.metrics.close()
    assert len(list((tmp_path / "run" / "stages" / "merge" / "tensorboard").iterdir())) == 1


def test_what_is_not_installed_is_said_before_a_step(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(MissingExtraError, match=rf"opd\[{name}\]"):
            MetricsWriter(tmp_path, sinks=[name])
    with pytest.raises(ConfigError, match="pip install trackio"):
        MetricsWriter(tmp_path, sinks=["trackio"])
