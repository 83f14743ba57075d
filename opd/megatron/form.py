"""Map a Hugging Face configuration and its tensors to Megatron-Core, or say why they cannot run there.

`rank_parameters` lists the slices of Hugging Face tensors that make up a rank's parameters. Megatron-Core
fuses query, key and value, key-value head by key-value head, and gate and up. It cuts both, like embedding
and head, by rows over the ranks. It cuts the projections back by columns. So every parameter of a rank is
some `Cut`s one below the other, those of a layer's experts too, followed by rows of padding. The same list
read backwards gives the Hugging Face tensors again, bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError, reason_of
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.megatron.families import FAMILIES, Latent, read_settings


@dataclass(frozen=True, slots=True)
class LayerStage:
    """The layers of one pipeline stage. The next layers are on other ranks."""

    layers: range
    """Their numbers in the full decoder. The stage itself counts them from 0."""
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the final norm and the head. If tied and not first, it has the rows once more."""


@dataclass(frozen=True, slots=True)
class MegatronForm:
    """A decoder of one of the `FAMILIES`: all its shapes and arithmetic, no weights."""

    family: str
    layers: int
    hidden_size: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    ffn: int
    """Width of a dense layer's gate."""
    vocabulary: int
    """Rows of the embedding and of the head. They may exceed the tokenizer's vocabulary."""
    norm_eps: float
    tied: bool
    rope: tuple[float, ...]
    """Inverse frequencies of the rotary embedding, half as many as numbers of a head that have positions, as
    transformers computes them.
    """
    windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the projection back."""
    qk_norm: Literal["", "head", "all"] = ""
    rope_factor: float = 1.0
    """Of cosine and sine."""
    latent: Latent | None = None
    """Widths of latent attention. It has as many `groups` as heads."""
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    """1 for every layer with a mixture of experts, else 0. Empty without experts."""
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1."""
    sigmoid: bool = False
    """Whether experts are scored and chosen as in DeepSeek-V3. Routers stay in float32."""
    expert_groups: int = 1
    chosen_groups: int = 1
    """Groups of experts from which a token's are chosen."""
    expert_factor: float = 1.0
    """Of the weights of chosen experts."""
    clamp: tuple[float, float] | None = None
    """Factor of the sigmoid and limit of gate and up in GPT-OSS's experts, which have biases."""
    shared_ffn: int = 0
    """Width of the experts that every token goes to, together."""

    @classmethod
    def from_config(cls, config: Any) -> MegatronForm:
        """Read a Hugging Face configuration.

        Raises `ModelError` for a family or a setting that these layers do not have.
        """
        config = config.get_text_config()
        try:
            return cls(**read_settings(config))
        except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
            raise ModelError(
                f"a setting of this {config.model_type} model is missing or cannot be ({reason_of(error)});"
                " mend its config.json."
            ) from error

    def check_divisible(self, ranks: int) -> None:
        """Raise `ModelError` if the decoder cannot be cut into `ranks` equal slices."""
        widths = {"key-value heads": self.groups, "attention heads": self.heads}
        if self.latent is not None:
            widths["numbers of latent keys"] = self.latent.rank + self.latent.turned
            widths |= {"numbers of latent queries": self.latent.query_rank or 0}
        widths |= {"units of an expert": self.expert_ffn} if self.experts else {}
        widths |= {"numbers of a hidden state": self.hidden_size} if self.clamp else {}
        widths |= {"units of a shared expert": self.shared_ffn} if self.shared_ffn else {}
        widths |= {"units of an MLP": self.ffn} if 0 in (self.moe_layers or (0,)) else {}
        for label, count in widths.items():
            if count % ranks:
                most = math.gcd(*widths.values())
                fitting = " or ".join(str(size) for size in range(1, most + 1) if most % size == 0)
                raise ModelError(
                    f"a model with {count} {label} cannot be cut into {ranks} equal slices; choose a tensor"
                    f" parallel size of {fitting}."
                )

    @property
    def replay_fault(self) -> str | None:
        """Why choices of experts cannot be replayed, as the end of a sentence."""
        if not self.experts:
            return "has no experts"
        if FAMILIES[self.family].limited and self.expert_groups > 1:
            return "gives experts no weight where it would not choose them"
        return None

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return bool(self.moe_layers and self.moe_layers[layer])

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor `name` where layers compute in `dtype`."""
        return torch.float32 if self.sigmoid and ".mlp.gate." in name else dtype

    def check_student(self, ranks: int, stages: int) -> None:
        """Raise `ModelError` if such a decoder cannot be cut into `ranks` slices and `stages`."""
        self.check_divisible(ranks)
        self.stage_layers(0, stages)

    def sharing_size(self, asked: int | Literal["auto"], copies: int) -> int:
        """Return how many of `copies` ranks with the same slices share experts, as `asked` by
        `train.expert_parallel`; `auto` takes as many as can. Raises `ModelError` if these cannot.
        """
        if asked == "auto":
            return math.gcd(self.experts, copies) if self.experts else 1
        if asked > 1 and (not self.experts or self.experts % asked):
            has = f"{self.experts} experts a layer" if self.experts else "no experts"
            raise ModelError(
                f"train.expert_parallel is {asked}, and a student of model_type {self.family} has {has},"
                f" which {asked} ranks cannot share equally; set it to auto or 1."
            )
        return asked

    def stage_layers(self, number: int, count: int) -> LayerStage:
        """Return the layers of stage `number` of `count`. If they cannot be equal, the last stages have one
        less, because the head is there. Raises `ModelError` if a stage would have none.
        """
        if count > self.layers:
            raise ModelError(
                f"a model of {self.layers} layers cannot be cut into {count} stages; set"
                f" train.pipeline_parallel to {self.layers} or less."
            )
        each, extra = divmod(self.layers, count)
        start = number * each + min(number, extra)
        return LayerStage(range(start, start + each + (number < extra)), number == 0, number == count - 1)

    def stage_form(self, stage: LayerStage) -> MegatronForm:
        """Return the same form with the layers of one stage alone."""
        layers = slice(stage.layers.start, stage.layers.stop)
        return replace(
            self,
            layers=len(stage.layers),
            windows=self.windows[layers],
            moe_layers=self.moe_layers[layers],
        )

    def padded_vocabulary(self, ranks: int) -> int:
        """Return the rows of the embedding and the head over all ranks, the same number on each."""
        return -(-self.vocabulary // ranks) * ranks


EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""Megatron-Core's names of embedding and head."""
CORRECTION = "router.correction"
"""End of the name of what a router adds to scores. Nothing learns it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`start` to `stop` of a Hugging Face tensor along `axis`, or all of it if `stop` is `None`."""

    source: str
    axis: int = 0
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """One Megatron-Core parameter of one rank."""

    name: str
    cuts: tuple[Cut, ...]
    padding: int = 0
    """Rows of zeros after the cuts."""
    split: bool = True
    """False if every rank holds the same values."""
    experts: range | None = None
    """The experts whose rows lie one below the other here. `None`: it is none of theirs."""


