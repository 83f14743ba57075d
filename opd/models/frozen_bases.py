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
from opd.models.long_sequence import decoder_of, layers_of
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

    def merged_weight(self) -> Tensor:
        """`[out, in]`: the merged weight, a new tensor."""
        return merge_weight(self.weight, *self.delta)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return linear(input, self.merged_weight(), self.bias)


class DeltaLM(CausalLM):
    """A model whose layers are a base's, with adapters of its own. Its `weights` are those of the merged."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged model's weights. One adapted weight is in memory at a time."""
        layers = dict(self.module.named_modules())
        for name, tensor in super().weights():
            layer = layers.get(name.removesuffix(".weight"))
            yield name, layer.merged_weight() if isinstance(layer, DeltaLinear) else tensor

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
class SharedWeights:
    """The weights of one folder, in one dtype, on one device.

    Args:
        model: Nobody changes its module: others are made around its parameters.
    """

    folder: Path
    placement: tuple[torch.dtype, torch.device]
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
            read_digests = _file_digests(self.folder)
            self._files = read_digests if self.is_unchanged else None
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
        module = empty_module(folder, self.placement[0])
        replacements: dict[int, nn.Parameter] = {}
        for name, old in module.named_parameters(remove_duplicate=False):
            parameter = self.parameters.get(name)
            if (
                parameter is None
                or parameter.shape != old.shape
                or replacements.setdefault(id(old), parameter) is not parameter
            ):
                return None
        replace_empty(module, self.placement[1], lambda old: replacements[id(old)])
        weights = dict(self.model.weights())
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(weights[name])
        return module

    def share_weights(self, model: CausalLM) -> CausalLM:
        """`model`, made around the parameters, which knows whose they are."""
        parameters = tuple(dict.fromkeys(self.parameters.values()))
        model.borrowed = Borrowed(parameters, lambda: self._digest)
        model.read_states = self.model.read_states
        return model


class FrozenBases:
    """The bases of a process that several compute with. One thread opens models of them."""

    def __init__(self) -> None:
        self._bases: list[SharedWeights] = []
        self._former: WeakSet[SharedWeights] = WeakSet()
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
        where, placement = Path(folder), (torch_dtype(dtype), torch_device(device))
        resident = self._find(placement, lambda one: one.is_of(where))
        base = resident or _read_base(where, dtype, placement)
        module = base.module_in(where)
        if module is None and resident is not None:
            return CausalLM.from_pretrained(where, dtype=dtype, device=device)
        if module is None:  # nobody else can compute with it
            return base.model
        if resident is None:
            self._bases.append(base)
        base.trained = base.trained or trains
        return base.share_weights(CausalLM(module))

    def adapted(
        self, folder: str | Path, *, dtype: str, device: str | torch.device, reads: bool = False
    ) -> CausalLM | None:
        """A model around a base and the adapters in `folder`, or kept in that merged model's folder; `reads`
        a base that is not here, which stays if the model is made. `None` if there are none, or they and the
        base are not the model in `folder`. Raises what `CausalLM.from_pretrained` raises.
        """
        where, placement = Path(folder), (torch_dtype(dtype), torch_device(device))
        adapter = _adapter_in(where)
        if adapter is None:
            return None
        files, base_folder = adapter.files, adapter.base
        resident = self._find(
            placement, lambda one: one.has_files(files) if files else one.is_of(base_folder)
        )
        base = resident
        if base is None and reads and (files is None or _has_files(base_folder, files)):
            base = _read_base(base_folder, dtype, placement)
        if base is None:
            return None
        check_folder(where)
        module = base.module_in(where)
        if module is None or not _add(module, adapter, placement[1]):
            return None
        if files is not None and not _is_stored(module, where):
            return None
        if resident is None:
            self._bases.append(base)
        return base.share_weights(DeltaLM(module))

    def resident(self) -> dict[str, int]:
        """Bytes of the bases that no student counts among its own."""
        bases = (base for base in (*self._bases, *self._former) if not base.trained)
        return {
            "teacher_weights": held_bytes(
                parameter for base in bases for parameter in base.parameters.values()
            )
        }

    def _find(
        self, placement: tuple[torch.dtype, torch.device], fits: Callable[[SharedWeights], bool]
    ) -> SharedWeights | None:
        self._former.update(base for base in self._bases if not base.is_unchanged)
        self._bases = [base for base in self._bases if base not in self._former]
        candidates = (*self._bases, *self._former)
        return next((base for base in candidates if base.placement == placement and fits(base)), None)


def _read_base(folder: Path, dtype: str, placement: tuple[torch.dtype, torch.device]) -> SharedWeights:
    model = CausalLM.from_pretrained(folder, dtype=dtype, device=placement[1])
    model.module.requires_grad_(False)
    return SharedWeights(folder, placement, model)


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
        peft = read_peft(folder, base)
        return _Adapter(base, None, peft.pairs, peft.scaling)
    if not has_adapter(folder):
        return None
    try:
        adapter = read_adapter(folder)
    except CheckpointError:
        return None
    return _Adapter(adapter.base, frozenset(adapter.base_files.values()), adapter.pairs, adapter.scaling)


def _add(module: Any, adapter: _Adapter, device: torch.device) -> bool:
    """Make `DeltaLinear` of the layers that `adapter` is for; `False` if one of them is none of the decoder's
    own linear layers.
    """
    inside = {id(part) for layer in layers_of(decoder_of(module)) for part in layer.modules()}
    parts = dict(module.named_modules())
    users = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
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
    covered: set[str] = set()
    for key, names in places.items():
        if key not in due:  # layers that predict tokens further ahead, which nobody loads
            continue
        try:
            stored = form.of_module({name: parts[name] for name in names})
        except ValueError:  # of no form that is read
            return False
        covered |= stored.keys()
        if not all(
            name in due and _is_merged(layers, name, due[name], tensor) for name, tensor in stored.items()
        ):
            return False
    return all(covered.intersection(names) for names, _ in own_tensors(module))


def _is_merged(layers: Mapping[str, nn.Module], name: str, tensor: Tensor, stored: Tensor) -> bool:
    """Return whether `stored` is `tensor`, merged with the adapter of its layer in `layers` if it has one."""
    if stored.shape != tensor.shape:
        return False
    layer, stored = layers.get(name.removesuffix(".weight")), stored.to(tensor.device, tensor.dtype)
    if not isinstance(layer, DeltaLinear):
        return torch.equal(stored, tensor)
    due, eps = layer.merged_weight(), torch.finfo(tensor.dtype).eps
    largest = float(due.abs().max()) if due.numel() else 0.0
    return torch.allclose(stored, due, rtol=eps, atol=4 * torch.finfo(torch.float32).eps * largest)
