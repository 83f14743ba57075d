"""Describe the shape of a model for estimates, and the formulas that need nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd.config.train import LoRAConfig
from opd.pipelines.stages.precision import WIDTH


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model for an estimate."""

    parameters: int
    hidden_size: int
    windows: tuple[int | None, ...]
    """Attention window of each layer. `None`: unlimited."""
    vocabulary: int
    kv_width: int
    """Key-value heads times head size: values per token, layer and side of the cache. If keys are longer than
    values (latent attention), the mean of both."""
    recurrent: int = 0
    """Layers that keep no keys and values: they carry a state from token to token."""
    state_bytes: int = 0
    """Bytes of the states of a sequence."""
    adapters: int = 0
    """Parameters of the adapters that `model.lora` puts on it."""
    adapted: int = 0
    """Parameters of the layers with adapters."""
    narrowest: int = 0
    """The smallest width of such a layer."""
    fused: int = 0
    """Parameters of the layers that decode fuses from a copy. They are queries, keys and values, and gate and
    up. 0 for a model whose own code decodes."""
    linear: int = 0
    """Parameters of the other linear layers that decode multiplies."""
    stored: int = 0
    """Bytes of its stored weights."""
    absent: bool = False
    """Whether its weights are not here. Then `stored` follows from its configuration."""
    form: str = ""
    """The format in which they are quantised, in words, if they are."""
    published: bool = False
    """Whether they lie where `opd publish` writes."""
    idle: int = 0
    """Parameters of the experts that a token is not routed to."""
    largest: int = 0
    """Parameters of the largest part that is read as one: a layer, or the embedding."""
    split_experts: int = 0
    """The most parameters of one layer's experts, which its files hold one by one."""
    experts: int = 0
    """Parameters of all experts that ranks can share."""
    experts_per_token: int = 0
    """Experts of a layer that a token is routed to."""
    choice_bytes: int = 0
    """Bytes of the choices of experts of a token, as the engine records them."""
    expert_count: int = 0
    """Experts of a layer: a number of ranks that divides it can share those of every layer."""
    digest: str = ""
    """Of what is read of it from an object store: adapters on one base have one digest."""
    origin: frozenset[str] = frozenset()
    """What its folder is told by, as what adapters say of their base (`on`): a path, digests of files."""
    on: frozenset[str] = frozenset()
    """Of a model that is adapters on a base, what that is told by."""
    delta: int = 0
    """Bytes of these adapters where they lie."""
    merged_dtype: str = ""
    """The dtype in which it is stored with these adapters merged, if it is."""

    @property
    def used(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.parameters - self.idle

    @property
    def size_text(self) -> str:
        routed = f" of which a token uses {self.used:,}" if self.idle else ""
        return f"{self.parameters:,} parameters{routed}{f' in {self.form}' if self.form else ''}"

    @property
    def layer_count(self) -> int:
        """Decoder layers."""
        return len(self.windows)


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "adapter_config.json")


