"""`Backend`: the gradient of a step, wherever the weights lie. `backends.py` lists the subclasses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from opd.config.train import BatchConfig, OptimConfig
from opd.errors import TrainingError
from opd.kernels import checks
from opd.kernels.ops import linear_logprobs
from opd.kernels.projection import tokens_per_chunk
from opd.kernels.vocab_parallel import AnyHead, HeadShard
from opd.models.causal_lm import CausalLM, weights_digest
from opd.models.hf_folder import layer_windows
from opd.models.routing import ExpertRouting, RoutedTokens, Router
from opd.ranks import Ranks
from opd.storage.tensors import Saved, State
from opd.train.masks import ForeignTokenError, policy_logprobs
from opd.train.offload import TRIMMED, OffloadBuffer, TrainerMemory
from opd.train.packing import Shares, of_packed, pack
from opd.train.plan import PLAIN, CostModel
from opd.train.routers import ExpertLoad, RouterLosses
from opd.train.terms import LossTerm, MetricSums, MismatchProbe, StudentRows, with_total
from opd.types import MicroBatch, RolloutBatch, Sample

Read = Callable[[Sequence[Sequence[int]]], Iterable[RolloutBatch]]
"""Yields the samples, with their terms, at each list of indices."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Training settings of a student, for every back end."""

    optim: OptimConfig
    """AdamW; the learning rate comes with every step."""
    batch: BatchConfig
    """Packing limits."""
    temperature: float
    """Sampling temperature; every log-probability is taken at it."""
    terms: Sequence[LossTerm]
    """The streams of the loss."""
    shelf: OffloadBuffer | None = None
    """Storage for offloaded tensors while others use the device. `None`: they stay."""
    balance_rate: float = 0.0
    """How far a step moves what routers add to their scores; see `ExpertLoad.balance`."""
    balance_loss: float = 0.0
    """Weight of the routers' balancing loss; see `routers`."""
    router_z_loss: float = 0.0
    """Weight of the routers' z-loss."""
    quantize: Literal["fp8"] | None = None
    """The format whose numbers the layers' matrices are, beside masters in float32."""


def cost_of(model: CausalLM) -> CostModel:
    """Return the cost of training `model` on a sample."""
    config = model.config
    return CostModel.of_model(model.parameter_count, config.hidden_size, layer_windows(config))


