"""LoRA: a frozen base with trained adapters (peft), and the plain model of the two merged.

The trainer's model applies its adapters. The rollout engine merges them into its own copy of the base. Weight
updates and checkpoints hold the adapters and the digest of their base. Their tensors have peft's names:
`model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]` and `lora_B` `[out, r]`.

FOLDER/                          the merged model, as any other
FOLDER/adapter/                  adapter_config.json and adapter_model.safetensors: peft loads it
FOLDER/adapter/base.json         where its base lies, and the sha256 of each of the base's weight files
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from opd.config.train import USUAL_TARGETS, LoRAConfig
from opd.errors import CheckpointError, ModelError, add_path_note, needs_extra, reason_of
from opd.models.causal_lm import CausalLM, WeightsDigest, weights_digest
from opd.models.checkpoint import MAX_SHARD_BYTES, save_checkpoint
from opd.models.hf_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_base,
    check_folder,
    check_shard,
    check_small_files,
    read_checksums,
    read_object,
    weight_files,
    weight_states,
)
from opd.models.long_sequence import decoder_of, layers_of
from opd.models.peft_folder import LORA_A, LORA_B, PREFIX, merge_weight, read_peft
from opd.models.sharded import gather_full, open_empty, put_in_file, stored_weights
from opd.storage.files import file_digest
from opd.untrusted import is_file_name

BASE_DIGEST = "base.json"
"""Name of the base's digest, `[32]` uint8, which precedes the adapters, in checkpoints too. A folder has the
same digest in a file of this name."""
_PART = re.compile(r"\.(lora_[AB])\.default\.weight$")


def weight_name(parameter: str) -> str:
    """Return the name in `weights` of a parameter of an adapted module. Other names stay."""
    return _PART.sub(r".\1.weight", parameter).replace(".base_layer.", ".")


class AdaptedLM(CausalLM):
    """A base with frozen weights and trained adapters. `weights` are the adapters."""

    gather: Callable[[str, Tensor], Tensor]
    """Gathers a tensor of this name, of which a rank may have a shard. All ranks call it together. Code that
    shards the module in another way sets it.
    """

    def __init__(self, base: CausalLM, config: LoRAConfig, base_path: str | Path, seed: int = 0) -> None:
        """Take over `base`, read from the folder `base_path`; `A` is drawn from `seed`, `B` is zero.

        Raises `ModelError` if `config` names no linear layer of the decoder, and `MissingExtraError` without
        the extra `lora`.
        """
        self.lora, self.base_path = config, Path(base_path)
        self.gather = lambda name, tensor: gather_full(tensor)
        self._scaling = config.scaling
        self._base_dtype, self._base_device = str(base.dtype).removeprefix("torch."), base.device
        if base.unread is None:
            self._base_digest = base_digest(base)
        described = peft_config(base.module, config)
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=[]), _weights_without_memory(base):
            torch.manual_seed(seed)
            # If a model names its type, peft takes the names of some dense layers for those of experts.
            inject_adapter_in_model(described, nn.ModuleDict({"model": base.module}))
        super().__init__(base.module, base.unread)
        self.vocabulary, self.borrowed = base.vocabulary, base.borrowed
        states = base.read_states
        self._base_states = weight_states(self.base_path) if states is None else states

    def mark_filled(self) -> None:
        super().mark_filled()
        self._base_states = weight_states(self.base_path)
        base = self.base_weights()
        self._base_digest = digest_tensor((name, self.gather(name, tensor)) for name, tensor in base)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` of the frozen base."""
        for name, tensor in super().weights():
            if not _PART.search(name):
                yield weight_name(name), tensor

    def base_files(self) -> dict[str, str]:
        """Return the sha256 of each of the base's weight files. Raises `CheckpointError` if its folder does
        not hold these weights any more.
        """
        states = weight_states(self.base_path)
        if states != self._base_states:
            check_folder(self.base_path)
            weights = stored_weights(open_empty(self.base_path, dtype=self._base_dtype))
            if not torch.equal(digest_tensor(weights), self._base_digest):
                raise _changed_base(self.base_path)
        digests = weight_digests(self.base_path)
        if weight_states(self.base_path) != states:
            raise _changed_base(self.base_path)
        return digests

    def _loaded_parameters(self) -> Iterable[nn.Parameter]:
        """The base stays: nobody sends it."""
        return [parameter for name, parameter in self.module.named_parameters() if _PART.search(name)]

    def keep_adapters_in(self, dtype: torch.dtype) -> None:
        """Cast the trained adapters; the base stays."""
        for name, parameter in self.module.named_parameters():
            if _PART.search(name):
                parameter.data = parameter.data.to(dtype)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `A` and `B` of every adapted layer, detached, in the module's order."""
        for name, parameter in self.module.named_parameters():
            if _PART.search(name):
                yield weight_name(name), parameter.detach()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the digest of the base and the adapters, all that training changes."""
        yield BASE_DIGEST, self._base_digest
        yield from self.adapters()

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest | None = None
    ) -> None:
        """Copy adapters, named as by `weights`, in place. Raises `ModelError` if they have another base or
        form.
        """
        super().load_weights(_of_base(weights, self._base_digest), digest)

    @torch.no_grad()
    def merged_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` of the plain model with the adapters merged, unsharded, one tensor at a time. Ranks
        that share it iterate together. `dtype`: round adapters to it first, as for adapters sent to be merged
        elsewhere.
        """
        adapters = dict(self.adapters())
        for name, tensor in self.base_weights():
            merged, layer = self.gather(name, tensor), name.removesuffix(".weight")
            pair = {part: adapters[part] for part in (layer + LORA_A, layer + LORA_B) if part in adapters}
            if pair:
                a, b = (self.gather(part, half).to(dtype or half.dtype) for part, half in pair.items())
                merged = merge_weight(merged, a, b, self._scaling)
            yield name, merged

    def merge_adapters(self, folder: Path | None = None) -> CausalLM:
        """A plain model with the adapters merged. It reads the base again and adds them. With a `folder` its
        weights lie in a file without a name there instead of memory. Raises `OSError` without space for it.
        """
        if folder is None:
            plain = CausalLM.from_pretrained(self.base_path, dtype=self._base_dtype, device=self._base_device)
        else:
            plain = open_empty(self.base_path, dtype=self._base_dtype)
            if plain.unread is not None:
                put_in_file(plain, folder)
        plain.load_weights(self.merged_weights())
        plain.vocabulary, plain.module.generation_config = self.vocabulary, self.module.generation_config
        return plain


