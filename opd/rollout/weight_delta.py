"""The changes between two versions of named tensors, as bytes that restore the newer one to the last bit.

A tensor is cut into blocks. An unchanged block sends nothing. A changed block sends either all values, or the
gaps between the changed elements and their new values, whichever is smaller. Two values are equal if their
bits are, so NaN, -0.0 and bfloat16 are exact. All blocks with all values are a full version, in the same
form. Blocks are grouped in parts, each of which is safetensors:

    blocks   [bytes] uint8: JSON, of each block [tensor, first element, elements, bytes of a gap's code]
    vN       [n] of the tensor's dtype: the new values of the block of number N
    gN       [bytes] uint8: the gaps before them, where the code has bytes

A code has w bytes, little-endian. Below 2^(8w) - 1 it is the number of unchanged elements before the next new
value. The highest code means that so many are unchanged and no value follows. So positions can neither repeat
nor go back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.errors import RolloutError, reason_of
from opd.storage import tensors
from opd.untrusted import safe_excerpt

BLOCK_ELEMENTS = 1 << 22
"""Elements of a tensor compared at once."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in tensors.DTYPES.values()}
"""Data types of tensors that can be sent."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type that compares and copies elements of so many bytes."""
_WIDTHS = (1, 2)
_METADATA = "__metadata__"
"""A name that no tensor of a safetensors file can have."""
_MOST = 2**48
"""Upper bound on the elements of a tensor, and on the bytes of all."""
_MEND = "send them anew"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.element_count * self.dtype.itemsize


Form = tuple[TensorForm, ...]
"""The forms of all tensors, in their order."""


def form_of(weights: Iterable[tuple[str, Tensor]]) -> Form:
    return tuple(TensorForm(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)


def form_as_json(form: Form) -> list[Any]:
    """Encode `form` for another process; see `form_from_json`."""
    return [[entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape)] for entry in form]


def form_from_json(document: Any) -> Form:
    """Decode the result of `form_as_json`. Raises `RolloutError` if `document` is anything else."""
    try:
        form = tuple(TensorForm(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in document)
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"weights of an unknown form were sent ({reason_of(error)}); {_MEND}.") from None
    for entry in form:
        if not isinstance(entry.name, str) or entry.name == _METADATA:
            raise RolloutError(
                f"weights with a tensor of the name {safe_excerpt(entry.name)} were sent; {_MEND}."
            )
        # An empty tensor has strides, too.
        sizes = all(type(size) is int and 0 <= size < _MOST for size in entry.shape)
        if not sizes or len(entry.shape) > 16 or math.prod(max(size, 1) for size in entry.shape) >= _MOST:
            raise RolloutError(
                f"weights with a tensor of the shape {safe_excerpt(entry.shape)} were sent; {_MEND}."
            )
    if len({entry.name for entry in form}) != len(form):
        raise RolloutError(f"weights with two tensors of one name were sent; {_MEND}.")
    if sum(entry.nbytes for entry in form) >= _MOST:
        raise RolloutError(f"weights of {len(form)} tensors with too many bytes were sent; {_MEND}.")
    return form


@dataclass(frozen=True, slots=True)
class Block:
    """New values for a run of a tensor's elements, in row-major order."""

    name: str
    first: int
    """Index of the first element of the run."""
    count: int
    """Elements of the run."""
    positions: Tensor | None
    """[n] int64, rising, below `count`: the changed elements. `None`: all."""
    values: Tensor
    """[n] of the tensor's dtype, or [count]."""

    def write_to(self, flat: Tensor) -> None:
        """Write the values into `flat`, all elements of the tensor."""
        run, values = bits_of(flat)[self.first : self.first + self.count], bits_of(self.values)
        if self.positions is None:
            run.copy_(values)
        else:
            run[self.positions] = values


