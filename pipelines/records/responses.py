"""What a stage has written since its checkpoint, where a run goes on otherwise than it did.

A step is repeated with the responses that were written for it, since the weights that wrote them come again.
With another learning rate, or rewards that were mended, those of the checkpoint do; those of later steps do
not, and what they wrote would be learnt from as if the weights of that step had written it.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def forget(stage: Path) -> None:
    """Drop all of it, in the folder of the stage, of every rank: it would be written otherwise now."""
    for own in (*_of_ranks(stage, "wal"), *_of_ranks(stage, "trajectories")):
        shutil.rmtree(own, ignore_errors=True)
    for file in stage.glob("in_flight*.safetensors*"):
        file.unlink(missing_ok=True)


def forget_later(stage: Path, step: int) -> None:
    """Drop each response of which weights of a later version than `step` have written a token. Raises
    `StorageError` where a log or a store cannot be read.
    """
    # Only here: a command that has no room for numpy opens run folders, too, and says so.
    from opd.storage.trajectories import TrajectoryWriter
    from opd.storage.wal import TokenWAL

    for own in _of_ranks(stage, "wal"):
        with TokenWAL(own) as log:
            known = ((uid, log.find(uid)) for uid in log.uids())
            log.retire([u for u, logged in known if logged and logged.policy_versions.max(initial=0) > step])
    for own in _of_ranks(stage, "trajectories"):
        with TrajectoryWriter(own) as store:
            store.retire([uid for uid in store.uids if store.record(uid).last_version > step])


def _of_ranks(stage: Path, name: str) -> list[Path]:
    return [own for own in (stage / name, *stage.glob(f"{name}-rank-*")) if own.is_dir()]
