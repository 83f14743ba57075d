"""Hugging Face tensors to a rank's Megatron-Core parameters, and all ranks' parameters back; bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.megatron.form import HEAD, Cut, MegatronForm, Piece, pieces

_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
"""Ends of names of buffers in old checkpoints, which are computed anew."""

Read = Callable[[Cut], Tensor]
"""Gives the part of a Hugging Face tensor that a cut names."""


def to_megatron(
    form: MegatronForm, weights: Mapping[str, Tensor], rank: int = 0, ranks: int = 1
) -> dict[str, Tensor]:
    """The parameters of rank `rank` of `ranks`, and its rows of the head, from a whole model's tensors.

    Raises `ModelError` naming a tensor that is missing or of another shape.
    """
    return {piece.name: assemble(piece, form, read_from(weights)) for piece in pieces(form, rank, ranks)}


def from_megatron(form: MegatronForm, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A whole model's tensors by Hugging Face's names, from the parameters of every rank, in their order.

    Raises `ModelError` naming a parameter that is missing, of another shape, or that the ranks should have
    in common and do not.
    """
    parts: dict[str, list[tuple[Cut, Tensor]]] = {}
    for rank, shard in enumerate(shards):
        for piece in pieces(form, rank, len(shards)):
            if piece.name == HEAD and form.tied:
                continue
            if piece.name not in shard:
                raise ModelError(f"rank {rank} has no parameter {piece.name}; give every rank's parameters.")
            _take_apart(piece, shard[piece.name], rank, parts)
    return {source: _join(source, found) for source, found in parts.items()}


def check_tensors(form: MegatronForm, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """`ModelError` naming a tensor of `where` that is missing, of another size, or unknown to `form`.

    `shapes` are those of all tensors. A tensor that would go unused stops here: without it the model would
    compute something else.
    """
    unused = {name for name in shapes if not name.endswith(_BUFFERS)}
    sizes: dict[tuple[str, int], int] = {}
    for piece in pieces(form, 0, 1):
        for cut in piece.cuts:
            if cut.source not in shapes:
                raise ModelError(f"{where} has no tensor {cut.source}, which its config.json asks for.")
            unused.discard(cut.source)
            key = (cut.source, cut.axis)
            sizes[key] = max(sizes.get(key, 0), cut.stop or 0)
    for (source, axis), size in sizes.items():
        shape = shapes[source]
        if size and (len(shape) <= axis or shape[axis] != size):
            raise ModelError(
                f"tensor {source} of {where} has shape {list(shape)}, but its config.json asks for {size}"
                f" along axis {axis}; copy the model again."
            )
    if form.tied:
        unused.discard("lm_head.weight")
    if unused:
        raise ModelError(
            f"tensor {min(unused)} of {where} has no place in a model_type {form.family} on Megatron-Core;"
            " take the torch back end for this one."
        )


def assemble(piece: Piece, form: MegatronForm, read: Read) -> Tensor:
    """The tensor of `piece`, in memory of its own."""
    found = [read(cut) for cut in piece.cuts]
    if piece.padding:
        like = found[0] if found else torch.empty(0, form.hidden_size)
        found.append(like.new_zeros(piece.padding, form.hidden_size))
    return torch.cat(found) if len(found) > 1 else found[0].clone(memory_format=torch.contiguous_format)


def read_from(weights: Mapping[str, Tensor]) -> Read:
    """Cuts of tensors that are in memory, as views."""

    def read(cut: Cut) -> Tensor:
        if cut.source not in weights:
            raise ModelError(f"the weights have no tensor {cut.source}; they do not fit their configuration.")
        tensor = weights[cut.source]
        length = tensor.shape[cut.axis] if tensor.ndim > cut.axis else 0
        stop = length if cut.stop is None else cut.stop
        if stop > length:
            raise ModelError(
                f"tensor {cut.source} has shape {list(tensor.shape)}, but {stop} are needed along axis"
                f" {cut.axis}; the weights do not fit their configuration."
            )
        return tensor.narrow(cut.axis, cut.start, stop - cut.start)

    return read


def _take_apart(piece: Piece, tensor: Tensor, rank: int, parts: dict[str, list[tuple[Cut, Tensor]]]) -> None:
    row = 0
    for cut in piece.cuts:
        stacked = cut.axis == 0 and cut.stop is not None
        rows = (cut.stop or 0) - cut.start if stacked else tensor.shape[0]
        found = parts.setdefault(cut.source, [])
        part = tensor[row : row + rows]
        if piece.split or not found:
            found.append((cut, part))
        elif not torch.equal(found[0][1], part):
            raise ModelError(
                f"rank {rank} has other values in {piece.name} than rank 0, but all ranks must hold the same;"
                " the parameters are not of one model."
            )
        row += rows
    if row + piece.padding != tensor.shape[0]:
        raise ModelError(
            f"{piece.name} of rank {rank} has {tensor.shape[0]} rows, but {row + piece.padding} are needed;"
            " the parameters do not fit their configuration."
        )


def _join(source: str, found: list[tuple[Cut, Tensor]]) -> Tensor:
    ordered = sorted(found, key=lambda part: part[0].start)
    at = 0
    for cut, _ in ordered:
        if cut.start != at:
            raise ModelError(
                f"the ranks' parts of {source} do not follow one another; give every rank's once."
            )
        at = cut.stop or 0
    return torch.cat([part for _, part in ordered], dim=ordered[0][0].axis)


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
