"""A checkpoint that is written while the stage goes on: who is told of it, and when."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synced import watched

from opd.errors import CheckpointError
from opd.metrics import MetricsWriter, NoMetrics
from opd.pipelines.stages.checkpoint_saver import CheckpointSaver
from opd.ranks import Ranks
from opd.storage.checkpoints import CheckpointStore


@pytest.mark.parametrize("way", ["wait", "settle", "the next one"])
def test_samples_are_forgotten_once_the_checkpoint_that_learnt_from_them_is_there(tmp_path: Path, way: str):
    store, told = CheckpointStore(tmp_path / "checkpoints"), []
    backend = SimpleNamespace(state=lambda: {"model": {"w": torch.ones(2)}}, offload_state=lambda: None)
    context = SimpleNamespace(ranks=Ranks(), stage="merge", checkpoints=store, metrics=NoMetrics())
    saver = CheckpointSaver(context, backend, {})  # type: ignore[arg-type]

    def save(step: int) -> None:
        saver.save(step, lambda tail: {}, lambda: told.append((step, sorted(store._saved_steps()))))

    def ended(step: int) -> None:
        assert saver.pending is not None
        saver.pending.exception()  # once it is written, or cannot be
        {"wait": saver.wait, "settle": saver.finish_pending, "the next one": lambda: save(step + 1)}[way]()

    save(1)
    assert told == []
    ended(1)
    saver.wait()
    assert told[0] == (1, [1])
    count = len(told)
    store.folder = tmp_path / "file" / "checkpoints"
    (tmp_path / "file").write_text("in its way")
    save(9)
    with pytest.raises(CheckpointError):
        ended(9)
    assert len(told) == count


def test_a_checkpoint_has_its_name_after_its_metrics_are_on_the_disk(tmp_path, monkeypatch):
    backend = SimpleNamespace(state=lambda: {"model": {"w": torch.ones(2)}}, offload_state=lambda: None)
    metrics, store = MetricsWriter(tmp_path), CheckpointStore(tmp_path / "checkpoints")
    context = SimpleNamespace(ranks=Ranks(), stage="merge", checkpoints=store, metrics=metrics)
    metrics.write(1, {"lr": 0.5})
    told = watched(monkeypatch)
    with CheckpointSaver(context, backend, {}) as saver:  # type: ignore[arg-type]
        saver.save(1, lambda tail: {"metrics": tail}, lambda: None)
    checkpoint, file = store.latest(), metrics.path.stat()
    assert checkpoint is not None
    assert checkpoint.state == {"metrics": metrics.last_chain}
    name = [one[:2] for one in told].index(("named", checkpoint.folder.stat().st_ino))
    assert ("synced", file.st_ino, file.st_size) in told[:name]
