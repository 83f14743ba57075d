"""The single-process back end: a Hugging Face model, AdamW, exact accumulation over micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from opd.config.train import BatchConfig, OptimConfig
from opd.errors import CheckpointError, TrainingError
from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM
from opd.train.packing import micro_batches, pack_tokens, split_by_tokens
from opd.train.student_rows import MetricSums, StudentRows, shares
from opd.train.terms import LossTerm
from opd.types import MicroBatch, RolloutBatch, Sample


class TorchBackend:
    """Owns the student's weights and its optimiser state.

    Args:
        model: The student; trained in place.
        optim: AdamW settings; the learning rate comes with every `step`.
        batch: Packing limits.
        temperature: Sampling temperature; every log-probability is taken at it.
        terms: The streams of the loss.
    """

    def __init__(
        self,
        model: CausalLM,
        optim: OptimConfig,
        batch: BatchConfig,
        temperature: float,
        terms: Sequence[LossTerm],
    ) -> None:
        self.model = model
        self.terms = list(terms)
        self._batch = batch
        self.temperature = temperature
        self._max_grad_norm = optim.max_grad_norm
        self._parameters = dict(model.module.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """`[R]` float32 log-probability of each response under the weights as they are now."""
        return response_logprobs(self.model, samples, self.temperature, self._batch)

    def forward_backward(self, batch: RolloutBatch) -> dict[str, float]:
        """Accumulate the gradient of `batch`; its weights hold the normalisers of the whole step.

        Returns token-weighted means of every term's metrics, and for batches with teachers each teacher's
        share of the tokens and of the gradient (sum over tokens of the L2 norm at the last hidden state).

        Raises `TrainingError` if the loss is not finite or no sample has a response token; the weights are
        untouched then.
        """
        if not any(len(sample.response_ids) for sample in batch.samples):
            raise TrainingError(
                f"all {len(batch.samples)} responses of this step are empty: there is nothing to learn from;"
                " check the stop ids, the prompts and rollout.max_new_tokens."
            )
        sums = MetricSums()
        try:
            for micro in micro_batches(batch, self._batch.max_tokens, self.model.device):
                self._micro_step(micro, sums)
        except FloatingPointError as error:
            self._optimizer.zero_grad()
            raise TrainingError(f"{error}; lower the learning rate or resume from a checkpoint.") from error
        metrics = sums.means()
        for kind in ("token_share", "grad_share"):
            for teacher, share in shares(sums.sums(f"{kind}/")).items():
                metrics[f"{kind}/{teacher}"] = share
        return metrics

    def _micro_step(self, micro: MicroBatch, sums: MetricSums) -> None:
        hidden = self.model.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens)[micro.rows]
        teacher = micro.samples[0].teacher
        if teacher is not None:
            counted = (micro.kl_weight != 0) | (micro.policy_weight != 0)
            sums.add(f"token_share/{teacher}", counted.sum())
            hidden.register_hook(
                lambda grad: sums.add(f"grad_share/{teacher}", grad.float().norm(dim=-1).sum())
            )
        student = StudentRows(
            hidden, self.model.head(), micro.targets, self.temperature, self._batch.kl_chunk
        )
        loss = torch.stack([term(micro, student, sums) for term in self.terms]).sum()
        if not torch.isfinite(loss):
            self._optimizer.zero_grad()
            first = micro.samples[0].uid
            raise TrainingError(
                f"the loss is {loss.item()} in the micro-batch that starts with sample {first}; lower the"
                " learning rate or resume from an earlier checkpoint."
            )
        loss.backward()

    def step(self, lr: float) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, zero the gradient.

        Raises `TrainingError` if the gradient is not finite; the weights are untouched then.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad()
            raise TrainingError(
                f"the gradient norm is {norm.item()}; lower the learning rate or resume from a checkpoint."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"lr": lr, "grad_norm": float(norm)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the student, in a fixed order."""
        return self.model.weights()

    def digest(self) -> str:
        """Digest of the student's weights, as the engine computes it after a sync."""
        return self.model.digest()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything `load_state` needs to continue bit for bit: the files `model` and `optimizer`."""
        optimizer: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                optimizer[f"{name}/{key}"] = value.detach().clone()
        return {"model": {n: t.detach().clone() for n, t in self.weights()}, "optimizer": optimizer}

    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from what `state` returned.

        Raises `CheckpointError` if it belongs to another model.
        """
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state["optimizer"].items():
            name, _, field = key.rpartition("/")
            by_name[name][field] = value
        unknown = sorted(set(by_name) - set(self._parameters))
        if unknown:
            raise CheckpointError(
                f"the checkpoint holds optimiser state for {unknown[0]}, which this model does not have;"
                " resume with the recipe the run was started with."
            )
        self.model.load_weights(state["model"].items())
        for name, fields in by_name.items():
            parameter = self._parameters[name]
            # The fused AdamW keeps its step count where the parameter is, too.
            self._optimizer.state[parameter] = {k: v.to(parameter.device) for k, v in fields.items()}


@torch.no_grad()
def response_logprobs(
    model: CausalLM, samples: Sequence[Sample], temperature: float, batch: BatchConfig
) -> list[np.ndarray]:
    """`[R]` float32 log-probabilities of each sample's response under `model`, at `temperature`."""
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    results: list[np.ndarray] = []
    for start, stop in split_by_tokens(lengths, [None] * len(lengths), batch.max_tokens):
        part = samples[start:stop]
        input_ids, position_ids, cu_seqlens, rows = (t.to(model.device) for t in pack_tokens(part))
        hidden = model.hidden(input_ids, position_ids, cu_seqlens)[rows]
        logprobs = linear_logprobs(
            hidden, model.head(), input_ids[rows + 1], temperature=temperature, chunk=batch.kl_chunk
        )
        ends = np.cumsum([len(s.response_ids) for s in part])[:-1]
        results.extend(np.split(logprobs.float().cpu().numpy(), ends))
    return results
