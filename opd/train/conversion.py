"""The last word on a batch: a function of the user's own between samples with their terms and the trainer."""

from __future__ import annotations

from typing import Any

from opd.errors import ConfigError, TrainingError
from opd.imports import import_function
from opd.types import RolloutBatch


def convert_batch(batch: RolloutBatch, path: str | None, where: str) -> RolloutBatch:
    """What the function at `path` makes of `batch`; `batch` itself for `None`.

    It may leave samples out, add some, and change their `TokenTerms`. The weights in there are normalised
    over the whole optimiser step already: whoever drops samples and wants a mean again divides anew. `where`
    is the recipe's key. Raises `ConfigError` if the function cannot be loaded and `TrainingError` if it
    returns anything but a batch.
    """
    if path is None:
        return batch
    found: Any = import_function(path, where, ConfigError)
    converted = found(batch)
    if not isinstance(converted, RolloutBatch):
        raise TrainingError(
            f"{where} {path} returned {type(converted).__name__}; return a RolloutBatch of samples and terms."
        )
    return converted
