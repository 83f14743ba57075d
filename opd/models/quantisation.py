"""Quantised checkpoints: which formats are read, and which stored tensors stand for one of the model's.

A matrix is stored as codes of 8 or 4 bits and as scales, each under the matrix's name with an ending. The
arithmetic is in `quantised_weights`. Scales of activations are not read: activations are not quantised here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from opd.errors import CheckpointError, ModelError
from opd.untrusted import safe_excerpt

KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of transformers, an older compressed-tensors and MLX for packed weights. Only the first is read."""
_ACTIVATIONS = re.compile(r"(^|[._])(input|activation|output|q|k|v|kv)(_global)?_scale$")
_FLOATS = frozenset({"F32", "BF16", "F16"})
_MEND = "copy all of the folder again, or give the model's unquantised folder"
_SIDE = 1 << 16
"""The longest side of a block that is believed."""

Parts = tuple[str, ...]
"""Names of a matrix's stored tensors: codes, scales, and the scale of the whole matrix if there is one."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A format of a quantised checkpoint."""

    title: str
    """Its name, for people."""
    endings: Parts
    """Of the names of codes, scales, and the scale of the whole matrix if there is one."""
    bits: int
    """8: a code is e4m3. 4: two e2m1 lie in a byte, the first in its low half."""
    block: tuple[int | None, int | None]
    """Rows and columns of a matrix that share a scale. `None`: all."""
    scale_types: frozenset[str] = _FLOATS
    """Safetensors' names of the types of scales. U8 are exponents of two, as F8_E8M0 are."""
    divides: bool = False
    """The scale of the whole matrix divides."""
    stacked: bool = False
    """Codes lie as [experts, rows, blocks, bytes], and the matrix is transposed, as GPT-OSS has it."""

    @property
    def code_type(self) -> str:
        """Safetensors' name of the type of codes."""
        return "F8_E4M3" if self.bits == 8 else "U8"

    def parts_of(self, names: Collection[str]) -> dict[str, Parts]:
        """The matrices that are quantised among the stored `names`, by the model's names."""
        codes, scales, *_ = self.endings
        marks = codes or scales  # codes without an ending have the name of a plain matrix
        candidates = (name.removesuffix(marks) for name in names if name.endswith(marks))
        return {
            name: tuple(name + ending for ending in self.endings)
            for name in candidates
            if name + codes in names and not _ACTIVATIONS.search(name + marks)
        }

    def activation_scales(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the stored `names` that are scales of activations."""
        return frozenset(name for name in names if _ACTIVATIONS.search(name))

    def plain_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the matrix whose codes have the shape `codes`."""
        *lead, rows, columns = (*codes[:-2], codes[-2] * codes[-1]) if self.stacked else codes
        columns *= 8 // self.bits
        return (*lead, columns, rows) if self.stacked else (*lead, rows, columns)

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a matrix of `shape`, one for each block."""
        *lead, rows, columns = shape
        rows, columns = (columns, rows) if self.stacked else (rows, columns)
        sides = zip((rows, columns), self.block, strict=True)
        return (*lead, *(1 if side is None else math.ceil(length / side) for length, side in sides))

    def plain_form(
        self, shapes: Mapping[str, Sequence[int]], formats: Mapping[str, str], where: object
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return shapes and types of the model's tensors for those of the stored ones, by name.

        Raises `CheckpointError` for a matrix whose codes and scales do not belong together.
        """
        parts = self.parts_of(shapes)
        for name, part_names in parts.items():
            if (fault := self._fault(name, part_names, shapes, formats)) is not None:
                raise CheckpointError(f"{where} {fault}; {_MEND}.")
        stored = {one for part_names in parts.values() for one in part_names}
        others = [name for name in shapes if name not in stored and not _ACTIVATIONS.search(name)]
        for name in others:
            if name in parts:
                raise CheckpointError(f"{where} holds {safe_excerpt(name)} quantised and as it is; {_MEND}.")
            if formats[name] == self.code_type and not self.endings[0]:
                scale = safe_excerpt(name + self.endings[1])
                raise CheckpointError(
                    f"{where} holds {safe_excerpt(name)} as {formats[name]} without its scale {scale};"
                    f" {_MEND}."
                )
        if not parts:
            raise CheckpointError(
                f"{where} says that its weights are quantised ({self.title}), and none of them is; take"
                f" {KEYS[0]} out of its config.json, or copy both from one source."
            )
        plain = {name: tuple(shapes[name]) for name in others}
        plain |= {name: self.plain_shape(shapes[part_names[0]]) for name, part_names in parts.items()}
        return plain, {name: formats[name] if name in others else "F32" for name in plain}

    def _fault(
        self, name: str, part_names: Parts, shapes: Mapping[str, Sequence[int]], formats: Mapping[str, str]
    ) -> str | None:
        codes, scales, *single_scales = part_names
        if absent := next((one for one in part_names if one not in shapes), None):
            return f"holds {safe_excerpt(codes)} without its scale {safe_excerpt(absent)}"
        due = {codes: {self.code_type}, scales: self.scale_types, **dict.fromkeys(single_scales, _FLOATS)}
        for one, types in due.items():
            if formats[one] not in types:
                return (
                    f"holds {safe_excerpt(one)} as {safe_excerpt(formats[one])} where {self.title} has"
                    f" {' or '.join(sorted(types))}"
                )
        if len(shapes[codes]) < (4 if self.stacked else 2):
            return f"holds {safe_excerpt(codes)} in the shape {list(shapes[codes])}, which is no matrix's"
        shape, side = self.plain_shape(shapes[codes]), self.block[1]
        if self.bits == 4 and side is not None and shape[-2 if self.stacked else -1] % side:
            return f"holds {safe_excerpt(codes)} with rows that blocks of {side} numbers do not divide"
        grid = self.grid(shape)
        if not _fits(tuple(shapes[scales]), grid):
            return (
                f"holds {safe_excerpt(scales)} in the shape {list(shapes[scales])} where {list(grid)} is"
                f" needed for {list(shape)} in {self.title}"
            )
        odd = next((one for one in single_scales if math.prod(shapes[one]) != math.prod(shape[:-2])), None)
        if odd is not None:
            return f"holds {safe_excerpt(odd)} in the shape {list(shapes[odd])}, which is no single scale's"
        return None


def _fits(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Return whether scales of `shape` are those of a `grid`, of which sides of 1 at the end may lack."""
    if set(grid) == {1} and shape == (1,):
        return True
    return any(shape == grid[:end] for end in range(len(grid) - 2, len(grid) + 1) if set(grid[end:]) <= {1})


_FP8_BLOCKS = Quantisation(
    "FP8", ("", "_scale_inv"), 8, (None, None), _FLOATS | {"F8_E8M0", "U8"}
)  # DeepSeek, Qwen, transformers
_FP8 = Quantisation("FP8", ("", "_scale"), 8, (None, None))
_MXFP4 = Quantisation("MXFP4", ("_blocks", "_scales"), 4, (1, 32), frozenset({"U8"}), stacked=True)
_MXFP4_PACKED = Quantisation("MXFP4", ("_packed", "_scale"), 4, (1, 32), frozenset({"U8", "F8_E8M0"}))
_E4M3 = frozenset({"F8_E4M3"})
_NVFP4_PACKED = Quantisation("NVFP4", ("_packed", "_scale", "_global_scale"), 4, (1, 16), _E4M3, divides=True)
_NVFP4 = Quantisation("NVFP4", ("", "_scale", "_scale_2"), 4, (1, 16), _E4M3)


def quantisation_of(config: object, where: object) -> Quantisation | None:
    """Return the format of a model's `config`, transformers' or the dictionary of a config.json; `None` for
    plain weights. Raises `ModelError` for a format that is not read.
    """
    settings = config.get(KEYS[0]) if isinstance(config, Mapping) else getattr(config, KEYS[0], None)
    if settings is None:
        return None
    if settings == {}:
        raise ModelError(f"{where} says {KEYS[0]} {{}}, which says nothing; take the key out.")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    read = _READERS.get(method) if isinstance(method, str) else None
    form = read(settings) if read is not None else KEYS[0] if method is None else str(method)
    if isinstance(form, Quantisation):
        return replace(form, title=f"{form.title} {_scope(form)}".rstrip())
    raise unread_format(form, where)


def unread_format(name: str, where: object) -> ModelError:
    """Return the error for weights in a format that is not read."""
    return ModelError(
        f"{where} says that its weights are quantised ({safe_excerpt(name)}), which is not read here, as FP8,"
        " MXFP4 and NVFP4 are; give the model's unquantised folder."
    )


def _scope(form: Quantisation) -> str:
    if form.bits == 4:
        return ""
    rows, columns = form.block
    if rows == 1:
        return "with a scale a row" if columns is None else f"with a scale for {columns} numbers"
    return "with a scale a matrix" if rows is None else f"in blocks of {rows} x {columns}"


def _side_pair(value: object) -> tuple[int, int] | None:
    """The two sides of a block, if `value` is a list of them or a text such as `128x128`."""
    sides = value.split("x") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2:
        return None
    texts = [str(side)[:12] for side in sides]
    lengths = [int(text) if text.isdecimal() else 0 for text in texts]
    return (lengths[0], lengths[1]) if all(0 < side <= _SIDE for side in lengths) else None


def _read_fp8(settings: Mapping[str, object]) -> Quantisation | str:
    block = settings.get("weight_block_size")
    if settings.get("fmt", "e4m3") != "e4m3":
        return f"fp8 in {settings['fmt']}"
    sides = (None, None) if block is None else _side_pair(block)
    return f"fp8 in blocks of {block}" if sides is None else replace(_FP8_BLOCKS, block=sides)


def _read_modelopt(settings: Mapping[str, object]) -> Quantisation | str:
    forms = {"FP8": _FP8, "NVFP4": _NVFP4}
    return forms.get(str(settings.get("quant_algo")), f"modelopt {settings.get('quant_algo')}")


def _read_compressed(settings: Mapping[str, object]) -> Quantisation | str:
    """The format of compressed-tensors, whose groups of layers must all have the same one."""
    forms = list(_compressed_groups(settings))
    if not forms or settings.get("transform_config"):
        return f"compressed-tensors {'with transforms' if forms else 'without groups'}"
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        return f"compressed-tensors {sparse['format']}"
    if any(one != forms[0] for one in forms):
        return "compressed-tensors in mixed formats"
    return forms[0]


def _compressed_groups(settings: Mapping[str, object]) -> Iterator[Quantisation | str]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        kind = str(group.get("format") or settings.get("format"))
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        if weights.get("type") != "float" or weights.get("symmetric", True) is not True:
            yield f"compressed-tensors {kind}"
        elif kind == "nvfp4-pack-quantized":
            yield _NVFP4_PACKED
        elif kind == "mxfp4-pack-quantized":
            yield _MXFP4_PACKED
        else:
            size = weights.get("group_size")
            blocks = {
                "tensor": (None, None),
                "channel": (1, None),
                "block": _side_pair(weights.get("block_structure")),
                "group": _side_pair([1, size]),
            }
            block = blocks.get(str(strategy))
            is_read = kind in ("float-quantized", "naive-quantized") and bits == 8 and block is not None
            yield replace(_FP8, block=block) if is_read and block else f"compressed-tensors {kind}"


_READERS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": lambda settings: replace(_FP8, block=(1, None)),
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "mxfp4": lambda settings: _MXFP4,
}
"""transformers' name of a method -> its format, or the name of one that is not read."""
