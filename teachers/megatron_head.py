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
from opd.megatron.head import tokens_of

if TYPE_CHECKING:
    from opd.megatron.form import MegatronForm


def whole_head(rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup) -> Head:
    """The head over the first `vocabulary` tokens from every rank's `rows` [padded V / ranks, D].

    A collective call with more than one rank. Raises `ModelError` for a vocabulary the head does not have.
    """
    tokens = tokens_of(form, vocabulary)
    if group.size() > 1:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        rows = torch.cat(parts)[: form.vocabulary]
    return Head(rows, vocab_size=tokens)


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
