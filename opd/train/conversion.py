"""The last word on a batch: a function of the user's own between samples with their terms and the trainer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from opd.errors import ConfigError, TrainingError
from opd.imports import BATCH, calling, import_function
from opd.types import RolloutBatch, Sample, TokenTerms


def convert_batch(batch: RolloutBatch, path: str | None, where: str) -> RolloutBatch:
    """What the function at `path` makes of `batch`; `batch` itself for `None`.

    It may leave samples out, add some, and change their `TokenTerms`. The weights in there are normalised
    over the whole optimiser step already: whoever drops samples and wants a mean again divides anew. `where`
    is the recipe's key. Raises `ConfigError` if the function cannot be loaded and `TrainingError` if it
    raises or returns anything but a whole batch.
    """
    if path is None:
        return batch
    found: Any = import_function(path, where, ConfigError, BATCH)
    with calling(f"{where} {path}", TrainingError):
        converted = found(batch)
    with calling(f"{where} {path}: checking what it returned", TrainingError):
        if not isinstance(converted, RolloutBatch):
            raise TrainingError(
                f"{where} {path} returned {type(converted).__name__}; return a RolloutBatch of samples and"
                " terms."
            )
        for sample, terms in zip(converted.samples, converted.terms, strict=True):
            _check(sample, terms)
    return converted


def _check(sample: Sample, terms: TokenTerms) -> None:
    """Raise `ValueError` unless every stream that is there has one finite number for each response token."""
    for field in fields(terms):
        name, values = field.name, getattr(terms, field.name)
        if values is None and field.default is None:
            continue
        wanted = np.shape(sample.response_ids)
        if values is None or np.shape(values) != wanted or not np.isfinite(values).all():
            raise ValueError(
                f"{name} of sample {sample.uid} is not one finite number for each of its"
                f" {len(sample.response_ids)} response tokens"
            )
