"""A checkpoint that version 0.1 has written, before ranks wrote pieces, is read by today's code.

`checkpoint_0_1` was made by that version's `CheckpointStore` and `TorchBackend` after three steps of the
batches of `backend_ranks`; `next.json` has what its next two steps told.
"""

import json
import shutil
from pathlib import Path

import backend_ranks
import pytest
import tiny

from opd.storage.checkpoints import CheckpointStore
from opd.train.backend import TrainingSettings
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend

OLD = Path(__file__).with_name("checkpoint_0_1")
FORM = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def test_a_checkpoint_of_version_0_1_goes_on_as_it_would_have_then(tmp_path):
    checkpoint = CheckpointStore(OLD, owner="run/merge").latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (3, {"step": 3, "student_tokens": 7})
    training = TrainingSettings(backend_ranks.OPTIM, backend_ranks.BATCH, 1.0, [CrossEntropyTerm()])
    backend = TorchBackend(tiny.model(seed=9, **FORM), training)
    backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    told = json.loads((OLD / "next.json").read_text())
    assert backend.digest() == told["digest"]
    for step, then in zip((3, 4), told["metrics"], strict=True):
        now = backend.forward_backward(backend_ranks.batch(step)) | backend.step(1e-3)
        assert now == {key: pytest.approx(value, rel=1e-5) for key, value in then.items()}
    # What it goes on with, it writes in today's way.
    store = CheckpointStore(tmp_path / "new", owner="run/merge")
    store.save(5, backend.state(), {"step": 5})
    newest = store.latest()
    assert newest is not None
    assert newest.load("model").keys() == checkpoint.load("model").keys()


def test_damage_to_an_old_checkpoint_is_found(tmp_path, caplog):
    shutil.copytree(OLD, tmp_path / "old")
    victim = tmp_path / "old" / "step_3" / "optimizer.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert CheckpointStore(tmp_path / "old", owner="run/merge").latest() is None
    assert "optimizer.safetensors" in caplog.text