class MergingLM(CausalLM):
    """A plain model with adapters merged into its base. `weights` are those adapters."""

    def __init__(self, base: CausalLM, config: LoRAConfig) -> None:
        """Take over `base`; the layers that `config` names are there twice, as they were and merged."""
        self._base_digest = base_digest(base)
        self._scaling = config.scaling
        self._merged: dict[str, nn.Parameter] = {}
        self._base: dict[str, Tensor] = {}
        self._adapters: dict[str, Tensor] = {}
        for layer in target_layers(base.module, config.targets):
            part = base.module.get_submodule(layer)
            weight = self._base[layer] = part.weight.detach()
            part.weight = self._merged[layer] = nn.Parameter(weight.clone(), requires_grad=False)
            self._adapters[layer + LORA_A] = weight.new_zeros(config.rank, weight.shape[1])
            self._adapters[layer + LORA_B] = weight.new_zeros(weight.shape[0], config.rank)
        super().__init__(base.module)
        self.vocabulary, self.borrowed = base.vocabulary, base.borrowed

    def _loaded_parameters(self) -> Iterable[nn.Parameter]:
        """Return the merged weights; the base is never sent."""
        return self._merged.values()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors. Adapted layers count twice: as they were, and merged."""
        return super().nbytes + self.own_bytes((*self._base.values(), *self._adapters.values()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the digest of the base and the merged adapters."""
        yield BASE_DIGEST, self._base_digest
        yield from self._adapters.items()

    @torch.no_grad()
    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest | None = None
    ) -> None:
        """Replace the merged adapters. Raises `ModelError` as for `AdaptedLM`."""
        try:
            super().load_weights(_of_base(weights, self._base_digest), digest)
        finally:  # even a refused tensor leaves earlier ones copied
            for layer, base in self._base.items():
                a, b = self._adapters[layer + LORA_A], self._adapters[layer + LORA_B]
                self._merged[layer].copy_(merge_weight(base, a, b, self._scaling))


