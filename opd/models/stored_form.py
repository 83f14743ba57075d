"""The tensors of a model as files hold them, and as its module does.

The two differ where transformers says so: a checkpoint has one tensor an expert
(`mlp.experts.3.gate_proj.weight`), the module one for all of them (`mlp.experts.gate_up_proj`). The table is
that of transformers, which loads and saves by it; a checkpoint that holds the module's own form is read too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from opd.errors import reason_of

MISSING, UNKNOWN = "is missing", "has no place in it"
_IN_LAYER = re.compile(r"\blayers\.\d+\.")


class StoredForm:
    """The form in which files hold the tensors of `module`, a causal LM that may be on the meta device."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state: dict[str, Tensor] = module.state_dict()
        table = get_model_conversion_mapping(module)
        self._renamings = [one for one in table if isinstance(one, WeightRenaming)]
        self._converters = [one for one in table if isinstance(one, WeightConverter)]
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        self._places: dict[str, tuple[str, str | None]] = {}

    @cached_property
    def saved(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors as transformers saves them."""
        reverted = revert_weight_conversion(self._module, self._state)
        return {name: tuple(tensor.shape) for name, tensor in reverted.items()}

    @property
    def differs(self) -> bool:
        """Return whether files hold other tensors than the module does."""
        return self.saved.keys() != self._state.keys()

    def unserved(self) -> tuple[str, str] | None:
        """Return a tensor of the module and one of its files that stands for it, by whose name no server is
        given it. `None` if servers can be given all: files differ inside layers, by one tensor an expert and
        by names. Experts that files stack are the same tensor twice: a server's own form of them is unknown.
        """
        for name in sorted(self.saved, key=dot_natural_key):
            stacked = len(self.saved[name]) > 2
            apart = name not in self._state and (stacked or _IN_LAYER.search(name) is None)
            if apart or (stacked and ".experts." in name):
                return self.place(name), name
        return None

    def of_files(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the module's tensor `name` as its files hold it: views of `tensor`."""
        if name in self.saved:
            return {name: tensor}
        return revert_weight_conversion(self._module, {name: tensor})

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the module uses a file's tensor `name`, or `None` if it has no place."""
        target, _ = self._placed(name)
        return self._state[target].dtype if target in self._state else None

    def left_out(self, names: Iterable[str]) -> frozenset[str]:
        """Those of files' tensors that the module has no place for and transformers does not load: layers
        that predict tokens further ahead, which DeepSeek-V3 and GLM-4.5 publish beside the model, and what
        sees images beside a language model (Llama 4).
        """
        patterns = [re.compile(one) for one in self._module._keys_to_ignore_on_load_unexpected or ()]
        names, part = list(names), self._module.base_model_prefix
        if not hasattr(self._module, part) and any(name.startswith(f"{part}.") for name in names):
            patterns.append(re.compile(rf"^(?!{part}\.)"))
        apart = (name for name in names if self._placed(name)[0] not in self._state) if patterns else ()
        return frozenset(name for name in apart if any(one.search(name) for one in patterns))

    def place(self, name: str) -> str:
        """The module's name for what a file's tensor `name` is, or is a part of."""
        return self._placed(name)[0]

    def merges(self, name: str) -> bool:
        """Return whether a file's tensor `name` is put together with others, or otherwise copied."""
        return self._placed(name)[1] is not None

    def of_module(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` of files in the form of the module: views of most, copies of those that merge.

        Raises `ValueError` saying why if they cannot be brought into it.
        """
        converted: dict[str, Tensor] = {}
        merging: dict[str, WeightConverter] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._placed(name)
            if pattern is not None:
                converter = merging.setdefault(target, deepcopy(self._by_pattern[pattern]))
                converter.add_tensor(target, name, pattern, tensors[name])  # type: ignore[arg-type]
            elif target in converted:
                raise ValueError(f"two tensors stand for {target}, one of them {name}")
            else:
                converted[target] = tensors[name]
        for target, converter in merging.items():
            converted |= self._merged(target, converter, converted)
        return converted

    def _merged(
        self, target: str, converter: WeightConverter, others: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        try:
            converted = converter.convert(target, model=self._module, config=self._module.config)
        except Exception as error:  # whatever the operations of transformers meet
            raise ValueError(f"the tensors of {target} do not fit together ({reason_of(error)})") from None
        if twice := converted.keys() & others.keys():
            raise ValueError(f"{min(twice)} is held as it is and in parts too")
        return {name: one[0] if isinstance(one, list) else one for name, one in converted.items()}

    def fault(self, shapes: Mapping[str, Sequence[int]], prefix: str = "") -> tuple[str, str] | None:
        """What is wrong with files' tensors below `prefix`, of these names and shapes, if they are of the
        form that transformers saves and that form is not the module's: the tensor's name, and what of it.
        """
        others = self.left_out(shapes)
        shapes = {name: shape for name, shape in shapes.items() if name not in others}
        apart = {name for name in shapes if self.merges(name) and name not in self._state}
        if not apart:
            return None
        if (lacking := self._lacking_expert(apart, shapes.keys())) is not None:
            return lacking, MISSING
        due = {name: shape for name, shape in self.saved.items() if name.startswith(prefix)}
        if not apart & due.keys():
            return None
        joined = {self._placed(name)[0] for name in apart} & shapes.keys()
        if joined:
            return min(joined), "is held as one and in parts too"
        for name in sorted(shapes.keys() ^ due.keys(), key=dot_natural_key):
            if name in due and self.merges(name):  # of others the module's form tells
                return name, MISSING
            if name in apart:
                return name, UNKNOWN
        for name in sorted(apart & due.keys(), key=dot_natural_key):
            if tuple(shapes[name]) != due[name]:
                return name, f"has shape {list(shapes[name])} where {list(due[name])} is needed"
        return None

    def one_by_one(self, names: Iterable[str]) -> dict[str, list[list[str]]]:
        """Return the module's name of each tensor of experts that files hold one by one, with the names of
        each expert's parts. `names` are all of the files'.
        """
        parts: dict[str, dict[int, list[str]]] = {}
        for name in names:
            at = self._expert_index(name)
            if at is not None:
                number = int(name.split(".")[at])
                parts.setdefault(self.place(name), {}).setdefault(number, []).append(name)
        return {
            target: [experts[number] for number in range(len(experts))]
            for target, experts in parts.items()
            if experts.keys() == set(range(self._state[target].shape[0]))
        }

    def _expert_index(self, name: str) -> int | None:
        """Return which part of a file's name, split at dots, is the number of an expert, if one is."""
        target, pattern = self._placed(name)
        numbers = [at for at, part in enumerate(name.split(".")) if part.isdecimal()]
        routed = len(numbers) > sum(part.isdecimal() for part in target.split("."))
        return numbers[-1] if routed and pattern is not None and target in self._state else None

    def _lacking_expert(self, apart: Iterable[str], names: Collection[str]) -> str | None:
        """The name of an expert's tensor that is not among `names`, if there are more experts than names: so
        many that naming each would take minutes.
        """
        for name in sorted(apart, key=dot_natural_key):
            at, parts = self._expert_index(name), name.split(".")
            if at is None or self._state[self.place(name)].shape[0] <= len(names):
                continue
            others = (".".join([*parts[:at], str(n), *parts[at + 1 :]]) for n in count())
            return next(other for other in others if other not in names)
        return None

    def _placed(self, name: str) -> tuple[str, str | None]:
        """The module's name for a file's tensor, and the pattern by which it is converted, if it is."""
        if name not in self._places:
            arguments = (self._module.base_model_prefix, self._state)
            placed = rename_source_key(name, self._renamings, self._converters, *arguments)
            if placed[0] not in self._state and name in self._state:  # as in the loader of transformers
                placed = rename_source_key(name, [], [], *arguments)
            self._places[name] = placed
        return self._places[name]
