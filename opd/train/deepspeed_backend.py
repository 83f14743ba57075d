"""DeepSpeed ZeRO: a Hugging Face model with optimiser state (1), gradients (2) and weights (3) over ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Tried with
DeepSpeed 0.19.8, on a CPU with gloo.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.config.train import TrainConfig
from opd.errors import ConfigError, from_system, needs_extra, reason_of
from opd.kernels.projection import Linear, linear, other_way
from opd.models.adapters import BASE_DIGEST, AdaptedLM, require_base, weight_name
from opd.models.causal_lm import CausalLM
from opd.models.sharded import (
    ForwardRoot,
    StoredWeights,
    layers_to_cut,
    own_tensors,
    read_on_ranks,
    replace_empty,
    require_memory,
    width_of,
)
from opd.ranks import Ranks
from opd.storage.tensors import (
    Saved,
    State,
    TensorPiece,
    check_tensors,
    copy_to_host,
    optimizer_fields,
    part_of,
)
from opd.train.backend import TrainingSettings
from opd.train.offload import BackendTensors
from opd.train.optimizer import MOMENTS, build_adamw, moments_of, not_finite
from opd.train.torch_backend import WholeModelBackend


def deepspeed_library() -> ModuleType:
    """`deepspeed`, imported. Raises `MissingExtraError` if it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it had to guess
    with needs_extra("train.backend deepspeed", "deepspeed"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # pyright: ignore[reportMissingImports]
        import deepspeed.ops  # pyright: ignore[reportMissingImports]
        import deepspeed.utils  # pyright: ignore[reportMissingImports]
    # These collectives have names that newer torch calls deprecated, and it would warn at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not torch.cuda.is_available():
        # This optional collective over shared memory takes a minute and a half to compile the first time.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _naming_settings() -> Iterator[None]:
    """Turn DeepSpeed's own errors about settings into `ConfigError`."""
    try:
        yield
    except Exception as error:
        if from_system(error) is not None or isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        raise ConfigError(
            f"DeepSpeed does not start with train.deepspeed as it is ({reason_of(error)[:300]}); change it,"
            " or leave it out."
        ) from error


class DeepSpeedBackend(WholeModelBackend):
    """The back end on a DeepSpeed engine. Each rank writes its own shard of weights and moments.

    With stage 3 the model may lack its weights. It is sharded first, and each rank then reads its share.

    Args:
        model: The student; trained in place.
        train: The ZeRO stage and further DeepSpeed settings.
        compute_dtype: The layers' dtype, while the engine keeps weights in float32.
    """

    lockstep = True
    empty_buffers = True

    def __init__(
        self,
        model: CausalLM,
        training: TrainingSettings,
        data: Ranks,
        *,
        train: TrainConfig,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, training, data)
        self._device = model.device
        self._library = deepspeed_library()
        self._stage = train.zero_stage
        config = self._engine_settings(train.deepspeed, compute_dtype)
        empty = {names[0] for names, tensor in own_tensors(model.module) if tensor.is_meta}
        if empty:
            self._shard_parameters(config, compute_dtype)
        parameters: dict[str, Any] = dict(model.module.named_parameters())
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self._named = {weight_name(name): one for name, one in parameters.items()}
        """All parameters, by their names in `weights`."""
        if isinstance(model, AdaptedLM):
            model.gather = self._gather_tensor
        exact: dict[str, Tensor] = {}
        if compute_dtype is not None:
            # Cast trained parameters that are not sharded yet, as DeepSpeed would before it makes its float32
            # copies. These then get the exact values.
            for name, parameter in self._parameters.items():
                if not hasattr(parameter, "ds_id"):
                    exact[name] = parameter.detach()
                    parameter.data = parameter.data.to(compute_dtype)
        self._engine = self._start_engine(build_adamw(self._parameters, training.optim, fused=False), config)
        for name in exact:
            self._set_values(self._parameters[name], None, partial(part_of, exact, name))
        if empty:
            self._read_share(empty)

    def _engine_settings(self, user: dict[str, Any], compute_dtype: torch.dtype | None) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with the `user`'s settings. The model's layers bound its gathers
        and reductions.
        """
        module = self.model.module
        layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_to_cut(self.model)]
        largest = max(p.numel() for p in module.parameters())
        # The current layer, the next one, and parameters outside layers.
        live = 2 * max(layers) + sum(p.numel() for p in module.parameters()) - sum(layers)
        bounds = {
            "reduce_bucket_size": min(500_000_000, largest),
            "stage3_prefetch_bucket_size": min(50_000_000, max(layers)),
            "stage3_max_live_parameters": min(1_000_000_000, live),
            "stage3_max_reuse_distance": min(1_000_000_000, live),
        }
        return user | {
            "train_micro_batch_size_per_gpu": 1,  # passes are counted here, not there
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._max_grad_norm,
            "zero_optimization": bounds
            | user.get("zero_optimization", {})
            # Else it replaces a function of torch for the whole process; see `_save_no_weights`.
            | {"stage": self._stage, "memory_efficient_linear": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # else offload_optimizer refuses any AdamW but its own
            "bf16": {"enabled": compute_dtype is torch.bfloat16},
            "fp16": {"enabled": compute_dtype is torch.float16},
            "steps_per_print": 2**31,
        }

    def _start_engine(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        os.environ.setdefault("LOCAL_RANK", "0")
        root = ForwardRoot(self.model.module)
        with _naming_settings():
            engine, *_ = self._library.initialize(
                model=root, optimizer=optimizer, config=config, dist_init_required=False
            )
        if self._stage == 3:
            self._save_no_weights()
            # The loss uses them outside the forward of the module that owns them.
            for parameter in self.model.module.get_output_embeddings().parameters():
                self._library.zero.register_external_parameter(root, parameter)
            zero = engine.optimizer
            pairs = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
            for masters, layers in pairs:
                # DeepSpeed means to do this but compares a device with its name. Share one copy of equal
                # weights.
                if layers is not None and (masters.dtype, masters.device) == (layers.dtype, layers.device):
                    masters.data = layers.data
        return engine

    def _save_no_weights(self) -> None:
        """Let linear layers save the parameter for backward instead of its gathered copy. Torch's own product
        saves a view of the weight, so the whole model would be in memory between forward and backward.
        """
        of_parameter = self._library.runtime.zero.linear.LinearFunctionForZeroStage3.apply

        def forward(part: nn.Linear, inputs: Tensor) -> Tensor:
            product = linear if other_way(inputs, part.weight) else of_parameter
            return product(inputs, part.weight, part.bias)

        for part in self.model.module.modules():
            if type(part) in (nn.Linear, Linear):
                setattr(part, "forward", partial(forward, part))  # noqa: B010

    def _shard_parameters(self, config: dict[str, Any], compute_dtype: torch.dtype | None) -> None:
        """Replace every parameter on the meta device by this rank's shard, as `zero.Init` does when a module
        is built. The shards have no values yet.
        """
        os.environ.setdefault("LOCAL_RANK", "0")
        dtype = compute_dtype or self.model.dtype
        empty = [p for p in self.model.module.parameters() if p.is_meta]
        share = sum(-(-p.numel() // self.data.size) for p in empty)
        # The layers' weights, DeepSpeed's own float32 copy, and the gradient.
        learns = any(p.requires_grad for p in empty)
        require_memory(self.model, self.data, share, dtype.itemsize + learns * (dtype.itemsize + 4))
        # Use the existing ranks: DeepSpeed would look for a launcher's.
        self._library.init_distributed(dist_init_required=False)
        with _naming_settings():
            init = self._library.zero.Init(config_dict_or_path=config)

        def local_shard(old: nn.Parameter) -> nn.Parameter:
            # The full tensor is never touched, so only the shard becomes resident.
            new: Any = nn.Parameter(
                torch.empty_like(old, device=self._device, dtype=dtype), requires_grad=old.requires_grad
            )
            # `Init` would first broadcast the first rank's values, which are empty.
            init._convert_to_deepspeed_param(new)
            new.partition()
            return new

        replace_empty(self.model.module, self._device, local_shard)

    @torch.no_grad()
    def _read_share(self, empty: Collection[str]) -> None:
        """Read this rank's share of the tensors that were `empty`, and check the model."""

        def read_tensors(stored: StoredWeights) -> None:
            for names, tensor in own_tensors(self.model.module):
                if not isinstance(tensor, nn.Parameter):
                    stored.read(names, width_of(tensor.shape), 0, tensor)
                elif names[0] in empty:
                    width = width_of(_full_shape(tensor))
                    self._set_values(tensor, None, partial(stored.read, names, width))

        read_on_ranks(self.model, self.data, read_tensors)
        self._hand_over()
        self.model.mark_filled()
        with self.data.name_missing_ranks("the first pass of a model"):
            self._engine(self.model.check)

    @property
    def device(self) -> torch.device:
        return self._device

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        return self._engine(compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks, but the loss weights already hold the normaliser of all of them.
        self._engine.backward(loss * self.data.size)

    def local_tensors(self) -> BackendTensors:
        zero, module = self._engine.optimizer, self.model.module
        parameters: list[Any] = list(module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._stage == 3:
            # Unsharded tensors, this rank's shard of the others, then the optimiser's own.
            weights = [*parameters, *(p.ds_tensor for p in parameters), *zero.fp32_partitioned_groups_flat]
            gradients.append(zero.grad_partitions_flat_buffer)
            gradients += [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
        else:
            weights = [*parameters, *zero.single_partition_of_fp32_groups]
            summed = [*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()]
            for parts in (*summed, *(bucket.buffer for bucket in zero.ipg_buckets.values())):
                gradients += parts or ()
        moments = (value for state in zero.optimizer.state.values() for value in state.values())
        return BackendTensors(weights, gradients, list(moments), tuple(module.buffers()))

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient was not finite. DeepSpeed reports it only afterwards, so the
        weights are lost and the run continues from the newest checkpoint.
        """
        self._reload_tensors("moments")
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        self.measured()  # the peak of the step's memory
        norm = float(self._engine.get_global_grad_norm())
        if not np.isfinite(norm):
            raise not_finite(norm)
        if self._load is not None:
            self._balance_experts(self._load)
        return {"lr": lr, "grad_norm": norm}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the student, unsharded, in its compute dtype. All ranks iterate together."""
        self.reload_weights()
        for name, tensor in self.model.weights():
            yield name, self._gather_tensor(name, tensor)

    def _gather_tensor(self, name: str, tensor: Tensor) -> Tensor:
        parameter = self._named.get(name)
        if self._stage < 3 or parameter is None:
            return tensor
        with self._library.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def state(self) -> State:
        """Return this rank's shards of the float32 weights and of the moments. The first rank adds tensors
        that all ranks have unsharded.
        """
        self._reload_tensors("weights", "moments")
        model: dict[str, Tensor | TensorPiece] = {}
        optimizer: dict[str, Tensor | TensorPiece] = {}
        steps = [state["step"] for state in self._engine.optimizer.optimizer.state.values()]
        for name, tensor in self.model.weights():
            if name in self._named:
                self._add_shard(model, name, self._named[name], None)
            elif self.data.is_main:
                model[name] = tensor.to("cpu", copy=True)
        for name, parameter in self._parameters.items() if steps else ():
            for key in MOMENTS:
                self._add_shard(optimizer, f"{name}/{key}", parameter, key)
            if self.data.is_main:
                optimizer[f"{name}/step"] = torch.as_tensor(steps[0], dtype=torch.float32).clone()
        return {"model": model, "optimizer": optimizer}

    def _add_shard(
        self, shards: dict[str, Tensor | TensorPiece], name: str, parameter: nn.Parameter, key: str | None
    ) -> None:
        first, count = self._local_range(parameter)
        if count:
            values = self._local_state(parameter, key)[:count]
            shards[name] = copy_to_host(values, _full_shape(parameter), first)

    def _local_range(self, parameter: Any) -> tuple[int, int]:
        """Return the first element of `parameter` (row-major) that this rank updates, and their count."""
        if self._stage == 3:
            each = parameter.ds_tensor.ds_numel  # the last rank's may be partly padding
            first = min(parameter.ds_zero_partition_rank * each, parameter.ds_numel)
            return first, min(each, parameter.ds_numel - first)
        if parameter._hp_mapping is None:
            return 0, 0
        address = parameter._hp_mapping.lp_fragment_address
        return address.start, address.numel

    def _local_state(self, parameter: Any, key: str | None) -> Tensor:
        """`[n]` float32 of this rank's share of the weights, or of the moment `key`. Padding may follow."""
        if self._stage < 3:
            return parameter._hp_mapping.get_hp_fragment(key).view(-1)
        utils = self._library.utils
        if key is None:
            return utils.safe_get_local_fp32_param(parameter)
        return utils.safe_get_local_optimizer_state(parameter, key)

    @torch.no_grad()
    def _set_values(self, parameter: Any, key: str | None, read: Callable[[int, Tensor], None]) -> None:
        """Set this rank's share of the weights, or of the moment `key`, with `read(first, into)`."""
        first, count = self._local_range(parameter)
        if not count:
            return
        if self._stage < 3:
            read(first, self._local_state(parameter, key))
            return
        if not parameter.requires_grad:  # the layers have the only copy
            read(first, parameter.ds_tensor[:count])
            return
        utils = self._library.utils
        values = torch.zeros(parameter.ds_tensor.ds_numel, dtype=torch.float32, device=self._device)
        read(first, values[:count])
        if key is None:
            utils.safe_set_local_fp32_param(parameter, values)
        else:
            utils.safe_set_local_optimizer_state(parameter, values, key)

    @torch.no_grad()
    def load_state(self, state: Saved) -> None:
        saved, moments = state["model"], state["optimizer"]
        fields = optimizer_fields(moments, self._parameters)
        self._reload_tensors("weights", "moments")
        shapes = {name: _full_shape(self._named.get(name, tensor)) for name, tensor in self.model.weights()}
        trained = {name: _full_shape(self._parameters[name]) for name in fields}
        check_tensors(saved, shapes, type(self.model.module).__name__)
        check_tensors(moments, moments_of(trained), "the optimiser of this run")
        for name, tensor in self.model.weights():
            parameter = self._named.get(name)
            if name == BASE_DIGEST:
                require_base(saved[name], tensor)
                continue
            if parameter is None:
                tensor.copy_(saved[name])
                continue
            self._set_values(parameter, None, partial(part_of, saved, name))
            if self._stage < 3:  # every rank has all weights
                parameter.copy_(saved[name])
        self._hand_over()
        if fields:  # AdamW's state before its first step, to be filled
            zero, step = self._engine.optimizer, next(iter(fields.values()))["step"]
            flats = (
                zero.single_partition_of_fp32_groups if self._stage < 3 else zero.fp32_partitioned_groups_flat
            )
            for flat in flats:
                empty = {key: torch.zeros_like(flat) for key in MOMENTS}
                zero.optimizer.state[flat] = empty | {"step": step.detach().clone().to(torch.float32)}
            if self._stage < 3:
                zero._lazy_init_hp_params_optimizer_state()
        for name in fields:
            for key in MOMENTS:
                self._set_values(self._parameters[name], key, partial(part_of, moments, f"{name}/{key}"))

    def _hand_over(self) -> None:
        """Copy the optimiser's weights to the layers, as DeepSpeed does after a step."""
        if self._stage < 3:
            return
        zero = self._engine.optimizer
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def close(self) -> None:
        super().close()
        self._engine.destroy()
        if self._stage == 3:
            # DeepSpeed never removes a model from this stack, and the model keeps everything that belongs to
            # it.
            stack = self._library.runtime.zero.parameter_offload.FWD_MODULE_STACK
            stack[:] = [module for module in stack if module is not self._engine.module]
        # Autograd hooks hold these objects, and Python's collector cannot see them. The weights, gradients
        # and moments of every stage of a run would stay.
        for part in (self._engine.optimizer, self._engine):
            vars(part).clear()
        for parameter in self.model.module.parameters() if self._stage == 3 else ():
            vars(parameter).clear()
            parameter.data = parameter.data.new_empty(0)
        # It would use its cached groups for the next stage too, which has another process group.
        self._library.utils.groups._release_process_group_references()


def _full_shape(tensor: Any) -> tuple[int, ...]:
    """Shape of the unsharded tensor, also if ZeRO-3 has sharded it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
