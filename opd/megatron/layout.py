"""Which parts of which Hugging Face tensors make up a rank's Megatron-Core parameters.

Megatron-Core fuses query, key and value, key-value head by key-value head, and gate and up, and cuts both
(as embedding and head) by rows over the ranks; the projections back are cut by columns. Every
parameter of a rank is therefore some `Cut`s one below the other, followed by rows of padding. The same
list read backwards gives the Hugging Face tensors again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opd.megatron.form import MegatronForm

HEAD = "output_layer.weight"
"""Megatron-Core's name of the head."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`start` to `stop` of a Hugging Face tensor along `axis`; all of it if `stop` is `None`."""

    source: str
    axis: int = 0
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's Megatron-Core parameter."""

    name: str
    cuts: tuple[Cut, ...]
    padding: int = 0
    """Rows of zeros after the cuts."""
    split: bool = True
    """False if every rank holds the same."""


def pieces(form: MegatronForm, rank: int, ranks: int) -> list[Piece]:
    """Every parameter of rank `rank` of `ranks`, in the order of a forward pass, and the head at the end."""
    found = [_vocabulary_rows(form, "embedding.word_embeddings.weight", "model.embed_tokens", rank, ranks)]
    for layer in range(form.layers):
        found += _layer(form, layer, rank, ranks)
    found.append(Piece("decoder.final_layernorm.weight", (Cut("model.norm.weight"),), split=False))
    head = "model.embed_tokens" if form.tied else "lm_head"
    found.append(_vocabulary_rows(form, HEAD, head, rank, ranks))
    return found


def _vocabulary_rows(form: MegatronForm, name: str, source: str, rank: int, ranks: int) -> Piece:
    rows = form.padded_vocabulary(ranks) // ranks
    start, stop = (min(form.vocabulary, r * rows) for r in (rank, rank + 1))
    cuts = (Cut(f"{source}.weight", 0, start, stop),) if stop > start else ()
    return Piece(name, cuts, padding=rows - (stop - start))


def _layer(form: MegatronForm, layer: int, rank: int, ranks: int) -> Iterator[Piece]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    whole = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    if form.qk_norm:
        whole |= {
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }
    for own, source in whole.items():
        yield Piece(f"{ours}.{own}.weight", (Cut(f"{theirs}.{source}.weight"),), split=False)
    for kind in ("weight", "bias") if form.qkv_bias else ("weight",):
        yield Piece(
            f"{ours}.self_attention.linear_qkv.{kind}",
            tuple(_qkv(form, f"{theirs}.self_attn", kind, rank, ranks)),
        )
    columns = _share(form.heads * form.head_dim, rank, ranks)
    yield Piece(
        f"{ours}.self_attention.linear_proj.weight", (Cut(f"{theirs}.self_attn.o_proj.weight", 1, *columns),)
    )
    if form.moe_layers and form.moe_layers[layer]:
        yield from _experts(form, f"{ours}.mlp", theirs, rank, ranks)
    else:
        names = [f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        yield from _mlp(f"{ours}.mlp", names, form.ffn, rank, ranks)


def _qkv(form: MegatronForm, attention: str, kind: str, rank: int, ranks: int) -> Iterator[Cut]:
    """For each key-value head of the rank: its query heads, the key, the value."""
    size, per_group = form.head_dim, form.heads // form.groups
    for group in range(*_share(form.groups, rank, ranks)):
        yield Cut(f"{attention}.q_proj.{kind}", 0, group * per_group * size, (group + 1) * per_group * size)
        for name in ("k_proj", "v_proj"):
            yield Cut(f"{attention}.{name}.{kind}", 0, group * size, (group + 1) * size)


def _mlp(ours: str, names: list[str], width: int, rank: int, ranks: int) -> Iterator[Piece]:
    """`names` are the tensors of gate, up and down."""
    gate, up, down = names
    rows = _share(width, rank, ranks)
    yield Piece(f"{ours}.linear_fc1.weight", (Cut(gate, 0, *rows), Cut(up, 0, *rows)))
    yield Piece(f"{ours}.linear_fc2.weight", (Cut(down, 1, *rows),))


def _experts(form: MegatronForm, ours: str, theirs: str, rank: int, ranks: int) -> Iterator[Piece]:
    mixtral = form.family == "mixtral"
    theirs = f"{theirs}.block_sparse_moe" if mixtral else f"{theirs}.mlp"
    linears = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield Piece(f"{ours}.router.weight", (Cut(f"{theirs}.gate.weight"),), split=False)
    for expert in range(form.experts):
        names = [f"{theirs}.experts.{expert}.{linear}.weight" for linear in linears]
        yield from _mlp(f"{ours}.experts.local_experts.{expert}", names, form.expert_ffn, rank, ranks)


def _share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop) of the rank's part of `count`, which `ranks` divides."""
    part = count // ranks
    return rank * part, (rank + 1) * part
