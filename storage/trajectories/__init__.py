"""`TrajectoryStore`: light metadata of every trajectory, and heavy fields that are mapped when needed."""

from opd.storage.trajectories.batch import TrajectoryBatch
from opd.storage.trajectories.segments import SAMPLE_FIELDS, Field
from opd.storage.trajectories.store import TrajectoryStore, TrajectoryUnion, UnionBatch
from opd.storage.trajectories.table import TrajectoryRecord, TrajectoryTable
from opd.storage.trajectories.writer import TrajectoryWriter, put_samples, record_of

__all__ = [
    "SAMPLE_FIELDS",
    "Field",
    "TrajectoryBatch",
    "TrajectoryRecord",
    "TrajectoryStore",
    "TrajectoryTable",
    "TrajectoryUnion",
    "TrajectoryWriter",
    "UnionBatch",
    "put_samples",
    "record_of",
]
