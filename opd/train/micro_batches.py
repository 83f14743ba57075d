"""The automatic size of micro-batches, and the memory of a token.

On a CPU it is always `PLAIN`. On CUDA launches cost as much for few tokens as for many, so a micro-batch
fills the memory that is free when a stage starts, up to `MOST` tokens.
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
"""Tokens of a micro-batch on a CPU, and the minimum on CUDA."""
MOST = 32_768
"""Maximum automatic tokens of a micro-batch. Launches are already rare enough at this size."""
SCORED = 16_384
"""Tokens of a pass on CUDA without a gradient. It saves nothing for a backward pass."""
_STEP = 1024
"""An automatic number of tokens is a multiple of this."""
_SHARE = 2
"""Activations may take 1 / `_SHARE` of the free memory. Norms and gates in plain PyTorch save more than
`LAYER_VALUES`, and memory is freed in fragments."""
LAYER_VALUES = 17
"""Values that a decoder layer saves per token and hidden unit for its backward pass, with fused attention
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4: 34 bytes in half precision)."""


def layer_bytes(tokens: int, hidden_size: int, width: int) -> int:
    """Return the bytes that a layer saves of `tokens` for its backward pass, in values of `width` bytes."""
    return tokens * hidden_size * LAYER_VALUES * width


def token_bytes(layers: int, hidden_size: int, width: int, *, recompute: bool) -> int:
    """Return the bytes that `layers` save of a token. With `recompute`: inputs, and one layer's values."""
    of_layer = layer_bytes(1, hidden_size, width)
    return layers * hidden_size * width + of_layer if recompute else layers * of_layer


def logits_bytes(rows: int, vocabulary: int) -> int:
    """Return the peak bytes of the logits of `rows` tokens in the loss: three float32 values of each."""
    return 3 * rows * vocabulary * 4


def scored_tokens(max_tokens: int | Literal["auto"], device: torch.device) -> int:
    """Return the packed tokens of a pass without a gradient. `max_tokens` is that of `batch`."""
    if max_tokens != "auto":
        return max_tokens
    return SCORED if device.type == "cuda" else PLAIN


def fitting_tokens(free_bytes: int, token_bytes: int) -> int:
    """Return how many tokens of `token_bytes` a micro-batch with a gradient packs in `free_bytes`."""
    fits = max(free_bytes, 0) // _SHARE // max(token_bytes, 1)
    return max(PLAIN, min(MOST, fits // _STEP * _STEP))


def choose_tokens(backend: Backend, batch: BatchConfig, ranks: Ranks, *, width: int, reserved: int) -> None:
    """Set the micro-batch size of `backend` to the largest that fits on every one of `ranks`, if `batch`
    leaves it open and the device is CUDA. All ranks call it together, once all resident memory is allocated.

    `width` is the bytes of a value that layers compute. `reserved` is the bytes that others will still
    allocate there.
    """
    if batch.max_tokens != "auto" or backend.device.type != "cuda":
        return
    import torch

    from opd.kernels.projection import tokens_per_chunk
    from opd.models.causal_lm import held_bytes

    free = torch.cuda.mem_get_info(backend.device)[0]
    tensors = backend.local_tensors()
    trained = held_bytes(weight for weight in tensors.weights if weight.requires_grad)
    coming = 3 * trained - held_bytes(tensors.gradients) - held_bytes(tensors.moments)
    chunk = tokens_per_chunk(batch.kl_chunk, backend.device, backend.vocabulary)
    logits = logits_bytes(chunk, backend.vocabulary)
    token = token_bytes(backend.layers, backend.hidden_size, width, recompute=batch.recompute_layers)
    tokens = fitting_tokens(free - coming - logits - reserved, token)
    backend.max_tokens = -ranks.max_over_ranks(-tokens, "the size of micro-batches")
    _log.info("micro-batches of up to %d tokens, of what %.1f GiB hold", backend.max_tokens, free / 2**30)
