"""Checkpoints of which each rank writes its pieces: read by any number of ranks, whole or not at all."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sharded_ranks
import tiny
from full import FULL
from rank_processes import run_ranks
from sharded_ranks import MIB
from test_sharded import said

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.storage.checkpoints import CheckpointStore
from opd.train.torch_backend import TorchBackend

pytestmark = pytest.mark.slow

SMALL = {"model": "tied"}
KINDS = {"small": SMALL, "masters": SMALL | {"dtype": "bfloat16"}}


def launch(root: Path, world: int, tasks: list[dict], seconds: float = 500) -> None:
    """Let `world` ranks do `tasks`; their answers are `root / f"{name}-{rank}.json"`."""
    (root / "rendezvous").unlink(missing_ok=True)
    (root / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(sharded_ranks.__file__, world, root, seconds)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, the checkpoints of four ranks and of one, and what three (and two) have made of them."""
    root = tmp_path_factory.mktemp("sharded")
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "tied", {})
    alone = TorchBackend(CausalLM.from_pretrained(root / "tied"), sharded_ranks.plain_training())
    sharded_ranks.learn(alone, 0, 3)
    CheckpointStore(root / "of one").save(3, alone.state(), {"step": 3})
    saving = [{"name": name, "does": "saves", "into": f"of {name}"} | task for name, task in KINDS.items()]
    reading = [{"does": "resumes", "from": f"of {name}"} | task for name, task in KINDS.items()]
    reading += [{"does": "resumes", "from": "of one"} | SMALL]
    launch(root, 4, saving)
    for world in (2, 3) if FULL else (3,):
        launch(root, world, [{"name": f"{task['from']} on {world}"} | task for task in reading])
    return root


def assert_alike(found: list[dict], expected: list[dict]) -> None:
    """Metrics agree within 1e-5; the gradient's norm, in which steps before add up, within 5e-5."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            near = 5e-5 if key == "grad_norm" else 1e-5
            assert math.isclose(value, theirs[key], rel_tol=near, abs_tol=1e-5), key


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ["small", "masters", "one"])
def test_any_number_of_ranks_goes_on(place, name, world):
    [expected, *_] = said(place, "small" if name == "one" else name)
    for result in said(place, f"of {name} on {world}", world):
        assert result["digest"] == expected["digest"] or name == "one"
        if name != "masters":  # sums in bfloat16 depend on who makes them
            assert_alike(result["metrics"], expected["metrics"])


def test_one_process_goes_on_with_the_pieces_of_four(place):
    checkpoint = CheckpointStore(place / "of small").latest()
    assert checkpoint is not None
    files = sorted(path.name for path in checkpoint.folder.glob("model*"))
    assert files == [f"model-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    backend = TorchBackend(tiny.model(seed=5), sharded_ranks.plain_training())
    backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    assert_alike(sharded_ranks.learn(backend, 3, 5), said(place, "small")[0]["metrics"])


@pytest.mark.long
def test_a_checkpoint_takes_a_share_of_memory_on_every_rank(tmp_path, monkeypatch):
    big = {"model": "big", "batch": {"max_tokens": 4096}}
    save_checkpoint(tiny.model(**sharded_ranks.BIG), tiny.tokenizer(), tmp_path / "big", {})
    for name, value in sharded_ranks.RETURNED.items():
        monkeypatch.setenv(name, value)
    tasks = [
        {"name": "saved", "does": "saves", "into": "c"} | big,
        {"name": "read", "does": "resumes", "from": "c"} | big,
    ]
    launch(tmp_path, 4, tasks)
    size = sum(file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors"))
    for result, again in zip(said(tmp_path, "saved"), said(tmp_path, "read"), strict=True):
        [saved], [read] = result["peaks"], again["peaks"]
        assert saved <= 1.1 * 3 * size / 4 + 16 * MIB  # weights and two moments; buffers
        assert read <= 1.1 * 2 * size / 4 + 16 * MIB  # the new moments beside the old ones
        assert_alike(again["metrics"], result["metrics"])


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip"])
def test_a_piece_that_is_missing_or_changed_is_named(place, tmp_path, damage, caplog):
    assert_damage_is_named(
        place / "of small", "optimizer-00002-of-00004.safetensors", damage, tmp_path, caplog
    )


def assert_damage_is_named(checkpoints: Path, name: str, damage: str, tmp_path: Path, caplog) -> None:
    """A copy of `checkpoints` is not used once its file `name` is damaged, which is said."""
    shutil.copytree(checkpoints, tmp_path / "c")
    victim = tmp_path / "c" / "step_3" / name
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.unlink()
    if damage != "remove":
        victim.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert CheckpointStore(tmp_path / "c").latest() is None
    [message] = caplog.messages
    assert name in message
    assert message.endswith("an older checkpoint is used, or the stage starts again")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_kill_9_while_a_checkpoint_is_written_leaves_the_newest_whole_one(place, tmp_path, victim, caplog):
    assert_kill_leaves_one({"model": str(place / "tied")}, tmp_path, victim, caplog)


def assert_kill_leaves_one(settings: dict, tmp_path: Path, victim: int, caplog) -> None:
    """Kill -9 of a rank in the middle of a save leaves the newest whole checkpoint, which is used."""
    into = tmp_path / "c"
    task = {"name": "killed", "does": "for ever", "into": str(into)} | settings
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    command = [sys.executable, sharded_ranks.__file__]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    try:
        middle = wait_for_draft(into, ranks)
        ranks[victim].send_signal(signal.SIGKILL)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert middle
    checkpoint = CheckpointStore(into).latest()
    assert checkpoint is not None
    assert checkpoint.step >= 3
    assert caplog.messages == []
    backend = TorchBackend(CausalLM.from_pretrained(settings["model"]), sharded_ranks.plain_training())
    backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    assert backend.digest() == checkpoint.state["digest"]


def wait_for_draft(folder: Path, ranks: list[subprocess.Popen]) -> bool:
    """Return as soon as files are written into a draft, of the fourth checkpoint or a later one."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and all(process.poll() is None for process in ranks):
        for draft in folder.glob(".step_*.tmp"):
            if int(draft.name.split("_")[1].split(".")[0]) > 3 and any(draft.glob("*")):
                return True
    return False
