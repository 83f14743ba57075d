"""Codes and scales of a quantised checkpoint become the model's numbers: one matrix at a time.

A number is its code times its scale in float32, rounded once to the dtype that is asked for. Where a matrix
has a scale of its own too, that is first multiplied into the others, or divides them, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from opd.errors import CheckpointError
from opd.models.hf_folder import quantisation_in, weight_files
from opd.models.quantisation import Quantisation
from opd.storage.tensors import TensorParts
from opd.untrusted import safe_excerpt

_PIECE = 1 << 22
"""Numbers in float32 at a time."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: the two e2m1 numbers in each byte."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


def _decode(form: Quantisation, codes: Tensor) -> Tensor:
    """[R, C] float32 of the rows `codes`."""
    if form.bits == 8:
        return codes.float()
    return torch.nn.functional.embedding(codes.int(), _pairs(codes.device)).flatten(-2)


def scale_values(scales: Tensor) -> Tensor:
    """Return `scales` in float32. U8 are exponents of two.

    Raises `ValueError` unless all are numbers above 0. Those in e4m3, of NVFP4, are 0 for blocks of zeros.
    """
    values = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    numbers = values.float()
    above = numbers >= 0 if values.dtype == torch.float8_e4m3fn else numbers > 0
    if not bool((above & numbers.isfinite()).all()):
        raise ValueError("a scale of it is NaN, infinite, negative or 0")
    return numbers


def matrix_of(form: Quantisation, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the matrix of codes, scales, and the scale of the whole if there is one, in `dtype`.

    The shapes are those of `Quantisation.plain_form`. Raises the `ValueError` of `scale_values`.
    """
    codes, scales, *single_scales = parts
    shape = form.plain_shape(codes.shape)
    factors = scale_values(scales).reshape(-1, *form.grid(shape)[-2:])
    for one in single_scales:
        single = scale_values(one).view(-1, 1, 1)
        factors = factors / single if form.divides else factors * single
    codes = (codes.flatten(-2) if form.stacked else codes).flatten(0, -3) if codes.ndim > 2 else codes[None]
    matrix = torch.empty(shape, dtype=dtype, device=codes.device)
    flat = matrix.view(-1, *shape[-2:])
    for code, factor, into in zip(codes, factors, flat.mT if form.stacked else flat, strict=True):
        _fill(form, code, factor, into)
    return matrix


def _finite_matrix(form: Quantisation, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return `matrix_of`. Also raises `ValueError` for a number that is not finite in `dtype`."""
    matrix = matrix_of(form, parts, dtype)
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"a number of it is NaN or too large for {str(dtype).removeprefix('torch.')}")
    return matrix


def _fill(form: Quantisation, codes: Tensor, factors: Tensor, into: Tensor) -> None:
    """Write into `into` [R, C] the codes of its rows times the `factors` [blocks of R, blocks of C]."""
    rows, columns = form.block
    side = 1 if rows is None else rows
    step = side * max(1, _PIECE // max(1, into.shape[1] * side))
    for start in range(0, len(into), step):
        values = _decode(form, codes[start : start + step])
        part = factors if rows is None else factors[start // side : -(-(start + len(values)) // side)]
        if side > 1:
            part = part.repeat_interleave(side, 0)[: len(values)]
        if columns is not None:
            part = part.repeat_interleave(columns, 1)[:, : values.shape[1]]
        into[start : start + step] = values.mul_(part)


def plain_tensors(
    form: Quantisation, tensors: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]
) -> dict[str, Tensor]:
    """Return the model's tensors for stored ones, quantised matrices in the dtypes of their names.

    Raises `CheckpointError` for a matrix that lacks a part, or whose scales are no numbers above 0.
    """
    parts = form.parts_of(tensors.keys())
    stored = {name for part_names in parts.values() for name in part_names}
    plain = {name: tensor for name, tensor in tensors.items() if name not in stored}
    for name, part_names in parts.items():
        try:
            plain[name] = _finite_matrix(form, [tensors[one] for one in part_names], dtype_of(name))
        except (ValueError, KeyError, RuntimeError) as error:
            raise _unusable(name, error) from None
    return plain


def _unusable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the quantised {safe_excerpt(name)} cannot be used: {error}; give the model's unquantised folder, or"
        " quantise it again."
    )


class PlainParts(TensorParts):
    """`TensorParts` of a quantised model: a tensor is read as the model has it, in float32."""

    def __init__(self, paths: Iterable[Path], form: Quantisation, where: Path) -> None:
        """Raises `CheckpointError` also for codes and scales that do not belong together."""
        super().__init__(paths)
        shapes = {name: pieces[0].shape for name, pieces in self._stored.items()}
        formats = {name: pieces[0].source.dtype for name, pieces in self._stored.items()}
        self._form = form
        self._shapes, _ = form.plain_form(shapes, formats, where)
        self._parts = form.parts_of(shapes)
        self._newest: tuple[object, Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the model's tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return float32 for a quantised matrix, else the stored dtype."""
        return torch.float32 if name in self._parts else super().dtype(name)

    def read(self, name: str, start: int, into: Tensor) -> None:
        """`TensorParts.read` of the model's tensor. All of a quantised matrix is read for any part of it, and
        of several matrices one below the other those that it touches. The newest stay in memory.
        """
        if name not in self._parts:
            super().read(name, start, into)
            return
        *lead, rows, columns = self._shapes[name]
        count, size = math.prod(lead), rows * columns
        first, stop = start // size, -(-(start + into.numel()) // size)
        if any(super(PlainParts, self).shape(one)[:1] != (count,) for one in self._parts[name]):
            first, stop = 0, count  # they are not one below the other
        key = (name, first, stop, into.dtype)
        newest = self._newest  # transformers reads in several threads
        if newest is None or newest[0] != key:
            newest = self._newest = None
            newest = self._newest = key, self._matrices(name, into.dtype, first, stop)
        start -= first * size
        into.detach().view(-1).copy_(newest[1].view(-1)[start : start + into.numel()])

    def _matrices(self, name: str, dtype: torch.dtype, first: int, stop: int) -> Tensor:
        """Return the matrices of `name` from number `first` on."""
        count, stored = math.prod(self._shapes[name][:-2]), []
        for one in self._parts[name]:
            shape = super().shape(one)
            if (first, stop) != (0, count):
                shape = (stop - first, *shape[1:])
            part = torch.empty(shape, dtype=self._stored_dtype(one))
            super().read(one, first * math.prod(shape[1:]), part)
            stored.append(part)
        try:
            return _finite_matrix(self._form, stored, dtype)
        except ValueError as error:
            raise _unusable(name, error) from None

    def check_scales(self, most: int) -> None:
        """Raise `CheckpointError` for a scale that is no number above 0, in about the first `most` bytes."""
        each = most // max(1, len(self._parts))
        for name, (_, *scales) in self._parts.items():
            for one in scales:
                dtype = self._stored_dtype(one)
                sample = torch.empty(
                    min(math.prod(super().shape(one)), 1 + each // dtype.itemsize), dtype=dtype
                )
                super().read(one, 0, sample)
                try:
                    scale_values(sample)
                except ValueError as error:
                    raise _unusable(name, error) from None


def folder_parts(folder: Path) -> TensorParts:
    """Return the tensors of the model in `folder`, which may be quantised. Raises as `TensorParts` does, and
    `ModelError` for a format that is not read.
    """
    paths = [folder / name for name in weight_files(folder)]
    form = quantisation_in(folder)
    return TensorParts(paths) if form is None else PlainParts(paths, form, folder)
