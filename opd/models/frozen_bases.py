"""Bases that nobody trains, each in memory once, whoever computes with it: students, engines, teachers,
references.

A model is told by the bytes of its files. Whoever opens it is given a module of its own, whose parameters are
those of the first. Adapters are added while a layer computes: the base is never written to. The numbers are
those of the merged model, because each layer's weight is merged as that is, and let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from opd.errors import CheckpointError
from opd.kernels.projection import linear
from opd.models.adapters import digest_tensor, has_adapter, read_adapter, weight_digests
from opd.models.causal_lm import Borrowed, CausalLM, held_bytes, torch_device, torch_dtype
from opd.models.hf_folder import adapter_base, check_folder, weight_states
from opd.models.hf_weights import empty_module
from opd.models.long_sequence import layers_of
from opd.models.peft_folder import merge_weight, read_peft
from opd.models.quantised_weights import folder_parts
from opd.models.sharded import own_tensors, replace_empty
from opd.models.stored_form import StoredForm

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""`A` `[r, in]` and `B` `[out, r]` by the name of the weight they are added to."""


class DeltaLinear(nn.Linear):
    """A linear layer that computes with its weight and an adapter, merged for the time that it computes."""

    delta: tuple[Tensor, Tensor, float]
    """`A`, `B`, and what their product is scaled by."""

    def whole(self) -> Tensor:
        """`[out, in]`: the merged weight, a new tensor."""
        return merge_weight(self.weight, *self.delta)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return linear(input, self.whole(), self.bias)


class DeltaLM(CausalLM):
    """A model whose layers are a base's, with adapters of its own. Its `weights` are those of the merged."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged model's weights. One adapted weight is in memory at a time."""
        layers = dict(self.module.named_modules())
        for name, tensor in super().weights():
            layer = layers.get(name.removesuffix(".weight"))
            yield name, layer.whole() if isinstance(layer, DeltaLinear) else tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its adapters and of its other own tensors."""
        layers = [part for part in self.module.modules() if isinstance(part, DeltaLinear)]
        return super().nbytes + held_bytes(half for layer in layers for half in layer.delta[:2])


class _Adapter(NamedTuple):
    """An adapter as its folder describes it: the base, and the weights that are added."""

    base: Path
    files: frozenset[str] | None
    """sha256 of the base's weight files, where the folder says them."""
    pairs: Pairs
    scaling: float