def rank_parameters(
    form: MegatronForm,
    rank: int,
    ranks: int,
    stage: LayerStage | None = None,
    sharing: tuple[int, int] = (0, 1),
) -> list[ParameterPart]:
    """Return every parameter of rank `rank` of `ranks`, or of one `stage`, in forward order, head last.

    `sharing` are index and number of the ranks that share the experts of a layer.
    """
    stage = stage or form.stage_layers(0, 1)
    parts = []
    if stage.first:
        parts.append(_vocabulary_rows(form, EMBEDDING, "model.embed_tokens", rank, ranks))
    for number, layer in enumerate(stage.layers):
        parts += _layer_parameters(form, layer, f"decoder.layers.{number}", (rank, ranks), sharing)
    if stage.last:
        parts.append(
            ParameterPart("decoder.final_layernorm.weight", (Cut("model.norm.weight"),), split=False)
        )
        head = "model.embed_tokens" if form.tied else "lm_head"
        parts.append(_vocabulary_rows(form, HEAD, head, rank, ranks))
    return parts


def _vocabulary_rows(form: MegatronForm, name: str, source: str, rank: int, ranks: int) -> ParameterPart:
    rows = form.padded_vocabulary(ranks) // ranks
    start, stop = (min(form.vocabulary, r * rows) for r in (rank, rank + 1))
    cuts = (Cut(f"{source}.weight", 0, start, stop),) if stop > start else ()
    return ParameterPart(name, cuts, padding=rows - (stop - start))


