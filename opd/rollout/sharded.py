"""The embedded engine's forwards, if no rank holds the full model: FSDP2 gathers each layer for every pass.

A pass is then communication between all ranks, and each generates responses of its own. Some have a prompt to
prefill, some a token to decode, some nothing. So they go in step. Before each pass they exchange whether
there is work. A rank with work runs it, and a rank without makes an empty pass. `drain` returns once no rank
has work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError, OpdError, RanksError, reason_of
from opd.kernels.head import Head
from opd.models.attention import PackedAttention
from opd.models.causal_lm import Attend, CausalLM, DigestedTensors, WeightsDigest, weights_digest
from opd.models.sharded import ForwardRoot, close_up, local_part, local_parts
from opd.ranks import Ranks
from opd.rollout.forward import Runner

PASS = "a pass of the model that ranks share"
_IDLE, _WORK, _LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ModelSharing:
    """The ranks that share a model."""

    root: ForwardRoot
    """Its weights are unsharded inside this root's forward; see `opd.models.sharded.shard_model`."""
    ranks: Ranks
    """All of them, in a group that nothing else uses meanwhile."""
    exclusive: bool = True
    """True if the model is the engine's alone, and not also the trainer's."""


class ShardedRunner(Runner):
    """A `Runner` of a model that is cut over ranks. A pass returns logits, because the head is unsharded
    inside it.

    A rank that stops in the middle of a pass cannot go on, because the others wait at another point then.
    """

    guard = torch.no_grad  # FSDP2 gathers into the same memory again, which inference tensors do not allow

    def __init__(
        self,
        model: CausalLM,
        vocab_size: int | None = None,
        *,
        sharing: ModelSharing,
        lean: bool | None = None,
        positions: int | None = None,
    ) -> None:
        """`lean` is for unsharded models. The others as of `Runner`."""
        del lean
        self._root, self._ranks, self._exclusive = sharing.root, sharing.ranks, sharing.exclusive
        self._over: str | None = None
        """Reason why there are no more passes."""
        super().__init__(model, vocab_size, lean=False, positions=positions)

    def run_pass(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Attend,
        rows: Tensor | slice,
    ) -> Tensor:
        """As `Runner.run_pass`, in step with the other ranks, but returns logits [R, V], not hidden states.
        Raises `RanksError` if one of the ranks has stopped, or this one did before.
        """
        self._agree_state(_WORK)
        with nullcontext() if self.recorder is None else self.recorder.record(len(ids)):
            return self._run_lockstep(
                lambda: self.model.head(self._vocab_size).logits(
                    self.model.run(ids, positions, attention)[rows]
                )
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, because `run_pass` already returned logits."""
        return hidden

    def drain(self) -> None:
        """Make empty passes until no rank has work. Raises `RanksError` as `run_pass`."""
        token = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        with torch.no_grad():
            while self._agree_state(_IDLE) != _IDLE:
                self._run_lockstep(lambda: self.model.run(token, token, PackedAttention([0, 1])))
        close_up(self._root)

    def stop_passes(self) -> None:
        """Tell the waiting ranks that this rank makes no more passes."""
        if self._over is None:
            with suppress(RanksError):
                self._agree_state(_LEFT)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest) -> None:
        """Copy this rank's rows of `weights`, which are full tensors or its parts (`local_parts`). The
        trainer's own model needs no copy. The resulting weights are compared with those of the sender.
        """
        close_up(self._root)
        parameters = dict(self.model.weights())
        sender_digest = weights.take_digest() if isinstance(weights, DigestedTensors) else None
        missing = set(parameters)
        for name, tensor in weights:
            if name not in parameters or parameters[name].ndim != tensor.ndim:
                raise ModelError(f"the engine's model has no tensor {name} of {list(tensor.shape)}.")
            parameter = parameters[name]
            local, first = local_part(parameter)
            if tensor.shape == parameter.shape:
                part = tensor.reshape(-1)[first : first + local.numel()].view(local.shape)
            elif tensor.shape == local.shape:
                part = tensor
            else:
                raise ModelError(
                    f"tensor {name} has shape {list(tensor.shape)} but the model needs"
                    f" {list(parameter.shape)}; the models differ in form."
                )
            if part.data_ptr() == local.data_ptr():
                digest.add(name, local)
                if sender_digest is not None:
                    sender_digest.add(name, part)
            else:
                digest.add_copied(name, local, part, sender_digest)
            missing.discard(name)
        if missing:
            raise ModelError(f"{len(missing)} tensors were not given, among them {min(missing)}.")

    def model_digest(self) -> str:
        """Digest of this rank's parts."""
        close_up(self._root)
        return weights_digest(local_parts(self.model))

    def sleep(self) -> None:
        """Keep this rank's part of the weights, and drop the head."""
        self.head = None

    def resident(self) -> dict[str, int]:
        """Bytes of this rank's part of the weights, unless they are the trainer's, and of keys and values."""
        return {"engine_weights": self.model.nbytes if self._exclusive else 0, "engine_kv": self.cache.nbytes}

    def _decode_head(self) -> Head:
        """Return the head, which marks the runner as awake. A pass uses the head inside the root."""
        return self.model.head(self._vocab_size)

    def _agree_state(self, state: int) -> int:
        """Return the maximum of all ranks' states, of which `state` is this rank's."""
        if self._over is not None:
            raise RanksError(self._over)
        states = torch.tensor([state])
        try:
            with self._ranks.name_missing_ranks(PASS):
                dist.all_reduce(states, dist.ReduceOp.MAX, self._ranks.group)
        except RanksError as error:
            self._over = str(error)
            raise
        most = int(states)
        if most == _LEFT:
            self._over = (
                "a rank has stopped writing, and no other goes on alone with the model that they share; look"
                " for that rank's own error and start again with --resume."
            )
            if state != _LEFT:
                raise RanksError(self._over)
        return most

    def _run_lockstep(self, compute: Callable[[], Tensor]) -> Tensor:
        try:
            with self._ranks.name_missing_ranks(PASS):
                return self._root(compute)
        except BaseException as error:
            who = f"rank {self._ranks.rank} stopped in the middle of {PASS}"
            self._over = f"{who} ({reason_of(error)[-200:]}); start again with --resume."
            if isinstance(error, OpdError) or not isinstance(error, Exception):
                raise
            raise RanksError(self._over) from error
