"""The embedded rollout engine: KV-cached, continuously batched sampling in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from opd.errors import RolloutError
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM
from opd.rollout.generation import Generation
from opd.rollout.kv_cache import PromptKV
from opd.rollout.kv_snapshot import Origin, pack, unpack
from opd.rollout.requests import Limits, queue_requests
from opd.rollout.runner import Runner
from opd.types import DecodeStep, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor


class TorchEngine:
    """Implements `opd.protocols.RolloutEngine` on a `CausalLM`.

    A request's tokens depend on the weights, its prompt, its sampling settings, and (seed, uid, position)
    alone: not on its batch mates, the number of slots, or on being interrupted and resumed through
    `prefix_ids`. (The log-probabilities of another batch differ by floating-point rounding, about 1e-6.)

    `model` is used in place, and its weights change only through `update_weights`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_running: int = 512,
        max_sequence: int = 4096,
        vocab_size: int | None = None,
        version: int = 0,
        lean: bool | None = None,
    ) -> None:
        """`max_running`: requests decoded together. `max_sequence`: prompt plus response tokens of a request,
        at most the model's own `max_position_embeddings`. `vocab_size`: sample from the first ids only (a
        model's head may be padded beyond its tokenizer). `lean`: force the lean decoder on or off; `None`
        chooses.
        """
        if max_running < 1 or max_sequence < 2:
            raise RolloutError(
                f"max_running must be at least 1 and max_sequence at least 2, not {max_running} and"
                f" {max_sequence}."
            )
        self.model = model
        self._vocab_size = vocab_size
        self._max_running = max_running
        trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._limits = Limits(
            vocab_size=vocab_size or model.vocab_size,
            max_sequence=min(max_sequence, trained) if trained else max_sequence,
        )
        self._runner = Runner(model, lean=lean)
        self._head = self._decode_head()
        self._version = version
        self._paused = False
        self._epoch = 0
        self._active: weakref.ref[Generation] | None = None
        self._restored = 0
        self.saved: dict[bytes, PromptKV] = {}
        """Restored keys and values that no request has taken yet, by the bytes of their token ids."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    @property
    def paused(self) -> bool:
        """Whether decoding is stopped."""
        return self._paused

    @property
    def cache_epoch(self) -> int:
        """Grows whenever the cached keys and values were dropped."""
        return self._epoch

    @property
    def head(self) -> Head:
        """The head that turns hidden states into logits."""
        return self._head

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far; one shared by several requests of a call counts once."""
        return self._runner.prefilled_tokens

    @property
    def restored_tokens(self) -> int:
        """Tokens whose keys and values came from `restore` instead of a forward, in all calls so far."""
        active = self._active() if self._active is not None else None
        return self._restored + (active.restored_tokens if active is not None else 0)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[DecodeStep]:
        """Decode all `requests`, more than `max_running` of them waiting for a free slot.

        A resumed request whose `prefix_ids` already end it is reported first, in a step without tokens.
        Raises `RolloutError` for a request that cannot be served, before anything is sampled, and if the
        iterator of an earlier call is neither exhausted nor closed nor dropped.
        """
        earlier = self._active() if self._active is not None else None
        if earlier is not None:
            raise RolloutError(
                "an earlier generate call is still in flight; exhaust or close its iterator before"
                " starting another."
            )
        queue = queue_requests(requests, self._limits)
        generation = Generation(self, self._runner, queue, self._max_running, _forget(weakref.ref(self)))
        self._active = weakref.ref(generation)
        return generation

    def pause(self) -> None:
        """Stop sampling; requests in flight stay where they are, and their iterator raises until `resume`."""
        self._paused = True

    def flush(self) -> None:
        """Drop every cached key and value; requests in flight rebuild theirs from their tokens when they go
        on.
        """
        self._runner.clear()
        self.saved.clear()
        self._epoch += 1

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy `weights` in place, flush, and return the digest of the model the engine now holds.

        Raises `RolloutError` if the engine is not paused or `version` does not grow.
        """
        if not self._paused:
            raise RolloutError(
                "weights can change only between decode steps; call pause() before update_weights()."
            )
        if version <= self._version:
            raise RolloutError(
                f"the policy version must grow, but {version} was given while the engine holds"
                f" {self._version}."
            )
        try:
            self.model.load_weights(weights)
        finally:
            # Even a refused tensor leaves those before it copied: nothing computed earlier is valid any more.
            self._runner.refresh()
            self.saved.clear()
            self._head = self._decode_head()
            self._epoch += 1
        self._version = version
        return self.model.digest()

    def resume(self) -> None:
        """Continue sampling."""
        self._paused = False

    def abort(self, uids: Collection[str]) -> None:
        """Stop these requests of the call in flight; its next step reports them as aborted."""
        active = self._active() if self._active is not None else None
        if active is not None:
            active.abort(uids)

    def snapshot(self) -> dict[str, Tensor]:
        """Keys and values of all requests in flight, as named tensors on the CPU; empty if there are none.

        Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("snapshot")
        active = self._active() if self._active is not None else None
        held = list(active.held()) if active is not None else []
        return pack(held, self._origin()) if held else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> int:
        """Take over a `snapshot`; returns how many sequences it holds. A request whose tokens are among them
        continues from these keys and values; every other is prefilled. `flush` and new weights drop them.

        Raises `RolloutError` if the snapshot was made with other weights or by another form of decoder.
        """
        saved, origin = unpack(tensors)
        if origin != self._origin():
            raise RolloutError(
                f"the saved keys and values come from {origin}, but the engine holds {self._origin()};"
                " let it prefill instead."
            )
        device = self.model.device
        for prompt in saved.values():
            prompt.layers = {i: (k.to(device), v.to(device)) for i, (k, v) in prompt.layers.items()}
        self.saved = saved
        return len(saved)

    def release(self) -> None:
        """Give the memory of keys and values back; requests in flight rebuild or restore theirs when they go
        on. Raises `RolloutError` if the engine is not paused.
        """
        self._check_paused("release")
        slots = self._runner.cache.slots
        self._runner.release()
        self._runner.start(slots)
        self.saved.clear()
        self._epoch += 1
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_paused(self, verb: str) -> None:
        if not self._paused:
            raise RolloutError(f"requests are being decoded; call pause() before {verb}().")

    def _origin(self) -> Origin:
        return Origin(self.model.digest(), self._version, self._runner.lean is not None)

    def _decode_head(self) -> Head:
        """The model's head, in float32: `Head.logits` would convert half-precision weights at every step."""
        head = self.model.head(self._vocab_size)
        if head.weight.dtype not in (torch.float16, torch.bfloat16):
            return head
        return replace(head, weight=head.weight.detach()[: head.vocabulary].float(), vocab_size=None)

    def _end(self, generation: Generation) -> None:
        if self._active is not None and self._active() is generation:
            self._active = None
            self._restored += generation.restored_tokens


def _forget(engine: weakref.ref[TorchEngine]) -> Callable[[Generation], None]:
    """A callback that does not keep the engine alive."""

    def on_end(generation: Generation) -> None:
        alive = engine()
        if alive is not None:
            alive._end(generation)

    return on_end
