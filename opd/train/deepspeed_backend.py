"""DeepSpeed ZeRO: a Hugging Face model with optimiser state (1), gradients (2) and weights (3) over ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Tried with
DeepSpeed 0.19.8, on a CPU with gloo.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.config.train import TrainConfig
from opd.errors import MissingExtraError
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import (
    MOMENTS,
    Saved,
    State,
    Training,
    WholeModelBackend,
    adamw,
    check_names,
    not_finite,
    optimizer_fields,
)
from opd.train.fsdp_backend import Root


def deepspeed_library() -> ModuleType:
    """`deepspeed`, imported. Raises `MissingExtraError` if it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it had to guess
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed  # pyright: ignore[reportMissingImports]
            import deepspeed.ops  # pyright: ignore[reportMissingImports]
            import deepspeed.utils  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("train.backend deepspeed", "deepspeed") from error
    # Collectives by names that newer releases of torch call old; it would be said at every one of them.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not torch.cuda.is_available():
        # An optional collective over shared memory; compiling it takes a minute and a half the first time.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedBackend(WholeModelBackend):
    """The back end on a DeepSpeed engine. Checkpoints hold whole tensors, which any back end reads.

    Args:
        model: The student; trained in place.
        training: How it is trained.
        train: Which stage of ZeRO, and more of DeepSpeed's configuration.
        compute_dtype: What layers compute in, while the engine keeps weights in float32.
    """

    lockstep = True

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        data: Ranks,
        *,
        train: TrainConfig,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, training, data)
        self._device = model.device
        self._parameters = dict(model.module.named_parameters())
        self._library = deepspeed_library()
        self._stage = train.zero_stage
        optimizer = adamw(self._parameters, training.optim, fused=False)
        self._engine = self._start(optimizer, train.deepspeed, compute_dtype)

    def _start(
        self, optimizer: torch.optim.Optimizer, more: dict[str, Any], compute_dtype: torch.dtype | None
    ) -> Any:
        os.environ.setdefault("LOCAL_RANK", "0")
        root = Root(self.model.module)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # passes are counted here, not there
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._max_grad_norm,
            "zero_optimization": more.get("zero_optimization", {}) | {"stage": self._stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": compute_dtype is torch.bfloat16},
            "fp16": {"enabled": compute_dtype is torch.float16},
            "steps_per_print": 2**31,
        }
        engine, *_ = self._library.initialize(
            model=root, optimizer=optimizer, config=more | config, dist_init_required=False
        )
        if self._stage == 3:
            # Used by the loss, outside of the forward of the module that owns them.
            for parameter in self.model.module.get_output_embeddings().parameters():
                self._library.zero.register_external_parameter(root, parameter)
        return engine

    @property
    def device(self) -> torch.device:
        return self._device

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        return self._engine(compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over the ranks; the weights of the loss hold the normaliser of all of them.
        self._engine.backward(loss * self.data.size)

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient was not finite. DeepSpeed tells only afterwards: the weights
        are lost then, and the newest checkpoint is where the run goes on.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not np.isfinite(norm):
            raise not_finite(norm)
        return {"lr": lr, "grad_norm": norm}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student, whole, in the dtype it computes in; all ranks walk together."""
        for name, tensor in self.model.weights():
            yield name, self._whole(name, tensor)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        parameter = self._parameters.get(name)
        if self._stage < 3 or parameter is None:
            return tensor
        with self._library.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def state(self) -> State:
        """On the first rank the files `model` and `optimizer`, with whole tensors; elsewhere nothing."""
        utils = self._library.utils
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        steps = [state["step"] for state in self._engine.optimizer.optimizer.state.values()]
        for name, tensor in self.model.weights():
            parameter = self._parameters.get(name)
            self._keep(
                model, name, tensor if parameter is None else utils.safe_get_full_fp32_param(parameter)
            )
            if not steps or parameter is None:
                continue
            for key in MOMENTS:
                self._keep(optimizer, f"{name}/{key}", utils.safe_get_full_optimizer_state(parameter, key))
            self._keep(optimizer, f"{name}/step", torch.as_tensor(steps[0], dtype=torch.float32))
        return {"model": model, "optimizer": optimizer} if self.data.main else {}

    def _keep(self, kept: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.data.main:
            kept[name] = tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def load_state(self, state: Saved) -> None:
        fields = optimizer_fields(state["optimizer"], self._parameters)
        self._load_weights(state["model"])
        if not fields:
            return
        self._make_moments(next(iter(fields.values()))["step"])
        for name, values in fields.items():
            for key in MOMENTS:
                value = values[key].to(self._device, torch.float32)
                self._library.utils.safe_set_full_optimizer_state(self._parameters[name], value, key)

    def _load_weights(self, saved: Mapping[str, Tensor]) -> None:
        own = {name for name, _ in self.model.weights()}
        check_names(saved, own, type(self.model.module).__name__)
        for name, parameter in self._parameters.items():
            value = saved[name].to(self._device)
            if self._stage == 3:
                with self._library.zero.GatheredParameters([parameter], modifier_rank=0):
                    if self.data.main:
                        parameter.copy_(value)
            else:
                parameter.copy_(value)
            self._library.utils.safe_set_full_fp32_param(parameter, value.float())

    def _make_moments(self, step: Tensor) -> None:
        """AdamW's state before its first step, for the values of a checkpoint."""
        zero = self._engine.optimizer
        whole = self._stage < 3
        for flat in zero.single_partition_of_fp32_groups if whole else zero.fp32_partitioned_groups_flat:
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            zero.optimizer.state[flat] = moments | {"step": step.detach().clone().to(torch.float32)}
        if whole:
            zero._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self._engine.destroy()
        # It would use the groups it has noted for the next stage too, whose process group is another.
        self._library.utils.groups._release_process_group_references()