_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def _layer_parameters(
    form: MegatronForm, layer: int, ours: str, rank_ranks: tuple[int, int], sharing: tuple[int, int]
) -> Iterator[ParameterPart]:
    """Yield a layer's parameters. `rank_ranks`: rank and ranks. `ours`: Megatron-Core's name of the layer."""
    (rank, ranks), theirs = rank_ranks, f"model.layers.{layer}"
    for name, source in _NORMS.items():
        yield ParameterPart(f"{ours}.{name}.weight", (Cut(f"{theirs}.{source}.weight"),), split=False)
    attention = _attention_parameters if form.latent is None else _latent_parameters
    yield from attention(form, f"{ours}.self_attention", f"{theirs}.self_attn", rank_ranks)
    rows = _rank_range(form.expert_ffn if form.is_mixture(layer) else form.ffn, rank, ranks)
    if form.is_mixture(layer):
        experts = range(*_rank_range(form.experts, *sharing))
        block = f"{theirs}.{FAMILIES[form.family].block}"
        if form.clamp is None:
            yield from _expert_parameters(form, f"{ours}.mlp", block, rows, experts)
        else:
            yield from _clamped_parameters(form, f"{ours}.mlp", block, rank_ranks, experts)
        if form.shared_ffn:
            gated, shared = FAMILIES[form.family].gated, _rank_range(form.shared_ffn, rank, ranks)
            source = f"{block}.shared_expert" if gated else f"{block}.shared_experts"
            yield from _mlp_parameters(f"{ours}.mlp.shared_experts", source, shared)
            if gated:
                cut = Cut(f"{source}_gate.weight")
                yield ParameterPart(f"{ours}.mlp.shared_gate.weight", (cut,), split=False)
    else:
        yield from _mlp_parameters(f"{ours}.mlp", f"{theirs}.mlp", rows)


def _mlp_parameters(ours: str, theirs: str, rows: tuple[int, int]) -> Iterator[ParameterPart]:
    """Yield the rows `rows` of gate and up and columns of down."""
    gate, up, down = (f"{theirs}.{name}_proj.weight" for name in ("gate", "up", "down"))
    yield ParameterPart(f"{ours}.linear_fc1.weight", (Cut(gate, 0, *rows), Cut(up, 0, *rows)))
    yield ParameterPart(f"{ours}.linear_fc2.weight", (Cut(down, 1, *rows),))


def _attention_parameters(
    form: MegatronForm, ours: str, theirs: str, rank_ranks: tuple[int, int]
) -> Iterator[ParameterPart]:
    (rank, ranks), size, per_group = rank_ranks, form.head_dim, form.heads // form.groups
    heads = {"q": form.heads, "k": form.groups}
    for name, count in heads.items() if form.qk_norm else ():
        whole = form.qk_norm == "all"
        rows = _rank_range(count * size, rank, ranks) if whole else ()
        cut = Cut(f"{theirs}.{name}_norm.weight", 0, *rows)
        yield ParameterPart(f"{ours}.{name}_layernorm.weight", (cut,), split=whole)
    for kind in ("weight", "bias") if form.qkv_bias else ("weight",):
        cuts: list[Cut] = []  # for each key-value head of the rank: its query heads, the key, the value
        for group in range(*_rank_range(form.groups, rank, ranks)):
            queries = (group * per_group * size, (group + 1) * per_group * size)
            cuts.append(Cut(f"{theirs}.q_proj.{kind}", 0, *queries))
            for name in ("k_proj", "v_proj"):
                cuts.append(Cut(f"{theirs}.{name}.{kind}", 0, group * size, (group + 1) * size))
        yield ParameterPart(f"{ours}.linear_qkv.{kind}", tuple(cuts))
    columns = _rank_range(form.heads * form.head_dim, rank, ranks)
    yield ParameterPart(f"{ours}.linear_proj.weight", (Cut(f"{theirs}.o_proj.weight", 1, *columns),))
    if form.out_bias:
        yield ParameterPart(f"{ours}.linear_proj.bias", (Cut(f"{theirs}.o_proj.bias"),), split=False)
    if FAMILIES[form.family].sinks:
        cut = Cut(f"{theirs}.sinks", 0, *_rank_range(form.heads, rank, ranks))
        yield ParameterPart(f"{ours}.core_attention.sinks", (cut,))


def _latent_parameters(
    form: MegatronForm, ours: str, theirs: str, rank_ranks: tuple[int, int]
) -> Iterator[ParameterPart]:
    latent, heads = form.latent, form.heads
    assert latent is not None
    rows = {
        "linear_q_down_proj": ("q_a_proj", latent.query_rank),
        "linear_q_up_proj": ("q_b_proj", latent.query_rank and heads * form.head_dim),
        "linear_q_proj": ("q_proj", None if latent.query_rank else heads * form.head_dim),
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", latent.rank + latent.turned),
        "linear_kv_up_proj": ("kv_b_proj", heads * (latent.still + latent.value)),
    }
    for name, (source, count) in rows.items():
        if count is not None:
            cut = Cut(f"{theirs}.{source}.weight", 0, *_rank_range(count, *rank_ranks))
            yield ParameterPart(f"{ours}.{name}.weight", (cut,))
    for name in ("q", "kv") if latent.query_rank else ("kv",):
        cut = Cut(f"{theirs}.{name}_a_layernorm.weight")
        yield ParameterPart(f"{ours}.{name}_layernorm.weight", (cut,), split=False)
    columns = _rank_range(heads * latent.value, *rank_ranks)
    yield ParameterPart(f"{ours}.linear_proj.weight", (Cut(f"{theirs}.o_proj.weight", 1, *columns),))


