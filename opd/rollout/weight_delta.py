"""What has changed between two versions of named tensors, as bytes that give the newer one to the last bit.

A tensor is cut into blocks. Of a block that has changed either all values go, or the gaps between the
changed elements and their new values, whichever is less; of one that has not, nothing. Two values are the
same if their bits are, so that NaN, -0.0 and bfloat16 come out as they went in. All blocks with all values
are a version whole, in the same form. Blocks go together in parts, each of which is safetensors:

    blocks   [bytes] uint8: JSON, of each block [tensor, first element, elements, bytes of a gap's code]
    vN       [n] of the tensor's dtype: the new values of the block of number N
    gN       [bytes] uint8: the gaps before them, where the code has bytes

A code of w bytes, little-endian, below 2^(8w) - 1 is the number of elements that stay before the next new
value; the highest says that so many stay and no value follows. Positions so can neither repeat nor go back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opd.errors import RolloutError, reason_of
from opd.foreign import shown
from opd.storage import tensors

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Of a tensor, compared at a time."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in tensors.DTYPES.values()}
"""Of tensors that can be sent."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What is compared and copied in place of elements of so many bytes."""
_WIDTHS = (1, 2)
_METADATA = "__metadata__"
"""What no tensor of a safetensors file can be called."""
_MOST = 2**48
"""Elements of a tensor, and bytes of all."""
_MEND = "send them anew"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What is known of a tensor before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


Form = tuple[TensorForm, ...]
"""Of all tensors, in their order."""