@dataclass(eq=False)
class KeptBase:
    """The weights of one folder, in one dtype, on one device.

    Args:
        model: Nobody changes its module: others are made around its parameters.
    """

    folder: Path
    place: tuple[torch.dtype, torch.device]
    model: CausalLM
    trained: bool = False
    """Whether a student counts them among its own."""
    _files: frozenset[str] | None = None
    """sha256 of the weight files that were read, once they are known."""

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By all their names."""
        return dict(self.model.module.named_parameters(remove_duplicate=False))

    @property
    def is_unchanged(self) -> bool:
        """Return whether its folder holds the files that were read."""
        return weight_states(self.folder) == self.model.read_states

    def has_files(self, digests: frozenset[str]) -> bool:
        """Return whether the files that were read are those of `digests`. The first call hashes them. If they
        have changed by then, the answer is no.
        """
        if self._files is None and self.is_unchanged:
            found = _file_digests(self.folder)
            self._files = found if self.is_unchanged else None
        return self._files == digests

    @cached_property
    def _digest(self) -> Tensor:
        return digest_tensor(self.model.weights())

    def is_of(self, folder: Path) -> bool:
        """Return whether `folder` holds the same weights: the same files, or files of the same bytes."""
        if folder.resolve() == self.folder.resolve():
            return self.is_unchanged
        return self.has_files(_file_digests(folder))

    def module_in(self, folder: Path) -> Any | None:
        """The module of `folder`, or of its base, with these weights; `None` if it is of another form."""
        module = empty_module(folder, self.place[0])
        found: dict[int, nn.Parameter] = {}
        for name, old in module.named_parameters(remove_duplicate=False):
            own = self.parameters.get(name)
            if own is None or own.shape != old.shape or found.setdefault(id(old), own) is not own:
                return None
        replace_empty(module, self.place[1], lambda old: found[id(old)])
        kept = dict(self.model.weights())
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(kept[name])
        return module

    def lend(self, model: CausalLM) -> CausalLM:
        """`model`, made around the parameters, which knows whose they are."""
        own = tuple(dict.fromkeys(self.parameters.values()))
        model.borrowed = Borrowed(own, lambda: self._digest)
        model.read_states = self.model.read_states
        return model


class FrozenBases:
    """The bases of a process that several compute with. One thread opens models of them."""

    def __init__(self) -> None:
        self._kept: list[KeptBase] = []
        self._former: WeakSet[KeptBase] = WeakSet()
        """Of files that have changed since. They are there as long as a model around them is."""

    def open(
        self, folder: str | Path, *, dtype: str, device: str | torch.device, trains: bool = False
    ) -> CausalLM:
        """A model around the base in `folder`, which is read unless it is here. `trains`: a student counts
        the base among its own weights. A folder that is an adapter itself is not shared.
        Raises the errors of `CausalLM.from_pretrained`.
        """
        if adapter_base(Path(folder)) is not None:
            return CausalLM.from_pretrained(folder, dtype=dtype, device=device)
        where, place = Path(folder), (torch_dtype(dtype), torch_device(device))
        known = self._find(place, lambda one: one.is_of(where))
        kept = known or _read_base(where, dtype, place)
        module = kept.module_in(where)
        if module is None and known is not None:
            return CausalLM.from_pretrained(where, dtype=dtype, device=device)
        if module is None:  # nobody else can compute with it
            return kept.model
        if known is None:
            self._kept.append(kept)
        kept.trained = kept.trained or trains
        return kept.lend(CausalLM(module))

    def adapted(
        self, folder: str | Path, *, dtype: str, device: str | torch.device, reads: bool = False
    ) -> CausalLM | None:
        """A model around a base and the adapters in `folder`, or kept in that merged model's folder; `reads`
        a base that is not here, which stays if the model is made. `None` if there are none, or they and the
        base are not the model in `folder`. Raises what `CausalLM.from_pretrained` raises.
        """
        where, place = Path(folder), (torch_dtype(dtype), torch_device(device))
        adapter = _adapter_in(where)
        if adapter is None:
            return None
        files, base = adapter.files, adapter.base
        known = self._find(place, lambda one: one.has_files(files) if files else one.is_of(base))
        kept = known
        if kept is None and reads and (files is None or _has_files(base, files)):
            kept = _read_base(base, dtype, place)
        if kept is None:
            return None
        check_folder(where)
        module = kept.module_in(where)
        if module is None or not _add(module, adapter, place[1]):
            return None
        if files is not None and not _is_stored(module, where):
            return None
        if known is None:
            self._kept.append(kept)
        return kept.lend(DeltaLM(module))

    def resident(self) -> dict[str, int]:
        """Bytes of the bases that no student counts among its own."""
        here = (kept for kept in (*self._kept, *self._former) if not kept.trained)
        return {"teacher_weights": held_bytes(own for kept in here for own in kept.parameters.values())}

    def _find(
        self, place: tuple[torch.dtype, torch.device], fits: Callable[[KeptBase], bool]
    ) -> KeptBase | None:
        self._former.update(kept for kept in self._kept if not kept.is_unchanged)
        self._kept = [kept for kept in self._kept if kept not in self._former]
        here = (*self._kept, *self._former)
        return next((kept for kept in here if kept.place == place and fits(kept)), None)


def _read_base(folder: Path, dtype: str, place: tuple[torch.dtype, torch.device]) -> KeptBase:
    model = CausalLM.from_pretrained(folder, dtype=dtype, device=place[1])
    model.module.requires_grad_(False)
    return KeptBase(folder, place, model)


def _file_digests(folder: Path) -> frozenset[str]:
    """Return the sha256 of the weight files in `folder`. Raises `CheckpointError` and `OSError`."""
    return frozenset(weight_digests(folder).values())


def _has_files(folder: Path, digests: frozenset[str]) -> bool:
    """Return whether the weight files of `folder` are those of `digests`."""
    try:
        return _file_digests(folder) == digests
    except (CheckpointError, OSError):  # it has gone since
        return False


def _adapter_in(folder: Path) -> _Adapter | None:
    """The adapter in `folder`, or what a merged model there says it was made of; `None` where it says
    nothing, or nothing sound: its own weights are what counts.
    """
    base = adapter_base(folder)
    if base is not None:
        found = read_peft(folder, base)
        return _Adapter(base, None, found.pairs, found.scaling)
    if not has_adapter(folder):
        return None
    try:
        kept = read_adapter(folder)
    except CheckpointError:
        return None
    return _Adapter(kept.base, frozenset(kept.base_files.values()), kept.pairs, kept.scaling)


def _add(module: Any, adapter: _Adapter, device: torch.device) -> bool:
    """Make `DeltaLinear` of the layers that `adapter` is for; `False` if one of them is none of the decoder's
    own linear layers.
    """
    inside = {id(part) for layer in layers_of(module.get_decoder()) for part in layer.modules()}
    parts = dict(module.named_modules())
    users = Counter(id(own) for _, own in module.named_parameters(remove_duplicate=False))
    for name, (a, b) in adapter.pairs.items():
        part = parts.get(name.removesuffix(".weight"))
        if not isinstance(part, nn.Linear) or id(part) not in inside or users[id(part.weight)] > 1:
            return False
        if part.weight.shape != (b.shape[0], a.shape[1]):
            return False
        layer: Any = part
        layer.__class__, layer.delta = DeltaLinear, (a.to(device), b.to(device), adapter.scaling)
    return True


def _is_stored(module: Any, folder: Path) -> bool:
    """Return whether `folder` holds the base and the adapters of `module`, merged. Rounding of another device
    is allowed. Reads the folder once, one tensor of the module at a time.
    """
    parts, layers = folder_parts(folder), dict(module.named_modules())
    form, due = StoredForm(module), module.state_dict(keep_vars=True)
    places: dict[str, list[str]] = {}
    for name in parts:
        places.setdefault(form.place(name), []).append(name)
    seen: set[str] = set()
    for place, names in places.items():
        if place not in due:  # layers that predict tokens further ahead, which nobody loads
            continue
        try:
            stored = form.of_module({name: parts[name] for name in names})
        except ValueError:  # of no form that is read
            return False
        seen |= stored.keys()
        if not all(name in due and _is_merged(layers, name, due[name], own) for name, own in stored.items()):
            return False
    return all(seen.intersection(names) for names, _ in own_tensors(module))


def _is_merged(layers: Mapping[str, nn.Module], name: str, tensor: Tensor, stored: Tensor) -> bool:
    """Return whether `stored` is `tensor`, merged with the adapter of its layer in `layers` if it has one."""
    if stored.shape != tensor.shape:
        return False
    layer, stored = layers.get(name.removesuffix(".weight")), stored.to(tensor.device, tensor.dtype)
    if not isinstance(layer, DeltaLinear):
        return torch.equal(stored, tensor)
    due, eps = layer.whole(), torch.finfo(tensor.dtype).eps
    largest = float(due.abs().max()) if due.numel() else 0.0
    return torch.allclose(stored, due, rtol=eps, atol=4 * torch.finfo(torch.float32).eps * largest)
