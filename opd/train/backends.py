"""Build the back end that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from opd.config.train import TrainConfig
from opd.errors import ConfigError
from opd.models.causal_lm import CausalLM, torch_dtype
from opd.ranks import Ranks, process_group
from opd.train.backend import Backend, TrainingSettings
from opd.train.torch_backend import TorchBackend


class ModelLoader(Protocol):
    """Loads the model that a stage trains."""

    def __call__(self, dtype: str | None, *, empty: bool = False) -> CausalLM:
        """Load it in a named dtype (`None`: the recipe's). If `empty`, it may be without weights, as
        `open_empty` returns it.
        """
        ...


@contextmanager
def open_backend(
    load: ModelLoader,
    train: TrainConfig,
    training: TrainingSettings,
    ranks: Ranks,
    *,
    dtype: str = "float32",
) -> Iterator[Backend]:
    """Open the back end of `train` on these `ranks` while the block runs. It trains the model from `load`,
    which computes in `dtype`. Unless `train.precision` is `pure`, trained weights are kept in float32.
    With `training.quantize` the layers' matrices are rounded copies of them.

    Raises `ConfigError` if the settings do not fit the number of ranks, `MissingExtraError` without the
    library.
    """
    if misfit := train.rank_count_fault(ranks.size):
        raise ConfigError(f"{misfit}.")
    with ExitStack() as stack:
        mixed = train.precision == "mixed" and torch_dtype(dtype) != torch.float32
        compute = torch_dtype(dtype) if mixed else None  # the layers' dtype beside float32 masters
        if train.backend != "torch" or not ranks.is_alone:
            stack.enter_context(process_group())
            shared = train.backend != "deepspeed" or train.zero_stage == 3
            model = load("float32" if mixed else None, empty=shared)
            backend: Backend = _on_ranks(model, train, training, ranks, compute)
        elif compute is None and training.quantize is None:
            backend = TorchBackend(load(None), training)
        else:
            from opd.train.torch_backend import MastersBackend

            backend = MastersBackend(load("float32"), training, compute or torch.float32)
        stack.callback(backend.close)
        yield backend


def _on_ranks(
    model: CausalLM, train: TrainConfig, training: TrainingSettings, ranks: Ranks, compute: torch.dtype | None
) -> Backend:
    if train.backend == "megatron":
        from opd.train import megatron_backend, megatron_pipeline

        if train.pipeline_parallel > 1 and train.context_parallel != 1:
            build = megatron_pipeline.MegatronPipelineContextBackend
        elif train.pipeline_parallel > 1:
            build = megatron_pipeline.MegatronPipelineBackend
        elif train.context_parallel != 1:
            build = megatron_backend.MegatronContextBackend
        else:
            build = megatron_backend.MegatronBackend
        return build(model, training, ranks, train=train, compute_dtype=compute)
    if train.context_parallel != 1:
        from opd.train.fsdp_backend import ContextBackend

        return ContextBackend(model, training, ranks, train.context_parallel, compute, train.expert_parallel)
    if train.backend == "deepspeed":
        from opd.train.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(model, training, ranks, train=train, compute_dtype=compute)
    from opd.train.fsdp_backend import FSDPBackend

    return FSDPBackend(model, training, ranks, compute, train.expert_parallel)