def target_layers(module: Any, targets: Iterable[str] | None = None) -> list[str]:
    """Return full names of the decoder's linear layers whose last name is in `targets`, adapted or not.
    `None` means `USUAL_TARGETS`, or every linear layer of the decoder that is no router if one of these is
    missing. Raises `ModelError` for a target that no decoder layer has, and if there is no linear layer.
    """
    inside = {id(part) for layer in layers_of(decoder_of(module)) for part in layer.modules()}
    names = [
        name.removesuffix(".base_layer")  # the name of an adapted layer's base
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and id(part) in inside and not _HALF.search(name)
    ]
    last = {name: name.rpartition(".")[2] for name in names}
    wanted = set(USUAL_TARGETS if targets is None else targets)
    absent = wanted.difference(last.values())
    usable = [name for name in names if not _CHOOSES.search(name)]
    if not names or (targets is None and not usable):
        raise ModelError(
            f"model.lora has nothing to adapt: {_no_layer_reason(module)}; leave model.lora out, and all"
            " weights"
            " are trained."
        )
    if targets is None and absent:
        return usable
    if absent:
        raise ModelError(
            f"model.lora.targets names {min(absent)!r}, but no decoder layer of {type(module).__name__} has a"
            f" linear layer of that name; take some of {', '.join(sorted(set(last.values())))}, or"
            " leave targets out for the usual ones."
        )
    return [name for name in names if last[name] in wanted]


def _no_layer_reason(module: Any) -> str:
    """Return the reason why the decoder's layers have no linear layer."""
    name, layers = type(module).__name__, layers_of(decoder_of(module))
    if not layers:
        return f"the decoder of {name} has no list of layers, or several, in which linear ones are looked for"
    if any(isinstance(part, Conv1D) for layer in layers for part in layer.modules()):
        return f"the decoder layers of {name} are Conv1D of transformers, and adapters go on nn.Linear alone"
    return f"the decoder layers of {name} have no linear layer"


_CHOOSES = re.compile(r"(^|\.)(\w*router\w*|(shared_expert_)?gate|\w*indexer\w*)(\.|$)")
"""Names of layers that choose experts, or tokens to attend to."""
_HALF = re.compile(r"\.lora_[AB]\.")


