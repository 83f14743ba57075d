"""What every back end does alike: shares, packing, lock step, metrics; and the one of a single process.

The learning rate, the optimiser that all share, its update after clipping, its state on disk. Where weights
lie is a subclass's: here, in a Hugging Face model of this process; others beside (`backends.py` says which).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from opd.config.train import BatchConfig, OptimConfig
from opd.errors import TrainingError, from_system, reason_of
from opd.kernels import checks
from opd.kernels.head import Head, gathered
from opd.kernels.projection import tokens_per_chunk
from opd.kernels.vocab_parallel import HeadShard
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM, held_bytes, tensors_of, weights_digest
from opd.models.hf_folder import layer_windows
from opd.models.long_sequence import LayerMemory
from opd.models.sharded import Root
from opd.ranks import Ranks
from opd.storage.tensors import Saved, State, optimizer_fields
from opd.train.micro_batches import PLAIN, scored_tokens
from opd.train.offload import Shelf, apart
from opd.train.packing import PerSample, Shares, of_packed, pack, pieces
from opd.train.plan import CostModel
from opd.train.terms import (
    LossTerm,
    MetricSums,
    MismatchProbe,
    StudentRows,
    adding_to,
    linear_logprobs,
    shares,
)
from opd.types import MicroBatch, RolloutBatch, Sample


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Learning rate of step `step` (from 0) at `progress` in [0, 1] of the stage.

    The warm-up counts steps; the decay follows `progress`, so that a stage with a token budget instead of a
    number of steps has the same shape.
    """
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    progress = min(max(progress, 0.0), 1.0)
    floor = config.final_lr_fraction
    if config.schedule == "constant":
        decay = 1.0
    elif config.schedule == "linear":
        decay = 1.0 - (1.0 - floor) * progress
    else:
        decay = floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * warmup * decay


def adamw(parameters: Mapping[str, Tensor], optim: OptimConfig, *, fused: bool = True) -> torch.optim.AdamW:
    """AdamW over `parameters` as the recipe asks for it; the learning rate comes with every step."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=fused,
    )


def update(backend: Backend, optimizer: torch.optim.Optimizer, norm: float, lr: float) -> dict[str, float]:
    """Take the step for a clipped gradient, whose norm was `norm`, and zero it; returns the step's metrics.

    Raises `TrainingError` if `norm` is not finite; the weights are untouched then.
    """
    if not math.isfinite(norm):
        backend.zero_grad()
        raise not_finite(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    backend.measured()  # all there is to a step
    backend.zero_grad()
    return {"lr": lr, "grad_norm": norm}


def not_finite(norm: float) -> TrainingError:
    """The error for a gradient of this norm."""
    return TrainingError(f"the gradient norm is {norm}; lower the learning rate or resume from a checkpoint.")


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's running means of a gradient and of its square, by torch's names."""