def form_of(weights: Iterable[tuple[str, Tensor]]) -> Form:
    """The form of `weights`."""
    return tuple(TensorForm(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)


def form_as_json(form: Form) -> list[Any]:
    """For another process; see `form_from_json`."""
    return [[own.name, str(own.dtype).removeprefix("torch."), list(own.shape)] for own in form]


def form_from_json(told: Any) -> Form:
    """What `form_as_json` gave. Raises `RolloutError` if `told` is anything else."""
    try:
        form = tuple(TensorForm(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in told)
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"weights of an unknown form were sent ({reason_of(error)}); {_MEND}.") from None
    for own in form:
        if not isinstance(own.name, str) or own.name == _METADATA:
            raise RolloutError(f"weights with a tensor of the name {shown(own.name)} were sent; {_MEND}.")
        if not _fits(own.shape):
            raise RolloutError(f"weights with a tensor of the shape {shown(own.shape)} were sent; {_MEND}.")
    if len({own.name for own in form}) != len(form):
        raise RolloutError(f"weights with two tensors of one name were sent; {_MEND}.")
    if sum(own.nbytes for own in form) >= _MOST:
        raise RolloutError(f"weights of {len(form)} tensors with too many bytes were sent; {_MEND}.")
    return form


def _fits(shape: tuple[Any, ...]) -> bool:
    """Whether there may be a tensor of that shape: an empty one has strides, too."""
    sizes = all(type(size) is int and 0 <= size < _MOST for size in shape)
    return sizes and len(shape) <= 16 and math.prod(max(size, 1) for size in shape) < _MOST


@dataclass(frozen=True, slots=True)
class Block:
    """New values for a run of a tensor's elements, in row-major order."""

    name: str
    """Of the tensor."""
    first: int
    """Number of the first element of the run."""
    count: int
    """Elements of the run."""
    positions: Tensor | None
    """[n] int64, rising, below `count`: those that have changed; `None`: all."""
    values: Tensor
    """[n] of the tensor's dtype, or [count]."""

    def apply(self, flat: Tensor) -> None:
        """Write the values into `flat`, all elements of the tensor."""
        run, values = bits_of(flat)[self.first : self.first + self.count], bits_of(self.values)
        if self.positions is None:
            run.copy_(values)
        else:
            run[self.positions] = values


def bits_of(tensor: Tensor) -> Tensor:
    """[elements] integers of its elements' size, the same memory; `tensor` is contiguous."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.dtype.itemsize])


def all_blocks(weights: Iterable[tuple[str, Tensor]], elements: int = BLOCK_ELEMENTS) -> Iterator[Block]:
    """Everything in `weights`, which are on the CPU; their memory is shared."""
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
    """What makes `weights` of `base`, which have the same form; both are on the CPU and contiguous."""
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


def grouped(blocks: Iterable[Block], most: int) -> Iterator[list[Block]]:
    """Blocks that go into a part of about `most` bytes; one that is larger is alone."""
    own: list[Block] = []
    size = 0
    for block in blocks:
        nbytes = block.values.nbytes + (0 if block.positions is None else 2 * len(block.positions))
        if own and size + nbytes > most:
            yield own
            own, size = [], 0
        own.append(block)
        size += nbytes
    if own:
        yield own


def pack(blocks: Sequence[Block]) -> bytes:
    """A part."""
    from safetensors.torch import save

    packed: dict[str, Tensor] = {}
    told: list[list[Any]] = []
    for number, block in enumerate(blocks):
        width = 0
        if block.positions is not None:
            width = min(_WIDTHS, key=lambda width, at=block.positions: _code_bytes(at, width))
            packed[f"g{number}"] = _codes(block.positions, width)
        packed[f"v{number}"] = block.values.clone()  # tensors may share memory, which safetensors refuses
        told.append([block.name, block.first, block.count, width])
    packed["blocks"] = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    return save(packed)


def unpack(part: bytes, form: Form) -> list[Block]:
    """The blocks of a part for tensors of `form`.

    Raises `RolloutError` if it is no part, or has anything that does not fit the form: an unknown name,
    another dtype, elements beyond the tensor's, values that are too many or too few, blocks that overlap or
    go back, or tensors of which no block knows.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        sent = load(part)
        told = json.loads(bytes(sent.pop("blocks").tolist()))
        named = [(str(name), int(first), int(count), int(width)) for name, first, count, width in told]
    except (SafetensorError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RolloutError(
            f"what came of new weights is no part of them ({reason_of(error)}); {_MEND}."
        ) from None
    places = {own.name: place for place, own in enumerate(form)}
    blocks, end = [], (-1, 0)
    for number, (name, first, count, width) in enumerate(named):
        place = places.get(name)
        if place is None:
            raise RolloutError(f"new values came for {name!r}, which is no tensor that is held; {_MEND}.")
        if not 0 <= first < first + count <= form[place].elements or (place, first) < end:
            raise _unfit(form[place], f"the elements {first} to {first + count}")
        end = place, first + count
        values, codes = sent.pop(f"v{number}", None), sent.pop(f"g{number}", None)
        blocks.append(_block(form[place], (first, count), width, values, codes))
    if sent:
        raise RolloutError(f"new weights came with {min(sent)!r}, of which no block knows; {_MEND}.")
    return blocks


def _block(
    form: TensorForm, run: tuple[int, int], width: int, values: Tensor | None, codes: Tensor | None
) -> Block:
    """One of a part, checked."""
    first, count = run
    if values is None or values.dtype != form.dtype or values.dim() != 1:
        raise _unfit(form, "values of another dtype or shape")
    if width == 0 and codes is None:
        if len(values) != count:
            raise _unfit(form, f"{len(values)} values for {count} elements")
        return Block(form.name, first, count, None, values)
    if codes is None or width not in _WIDTHS or codes.dtype != torch.uint8 or codes.dim() != 1:
        raise _unfit(form, "gaps of an unknown form")
    if len(codes) % width or len(codes) > width * count:
        raise _unfit(form, "gaps of an unknown form")
    positions = _positions(codes, width)
    if positions is None or len(positions) != len(values) or int(positions[-1]) >= count:
        raise _unfit(form, f"positions that are not {len(values)} of {count} elements")
    return Block(form.name, first, count, positions, values)


def _unfit(form: TensorForm, what: str) -> RolloutError:
    return RolloutError(f"new values for {form.name} {list(form.shape)} came with {what}; {_MEND}.")


def _code_bytes(positions: Tensor, width: int) -> int:
    """Bytes of the codes of these positions, at `width` bytes each."""
    skips = _gaps(positions) // _top(width)
    return width * (len(positions) + int(skips.sum()))


def _top(width: int) -> int:
    return 2 ** (8 * width) - 1


def _gaps(positions: Tensor) -> Tensor:
    """[n] int64: how many elements stay before each of the rising positions."""
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _codes(positions: Tensor, width: int) -> Tensor:
    """[bytes] uint8: the codes of these positions."""
    gaps, top = _gaps(positions), _top(width)
    ends = (gaps // top + 1).cumsum(0) - 1  # of each value, its own code; skips are before it
    codes = gaps.new_full((int(ends[-1]) + 1,), top)
    codes[ends] = gaps % top
    return codes.to(torch.uint8 if width == 1 else torch.uint16).view(torch.uint8)


def _positions(codes: Tensor, width: int) -> Tensor | None:
    """[n] int64: the positions behind these codes, at least one; `None` if they end with none."""
    read = codes.contiguous().view(torch.uint8 if width == 1 else torch.uint16).to(torch.int64)
    if not len(read) or int(read[-1]) == _top(width):
        return None
    named = read != _top(width)
    ends = (read + named).cumsum(0)
    return ends[named] - 1