def digest_tensor(weights: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Return `[32]` uint8, the digest of a plain model's weights, as sent with adapters."""
    return torch.frombuffer(bytearray.fromhex(weights_digest(weights)), dtype=torch.uint8)


def base_digest(base: CausalLM) -> Tensor:
    """`digest_tensor` of a plain model, which others may have told already."""
    return digest_tensor(base.weights()) if base.borrowed is None else base.borrowed.digest()


def require_base(digest: Tensor, local: Tensor) -> None:
    """Raise `ModelError` if the adapters' base has another `digest` than the `local` one."""
    if not torch.equal(digest.cpu(), local):
        raise ModelError(
            f"the adapters belong to a base of digest {bytes(digest.tolist()).hex()[:12]}, but the one here"
            f" has {bytes(local.tolist()).hex()[:12]}; give every process the same base, and a run that goes"
            " on the one it began with, or start a new run."
        )


def _changed_base(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds other weights than those that the adapters were trained on, so that they are not"
        " written; put the files of that base back and resume the run."
    )


def _of_base(weights: Iterable[tuple[str, Tensor]], digest: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`. Raises `ModelError` if they belong to another base."""
    for name, tensor in weights:
        if name == BASE_DIGEST:
            require_base(tensor, digest)
        yield name, tensor


def peft_config(
    module: Any, config: LoRAConfig, *, base: str | None = None, inference_mode: bool = False
) -> Any:
    """`config` as peft's `LoraConfig`, with every target by its full name.

    Raises `MissingExtraError` without the extra `lora`.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed (via peft) warns that it guesses
    with needs_extra("model.lora", "lora"):
        from peft import LoraConfig, TaskType
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=0.0,
        bias="none",
        target_modules=target_layers(module, config.targets),
        base_model_name_or_path=base,
        inference_mode=inference_mode,
    )


@contextmanager
def _weights_without_memory(base: CausalLM) -> Iterator[None]:
    """Replace each weight on the meta device by one number expanded to its shape. Peft then creates adapters
    beside it as beside a real weight.
    """
    swapped = {part: part.weight for part in base.module.modules() if isinstance(part, nn.Linear)}
    swapped = {part: weight for part, weight in swapped.items() if weight.is_meta}
    for part, weight in swapped.items():
        number = torch.zeros(1, dtype=weight.dtype, device=base.device)
        part.weight = nn.Parameter(number.expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for part, weight in swapped.items():
            part.weight = weight.requires_grad_(False)


FOLDER = "adapter"
CONFIG, WEIGHTS, BASE = ADAPTER_CONFIG, ADAPTER_WEIGHTS, "base.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Contents of an adapter folder."""

    base: Path
    """The Hugging Face folder of its base."""
    base_files: dict[str, str]
    """sha256 of each of the base's weight files."""
    scaling: float
    """`W + scaling * B A`."""
    pairs: dict[str, tuple[Tensor, Tensor]]
    """`A` `[r, in]` and `B` `[out, r]` by the weight's name."""


def save_adapted(
    model: AdaptedLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    card: dict[str, Any],
    max_shard_bytes: int | None = None,
) -> str:
    """Write the merged model to `folder` as `save_checkpoint` does, with its adapters in `folder/adapter`;
    with `max_shard_bytes` in files of so many. Not much more of it is in memory then, and of a model on a
    device nothing is there.

    Returns the digest of the merged weights. Raises `CheckpointError` if the base's folder has changed.
    """
    files = model.base_files()

    def write_adapter(draft: Path) -> None:
        (draft / FOLDER).mkdir()
        tensors = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in model.adapters()}
        safetensors.torch.save_file(tensors, draft / FOLDER / WEIGHTS, metadata={"format": "pt"})
        described = peft_config(model.module, model.lora, base=str(model.base_path), inference_mode=True)
        described.target_modules = sorted(described.target_modules or ())  # a set, of another order each time
        described.save_pretrained(draft / FOLDER)
        base = {"path": str(model.base_path.absolute()), "files": files}
        (draft / FOLDER / BASE).write_text(json.dumps(base, indent=2) + "\n", "utf-8")

    layers = target_layers(model.module, model.lora.targets)
    targets = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
    form = f"LoRA, rank {model.lora.rank}, alpha {model.lora.alpha:g}, on {targets}; in {FOLDER}/"
    card = {**card, "adapter": form}
    target = Path(folder)
    if max_shard_bytes is None and model.device.type == "cpu":
        plain = model.merge_adapters()
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with add_path_note(target):
            plain = model.merge_adapters(target.parent)
    most = MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    save_checkpoint(plain, tokenizer, target, card, max_shard_bytes=most, add_files=write_adapter)
    return plain.digest()


def has_adapter(folder: str | Path) -> bool:
    """Return True if `folder` is a peft adapter, or a merged model with its adapters and their base."""
    path = Path(folder)
    return (path / FOLDER / BASE).is_file() or (path.is_dir() and adapter_base(path) is not None)


def read_adapter(folder: str | Path) -> Adapter:
    """Read the adapters in `folder`, or in the merged model's `folder`.

    Raises `CheckpointError` naming the file that is missing or damaged, or if the adapters are of a kind
    other than plain LoRA.
    """
    adapter_folder = Path(folder) / FOLDER
    if not (adapter_folder / BASE).is_file():
        base = adapter_base(Path(folder))
        if base is None:
            raise CheckpointError(f"{folder} holds no adapter; give a folder that does.")
        peft = read_peft(Path(folder), base)
        return Adapter(base, weight_digests(base), peft.scaling, peft.pairs)
    check_small_files(Path(folder))
    check_shard(adapter_folder / WEIGHTS, read_checksums(Path(folder)).get(f"{FOLDER}/{WEIGHTS}"))
    peft, described = read_peft(adapter_folder), read_object(adapter_folder / BASE)
    try:
        path, files = Path(described["path"]), dict(described["files"])
        if not all(is_file_name(name) and isinstance(digest, str) for name, digest in files.items()):
            raise ValueError("files that are no names with digests")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{adapter_folder} is not a whole adapter ({reason_of(error)}); copy it again."
        ) from error
    return Adapter(path, files, peft.scaling, peft.pairs)


def weight_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each weight file of a Hugging Face folder, from `checksums.json` or computed."""
    checksums = read_checksums(folder)
    return {name: checksums.get(name) or file_digest(folder / name) for name in weight_files(folder)}
