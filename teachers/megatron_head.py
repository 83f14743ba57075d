"""A teacher's head from the ranks' rows: whole, or as each rank's part for vocabulary-parallel operations."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_shard import HeadShard

if TYPE_CHECKING:
    from opd.megatron.form import MegatronForm


def whole_head(rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup) -> Head:
    """The head over the first `vocabulary` tokens from every rank's `rows` [padded V / ranks, D].

    A collective call with more than one rank. Raises `ModelError` for a vocabulary the head does not have.
    """
    tokens = _tokens(form, vocabulary)
    if group.size() > 1:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        rows = torch.cat(parts)[: form.vocabulary]
    return Head(rows, vocab_size=tokens)


def head_shard(
    rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup
) -> HeadShard:
    """This rank's `rows` [padded V / ranks, D] without padding, for `opd.kernels.vocab_parallel`.

    Ranks hold as many rows each as Megatron-Core gives them; of the last ones `vocabulary` leaves fewer.
    Raises `ModelError` on all ranks if it leaves one without any.
    """
    tokens, each = _tokens(form, vocabulary), len(rows)
    sizes = tuple(min(max(tokens - rank * each, 0), each) for rank in range(group.size()))
    if 0 in sizes:
        raise ModelError(
            f"a vocabulary of {tokens} tokens leaves rank {sizes.index(0)} of {group.size()} without any;"
            " choose a smaller tensor parallel size."
        )
    return HeadShard(Head(rows, vocab_size=sizes[group.rank()]), sizes, group)


def cut_like(head: Head, shard: HeadShard) -> HeadShard:
    """This rank's rows of a whole `head`, at the tokens where `shard` is cut: for the student of a KL.

    Views, so gradients reach its parameters. Raises `ModelError` if the vocabularies differ.
    """
    if head.vocabulary != shard.vocabulary:
        raise ModelError(
            f"the heads have {head.vocabulary} and {shard.vocabulary} tokens; student and teacher must have"
            " one vocabulary."
        )
    rank = dist.get_rank(shard.group)
    stop = list(accumulate(shard.sizes))[rank]
    rows = slice(stop - shard.sizes[rank], stop)
    bias = None if head.bias is None else head.bias[rows]
    part = replace(head, weight=head.weight[rows], bias=bias, vocab_size=None)
    return HeadShard(part, shard.sizes, shard.group)


def _tokens(form: MegatronForm, vocabulary: int | None) -> int:
    if vocabulary is not None and vocabulary > form.vocabulary:
        raise ModelError(
            f"the teacher's head has {form.vocabulary} rows, fewer than the {vocabulary} tokens asked for;"
            " use the tokenizer the model was made for."
        )
    return form.vocabulary if vocabulary is None else vocabulary
