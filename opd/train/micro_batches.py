"""How many packed tokens a micro-batch has where the recipe leaves it open, and what memory a token takes.

On a CPU always `PLAIN`. On CUDA launches cost as much for few tokens as for many, so a micro-batch is as
large as what is free when a stage starts will hold, up to `MOST`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from opd.config.train import BatchConfig
    from opd.ranks import Ranks
    from opd.train.backend import Backend

_log = logging.getLogger(__name__)
PLAIN = 4096
"""Tokens of a micro-batch on a CPU, and the least on CUDA."""
MOST = 32_768
"""Tokens of the largest micro-batch that is chosen: a larger one makes no launch rarer that still counts."""
SCORED = 16_384
"""Tokens of a pass on CUDA without a gradient, which keeps nothing for a backward pass."""
_WHOLE = 1024
"""Of which a chosen number of tokens is a multiple."""
_SHARE = 2
"""Activations may take one part of so many of the room: norms and gates written in plain PyTorch keep more
than `LAYER_VALUES`, and memory is freed in pieces."""
LAYER_VALUES = 17
"""Values a decoder layer keeps per token and hidden unit for its backward pass, with fused attention
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4: 34 bytes in half precision)."""


def layer_bytes(tokens: int, hidden_size: int, width: int) -> int:
    """Bytes that a layer keeps of so many tokens for its backward pass, in values of `width` bytes."""
    return tokens * hidden_size * LAYER_VALUES * width


def logits_bytes(rows: int, vocabulary: int) -> int:
    """Bytes of the logits of so many tokens while their loss is computed: three of each in float32."""
    return 3 * rows * vocabulary * 4


def scored_tokens(asked: int | Literal["auto"], device: torch.device) -> int:
    """Packed tokens of a pass without a gradient, with `batch.max_tokens` as `asked`."""
    if asked != "auto":
        return asked
    return SCORED if device.type == "cuda" else PLAIN


def fitting_tokens(room: int, token_bytes: int) -> int:
    """Packed tokens of a micro-batch with a gradient, of which each keeps `token_bytes`, in `room` bytes."""
    fits = max(room, 0) // _SHARE // max(token_bytes, 1)
    return max(PLAIN, min(MOST, fits // _WHOLE * _WHOLE))


def choose_tokens(backend: Backend, batch: BatchConfig, ranks: Ranks, *, width: int, beside: int) -> None:
    """Let the micro-batches of `backend` be as large as fits on every one of `ranks`, where `batch` leaves it
    open and the device is CUDA; all of them call it together, once all that stays there is in memory.

    `width`: bytes of a value that layers compute. `beside`: bytes that others will still take there.
    """
    if batch.max_tokens != "auto" or backend.device.type != "cuda":
        return
    import torch

    from opd.kernels.projection import tokens_per_chunk
    from opd.models.causal_lm import held_bytes

    free = torch.cuda.mem_get_info(backend.device)[0]
    held = backend.held()
    learns = held_bytes(weight for weight in held.weights if weight.requires_grad)
    coming = 3 * learns - held_bytes(held.gradients) - held_bytes(held.moments)
    chunk = tokens_per_chunk(batch.kl_chunk, backend.device, backend.vocabulary)
    logits = logits_bytes(chunk, backend.vocabulary)
    token = backend.layers * layer_bytes(1, backend.hidden_size, width)
    mine = fitting_tokens(free - coming - logits - beside, token)
    backend.max_tokens = -ranks.max(-mine, "the size of micro-batches")
    _log.info("micro-batches of up to %d tokens, of what %.1f GiB hold", backend.max_tokens, free / 2**30)