def _expert_parameters(
    form: MegatronForm, ours: str, theirs: str, rows: tuple[int, int], experts: range
) -> Iterator[ParameterPart]:
    """Yield a router, and the rows `rows` of gate and up and columns of down of `experts`."""
    linears = FAMILIES[form.family].linears
    yield ParameterPart(f"{ours}.router.weight", (Cut(f"{theirs}.gate.weight"),), split=False)
    if form.sigmoid:
        correction = (Cut(f"{theirs}.gate.e_score_correction_bias"),)
        yield ParameterPart(f"{ours}.{CORRECTION}", correction, split=False)
    names = [[f"{theirs}.experts.{expert}.{linear}.weight" for linear in linears] for expert in experts]
    first = tuple(Cut(name, 0, *rows) for gate, up, _ in names for name in (gate, up))
    second = tuple(Cut(down, 1, *rows) for _, _, down in names)
    yield ParameterPart(f"{ours}.experts.linear_fc1", first, experts=experts)
    yield ParameterPart(f"{ours}.experts.linear_fc2", second, experts=experts)


def _clamped_parameters(
    form: MegatronForm, ours: str, theirs: str, rank_ranks: tuple[int, int], experts: range
) -> Iterator[ParameterPart]:
    """Yield a router, the columns of gate and up of `experts` and the rows of down, and a slice of each bias.
    An expert's tensors are named as if files had one for each, see `in_stack`.
    """
    for kind in ("weight", "bias"):
        yield ParameterPart(f"{ours}.router.{kind}", (Cut(f"{theirs}.router.{kind}"),), split=False)
    pairs, units, outputs = (
        _rank_range(count, *rank_ranks) for count in (2 * form.expert_ffn, form.expert_ffn, form.hidden_size)
    )
    slices = {
        "linear_fc1": ("gate_up_proj", 1, pairs),
        "linear_fc2": ("down_proj", 0, units),
        "linear_fc1_bias": ("gate_up_proj_bias", 0, pairs),
        "linear_fc2_bias": ("down_proj_bias", 0, outputs),
    }
    for name, (source, axis, part) in slices.items():
        cuts = (Cut(f"{theirs}.experts.{expert}.{source}", axis, *part) for expert in experts)
        yield ParameterPart(f"{ours}.experts.{name}", tuple(cuts), experts=experts)


_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\.\w+)")


def in_stack(source: str) -> tuple[str, int]:
    """Return the tensor of all experts that has GPT-OSS's tensor `source` of one, and the expert's number."""
    found = _OF_EXPERT.fullmatch(source)
    return (source, 0) if found is None else (found[1] + found[3], int(found[2]))