class Backend(TrainerMemory):
    """The student's weights and optimiser state; `hidden` and `head` run its model.

    With several ranks each makes the whole call and computes its share. If `lockstep`, a pass of the model
    communicates, and a rank with fewer micro-batches makes empty passes.

    Args:
        data: The ranks that share the samples. A tensor-parallel group counts as one.
        model: The student. Its cost decides which rank gets a sample.
    """

    lockstep = False
    files: tuple[str, ...] = ("model", "optimizer")

    def __init__(
        self, training: TrainingSettings, data: Ranks | None = None, model: CausalLM | None = None
    ) -> None:
        weights = 0 if model is None else sum(part.nbytes for part in model.module.parameters())
        super().__init__(training.shelf, weights)
        self.terms = list(training.terms)
        self.temperature = training.temperature
        self.data = Ranks() if data is None else data
        self.together = self.data
        """All ranks of one pass through the model; by default the data-parallel ranks."""
        self.shares = Shares(self.data, None if model is None else cost_of(model))
        limit = training.batch.max_tokens
        self.max_tokens = PLAIN if limit == "auto" else limit
        """Maximum packed tokens of a micro-batch, except for one longer sample; see `choose_tokens`."""
        self.one_teacher = training.balance_loss > 0
        """A micro-batch has one teacher's samples. A balancing loss is a micro-batch's, and so a domain's."""
        self._most_tokens: int | None = None
        """Upper limit of `max_tokens`, for chosen and resumed sizes too."""
        self.layers = 0 if model is None else len(layer_windows(model.config))
        self.vocabulary = 0 if model is None else model.vocabulary or model.vocab_size
        self._batch = training.batch
        self.quantize: Literal["fp8"] | None = training.quantize
        """The format whose numbers the layers' matrices are."""
        self._balance_rate = training.balance_rate
        self.routing: ExpertRouting | None = None
        """The routed blocks whose choices are the engine's; see `replay_experts`."""
        self._load: ExpertLoad | None = None
        """Of this rank's samples, during a step's passes."""
        self._router_weights = (training.balance_loss, training.router_z_loss)
        self._router_losses: RouterLosses | None = None
        """Set by `replay_experts`, if they have a weight."""
        self._total: Tensor | None = None
        """The value of `gradient_total` during a step's passes."""
        self._step_tokens = 0
        """Packed tokens of all ranks' samples in a step, during its passes."""
        self.measured: Callable[[], object] = lambda: None
        """Called at the peak of a step's memory."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Size of the student's last hidden states."""

    @abstractmethod
    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: RoutedTokens | None = None
    ) -> Tensor:
        """Return the last hidden states `[T, D]` of packed sequences, whose `routed` tokens go to the experts
        that it names. Valid inside `run`.
        """

    @abstractmethod
    def head(self) -> AnyHead:
        """Return the live head. Valid inside `run`."""

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, which uses `hidden` and `head`, with their weights in place."""
        return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`. `last` marks the last one of the step."""
        del last
        loss.backward()

    def gradient_total(self) -> AbstractContextManager[Tensor | None]:
        """Yield the tensor in which kernels sum the gradient of the head's weight; `None`: autograd."""
        return nullcontext(None)

    def reduce_gradient(self) -> None:
        """Sum the gradient over the data-parallel ranks, unless `backward` has done so."""
        return

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def step(self, lr: float) -> dict[str, float]: ...

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` with the adapters merged, for engines without adapters."""
        return self.weights()

    @abstractmethod
    def state(self) -> State:
        """Return a host copy of this rank's part of `files`. `load_state` continues from all parts bit for
        bit, with any number of ranks and any back end.
        """

    @abstractmethod
    def load_state(self, state: Saved) -> None:
        """Continue from the parts that `state` returned on all ranks. Raises `CheckpointError` or
        `ModelError` if they belong to another model.
        """

    def digest(self) -> str:
        """Return the sha256 of the student's weights. All ranks call it."""
        return weights_digest(self.weights())

    def packed_as(self, tokens: int) -> int:
        """Keep the micro-batch size `tokens` of a resumed stage (0: a new stage) if the recipe leaves it
        open. Return the size.
        """
        if tokens and self._batch.max_tokens == "auto":
            self.max_tokens = min(tokens, self._most_tokens or tokens)
        return self.max_tokens

    def compile_layers(self, asked: bool | Literal["auto"], begun: bool | None) -> bool:
        """Let the layers run as compiled code, or not, as `asked` by `train.compile`. `auto` goes on as a
        resumed stage has `begun` (`None`: a new stage). Return whether they are compiled. All ranks call it
        together. Raises `TrainingError` if that is `asked` for and cannot be.
        """
        del asked, begun
        return False

    def replay_experts(self, asked: bool | Literal["auto"]) -> bool:
        """Send the samples' tokens to the experts that the engine chose, as `asked` by
        `rollout.replay_experts`, from now on. `auto` does so if the model can. Return whether it is done. All
        ranks call it together, before `compile_layers`. Raises `TrainingError` if that is `asked` for and
        cannot be.
        """
        fault = self._find_routing() if asked is not False else "is not asked for"
        if fault is not None and asked is True:
            raise TrainingError(
                f"rollout.replay_experts is true, and the student {fault}; set it to auto or false."
            )
        if self._balance_rate and not self._has_corrections():
            why = "has no e_score_correction_bias" if fault is None else "learns without replayed choices"
            raise TrainingError(f"train.balance_rate is set, and the student {why}; leave it out.")
        if any(self._router_weights):
            found = self._find_routers()
            if isinstance(found, str):
                raise TrainingError(
                    f"train.balance_loss or train.router_z_loss is set, and the student {found}; leave them"
                    " out."
                )
            self._router_losses = RouterLosses(*found, *self._router_weights)
        return fault is None

    def _has_corrections(self) -> bool:
        """Return whether routers add a number to the scores that they choose by."""
        return self.routing is not None and self.routing.corrections is not None

    def _find_routing(self) -> str | None:
        """Set `routing`. Return why it cannot be, as the end of a sentence."""
        return "is trained by a back end that replays none"

    def _find_routers(self) -> tuple[ExpertRouting, list[Router]] | str:
        """Return the routed blocks and the router of each, or why their logits cannot be had, as the end of a
        sentence.
        """
        return "is trained by a back end that reads none of its routers"

    def cap_tokens(self, most: int) -> None:
        """Pack at most `most` tokens, because no more fit in the memory that samples are read into."""
        self._most_tokens = most
        self.max_tokens = min(self.max_tokens, most)

    def assign_samples(self, samples: Sequence[Sample]) -> None:
        """Assign the samples of a new step to ranks."""
        self.shares.assign_ranks(samples)

    def recompute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return `[R]` float32 log-probabilities of each response under the current weights."""
        label = "the recomputed log-probabilities"
        return self.shares.compute_on_ranks(samples, self.local_logprobs, label)

    def local_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return `recompute_logprobs` of this rank's samples. All ranks call it together."""
        label = "the recomputed log-probabilities"

        def logprobs(hidden: Tensor, targets: Tensor, masks: Tensor | None = None) -> Tensor:
            head = self.head()
            chunk = self.logits_chunk(head)
            if masks is not None:
                return policy_logprobs(hidden, head, targets, masks, self.temperature, chunk)[0]
            return linear_logprobs(hidden, head, targets, temperature=self.temperature, chunk=chunk)

        return self.local_values(samples, logprobs, label, self.routing, masked=True)

    @torch.no_grad()
    def local_values(
        self,
        samples: Sequence[Sample],
        compute: Callable[..., Tensor],
        label: str,
        routing: ExpertRouting | None = None,
        masked: bool = False,
    ) -> list[np.ndarray]:
        """Return `[R]` float32 for each of this rank's samples. `compute` makes it `[N]` of the last hidden
        states `[N, D]` before some of their tokens, these tokens' ids `[N]`, and with `masked` their `masks`
        [N, K], if they have any. It may use `head`. `label` names the result. All ranks call it together.
        """
        self.reload_weights()
        with self.together.collective(label):
            return of_packed(
                samples,
                self.max_tokens,
                self.device,
                lambda *packed, **routed: self.run(lambda: self._packed_values(compute, *packed, **routed)),
                routing,
                self.data if self.lockstep else None,
                lambda: self.run(self._zero_loss),
                masked,
            )

    def _packed_values(
        self,
        compute: Callable[..., Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        rows: Tensor,
        routed: RoutedTokens | None = None,
        **masks: Tensor,
    ) -> Tensor:
        """Return `compute` of a pack's `rows` `[N]`, see `local_values`."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, routed)[rows]
        return compute(hidden, input_ids[rows + 1], **masks)

    def logits_chunk(self, head: AnyHead) -> int:
        """Number of tokens whose logits exist at a time."""
        return tokens_per_chunk(self._batch.kl_chunk, self.device, head.vocabulary)

    def forward_backward(self, batch: RolloutBatch) -> dict[str, float]:
        """`accumulate_gradient` of a batch in memory."""
        return self.accumulate_gradient(
            batch.samples, lambda parts: (batch.select_samples(part) for part in parts)
        )

    def accumulate_gradient(self, samples: Sequence[Sample], read: Read) -> dict[str, float]:
        """Accumulate the gradient of a step; its weights hold the normalisers of the whole step.

        `samples` are all of the step, the same on every rank, in training order. Only their lengths and
        teachers are read. `read(parts)` yields this rank's micro-batches, each one when the one before is
        done. A part lists indices into `samples`; an empty part has nothing to read.

        Returns token-weighted means of every term's metrics. Batches with teachers add each teacher's share
        of the tokens and of the gradient (sum over tokens of the L2 norm at the last hidden state).

        Raises `TrainingError` if the loss is not finite or no sample has a response token; the weights are
        untouched then.
        """
        if not any(len(sample.response_ids) for sample in samples):
            raise TrainingError(
                f"all {len(samples)} responses of this step are empty: there is nothing to learn from;"
                " check the stop ids, the prompts and rollout.max_new_tokens."
            )
        self._reload_tensors("weights", "gradients")
        sums = MetricSums()
        self._load = None if self.routing is None else ExpertLoad(self.routing)
        parts = self.shares.in_step(samples, self.max_tokens, by_teacher=self.one_teacher)
        self._step_tokens = sum(
            len(s.prompt_ids) + len(s.response_ids) for s in samples if len(s.response_ids)
        )
        self._return_memory()  # fragments of rollout and teachers
        try:
            with (
                self.together.collective("the forward and backward passes"),
                self.gradient_total() as self._total,
            ):
                self._run_passes(read(parts), parts, sums)
                self.reduce_gradient()
        except FloatingPointError as error:
            self.zero_grad()
            raise TrainingError(f"{error}; lower the learning rate or resume from a checkpoint.") from error
        finally:
            self._total = None
        self._return_memory()
        self.measured()  # with the head that came last
        sums = self._merge_metrics(sums)
        shares = sums.normalised_shares("token_share/") | sums.normalised_shares("grad_share/")
        return sums.means() | shares | self.own_metrics()

    def own_metrics(self) -> dict[str, float]:
        """Return a step's metrics of this back end, over all ranks: here the experts' loads."""
        load = self._load
        if load is None:
            return {}
        if not self.data.is_alone:
            parts = self.data.gather(load.counts.tobytes(), "the experts' loads")  # of all ranks, on each
            load.counts = np.sum([np.frombuffer(part, np.int64) for part in parts], 0).reshape(
                load.counts.shape
            )
        return load.metrics()

    def _merge_metrics(self, sums: MetricSums) -> MetricSums:
        """Merge `sums` over all ranks that train together."""
        if self.data.is_alone:
            return sums
        return MetricSums.merge_ranks(self.data.gather_json(sums.raw_sums(), "the metrics of a step"))

    def _run_passes(
        self, batches: Iterable[RolloutBatch], parts: Sequence[Sequence[int]], sums: MetricSums
    ) -> None:
        """Add the gradient of all `batches`, at the indices `parts`. Their metrics go to `sums`."""
        for number, batch in enumerate(batches, start=1):
            self._run_pass(batch, sums, last=number == len(parts))
            self._return_memory(TRIMMED)

    def _run_pass(self, batch: RolloutBatch, sums: MetricSums, last: bool) -> None:
        if not batch.samples:
            if self.lockstep:
                self.backward(self.run(self._zero_loss), last)
            return
        micro = pack(list(batch), self.device, self.routing)
        if self._load is not None:
            self._load.add(micro.samples)
        # The loss ends with this call, so its graph frees a teacher's head before the next micro-batch.
        self.backward(self._checked_loss(micro, sums), last)

    def _zero_loss(self) -> Tensor:
        """Return 0, with a gradient of 0 for every weight."""
        head = self.head()
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        ends = torch.tensor([0, 1], dtype=torch.int32)
        hidden = self.hidden(ids, ids, ends)
        rows = head.head if isinstance(head, HeadShard) else head
        unused = rows.weight[:1].sum() if rows.bias is None else rows.weight[:1].sum() + rows.bias.sum()
        return 0.0 * (hidden.sum() + unused)

    def _micro_loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        states = self.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens, micro.routed)
        hidden = states[micro.rows]
        if micro.routed is not None:
            sums.add("routing/apart", micro.routed.count.apart, micro.routed.count.replayed)
        for sample in micro.samples:
            if sample.sampling_masks is not None:
                count = len(sample.response_ids)
                masked = int(np.count_nonzero(sample.sampling_masks[:count]))
                sums.add("sampling/kept", len(sample.sampling_masks) - count, masked)
                sums.add("sampling/masked", masked, count)
        runs = [(micro.samples[run.start].teacher, rows) for run, rows in micro.runs]
        if any(teacher is not None for teacher, _ in runs):

            def add_shares(kind: str, values: Tensor) -> None:
                for teacher, rows in runs:
                    if teacher is not None:
                        sums.add(f"{kind}_share/{teacher}", values[rows].sum())

            add_shares("token", (micro.kl_weight != 0) | (micro.policy_weight != 0))
            hidden.register_hook(lambda grad: add_shares("grad", grad.float().norm(dim=-1)))
        head = with_total(self.head(), self._total)
        scale = (self.temperature, self.logits_chunk(head))
        student = StudentRows(hidden, head, micro.targets, *scale, self.sum_shared)
        student.masks = micro.masks
        student.probed = any(isinstance(term, MismatchProbe) and not term.shared for term in self.terms)
        loss = torch.stack([term(micro, student, sums) for term in self.terms]).sum()
        if student.kept_mass is not None:
            sums.add("sampling/mass", student.kept_mass.sum(), (student.kept_mass > 0).sum())
        return loss

    def _loss_with_routers(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        if self._router_losses is None:
            return self._micro_loss(micro, sums)
        with self._router_losses.record() as logits:
            loss = self._micro_loss(micro, sums)
        of_routers, parts = self._router_losses(logits, micro.routed)
        tokens = len(micro.input_ids)
        for name, value in parts.items():
            sums.add(name, value * tokens, tokens)
        return loss + of_routers * (tokens / self._step_tokens)

    def sum_shared(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks that share each sequence. Here one rank has all of it."""
        return values

    def _checked_loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        """Return `_micro_loss` after its inputs are checked to be finite."""

        def fail() -> None:
            self.zero_grad()
            first = micro.samples[0].uid
            raise TrainingError(
                f"the loss is {loss.item()} in the micro-batch that starts with sample {first}; lower the"
                " learning rate or resume from an earlier checkpoint."
            )

        try:
            with checks.deferred_checks():
                loss = self.run(lambda: self._loss_with_routers(micro, sums))
                checks.require_true(torch.isfinite(loss), fail)
        except ForeignTokenError as error:
            raise error.naming(micro.samples) from None
        return loss
