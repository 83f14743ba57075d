"""One rank's rows of a head that is spread over the vocabulary as Megatron-Core spreads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_shard import HeadShard

if TYPE_CHECKING:
    from opd.megatron.form import MegatronForm


def head_shard(
    rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup
) -> HeadShard:
    """This rank's `rows` [padded V / ranks, D] without padding, for `opd.kernels.vocab_parallel`.

    Ranks hold as many rows each as Megatron-Core gives them; of the last ones `vocabulary` leaves fewer.
    Raises `ModelError` on all ranks if it leaves one without any, or if the head has fewer rows.
    """
    tokens, each = tokens_of(form, vocabulary), len(rows)
    sizes = tuple(min(max(tokens - rank * each, 0), each) for rank in range(group.size()))
    if 0 in sizes:
        raise ModelError(
            f"a vocabulary of {tokens} tokens leaves rank {sizes.index(0)} of {group.size()} without any;"
            " choose a smaller tensor parallel size."
        )
    return HeadShard(Head(rows, vocab_size=sizes[group.rank()]), sizes, group)


def tokens_of(form: MegatronForm, vocabulary: int | None) -> int:
    """How many logits a head has: `vocabulary`, or all its rows; `ModelError` if it has fewer."""
    if vocabulary is not None and vocabulary > form.vocabulary:
        raise ModelError(
            f"the head has {form.vocabulary} rows, fewer than the {vocabulary} tokens asked for;"
            " use the tokenizer the model was made for."
        )
    return form.vocabulary if vocabulary is None else vocabulary
