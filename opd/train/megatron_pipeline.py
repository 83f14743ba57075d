"""Stages of layers on Megatron-Core: hidden states go from stage to stage, and their gradients back.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters" (2.2.1, 1F1B). A stage
first makes as many forward passes as there are stages behind it. It then makes a backward pass after each
forward pass, so it holds the activations of at most as many micro-batches as stages from it on. The last
stage has loss, head and metrics. Megatron-Core's own schedule runs on CUDA only and asks for the shape of
each micro-batch. Here all ranks know the packing of a step, so only values travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opd.models.attention import Attend
from opd.models.routing import ExpertRouting, RoutedTokens
from opd.ranks import Ranks
from opd.train.megatron_backend import MegatronBackend, MegatronContextBackend
from opd.train.packing import pack
from opd.train.terms import MetricSums
from opd.types import RolloutBatch, Sample


class Neighbours:
    """The stages before and after this rank's. Hidden states and their gradients have a group each, because
    two tensors that pass each other on one would deadlock on a GPU.

    Args:
        forward: The ranks that share samples and have other layers, in the order of stages.
        backward: The same ranks, for gradients.
    """

    def __init__(self, forward: Ranks, backward: Ranks) -> None:
        assert forward.group is not None
        assert backward.group is not None
        self._forward, self._backward = forward.group, backward.group
        self._stage, self._stages = forward.rank, forward.size
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def from_before(self, into: Tensor) -> Tensor:
        """Receive hidden states into `into`."""
        dist.recv(into, group=self._forward, group_src=self._stage - 1)
        return into

    def to_next(self, hidden: Tensor) -> None:
        """Send hidden states; does not wait."""
        self._send_tensor(hidden, self._forward, self._stage + 1)

    def from_next(self, into: Tensor) -> Tensor:
        """Receive the gradient of the hidden states that were sent into `into`."""
        dist.recv(into, group=self._backward, group_src=self._stage + 1)
        return into

    def to_before(self, gradient: Tensor) -> None:
        """Send the gradient of the received hidden states; does not wait."""
        self._send_tensor(gradient, self._backward, self._stage - 1)

    def _send_tensor(self, tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        tensor = tensor.detach().contiguous()
        self._sent.append((dist.isend(tensor, group=group, group_dst=to), tensor))
        # A neighbour is at most as far behind as there are stages, so older tensors have arrived.
        self.wait_sent(2 * self._stages + 2)

    def wait_sent(self, newest: int = 0) -> None:
        """Wait until all but the `newest` tensors have arrived."""
        while len(self._sent) > newest:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()


@dataclass(slots=True)
class PendingPass:
    """A micro-batch between its forward and its backward pass."""

    received: Tensor | None = None
    """[t, 1, D] from the stage before."""
    output: Tensor | None = None
    """[t, D] for the next stage, or the loss."""


class MegatronPipelineBackend(MegatronBackend):
    """A `MegatronBackend` whose layers are cut into `train.pipeline_parallel` stages on different ranks."""

    def _open_groups(self, ranks: Ranks) -> None:
        super()._open_groups(ranks)
        backward = ranks.one_of(self._layout.rank_groups("stages"), "stages-back")
        self._neighbours = Neighbours(self._stages, backward)
        self._pending = PendingPass()

    def _run_module(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        attend: Attend | None = None,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        """Return the hidden states of this stage. Before the last stage, send them to the next."""
        received = None
        if not self._stage.first:
            shape = (len(input_ids), 1, self.hidden_size)
            received = torch.empty(shape, dtype=self._module.dtype, device=self.device)
            self._neighbours.from_before(received).requires_grad_(torch.is_grad_enabled())
        hidden = self._module.run(input_ids, position_ids, cu_seqlens, attend, received, routed)
        if not self._stage.last:
            self._neighbours.to_next(hidden)
        self._pending = PendingPass(received, hidden)
        return hidden

    def _run_passes(
        self, batches: Iterable[RolloutBatch], parts: Sequence[Sequence[int]], sums: MetricSums
    ) -> None:
        ahead = self._layout.stages - 1 - self._layout.stage_index
        waiting: deque[PendingPass] = deque()
        remaining = len(parts) if self.lockstep else sum(map(bool, parts))
        if not remaining and self._overlaps:  # others sum in their last pass
            self._backward_pass(self._empty_pass(), last=True)
        for batch in batches:
            if not batch.samples and not self.lockstep:
                continue
            waiting.append(self._forward_pass(batch, sums) if batch.samples else self._empty_pass())
            if len(waiting) > ahead:
                remaining -= 1
                self._backward_pass(waiting.popleft(), last=not remaining)
        while waiting:
            remaining -= 1
            self._backward_pass(waiting.popleft(), last=not remaining)
        self._neighbours.wait_sent()
        self._pending = PendingPass()

    def _forward_pass(self, batch: RolloutBatch, sums: MetricSums) -> PendingPass:
        micro = pack(list(batch), self.device, self.routing)
        if self._load is not None:
            self._load.add(micro.samples)
        if not self._stage.last:
            self.run(lambda: self.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens, micro.routed))
            if micro.routed is not None:  # of the layers here
                sums.add("routing/apart", micro.routed.count.apart, micro.routed.count.replayed)
            return self._pending
        loss = self._checked_loss(micro, sums)
        return PendingPass(self._pending.received, loss)

    def _empty_pass(self) -> PendingPass:
        """Return a pass with a gradient of 0 for every weight."""
        output = self.run(self._zero_loss)
        return PendingPass(self._pending.received, output)

    def _zero_loss(self) -> Tensor:
        if self._stage.last:
            return super()._zero_loss()
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self.hidden(ids, ids, torch.tensor([0, 1], dtype=torch.int32))

    def _backward_pass(self, pending: PendingPass, last: bool) -> None:
        output = pending.output
        assert output is not None
        if self._stage.last:
            self.backward(output, last)
        else:
            gradient = self._neighbours.from_next(
                torch.empty(output.shape, dtype=output.dtype, device=output.device)
            )
            self._add_gradient(output, gradient, last)
        if pending.received is not None:
            assert pending.received.grad is not None
            self._neighbours.to_before(pending.received.grad)

    @torch.no_grad()
    def local_values(
        self,
        samples: Sequence[Sample],
        compute: Callable[..., Tensor],
        label: str,
        routing: ExpertRouting | None = None,
        masked: bool = False,
    ) -> list[np.ndarray]:
        """Return the last stage's results on all stages."""

        def nothing(hidden: Tensor, targets: Tensor, **masks: Tensor) -> Tensor:
            return targets.new_zeros(len(targets), dtype=torch.float32)

        compute = compute if self._stage.last else nothing
        local = super().local_values(samples, compute, label, routing, masked)
        self._pending = PendingPass()
        with self.together.collective(label):
            self._neighbours.wait_sent()
            flat = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *local])).to(self.device)
            values = self._tensors.broadcast_stage(flat, self._layout.stages - 1)
        ends = np.cumsum([len(part) for part in local])[:-1]
        return np.split(values.cpu().numpy(), ends) if local else []


class MegatronPipelineContextBackend(MegatronContextBackend, MegatronPipelineBackend):
    """Pipeline stages whose ranks share each sequence, too."""