def _rank_range(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (start, stop) of the rank's part of `count`, which `ranks` divides."""
    part = count // ranks
    return rank * part, (rank + 1) * part


_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
"""Suffixes of buffers in old checkpoints, which are computed again."""

Read = Callable[[Cut], Tensor]
"""Returns the slice of a Hugging Face tensor that a cut names."""


def parts_of(piece: ParameterPart, tensor: Tensor) -> dict[str, tuple[Cut, Tensor]]:
    """Split a rank's parameter `tensor` by Hugging Face tensor name, each with its cut and its values.

    Cuts of one tensor follow one another there, and are joined. Raises `ModelError` if `tensor` does not have
    the rows of `piece`.
    """
    by_source: dict[str, list[tuple[Cut, Tensor]]] = {}
    row = 0
    for cut in piece.cuts:
        stacked = cut.axis == 0 and cut.stop is not None
        # Others are full in rows: one, or as many alike as there are experts.
        rows = (cut.stop or 0) - cut.start if stacked else tensor.shape[0] // len(piece.cuts)
        by_source.setdefault(cut.source, []).append((cut, tensor[row : row + rows]))
        row += rows
    if row + piece.padding != tensor.shape[0]:
        raise ModelError(
            f"{piece.name} has {tensor.shape[0]} rows, but {row + piece.padding} are needed; the parameters"
            " do not fit their configuration."
        )
    return {
        source: (replace(parts[0][0], stop=parts[-1][0].stop), _concatenate_rows([part for _, part in parts]))
        for source, parts in by_source.items()
    }


def _concatenate_rows(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_tensors(form: MegatronForm, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Raise `ModelError` naming a tensor of `where` that is missing, of another size, or unknown to `form`.

    `shapes` are those of all tensors. An unused tensor is an error, because the model would compute something
    else without it.
    """
    shapes = one_by_one(form, shapes)
    ahead = f"model.layers.{form.layers}."  # a layer that predicts further ahead, left out by transformers
    unused = {
        name
        for name in shapes
        if not name.endswith(_BUFFERS) and not (form.sigmoid and name.startswith(ahead))
    }
    sizes: dict[tuple[str, int], int] = {}
    for piece in rank_parameters(form, 0, 1):
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


def one_by_one(form: MegatronForm, shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return `shapes` with a tensor for each expert in the place of those that have all, if files of `form`
    have such ones.
    """
    if form.clamp is None:
        return dict(shapes)
    parted: dict[str, Sequence[int]] = {}
    for name, shape in shapes.items():
        head, infix, tail = name.rpartition(".experts.")
        if infix and list(shape[:1]) == [form.experts]:
            parted |= {f"{head}{infix}{expert}.{tail}": shape[1:] for expert in range(form.experts)}
        else:
            parted[name] = shape
    return parted


def assemble_tensor(piece: ParameterPart, form: MegatronForm, read: Read) -> Tensor:
    """Return the tensor of `piece`, in new memory."""
    tensors = [read(cut) for cut in piece.cuts]
    if piece.padding:
        like = tensors[0] if tensors else torch.empty(0, form.hidden_size)
        tensors.append(like.new_zeros(piece.padding, form.hidden_size))
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone(memory_format=torch.contiguous_format)


def read_from(weights: Mapping[str, Tensor]) -> Read:
    """Return a reader of cuts of tensors in memory. It gives views."""

    def read_cut(cut: Cut) -> Tensor:
        stack, expert = in_stack(cut.source)
        if cut.source not in weights and stack not in weights:
            raise ModelError(f"the weights have no tensor {cut.source}; they do not fit their configuration.")
        tensor = weights[cut.source] if cut.source in weights else weights[stack][expert]
        length = tensor.shape[cut.axis] if tensor.ndim > cut.axis else 0
        stop = length if cut.stop is None else cut.stop
        if stop > length:
            raise ModelError(
                f"tensor {cut.source} has shape {list(tensor.shape)}, but {stop} are needed along axis"
                f" {cut.axis}; the weights do not fit their configuration."
            )
        return tensor.narrow(cut.axis, cut.start, stop - cut.start)

    return read_cut


Elements = Callable[[str, int, Tensor], None]
"""Fills a tensor with elements of a named one, from an index on, in row-major order."""
_BLOCK = 1 << 20
"""Elements read at a time from a tensor that is cut by columns."""


def read_elements(shapes: Mapping[str, Sequence[int]], elements: Elements, device: torch.device) -> Read:
    """Return a reader of cuts of tensors of these `shapes`, in float32 on `device`. For a cut by columns it
    reads full rows, a few MiB at a time.
    """

    def read_cut(cut: Cut) -> Tensor:
        shape = shapes[cut.source]
        stop = shape[cut.axis] if cut.stop is None else cut.stop
        if cut.axis == 0:
            tensor = torch.empty(stop - cut.start, *shape[1:], device=device)
            elements(cut.source, cut.start * math.prod(shape[1:]), tensor)
            return tensor
        rows, width = shape
        tensor = torch.empty(rows, stop - cut.start, device=device)
        each = max(1, _BLOCK // width)
        for first in range(0, rows, each):
            part = tensor[first : first + each]
            block = torch.empty(len(part), width, device=device)
            elements(cut.source, first * width, block)
            part.copy_(block[:, cut.start : stop])
        return tensor

    return read_cut


def head_shard(
    rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup
) -> HeadShard:
    """Return this rank's `rows` [padded V / ranks, D] without padding, for `opd.kernels.vocab_parallel`.

    Each rank holds as many rows as Megatron-Core gives it. `vocabulary` leaves fewer on the last ranks.
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
    """Return the number of logits of a head: `vocabulary`, or all its rows. `ModelError` if it has fewer."""
    if vocabulary is not None and vocabulary > form.vocabulary:
        raise ModelError(
            f"the head has {form.vocabulary} rows, fewer than the {vocabulary} tokens asked for;"
            " use the tokenizer the model was made for."
        )
    return form.vocabulary if vocabulary is None else vocabulary
