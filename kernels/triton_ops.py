"""The operations with Triton's row kernels: chunked matmuls from the library, Triton between them.

Same names and arguments as `opd.kernels.chunked`; operations without a compiled kernel are that module's own.
Call them through `opd.kernels.ops`, which checks inputs. Logits that are not float32 on a GPU take PyTorch's
row kernels.
"""

from __future__ import annotations

from functools import partial

from opd.kernels import chunked
from opd.kernels.chunked import (
    geometric_floor,
    linear_logprobs,
    linear_logprobs_entropy,
    linear_topk,
    selective_log_softmax,
    topk_log_probs,
)
from opd.kernels.triton_rows import divergence_

__all__ = [
    "geometric_floor",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
    "logits_kl",
    "score_kl",
    "selective_log_softmax",
    "topk_log_probs",
]

linear_kl = partial(chunked.linear_kl, row_kernel=divergence_, rounds=True)
linear_mixture_kl = partial(chunked.linear_mixture_kl, row_kernel=divergence_, rounds=True)
logits_kl = partial(chunked.logits_kl, row_kernel=divergence_)
score_kl = partial(chunked.score_kl, row_kernel=divergence_)
