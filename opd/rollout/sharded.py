"""The embedded engine's forwards, where no rank holds the model: FSDP2 gathers each layer for every pass.

A pass is then communication between all ranks, each of which writes responses of its own: some have a prompt
to read, some a token to decode, some nothing. So they go in step. Before each pass they tell each other
whether there is work; whoever has some runs it, whoever has none makes an empty pass, and `drain` returns
once nobody has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError, OpdError, RanksError, reason_of
from opd.kernels.head import Head
from opd.models.attention import PackedAttention
from opd.models.causal_lm import CausalLM, DigestedTensors, WeightsDigest, weights_digest
from opd.models.sharded import Root, close_up, local_part, own_parts
from opd.ranks import Ranks
from opd.rollout.forward import Runner

PASS = "a pass of the model that ranks share"
_IDLE, _WORK, _LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who shares a model."""

    root: Root
    """Inside whose forward its weights are whole; see `opd.models.sharded.cut`."""
    ranks: Ranks
    """All of them, in a group that nobody else uses meanwhile."""
    own: bool = True
    """Whether the model is the engine's alone, and not also what a trainer trains."""


class ShardedRunner(Runner):
    """A `Runner` of a model that is cut over ranks. A pass gives logits, since the head is whole inside it.

    What stops in the middle of a pass cannot go on: the others wait in another place then.
    """

    guard = torch.no_grad  # FSDP2 gathers into the same memory again, which inference tensors do not allow

    def __init__(
        self,
        model: CausalLM,
        vocab_size: int | None = None,
        *,
        sharing: Sharing,
        lean: bool | None = None,
        positions: int | None = None,
    ) -> None:
        """`lean` is for models that are whole. The others as of `Runner`."""
        del lean
        self._root, self._ranks, self._own = sharing.root, sharing.ranks, sharing.own
        self._over: str | None = None
        """Why there are no more passes."""
        super().__init__(model, vocab_size, lean=False, positions=positions)

    def passed(self, compute: Callable[[], Tensor]) -> Tensor:
        """Logits [B, V] of the hidden states [B, D] that `compute` gives, in step with the other ranks.

        Raises `RanksError` if one of them has stopped, or this one did before.
        """
        self._vote(_WORK)
        return self._together(lambda: self.model.head(self._vocab_size).logits(compute()))

    def logits(self, hidden: Tensor) -> Tensor:
        """They are what `passed` has given."""
        return hidden

    def drain(self) -> None:
        """Make empty passes until no rank has work. Raises `RanksError` as `passed`."""
        with torch.no_grad():
            while self._vote(_IDLE) != _IDLE:
                self._together(self._nothing)
        close_up(self._root)

    def leave(self) -> None:
        """Tell the others, who wait for a pass, that this rank makes none any more."""
        if self._over is None:
            with suppress(RanksError):
                self._vote(_LEFT)

    def receive(self, weights: Iterable[tuple[str, Tensor]], held: WeightsDigest) -> None:
        """Copy this rank's rows of `weights`, which are whole, or its parts (`own_parts`); of the trainer's
        own model they lie here already. What is held of them is compared with what was sent.
        """
        close_up(self._root)
        own = dict(self.model.weights())
        sent = weights.take_digest() if isinstance(weights, DigestedTensors) else None
        missing = set(own)
        for name, tensor in weights:
            if name not in own or own[name].ndim != tensor.ndim:
                raise ModelError(f"the engine's model has no tensor {name} of {list(tensor.shape)}.")
            local, first = local_part(own[name])
            if tensor.shape == own[name].shape:
                part = tensor.reshape(-1)[first : first + local.numel()].view(local.shape)
            elif tensor.shape == local.shape:
                part = tensor
            else:
                raise ModelError(
                    f"tensor {name} has shape {list(tensor.shape)} but the model needs"
                    f" {list(own[name].shape)}; the models differ in form."
                )
            if part.data_ptr() == local.data_ptr():
                held.add(name, local)
                if sent is not None:
                    sent.add(name, part)
            else:
                held.add_copied(name, local, part, sent)
            missing.discard(name)
        if missing:
            raise ModelError(f"{len(missing)} tensors were not given, among them {min(missing)}.")

    def origin(self) -> str:
        """Of this rank's parts."""
        close_up(self._root)
        return weights_digest(own_parts(self.model))

    def sleep(self) -> None:
        """This rank's part of the weights stays."""
        self.head = None

    def resident(self) -> dict[str, int]:
        """Bytes of this rank's part of the weights, unless they are the trainer's, and of keys and values."""
        return {"engine_weights": self.model.nbytes if self._own else 0, "engine_kv": self.cache.nbytes}

    def _decode_head(self) -> Head:
        """Says that it is awake; a pass takes the head as it is inside."""
        return self.model.head(self._vocab_size)

    def _vote(self, own: int) -> int:
        """The most that any rank says."""
        if self._over is not None:
            raise RanksError(self._over)
        try:
            most = self._say(own)
        except RanksError as error:
            self._over = str(error)
            raise
        if most == _LEFT:
            self._over = (
                "a rank has stopped writing, and no other goes on alone with the model that they share; look"
                " for that rank's own error and start again with --resume."
            )
            if own != _LEFT:
                raise RanksError(self._over)
        return most

    def _say(self, own: int) -> int:
        said = torch.tensor([own])
        with self._ranks.naming_the_lost(PASS):
            dist.all_reduce(said, dist.ReduceOp.MAX, self._ranks.group)
        return int(said)

    def _together(self, compute: Callable[[], Tensor]) -> Tensor:
        try:
            with self._ranks.naming_the_lost(PASS):
                return self._root(compute)
        except BaseException as error:
            who = f"rank {self._ranks.rank} stopped in the middle of {PASS}"
            self._over = f"{who} ({reason_of(error)[-200:]}); start again with --resume."
            if isinstance(error, OpdError) or not isinstance(error, Exception):
                raise
            raise RanksError(self._over) from error

    def _nothing(self) -> Tensor:
        """A pass of one token, of which nobody hears."""
        ids = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        return self.model.run(ids, ids, PackedAttention([0, 1]))
