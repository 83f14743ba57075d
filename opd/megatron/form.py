"""Map a Hugging Face configuration and its tensors to Megatron-Core, or say why they cannot run there.

`rank_parameters` lists the slices of Hugging Face tensors that make up a rank's parameters. Megatron-Core
fuses query, key and value, key-value head by key-value head, and gate and up. It cuts both, like embedding
and head, by rows over the ranks. It cuts the projections back by columns. So every parameter of a rank is
some `Cut`s one below the other, those of a layer's experts too, followed by rows of padding. The same list
read backwards gives the Hugging Face tensors again, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Values of `model_type` that are known to have these layers and no others."""


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
    """Inverse frequencies of the rotary embedding, [head_dim / 2], as transformers computes them."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    """1 for every layer with a mixture of experts, else 0. Empty without experts."""
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1."""

    @classmethod
    def from_config(cls, config: Any) -> MegatronForm:
        """Read a Hugging Face configuration.

        Raises `ModelError` for a family or a setting that these layers do not have.
        """
        config = config.get_text_config()
        _refuse_config(config)
        family = config.model_type
        heads = config.num_attention_heads
        experts = {} if family not in ("qwen3_moe", "mixtral") else _expert_settings(config)
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads,
            groups=config.num_key_value_heads or heads,
            head_dim=_head_dim(config),
            ffn=config.intermediate_size,
            vocabulary=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            rope=tuple(_inverse_frequencies(config).tolist()),
            windows=_layer_windows(config),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            **experts,
        )

    def check_divisible(self, ranks: int) -> None:
        """Raise `ModelError` if the decoder cannot be cut into `ranks` equal slices."""
        widths = {"key-value heads": self.groups, "attention heads": self.heads}
        widths |= {"units of an expert": self.expert_ffn} if self.experts else {}
        widths |= {"units of an MLP": self.ffn} if 0 in (self.moe_layers or (0,)) else {}
        for label, count in widths.items():
            if count % ranks:
                most = math.gcd(*widths.values())
                fitting = " or ".join(str(size) for size in range(1, most + 1) if most % size == 0)
                raise ModelError(
                    f"a model with {count} {label} cannot be cut into {ranks} equal slices; choose a tensor"
                    f" parallel size of {fitting}."
                )

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return bool(self.moe_layers and self.moe_layers[layer])

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


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refuse_config(config: Any) -> None:
    family = config.model_type
    if family not in FAMILIES:
        raise ModelError(
            f"a model on Megatron-Core cannot be of model_type {family!r}; known are {', '.join(FAMILIES)}."
            " take the torch back end for this one."
        )
    others = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
    }
    for name, value in others.items():
        if value:
            raise ModelError(
                f"a model on Megatron-Core of model_type {family} cannot have {name} {value!r}; take"
                " the torch back end for this one."
            )


def _expert_settings(config: Any) -> Mapping[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        width, where, renormalise = config.intermediate_size, [1 for _ in layers], True
    else:
        width, renormalise = config.moe_intermediate_size, bool(config.norm_topk_prob)
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or []
        where = [int(i not in dense and (i + 1) % step == 0) for i in layers]
    return {
        "experts": count,
        "experts_per_token": config.num_experts_per_tok,
        "expert_ffn": width,
        "moe_layers": tuple(where),
        "renormalise": renormalise,
    }


def _layer_windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or []
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in windows or (kind == "sliding_attention" and window is None):
            raise ModelError(
                f"a model on Megatron-Core cannot have a layer of kind {kind!r} with window {window}; take"
                " the torch back end for this one."
            )
    return tuple(windows[kind] for kind in kinds)


def _inverse_frequencies(config: Any) -> Tensor:
    """Return [head_dim / 2] float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.int64).float() / _head_dim(config)
        return 1.0 / rope["rope_theta"] ** exponents
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if kind not in ("linear", "llama3") or factor != 1.0 or len(frequencies) * 2 != _head_dim(config):
        raise ModelError(
            f"a model on Megatron-Core cannot have rotary embeddings of rope_type {kind!r}; known are"
            " default, linear and llama3. Take the torch back end for this one."
        )
    return frequencies


EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""Megatron-Core's names of embedding and head."""


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


def _layer_parameters(
    form: MegatronForm, layer: int, ours: str, rank_ranks: tuple[int, int], sharing: tuple[int, int]
) -> Iterator[ParameterPart]:
    """Yield a layer's parameters. `rank_ranks`: rank and ranks. `ours`: Megatron-Core's name of the layer."""
    (rank, ranks), theirs = rank_ranks, f"model.layers.{layer}"
    sources = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    if form.qk_norm:
        sources |= {
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }
    for name, source in sources.items():
        yield ParameterPart(f"{ours}.{name}.weight", (Cut(f"{theirs}.{source}.weight"),), split=False)
    attention, size, per_group = f"{theirs}.self_attn", form.head_dim, form.heads // form.groups
    for kind in ("weight", "bias") if form.qkv_bias else ("weight",):
        cuts: list[Cut] = []  # for each key-value head of the rank: its query heads, the key, the value
        for group in range(*_rank_range(form.groups, rank, ranks)):
            queries = (group * per_group * size, (group + 1) * per_group * size)
            cuts.append(Cut(f"{attention}.q_proj.{kind}", 0, *queries))
            for name in ("k_proj", "v_proj"):
                cuts.append(Cut(f"{attention}.{name}.{kind}", 0, group * size, (group + 1) * size))
        yield ParameterPart(f"{ours}.self_attention.linear_qkv.{kind}", tuple(cuts))
    columns = _rank_range(form.heads * form.head_dim, rank, ranks)
    yield ParameterPart(
        f"{ours}.self_attention.linear_proj.weight", (Cut(f"{attention}.o_proj.weight", 1, *columns),)
    )
    rows = _rank_range(form.expert_ffn if form.is_mixture(layer) else form.ffn, rank, ranks)
    if form.is_mixture(layer):
        experts = range(*_rank_range(form.experts, *sharing))
        yield from _expert_parameters(form, f"{ours}.mlp", theirs, rows, experts)
    else:
        gate, up, down = (f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        yield ParameterPart(f"{ours}.mlp.linear_fc1.weight", (Cut(gate, 0, *rows), Cut(up, 0, *rows)))
        yield ParameterPart(f"{ours}.mlp.linear_fc2.weight", (Cut(down, 1, *rows),))


def _expert_parameters(
    form: MegatronForm, ours: str, theirs: str, rows: tuple[int, int], experts: range
) -> Iterator[ParameterPart]:
    """Yield a router, and the rows `rows` of gate and up and columns of down of `experts`."""
    mixtral = form.family == "mixtral"
    theirs = f"{theirs}.block_sparse_moe" if mixtral else f"{theirs}.mlp"
    linears = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield ParameterPart(f"{ours}.router.weight", (Cut(f"{theirs}.gate.weight"),), split=False)
    names = [[f"{theirs}.experts.{expert}.{linear}.weight" for linear in linears] for expert in experts]
    first = tuple(Cut(name, 0, *rows) for gate, up, _ in names for name in (gate, up))
    second = tuple(Cut(down, 1, *rows) for _, _, down in names)
    yield ParameterPart(f"{ours}.experts.linear_fc1", first, experts=experts)
    yield ParameterPart(f"{ours}.experts.linear_fc2", second, experts=experts)


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
    unused = {name for name in shapes if not name.endswith(_BUFFERS)}
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