def state_of(parameter: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state of `parameter` from `fields` of a checkpoint, perhaps written in another precision."""
    # The fused AdamW keeps its step count, in its own dtype, where the parameter is, too.
    return {
        key: value.to(parameter.device, parameter.dtype if key in MOMENTS else value.dtype)
        for key, value in fields.items()
    }


def moments_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes of what AdamW keeps of parameters of these `shapes`, all of which have been updated."""
    fields = {f"{name}/{key}": shape for name, shape in shapes.items() for key in MOMENTS}
    return fields | {f"{name}/step": () for name in shapes}


Read = Callable[[Sequence[Sequence[int]]], Iterable[RolloutBatch]]
"""Hands out the samples at some places, with their terms, one list of places after another."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a student is trained, whatever the back end."""

    optim: OptimConfig
    """AdamW; the learning rate comes with every step."""
    batch: BatchConfig
    """Packing limits."""
    temperature: float
    """Sampling temperature; every log-probability is taken at it."""
    terms: Sequence[LossTerm]
    """The streams of the loss."""
    shelf: Shelf | None = None
    """Where what learns is put while others use the device; `None`: it stays."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a back end has in memory on this rank, whichever of it is there now."""

    weights: Iterable[Tensor]
    """What layers compute with, and copies of it in the optimiser's precision."""
    gradients: Iterable[Tensor]
    moments: Iterable[Tensor]
    """What the optimiser keeps beside weights, which a step alone needs."""
    stays: Iterable[Tensor] = ()
    """What belongs to the model and never leaves."""


def cost_of(model: CausalLM) -> CostModel:
    """What a sample costs to train `model` on."""
    config = model.config
    return CostModel.of_model(model.parameter_count, config.hidden_size, layer_windows(config))


TRIMMED = 64 << 20
"""Bytes of a model's weights from which freed memory is given back within a step: smaller ones free little,
and steps are so short that asking for it again would be seen."""


def resident_bytes() -> int:
    """Of this process, where the system says so; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError):
        return 0


def model_bytes(model: CausalLM) -> int:
    """Bytes of its parameters; of those that are sharded, all."""
    return sum(parameter.nbytes for parameter in model.module.parameters())


class Backend(ABC):
    """The student's weights and optimiser state, whose model is reached through `hidden` and `head`.

    With several ranks each makes the whole call and computes its share. Where `lockstep` says that a pass of
    the model is itself communication, a rank with fewer micro-batches makes empty passes.

    Args:
        training: How it is trained.
        data: The ranks that share the samples; those of one tensor-parallel group are one of them.
        model: The student, by whose cost samples are dealt out.
    """

    lockstep = False
    empty_buffers = False
    """Whether the memory of gradients is there between steps, too, with nothing in it."""
    lent = False
    """Whether an engine writes with these very weights: they stay then."""

    def __init__(self, training: Training, data: Ranks | None = None, model: CausalLM | None = None) -> None:
        self.terms = list(training.terms)
        self.temperature = training.temperature
        self.data = Ranks() if data is None else data
        self.together = self.data
        """All ranks that pass through the model together; by default those."""
        self.shares = Shares(self.data, None if model is None else cost_of(model))
        self._trims = model is not None and model_bytes(model) >= TRIMMED
        self._trimmed = 0
        """Resident bytes when freed memory was last given back."""
        asked = training.batch.max_tokens
        self.max_tokens = PLAIN if asked == "auto" else asked
        """Packed tokens of a micro-batch, at most, but for one sample that has more; see `choose_tokens`."""
        self._most_tokens: int | None = None
        """What `max_tokens` is at most, whatever is chosen or was begun with."""
        self.layers = 0 if model is None else len(layer_windows(model.config))
        self.vocabulary = 0 if model is None else model.vocabulary or model.vocab_size
        self._batch = training.batch
        self._shelf = training.shelf
        self._total: Tensor | None = None
        """During a step's passes, what `gathered` says."""
        self.measured: Callable[[], object] = lambda: None
        """Called when most of the memory of a step is held."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Of the student's last hidden states."""

    @abstractmethod
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Last hidden states [T, D] of packed sequences, inside `run`."""

    @abstractmethod
    def head(self) -> Head | HeadShard:
        """The head as it is inside `run`, live."""

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, which uses `hidden` and `head`, with their weights in place."""
        return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; `last` of this step's."""
        del last
        loss.backward()

    def gathered(self) -> AbstractContextManager[Tensor | None]:
        """During a step's passes: where kernels add the gradient of the head's weight; `None`: autograd."""
        return nullcontext(None)

    def reduce(self) -> None:
        """Sum the gradient over the data-parallel ranks, where `backward` has not done so."""
        return

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def step(self, lr: float) -> dict[str, float]: ...

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights` of the model with its adapters merged, for engines that know of none."""
        return self.weights()

    @abstractmethod
    def state(self) -> State:
        """A copy in the host's memory of what this rank has of the files `model` and `optimizer`: everything
        that `load_state` needs to continue bit for bit, whatever the number of ranks and the back end.
        """

    @abstractmethod
    def load_state(self, state: Saved) -> None:
        """Continue from what `state` has returned on all ranks. Raises `CheckpointError` or `ModelError` if
        it belongs to another model.
        """

    def digest(self) -> str:
        """sha256 of the student's weights; all ranks take part."""
        return weights_digest(self.weights())

    def close(self) -> None:
        """Give back what outlives the object."""
        if self._shelf is not None:
            self._shelf.close()

    @abstractmethod
    def held(self) -> Held:
        """What is in memory on this rank."""

    def resident(self) -> dict[str, int]:
        """Bytes that weights, gradients and moments take now, of this rank."""
        held = self.held()
        return {
            "trainer_weights": held_bytes((*held.weights, *held.stays)),
            "trainer_gradients": held_bytes(held.gradients),
            "trainer_moments": held_bytes(held.moments),
        }

    def rest(self, weights: bool = True) -> None:
        """Between two steps put moments, and `weights`, away until they are used, where that is asked for.
        Raises `OSError` if they cannot be written, on all ranks; nothing is lost by that.
        """
        if self._shelf is None:
            return
        if self.together.alone:
            self._put_away(self._shelf, weights)
            return
        shelf = self._shelf

        def work() -> None:
            try:
                self._put_away(shelf, weights)
            except OSError as error:
                raise from_system(error) or TrainingError(f"{reason_of(error)}.") from error

        self.together.agreed(work, "putting away what learns")

    def _put_away(self, shelf: Shelf, weights: bool) -> None:
        held = self.held()
        shelf.put("moments", held.moments)
        if self.empty_buffers:
            shelf.put("gradients", held.gradients, zero=True)
        if weights and not self.lent:
            shelf.put("weights", held.weights)
        self._trim()

    def wake(self) -> None:
        """Bring the weights back. Raises `CheckpointError` if they are not what was put away."""
        self._take("weights")

    def _take(self, *names: str) -> None:
        if self._shelf is not None:
            for name in names:
                self._shelf.take(name)

    def packed_as(self, tokens: int) -> int:
        """Go on with the micro-batches of `tokens` that a stage has begun with (0: it begins now), where its
        recipe leaves their size open; returns it.
        """
        if tokens and self._batch.max_tokens == "auto":
            self.max_tokens = min(tokens, self._most_tokens or tokens)
        return self.max_tokens

    def cap_tokens(self, most: int) -> None:
        """Pack no more than `most` tokens, since no more fit where samples are read to."""
        self._most_tokens = most
        self.max_tokens = min(self.max_tokens, most)

    def mine(self, samples: Sequence[Sample]) -> list[Sample]:
        """Deal out the samples of a new step; returns those this rank scores and trains."""
        self.shares.deal(samples)
        return self.shares.mine(samples)

    def each(self, samples: Sequence[Sample], compute: PerSample, what: str) -> list[np.ndarray]:
        """`compute` for all `samples`, each on the rank that trains it."""
        return self.shares.each(samples, compute, what)

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """`[R]` float32 log-probability of each response under the weights as they are now."""
        return self.each(samples, self.own_logprobs, "the recomputed log-probabilities")

    def own_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """`logprobs` of samples that are this rank's; all ranks call it together, each with its own."""
        return self.own_numbers(samples, self._packed_logprobs, "the recomputed log-probabilities")

    @torch.no_grad()
    def own_numbers(
        self, samples: Sequence[Sample], compute: Callable[..., Tensor], what: str
    ) -> list[np.ndarray]:
        """`[R]` float32 of samples that are this rank's: what `compute`, which uses `hidden` and `head`,
        makes of packs of them (see `of_packed`); `what` names it. All ranks call it together.
        """
        self.wake()
        with self.together.collective(what):
            missing = self._missing_passes(samples)
            results = of_packed(
                samples,
                self.max_tokens,
                self.device,
                lambda *packed: self.run(lambda: compute(*packed)),
            )
            for _ in range(missing):
                self.run(self._nothing)
        return results

    def _packed_logprobs(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, rows: Tensor
    ) -> Tensor:
        hidden, head = self.hidden(input_ids, position_ids, cu_seqlens)[rows], self.head()
        scale = {"temperature": self.temperature, "chunk": self.chunk(head)}
        return linear_logprobs(hidden, head, input_ids[rows + 1], **scale)

    def chunk(self, head: Head | HeadShard) -> int:
        """Tokens whose logits exist at a time."""
        return tokens_per_chunk(self._batch.kl_chunk, self.device, head.vocabulary)

    def forward_backward(self, batch: RolloutBatch) -> dict[str, float]:
        """`accumulate` of a batch that is in memory."""
        return self.accumulate(batch.samples, lambda parts: (batch.take(part) for part in parts))

    def accumulate(self, samples: Sequence[Sample], read: Read) -> dict[str, float]:
        """Accumulate the gradient of a step; its weights hold the normalisers of the whole step.

        `samples` are all of the step, the same on every rank, in the order in which they are trained; nothing
        but their lengths and teachers is looked at. `read(parts)` hands out this rank's micro-batches, each
        of which lists places in `samples`, one when the one before is done with; an empty one is nothing to
        read.

        Returns token-weighted means of every term's metrics, and for batches with teachers each teacher's
        share of the tokens and of the gradient (sum over tokens of the L2 norm at the last hidden state).

        Raises `TrainingError` if the loss is not finite or no sample has a response token; the weights are
        untouched then.
        """
        if not any(len(sample.response_ids) for sample in samples):
            raise TrainingError(
                f"all {len(samples)} responses of this step are empty: there is nothing to learn from;"
                " check the stop ids, the prompts and rollout.max_new_tokens."
            )
        self._take("weights", "gradients")
        sums = MetricSums()
        parts = self.shares.in_step(samples, self.max_tokens)
        self._trim()  # what rollout and teachers have left in pieces
        try:
            with (
                self.together.collective("the forward and backward passes"),
                self.gathered() as self._total,
            ):
                self._passes(read(parts), parts, sums)
                self.reduce()
        except FloatingPointError as error:
            self.zero_grad()
            raise TrainingError(f"{error}; lower the learning rate or resume from a checkpoint.") from error
        finally:
            self._total = None
        self._trim()
        self.measured()  # with the head that came last
        sums = self._everyones(sums)
        metrics = sums.means()
        for kind in ("token_share", "grad_share"):
            for teacher, share in shares(sums.sums(f"{kind}/")).items():
                metrics[f"{kind}/{teacher}"] = share
        return metrics

    def _trim(self, kept: int = 0) -> None:
        """Give freed memory back to the system, unless it is less than `kept` bytes since it last was.

        On a CPU glibc keeps what lies between pieces still in use, and phases and micro-batches that follow
        each other, each with pieces of its own sizes, would need the sum of their memory and not that of the
        largest.
        """
        if not self._trims or self.device.type != "cpu":
            return
        if kept and resident_bytes() - self._trimmed < kept:
            return
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if give_back is not None:
            give_back(0)
        self._trimmed = resident_bytes()

    def _everyones(self, sums: MetricSums) -> MetricSums:
        """`sums` of this rank with those of all that train with it."""
        if self.data.alone:
            return sums
        return MetricSums.merged(self.data.gather_json(sums.parts(), "the metrics of a step"))

    def _passes(
        self, batches: Iterable[RolloutBatch], parts: Sequence[Sequence[int]], sums: MetricSums
    ) -> None:
        """Add the gradient of all `batches`, whose places are `parts`; what they say goes to `sums`."""
        for number, batch in enumerate(batches, start=1):
            self._pass(batch, sums, last=number == len(parts))
            self._trim(kept=TRIMMED)

    def _pass(self, batch: RolloutBatch, sums: MetricSums, last: bool) -> None:
        if not batch.samples:
            if self.lockstep:
                self.backward(self.run(self._nothing), last)
            return
        micro = pack(list(batch), self.device)
        # The loss ends with this call: what its graph still holds, a teacher's head, is gone before the next.
        self.backward(self._checked_loss(micro, sums), last)

    def _missing_passes(self, samples: Sequence[Sample]) -> int:
        """Passes this rank has to make beyond those of its own `samples`, so that all make as many."""
        if not self.lockstep:
            return 0
        own = len(pieces(samples, range(len(samples)), self.max_tokens, by_teacher=False))
        return self.data.max(own, "the number of passes") - own

    def _nothing(self) -> Tensor:
        """0, with a gradient of 0 for every weight."""
        head = self.head()
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        ends = torch.tensor([0, 1], dtype=torch.int32)
        hidden = self.hidden(ids, ids, ends)
        own = head.head if isinstance(head, HeadShard) else head
        unused = own.weight[:1].sum() if own.bias is None else own.weight[:1].sum() + own.bias.sum()
        return 0.0 * (hidden.sum() + unused)

    def _loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        hidden = self.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens)[micro.rows]
        teacher = micro.samples[0].teacher
        if teacher is not None:
            counted = (micro.kl_weight != 0) | (micro.policy_weight != 0)
            sums.add(f"token_share/{teacher}", counted.sum())
            hidden.register_hook(
                lambda grad: sums.add(f"grad_share/{teacher}", grad.float().norm(dim=-1).sum())
            )
        head = adding_to(self.head(), self._total)
        scale = (self.temperature, self.chunk(head))
        student = StudentRows(hidden, head, micro.targets, *scale, self.sum_shared)
        student.probed = any(isinstance(term, MismatchProbe) and not term.shared for term in self.terms)
        return torch.stack([term(micro, student, sums) for term in self.terms]).sum()

    def sum_shared(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks that share each sequence; here one rank has all of it."""
        return values

    def _checked_loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        """`_loss`, when all numbers that it was made from are known to be sound."""

        def fail() -> None:
            self.zero_grad()
            first = micro.samples[0].uid
            raise TrainingError(
                f"the loss is {loss.item()} in the micro-batch that starts with sample {first}; lower the"
                " learning rate or resume from an earlier checkpoint."
            )

        with checks.read_together():
            loss = self.run(lambda: self._loss(micro, sums))
            checks.require(torch.isfinite(loss), fail)
        return loss


class WholeModelBackend(Backend):
    """A back end whose student is a `CausalLM` that each rank calls as a whole, however weights are kept."""

    def __init__(self, model: CausalLM, training: Training, data: Ranks | None = None) -> None:
        super().__init__(training, data, model)
        self.model = model
        self._memory = layer_memory(training.batch)
        self._max_grad_norm = training.optim.max_grad_norm

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.model.hidden(input_ids, position_ids, cu_seqlens, self._memory)

    def head(self) -> Head:
        return self.model.head()

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(self.model, AdaptedLM):
            return self.weights()
        self.wake()
        return self.model.merged_weights(self._sent_dtype)

    @property
    def _sent_dtype(self) -> torch.dtype | None:
        """What `weights` are rounded to; `None`: they are not."""
        return None


class TorchBackend(WholeModelBackend):
    """Owns the student's weights and its optimiser state.

    Args:
        model: The student; trained in place.
        training: How it is trained.
        data: The ranks that share the samples.
    """

    root: Root | None = None
    """Inside whose forward the weights are whole, where they are cut over ranks."""

    def __init__(self, model: CausalLM, training: Training, data: Ranks | None = None) -> None:
        super().__init__(model, training, data)
        self._parameters = self._learning()
        if training.shelf is not None:
            apart(model.module.parameters())
        self._optimizer = adamw(self._parameters, training.optim)

    def _learning(self) -> dict[str, nn.Parameter]:
        """What the optimiser updates, by the names of the model's parameters."""
        return {n: p for n, p in self.model.module.named_parameters() if p.requires_grad}

    def gathered(self) -> AbstractContextManager[Tensor | None]:
        return gathered(self.model.module)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        norm = self._clip()
        self._take("moments")
        return update(self, self._optimizer, norm, lr)

    def _clip(self) -> float:
        """The global norm of the gradient, which is scaled down to the limit."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm))

    def held(self) -> Held:
        parameters, buffers = tensors_of(self.model.module)
        if self.model.borrowed is not None:  # others compute with it while this one is away
            lent = set(self.model.borrowed.parameters)
            buffers += [one for one in parameters if one in lent]
            parameters = [one for one in parameters if one not in lent]
        return Held(
            tuple(parameters),
            [p.grad for p in self._parameters.values() if p.grad is not None],
            [value for state in self._optimizer.state.values() for value in state.values()],
            tuple(buffers),
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student, in a fixed order."""
        self.wake()
        return self.model.weights()

    def state(self) -> State:
        model = {n: t.detach().to("cpu", copy=True) for n, t in self.weights()}
        self.rest()  # where they leave the device, both need not be there at once
        moments = {n: t.detach().to("cpu", copy=True) for n, t in self._moments()}
        return {"model": model, "optimizer": moments}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimiser keeps of each parameter, as `NAME/FIELD`."""
        self._take("moments")
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield f"{name}/{key}", value

    def load_state(self, state: Saved) -> None:
        by_name = optimizer_fields(state["optimizer"], self._parameters)
        self._take("weights", "moments")
        self.model.load_weights(state["model"].items())
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = state_of(parameter, fields)


def layer_memory(batch: BatchConfig) -> LayerMemory:
    """What `batch` says about the memory of a forward pass."""
    return LayerMemory(batch.recompute_layers, batch.sequence_chunk)


@torch.no_grad()
def response_logprobs(
    model: CausalLM,
    samples: Sequence[Sample],
    temperature: float,
    batch: BatchConfig,
    run: Callable[[Callable[[], Tensor]], Tensor] = lambda compute: compute(),
) -> list[np.ndarray]:
    """`[R]` float32 log-probabilities of each sample's response under `model`, at `temperature`; `run`: runs
    each pass, in which the weights have to be whole.
    """

    def one_pass(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        hidden = model.hidden(input_ids, position_ids, cu_seqlens, layer_memory(batch))[rows]
        head, targets = model.head(), input_ids[rows + 1]
        chunk = tokens_per_chunk(batch.kl_chunk, model.device, head.vocabulary)
        return linear_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

    tokens = scored_tokens(batch.max_tokens, model.device)
    return of_packed(samples, tokens, model.device, lambda *packed: run(lambda: one_pass(*packed)))