def has_weights(folder: Path) -> bool:
    """Return whether `folder` holds weights, also in a format that is not read."""
    return any(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def stored_of(source: str) -> dict[str, Any]:
    """Return the fields of `ModelShape` that tell how a teacher's weights are stored: bytes, and whether they
    are published, or the base and bytes of its adapters.
    """
    from opd.models.adapters import FOLDER, WEIGHTS, has_adapter, read_adapter
    from opd.models.hf_folder import adapter_base, described_in
    from opd.pipelines.stages.precision import checkpoint_dtype
    from opd.storage.object_store import folder_of
    from opd.storage.published import PublishedModel
    from opd.storage.weight_folder import read_headers
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter
    from opd.teachers.skeleton import is_published

    if is_published(source):
        url = PublishedAdapter.open(source).base if is_adapter(source) else source
        with PublishedModel.open(url) as model:
            digest = model.manifest.digest if folder_of(url) is None else ""
            return {"stored": sum(model.manifest.sizes), "published": True, "digest": digest}
    folder = described_in(Path(source))  # of an adapter, its base: what it adds is small
    fields: dict[str, Any] = {"stored": sum(tensor.nbytes for tensor in read_headers(folder).values())}
    path = Path(source)
    base = adapter_base(path)
    if base is not None:
        return fields | {"on": origin_of(base), "delta": (path / WEIGHTS).stat().st_size}
    if has_adapter(path):  # the merged model's folder keeps it
        adapter = read_adapter(path)
        fields["on"] = frozenset([str(adapter.base.resolve()), *adapter.base_files.values()])
        fields["delta"] = (path / FOLDER / WEIGHTS).stat().st_size
        fields["merged_dtype"] = checkpoint_dtype(path)
    return fields


def absent_shape(shape: ModelShape, config: Any) -> ModelShape:
    """Return `shape` as stored in the format or the dtype that its `config` names."""
    from opd.models.quantisation import quantisation_of

    form = quantisation_of(config, "config.json")
    width = form.bits / 8 if form is not None else WIDTH[absent_dtype(config)]
    return replace(shape, stored=int(shape.parameters * width), absent=True)


def absent_dtype(config: Any) -> str:
    """Return the dtype that a model of `config` is computed in if its weights are not here."""
    name = str(config.dtype).removeprefix("torch.")
    return name if name in WIDTH else "bfloat16"


def origin_of(folder: Path) -> frozenset[str]:
    """Return the marks of a Hugging Face folder without reading its weights: its path, and the digests of its
    weight files if it lists them.
    """
    from opd.models.hf_folder import adapter_base, read_checksums, weight_files

    marks, checksums = frozenset([str(folder.resolve())]), read_checksums(folder)
    if adapter_base(folder) is not None:
        return marks
    digests = [checksums.get(name, "") for name in weight_files(folder)]
    return marks | frozenset(digests) if all(digests) else marks


def _kv_width(text: Any) -> int:
    """Return `ModelShape.kv_width` of a configuration: the mean if layers differ or share keys."""
    from opd.models.attention import key_layer

    kept = 0
    for layer, one in enumerate(text.per_layer_config):
        heads = getattr(one, "num_key_value_heads", None) or one.num_attention_heads
        width = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
        latent = [getattr(one, f"{part}_head_dim", 0) for part in ("qk_nope", "qk_rope", "v")]
        kept += heads * (sum(latent) // 2 or width) if key_layer(text, layer) == layer else 0
        indexes = (getattr(text, "indexer_types", None) or ["full"] * (layer + 1))[layer] == "full"
        kept += getattr(one, "index_head_dim", 0) // 2 if indexes else 0  # index keys have no values
    return -(-kept // text.num_hidden_layers)


_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def shape_of(config: Any, module: Any, lora: LoRAConfig | None = None) -> ModelShape:
    """Count the parameters of `module`, the model of `config` on the meta device."""
    import torch

    from opd.models.adapters import target_layers
    from opd.models.architecture import chosen_experts, expert_parts
    from opd.models.expert_parallel import expert_modules
    from opd.models.hf_folder import layer_windows
    from opd.models.long_sequence import decoder_of, layers_of
    from opd.models.quantisation import quantisation_of
    from opd.rollout.forward import supports_model

    text = config.get_text_config()
    adapted = target_layers(module, lora.targets) if lora is not None else []
    linear = [module.get_submodule(name) for name in adapted]
    rank = lora.rank if lora is not None else 0
    layers = layers_of(decoder_of(module))
    decoded = [
        (name.rpartition(".")[2], part.weight.numel())
        for layer in (layers if supports_model(text, layers) else ())
        for name, part in layer.named_modules()
        if isinstance(part, torch.nn.Linear)
    ]
    chosen, idle, choice_bytes = chosen_experts(text), 0, 0
    if chosen is not None:  # one tensor has the same weight of all experts
        for _, count, size in expert_parts(module):
            idle += max(0, count - chosen[1]) * (size // max(count, 1))
            choice_bytes += chosen[1] * (1 if count <= 256 else 2) * (size > 0)
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in (module, *layers)]
    form = quantisation_of(config, "config.json")
    shared = expert_modules(module)
    return ModelShape(
        form=form.title if form is not None else "",
        fused=sum(size for name, size in decoded if name in _FUSED),
        linear=sum(size for name, size in decoded if name not in _FUSED),
        adapters=sum(rank * (layer.in_features + layer.out_features) for layer in linear),
        adapted=sum(layer.weight.numel() for layer in linear),
        narrowest=min((min(layer.weight.shape) for layer in linear), default=0),
        parameters=sizes[0],
        largest=max([text.vocab_size * text.hidden_size, *sizes[1:]]),
        split_experts=max((sum(size for _, _, size in expert_parts(layer)) for layer in layers), default=0),
        experts=sum(one.numel() for part in shared for one in part.parameters(recurse=False)),
        experts_per_token=chosen[1] if chosen is not None else 0,
        expert_count=math.gcd(*(part.num_experts for part in shared)),
        hidden_size=text.hidden_size,
        idle=idle,
        choice_bytes=choice_bytes,
        windows=layer_windows(config),
        vocabulary=text.vocab_size,
        kv_width=_kv_width(text),
    )
