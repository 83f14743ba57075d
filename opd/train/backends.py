"""Which back end a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opd.config.train import BatchConfig, OptimConfig, TrainConfig
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import Backend
from opd.train.terms import LossTerm
from opd.train.torch_backend import TorchBackend


def open_backend(
    load: Callable[[], CausalLM],
    train: TrainConfig,
    optim: OptimConfig,
    batch: BatchConfig,
    temperature: float,
    terms: Sequence[LossTerm],
    ranks: Ranks,
) -> Backend:
    """The back end of `train` on these `ranks`, around the model `load` gives.

    Raises `ConfigError` if the settings do not fit the number of ranks, `MissingExtraError` without the
    library.
    """
    if train.backend == "torch" and ranks.alone:
        return TorchBackend(load(), optim, batch, temperature, terms)
    from opd.train.fsdp_backend import FSDPBackend

    return FSDPBackend(load(), optim, batch, temperature, terms, ranks)