def bits_of(tensor: Tensor) -> Tensor:
    """[elements] integers of the elements' size, in the same memory. `tensor` is contiguous."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.dtype.itemsize])


def all_blocks(weights: Iterable[tuple[str, Tensor]], elements: int = BLOCK_ELEMENTS) -> Iterator[Block]:
    """Yield all blocks of `weights`, which are on the CPU. Their memory is shared."""
    for name, tensor in weights:
        flat = tensor.detach().reshape(-1)
        for first in range(0, len(flat), elements):
            values = flat[first : first + elements]
            yield Block(name, first, len(values), None, values)


def changed_blocks(
    base: Iterable[tuple[str, Tensor]],
    weights: Iterable[tuple[str, Tensor]],
    elements: int = BLOCK_ELEMENTS,
) -> Iterator[Block]:
    """Yield the blocks that turn `base` into `weights`, of the same form. Both are contiguous on the CPU."""
    for (name, old), (_, new) in zip(base, weights, strict=True):
        before, after, flat = bits_of(old), bits_of(new), new.detach().reshape(-1)
        for first in range(0, len(flat), elements):
            run = slice(first, first + elements)
            changed = (before[run] != after[run]).nonzero().view(-1)
            values = flat[run]
            if not len(changed):
                continue
            size = len(changed) * new.dtype.itemsize + min(_code_bytes(changed, width) for width in _WIDTHS)
            if size < values.nbytes:
                yield Block(name, first, len(values), changed, values[changed])
            else:
                yield Block(name, first, len(values), None, values)


def group_blocks(blocks: Iterable[Block], most: int) -> Iterator[list[Block]]:
    """Group blocks into parts of about `most` bytes. A larger block is alone."""
    group: list[Block] = []
    size = 0
    for block in blocks:
        nbytes = block.values.nbytes + (0 if block.positions is None else 2 * len(block.positions))
        if group and size + nbytes > most:
            yield group
            group, size = [], 0
        group.append(block)
        size += nbytes
    if group:
        yield group


def pack_blocks(blocks: Sequence[Block]) -> bytes:
    """Encode blocks as a part."""
    from safetensors.torch import save

    packed: dict[str, Tensor] = {}
    entries: list[list[Any]] = []
    for number, block in enumerate(blocks):
        width = 0
        if block.positions is not None:
            width = min(_WIDTHS, key=lambda width, at=block.positions: _code_bytes(at, width))
            packed[f"g{number}"] = _encode_gaps(block.positions, width)
        packed[f"v{number}"] = block.values.clone()  # tensors may share memory, which safetensors refuses
        entries.append([block.name, block.first, block.count, width])
    packed["blocks"] = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
    return save(packed)


def unpack_blocks(part: bytes, form: Form) -> list[Block]:
    """Decode a part's blocks for tensors of `form`.

    Raises `RolloutError` if it is no part, or does not fit the form: an unknown name, another dtype, elements
    beyond the tensor's, too many or too few values, blocks that overlap or go back, or tensors that belong to
    no block.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(part)
        entries = json.loads(bytes(tensors.pop("blocks").tolist()))
        headers = [(str(name), int(first), int(count), int(width)) for name, first, count, width in entries]
    except (SafetensorError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RolloutError(
            f"what came of new weights is no part of them ({reason_of(error)}); {_MEND}."
        ) from None
    places = {entry.name: index for index, entry in enumerate(form)}
    blocks, end = [], (-1, 0)
    for number, (name, first, count, width) in enumerate(headers):
        index = places.get(name)
        if index is None:
            raise RolloutError(f"new values came for {name!r}, which is no tensor that is held; {_MEND}.")
        if not 0 <= first < first + count <= form[index].element_count or (index, first) < end:
            raise _unfit_error(form[index], f"the elements {first} to {first + count}")
        end = index, first + count
        values, codes = tensors.pop(f"v{number}", None), tensors.pop(f"g{number}", None)
        blocks.append(_read_block(form[index], (first, count), width, values, codes))
    if tensors:
        raise RolloutError(f"new weights came with {min(tensors)!r}, of which no block knows; {_MEND}.")
    return blocks


def _read_block(
    form: TensorForm, run: tuple[int, int], width: int, values: Tensor | None, codes: Tensor | None
) -> Block:
    """Decode one block of a part, with checks."""
    first, count = run
    if values is None or values.dtype != form.dtype or values.dim() != 1:
        raise _unfit_error(form, "values of another dtype or shape")
    if width == 0 and codes is None:
        if len(values) != count:
            raise _unfit_error(form, f"{len(values)} values for {count} elements")
        return Block(form.name, first, count, None, values)
    if codes is None or width not in _WIDTHS or codes.dtype != torch.uint8 or codes.dim() != 1:
        raise _unfit_error(form, "gaps of an unknown form")
    if len(codes) % width or len(codes) > width * count:
        raise _unfit_error(form, "gaps of an unknown form")
    positions = _decode_gaps(codes, width)
    if positions is None or len(positions) != len(values) or int(positions[-1]) >= count:
        raise _unfit_error(form, f"positions that are not {len(values)} of {count} elements")
    return Block(form.name, first, count, positions, values)


def _unfit_error(form: TensorForm, fault: str) -> RolloutError:
    return RolloutError(f"new values for {form.name} {list(form.shape)} came with {fault}; {_MEND}.")


def _code_bytes(positions: Tensor, width: int) -> int:
    """Bytes of the codes of these positions, at `width` bytes each."""
    skips = _position_gaps(positions) // _top_code(width)
    return width * (len(positions) + int(skips.sum()))


def _top_code(width: int) -> int:
    return 2 ** (8 * width) - 1


def _position_gaps(positions: Tensor) -> Tensor:
    """[n] int64: number of unchanged elements before each of the rising positions."""
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _encode_gaps(positions: Tensor, width: int) -> Tensor:
    """[bytes] uint8: the codes of these positions."""
    gaps, top = _position_gaps(positions), _top_code(width)
    ends = (gaps // top + 1).cumsum(0) - 1  # index of each value's own code, after its skips
    codes = gaps.new_full((int(ends[-1]) + 1,), top)
    codes[ends] = gaps % top
    return codes.to(torch.uint8 if width == 1 else torch.uint16).view(torch.uint8)


def _decode_gaps(codes: Tensor, width: int) -> Tensor | None:
    """[n] int64: the positions of these codes, at least one. `None` if the last code has no value."""
    read = codes.contiguous().view(torch.uint8 if width == 1 else torch.uint16).to(torch.int64)
    if not len(read) or int(read[-1]) == _top_code(width):
        return None
    is_last = read != _top_code(width)
    ends = (read + is_last).cumsum(0)
    return ends[is_last] - 1
