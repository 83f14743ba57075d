"""Megatron-Core: layers and vocabulary sharded over tensor-parallel ranks, samples over the others.

Shoeybi et al. 2019, "Megatron-LM". Gradients go through Megatron-Core's own data-parallel buffers and
`finalize_model_grads`, in float32. `megatron_optimizer.py` has the optimisers.

`MegatronContextBackend` shares each sequence among ranks, and the samples among groups of such ranks.
`megatron_tensors.py` has the slices of tensors, `megatron_pipeline.py` the schedule of stages. With adapters
(`opd/megatron/adapters.py`) only these train; the base has neither gradients nor optimiser state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.config.train import OptimConfig, TrainConfig
from opd.errors import ConfigError
from opd.kernels.vocab_parallel import AnyHead
from opd.megatron.adapters import add_adapters
from opd.megatron.experts import LOGITS, Mixture
from opd.megatron.form import CORRECTION, EMBEDDING, HEAD, Elements, MegatronForm, ParameterPart, head_shard
from opd.megatron.layout import RankLayout
from opd.megatron.module import MegatronModule, inside_megatron, megatron_core, model_parallel
from opd.models.adapters import BASE_DIGEST, AdaptedLM, require_base, weight_name
from opd.models.attention import Attend
from opd.models.causal_lm import CausalLM
from opd.models.context_parallel import ContextAttention, TokenShare
from opd.models.peft_folder import LORA_A, LORA_B, merge_weight
from opd.models.routing import ExpertRouting, RoutedTokens, Router, balancing_fault
from opd.models.sharded import StoredWeights, read_on_ranks, require_memory, width_of
from opd.ranks import Ranks
from opd.storage.tensors import Saved, State, TensorPiece, check_tensors, optimizer_fields, part_of
from opd.train.backend import Backend, TrainingSettings
from opd.train.megatron_optimizer import (
    WEIGHT,
    DistributedAdamW,
    MegatronOptimizer,
    SlicedAdamW,
    Slices,
    main_gradient,
)
from opd.train.megatron_tensors import RankTensors, SlicePlan
from opd.train.offload import TRIMMED, BackendTensors
from opd.train.optimizer import MOMENTS, moments_of, not_finite
from opd.train.shared_sequences import SharedSequences, context_of
from opd.train.terms import MetricSums
from opd.types import RolloutBatch


class MegatronBackend(Backend):
    """The back end on Megatron-Core. Each rank reads its slices of a model or checkpoint. It writes its
    shards of Hugging Face's tensors, which any back end reads.

    Args:
        model: The initial student. Its weights are copied, so it may be dropped.
        ranks: All ranks. `train.tensor_parallel` neighbours share a model and its samples.
        train: Parallel sizes and the optimiser.
        compute_dtype: The layers' dtype, while the optimiser keeps weights in float32.
    """

    empty_buffers = True

    def __init__(
        self,
        model: CausalLM,
        training: TrainingSettings,
        ranks: Ranks,
        *,
        train: TrainConfig,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises `ModelError` if Megatron-Core does not support the model or cannot split it into that many,
        and `ConfigError` if the optimiser does not run here.
        """
        tensor_parallel, stages = train.tensor_parallel, train.pipeline_parallel
        distributed = _uses_distributed(train, model.device)
        self._form = MegatronForm.from_config(model.module.config)
        self._form.check_student(tensor_parallel, stages)
        copies = ranks.size // (tensor_parallel * stages)
        sharing = self._form.sharing_size(train.expert_parallel, copies)
        self._layout = RankLayout(
            ranks.rank, ranks.size, tensor_parallel, train.context_size, stages, sharing
        )
        self.lockstep = sharing > 1
        self._plan = SlicePlan(self._form, self._layout, model)
        self._stage = self._plan.stage
        dtype = compute_dtype or model.dtype
        if model.unread is not None:
            extra = 4 if compute_dtype is None else 8  # gradients are float32, and perhaps masters
            require_memory(model, ranks, self._plan.parameter_bytes(dtype.itemsize, extra), 1)
        self._ranks, self._stack = ranks, ExitStack()
        self._group = self._stack.enter_context(model_parallel(tensor_parallel, stages))
        self._sharing: dist.ProcessGroup | None = None
        self._same_experts: dist.ProcessGroup | None = None
        if sharing > 1:
            shared, same = self._layout.expert_groups()
            self._sharing = ranks.one_of(shared, "experts").group
            self._same_experts = ranks.one_of(same, "same-experts").group
        data = ranks.one_of(self._layout.rank_groups("data"), "data")
        # Together they have all tokens of a step once.
        everyone = self._layout.rank_groups("stages", "data", "context")
        self._everyone = data if len(everyone[0]) == data.size else ranks.one_of(everyone, "tokens")
        if stages > 1:
            self._stages = ranks.one_of(self._layout.rank_groups("stages"), "stages")
        super().__init__(training, data, model)
        self.together = ranks
        self._unbalanced = balancing_fault(model.module)
        """Why a loss of routers has no meaning."""
        self._vocabulary = model.vocabulary
        self._device = model.device
        self._scaling = model.lora.scaling if isinstance(model, AdaptedLM) else None
        self._module = self._build_module(model, dtype)
        self._module.recompute = training.batch.recompute_layers
        self._parameters = self._all_parameters()
        of_stages = self._stages.group if stages > 1 else None
        self._tensors = RankTensors(self._plan, self._module, self._parameters, self._sharing, of_stages)
        self._max_grad_norm = training.optim.max_grad_norm
        self._overlaps = model.device.type == "cuda" if train.overlap is None else train.overlap
        self._buffers = self._data_parallel(distributed)
        self._keeps_float32 = compute_dtype is not None
        self._optimizer = self._open_optimizer(training.optim, distributed)
        self._base_digest = self._read_model(model)
        self._open_groups(ranks)

    def _open_groups(self, ranks: Ranks) -> None:
        """Open further groups of `ranks`. All ranks call it together."""

    def _build_module(self, model: CausalLM, dtype: torch.dtype) -> MegatronModule:
        """Return this rank's layers without values, with adapters if `model` has them."""
        trains = self._scaling is None
        module = MegatronModule(
            self._form, self._group, dtype, model.device, trains, self._stage, self._sharing
        )
        if self._scaling is not None:
            bases = self._plan.bases_of(self._group.rank(), self._stage)
            add_adapters(module.module, bases, self._plan.shapes, self._scaling, self._group)
        padding = model.module.get_input_embeddings().padding_idx
        if padding is not None and self._stage.first:
            words = module.module.embedding.word_embeddings
            words.register_forward_hook(partial(_constant_padding, padding))
        return module

    def _all_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's layers, and its rows of a head that is not the embedding here."""
        parameters = dict(self._module.parameters())
        if self._stage.last and not (self._form.tied and self._stage.first):
            rows = self._form.padded_vocabulary(self._group.size()) // self._group.size()
            head = torch.empty(
                rows, self._form.hidden_size, dtype=self._module.dtype, device=self._module.device
            )
            parameters[HEAD] = nn.Parameter(head, requires_grad=self._scaling is None)
        return parameters

    def _read_model(self, model: CausalLM) -> Tensor | None:
        """Read this rank's slices of `model`. Those on the meta device come from its files. Return the digest
        of its base if adapters are trained.
        """
        tensors = {weight_name(name): tensor for name, tensor in CausalLM.weights(model)}
        pieces, experts, shapes = self._tensors.pieces.values(), self._plan.experts, self._plan.shapes

        def read_missing(stored: StoredWeights) -> None:
            def read_element(source: str, first: int, into: Tensor) -> None:
                name, start = experts.places.get(source, (source, 0))
                if name.endswith((LORA_A, LORA_B)):
                    part_of(tensors, name, first, into)
                elif name == source:
                    stored.read([name], width_of(shapes[name]), first, into)
                else:
                    stored.read_expert(name, start, math.prod(experts.shapes[source]), first, into)

            self._read_slices(pieces, read_element)

        adapted = model if isinstance(model, AdaptedLM) else None
        if model.unread is None:
            self._read_slices(pieces, self._tensors.elements_of(tensors))
        else:
            read_on_ranks(model, self._ranks, read_missing)
            if adapted is not None:  # its base, of which it takes the digest
                adapted.gather = lambda name, _: self._tensors.gather_tensor(name)
            model.mark_filled()
        return None if adapted is None else dict(adapted.weights())[BASE_DIGEST]

    @property
    def _shared_parameter(self) -> str | None:
        """The parameter whose rows another stage also has, trains and writes."""
        return HEAD if self._shared_rows() is not None and self._stage.last else None

    def _open_optimizer(self, optim: OptimConfig, distributed: bool) -> MegatronOptimizer:
        pieces, stages = self._tensors.learning_pieces(), self._tensors.stages
        cut = {piece.name: piece.split for piece in pieces}
        learn = {name: parameter for name, parameter in self._parameters.items() if name in cut}
        experts = {piece.name for piece in pieces if piece.experts is not None}
        slices = Slices(learn, cut, self._group, stages, self._shared_parameter, experts, self._sharing)
        if distributed:
            return DistributedAdamW(self._buffers, slices, optim, self._process_groups())
        return SlicedAdamW(slices, optim, float32=self._keeps_float32)

    def _data_parallel(self, distributed: bool) -> Any:
        """Return Megatron-Core's gradient buffers of all trained parameters, including the head's."""
        megatron_core()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        module = _StageModule(self._module.module, self._parameters.get(HEAD), self._shared_rows())
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self._overlaps,
            use_distributed_optimizer=distributed,
        )
        with inside_megatron(self._device):
            return DistributedDataParallel(
                self._module.module.config, settings, module, pg_collection=self._process_groups()
            )

    def _process_groups(self) -> Any:
        """Return Megatron-Core's groups if ranks share experts, which it was not told of, because teachers
        may have all. `None`: its own.
        """
        if self._same_experts is None:
            return None
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups: Any = ProcessGroupCollection.use_mpu_process_groups()
        groups.ep, groups.expt_dp = self._sharing, self._same_experts
        return groups

    def _shared_rows(self) -> nn.Parameter | None:
        """Return the embedding, or the head in the last stage, if both have the same trained rows."""
        if not self._form.tied or self._layout.stages == 1 or self._scaling is not None:
            return None
        return self._parameters.get(EMBEDDING if self._stage.first else HEAD)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def hidden_size(self) -> int:
        return self._form.hidden_size

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: RoutedTokens | None = None
    ) -> Tensor:
        return self._run_module(input_ids, position_ids, cu_seqlens, routed=routed)

    def _run_module(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        attend: Attend | None = None,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        return self._module.run(input_ids, position_ids, cu_seqlens, attend, routed=routed)

    def _find_routing(self) -> str | None:
        if self._form.replay_fault is None:
            self.routing = self._routed_blocks()
        return self._form.replay_fault

    def _routed_blocks(self) -> ExpertRouting:
        form = self._form
        # `MegatronModule.run` replays choices: here only their form is needed, of other stages' layers too.
        layers = [nn.Identity() for _ in range(form.layers)]
        blocks = [(at, layer) for at, layer in enumerate(layers) if form.is_mixture(at)]
        return ExpertRouting(layers, blocks, form.experts, form.experts_per_token)

    def _find_routers(self) -> tuple[ExpertRouting, list[Router]] | str:
        if self._unbalanced is not None:
            return self._unbalanced
        mixtures = [part for part in self._module.module.modules() if isinstance(part, Mixture)]
        return self._routed_blocks(), [(mixture.router, LOGITS) for mixture in mixtures]

    def _has_corrections(self) -> bool:
        return self.routing is not None and self._form.sigmoid

    def _merge_metrics(self, sums: MetricSums) -> MetricSums:
        return MetricSums.merge_ranks(self._everyone.gather_json(sums.raw_sums(), "the metrics of a step"))

    def head(self) -> AnyHead:
        rows = self._parameters[HEAD if HEAD in self._parameters else EMBEDDING]
        shard = head_shard(rows, self._form, self._vocabulary, self._group)
        return shard if self._group.size() > 1 else shard.head

    def gradient_total(self) -> AbstractContextManager[Tensor | None]:
        """Yield Megatron-Core's float32 buffer, which the ranks sum at the end. Yield None if it sums during
        backward, because it waits for each gradient from autograd, and if the head is frozen.
        """
        if self._overlaps or not self._stage.last or self._scaling is not None:
            return nullcontext(None)
        rows = len(self.head().weight)  # without padding
        padded = self._parameters[HEAD if HEAD in self._parameters else EMBEDDING]
        return nullcontext(main_gradient(padded)[:rows])

    def backward(self, loss: Tensor, last: bool) -> None:
        self._add_gradient(loss, None, last)

    def _add_gradient(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        """Add the gradient of `output`, whose own gradient is `gradient`. After the `last` of a step
        Megatron-Core may start to sum it over the ranks.
        """
        with inside_megatron(self._device), nullcontext() if last else self._buffers.no_sync():
            output.backward(gradient)
        self._return_memory(TRIMMED)

    def _run_passes(
        self, batches: Iterable[RolloutBatch], parts: Sequence[Sequence[int]], sums: MetricSums
    ) -> None:
        if self.lockstep:
            super()._run_passes(batches, parts, sums)
            return
        remaining = sum(map(bool, parts))
        if not remaining and self._overlaps:
            self.backward(self.run(self._zero_loss), last=True)  # others sum in their last pass
        for batch in batches:
            if batch.samples:
                remaining -= 1
                self._run_pass(batch, sums, last=not remaining)

    def reduce_gradient(self) -> None:
        """Sum over the data-parallel ranks, and over tensor-parallel ranks for the heads' norms."""
        from megatron.core.distributed import finalize_model_grads

        with inside_megatron(self._device):
            finalize_model_grads([self._buffers])

    def local_tensors(self) -> BackendTensors:
        buffers = self._buffers.buffers + self._buffers.expert_parallel_buffers
        buffers = [buffer.grad_data for buffer in buffers]
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return BackendTensors(
            weights=(*self._parameters.values(), *self._optimizer.master_weights()),
            gradients=buffers + gradients,
            moments=self._optimizer.moment_tensors(),
            stays=tuple(self._module.module.buffers()),
        )

    def zero_grad(self) -> None:
        self._buffers.zero_grad_buffer()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        self._reload_tensors("moments")
        norm = self._optimizer.gradient_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            raise not_finite(norm)
        self._optimizer.step(lr, min(1.0, self._max_grad_norm / (norm + 1e-6)))
        if self._balance_rate and self._load is not None:
            here = [one.data for name, one in self._parameters.items() if name.endswith(CORRECTION)]
            before = sum(self._form.moe_layers[: self._stage.layers.start])
            self._load.balance(here, self._balance_rate, before)
        self.measured()  # all there is to a step
        self.zero_grad()
        return {"lr": lr, "grad_norm": norm}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained tensor of the student by Hugging Face's names, unsharded, in its compute dtype.
        All ranks iterate together, one tensor at a time. The digest of the base precedes adapters.
        """
        self.reload_weights()
        if self._base_digest is not None:
            yield BASE_DIGEST, self._base_digest
        for name in (*self._plan.learnt, *self._plan.kept):
            yield name, self._tensors.gather_tensor(name)

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.reload_weights()
        names, gather = self._plan.shapes, self._tensors.gather_tensor
        for name in names:
            if name.endswith((LORA_A, LORA_B)):
                continue
            tensor, layer = gather(name), name.removesuffix(".weight")
            if layer + LORA_A in names:
                assert self._scaling is not None
                tensor = merge_weight(tensor, gather(layer + LORA_A), gather(layer + LORA_B), self._scaling)
            yield name, tensor

    @torch.no_grad()
    def state(self) -> State:
        """Return this rank's shards of Hugging Face's tensors. A stage's first rank adds unsharded ones."""
        self._reload_tensors("weights", "moments")
        files: dict[str, dict[str, Tensor | TensorPiece]] = {"model": {}, "optimizer": {}}
        if self._base_digest is not None and self._ranks.is_main:
            files["model"][BASE_DIGEST] = self._base_digest.clone()
        for piece in self._tensors.learning_pieces():
            if piece.name == self._shared_parameter:
                continue
            for key in (WEIGHT, *MOMENTS) if self._optimizer.steps else (WEIGHT,):
                values = self._optimizer.full_values(piece.name, key)
                if key == WEIGHT and not self._keeps_float32:
                    values = values.to(self._parameters[piece.name].dtype)
                for source, (cut, part) in self._tensors.parts_of(piece, values).items():
                    if key == WEIGHT:
                        self._tensors.add_shard(files["model"], source, piece, cut, part)
                    else:
                        name = f"{self._plan.learnt[source]}/{key}"
                        self._tensors.add_shard(files["optimizer"], name, piece, cut, part)
        for piece in self._tensors.kept_pieces():
            values = self._parameters[piece.name].detach()
            [(source, (cut, part))] = self._tensors.parts_of(piece, values).items()
            self._tensors.add_shard(files["model"], source, piece, cut, part)
        if self._optimizer.steps and self._ranks.is_main:
            step = torch.tensor(float(self._optimizer.steps))
            files["optimizer"] |= {f"{name}/step": step.clone() for name in self._plan.learnt.values()}
        return files

    def load_state(self, state: Saved) -> None:
        saved, moments = state["model"], state["optimizer"]
        shapes = {name: self._plan.shapes[name] for name in self._plan.learnt}
        trained = {self._plan.learnt[name]: shape for name, shape in shapes.items()}
        fields = optimizer_fields(moments, trained)
        shapes |= {name: self._plan.shapes[name] for name in self._plan.kept}
        if self._base_digest is not None:
            shapes[BASE_DIGEST] = tuple(self._base_digest.shape)
        check_tensors(saved, shapes, f"a {self._form.family} on Megatron-Core")
        if self._base_digest is not None:
            require_base(saved[BASE_DIGEST], self._base_digest)
        pieces = self._tensors.learning_pieces() + self._tensors.kept_pieces()
        weights = self._tensors.elements_of(saved)
        if not fields:
            self._read_slices(pieces, weights)
            return
        check_tensors(moments, moments_of(trained), "the optimiser of this run")
        steps = int(next(iter(fields.values()))["step"])
        self._read_slices(pieces, weights, moments, steps)

    @torch.no_grad()
    def _read_slices(
        self,
        pieces: Iterable[ParameterPart],
        weights: Elements,
        moments: Mapping[str, Tensor] | None = None,
        steps: int = 0,
    ) -> None:
        """Read these slices of weights, and of moments, one parameter at a time."""
        self._reload_tensors("weights", "moments")
        self._optimizer.resume_after(steps)
        assemble = self._tensors.assemble_parameter
        for piece in pieces:
            value, parameter = assemble(piece, weights), self._parameters[piece.name]
            parameter.copy_(value)
            if parameter.requires_grad:
                self._optimizer.set_values(piece.name, WEIGHT, value)
            if moments is not None and parameter.requires_grad:
                for key in MOMENTS:
                    value = assemble(piece, self._tensors.elements_of(moments, key))
                    self._optimizer.set_values(piece.name, key, value)

    def close(self) -> None:
        super().close()
        self._stack.close()


class MegatronContextBackend(SharedSequences, MegatronBackend):
    """A `MegatronBackend` whose ranks share the tokens of each micro-batch in rows of
    `train.context_parallel`. The rows share the samples. Every rank has the same slices of layers as without
    context parallelism.
    """

    def _open_groups(self, ranks: Ranks) -> None:
        super()._open_groups(ranks)
        self._context = context_of(ranks.one_of(self._layout.rank_groups("context"), "context"))

    def _local_hidden(self, share: TokenShare, routed: RoutedTokens | None = None) -> Tensor:
        bounds = torch.tensor([0, len(share.input_ids)], dtype=torch.int32)
        assert self._context is not None
        attend = ContextAttention(self._context, share.segments)
        here = None if routed is None else routed.select(share.places)
        return self._run_module(share.input_ids, share.position_ids, bounds, attend, here)


def _uses_distributed(train: TrainConfig, device: torch.device) -> bool:
    """Return True to use Megatron-Core's distributed optimiser. It accepts CUDA tensor types only."""
    on_cuda = torch.empty(0, device=device).type().startswith("torch.cuda.")
    if train.distributed_optimizer and not on_cuda:
        raise ConfigError(
            "train.distributed_optimizer needs a GPU: Megatron-Core's optimiser refuses tensors of a"
            f" {device.type}; leave it out."
        )
    return train.distributes_optimizer(on_cuda)


class _StageModule(nn.Module):
    """The module that Megatron-Core reduces gradients of: a stage's layers and its head. `shared` are rows of
    both the first and the last stage; it sums their gradients.
    """

    def __init__(self, decoder: nn.Module, head: nn.Parameter | None, shared: nn.Parameter | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.register_parameter("head", head)
        self.pre_process = True  # tells Megatron-Core that it asks the right module
        self.share_embeddings_and_output_weights = shared is not None
        self._rows = (shared,)  # registered already
        if shared is not None:
            # Both stages shard the optimiser's state of these rows in the same way.
            setattr(shared, "shared_embedding", True)  # noqa: B010

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Called by Megatron-Core under this name."""
        return self._rows[0]


def _constant_padding(padding: int, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """As in `nn.Embedding`, give the row of the padding token no gradient from lookups."""
    return torch.where((inputs[0] == padding).unsqueeze(-1), output.detach(), output)
