"""A model of which every rank holds its share: made without weights, cut, then filled.

Nobody holds all of it at any time. `open_empty` makes the module with its parameters on the meta device. Once
FSDP2 has made them `DTensor`s, `fill` gives each rank memory for its rows and reads those rows of the
safetensors files into them; other back ends cut it in their own ways, and `read_together` is their share of
the files. Before that these are compared with their digests: ranks that see the same files hash each file
once between them.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.errors import CheckpointError, ModelError, OpdError, reason_of
from opd.models.architecture import check_architecture
from opd.models.causal_lm import CausalLM, Unread, torch_device, torch_dtype
from opd.models.hf_folder import MEND, adapter_base, check_folder, read_checksums, read_config, weight_files
from opd.models.hf_weights import empty_module
from opd.models.peft_folder import merged, read_peft
from opd.ranks import Ranks
from opd.storage.files import check_files, file_state
from opd.storage.tensors import TensorParts, require_numbers

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BASE_LAYER = ".base_layer."
"""What peft puts into the name of a weight it adapts."""


def open_empty(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu") -> CausalLM:
    """`CausalLM.from_pretrained` without weights, which `fill` reads: neither they nor the model's forward
    are checked yet. All of the model where files do not hold its tensors as they are (experts one by one).

    Raises what `CausalLM.from_pretrained` raises of files that are missing or do not fit.
    """
    folder = Path(path)
    check_folder(folder, digests=False)
    check_architecture(read_config(folder), folder)
    module = empty_module(folder, torch_dtype(dtype))
    parts, stored = _parts(adapter_base(folder) or folder), {}
    for names, tensor in own_tensors(module):
        found = [name for name in names if name in parts and parts.shape(name) == tuple(tensor.shape)]
        if not found:
            return CausalLM.from_pretrained(folder, dtype=dtype, device=device)
        stored |= dict.fromkeys(names, found[0])
    return CausalLM(module, Unread(folder, torch_device(device), stored))


class Root(nn.Module):
    """Runs a function in place of a forward.

    The loss reads the head's weight itself, outside of any module's forward; FSDP2 and ZeRO-3 gather
    weights only around one. Inside this one those of `module` that belong to no layer are whole.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def layers_to_cut(model: CausalLM) -> list[nn.Module]:
    """The decoder's layers. Raises `ModelError` if it has no list of them."""
    if not model.layers:
        raise ModelError(
            f"{type(model.decoder).__name__} does not keep its layers as one list, so its weights cannot be"
            " sharded layer by layer; use it with one rank."
        )
    return model.layers


def cut(model: CausalLM, ranks: Ranks, compute_dtype: torch.dtype | None = None) -> Root:
    """Cut `model` by FSDP2 over all `ranks`, which call it together, layer by layer; one that `open_empty`
    gave is then filled and tried. Its forwards run inside the root that is returned.

    `compute_dtype`: what layers compute in, if it is not the model's own. Raises what `fill` raises, and
    `ModelError` for an architecture that cannot be used or cut.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    root, empty = Root(model.module), model.unread is not None
    mesh = init_device_mesh(model.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for part in [*layers_to_cut(model), root]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if empty:
        fill(model, ranks)
        with torch.no_grad(), ranks.naming_the_lost("the first pass of a model"):
            root(model.check)  # all ranks compute the same
        close_up(root)
    return root


def close_up(root: Root) -> None:
    """Let go what a forward of `root` has left gathered: the weights that belong to no layer."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, FSDPModule)  # which `cut` has made it
    root.reshard()


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank has of `tensor`, and the number of its first element in row-major order. A `DTensor` is
    cut by rows, as FSDP2 cuts it; anything else every rank has whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0
    [placement] = tensor.placements
    if not placement.is_shard(0):
        raise ModelError(f"a tensor is cut as {placement}, and only rows can be read in parts.")
    mesh = tensor.device_mesh
    each = -(-tensor.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * each, tensor.shape[0])
    return tensor.to_local(), first * (tensor.numel() // max(tensor.shape[0], 1))


def own_parts(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """`model.weights()`, of each what this rank has of it."""
    return ((name, local_part(tensor)[0]) for name, tensor in model.weights())


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with the parts of all ranks, which call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Stored:
    """The weights that a model lacks, as its folder has them; where that is an adapter's, merged with it.

    Of a tensor, named by all its names in the module, it gives the part that is asked for and reads no more.
    """

    def __init__(self, unread: Unread) -> None:
        base = adapter_base(unread.folder)
        self._names = unread.stored
        self._folder = base or unread.folder
        self._parts = _parts(self._folder)
        self._adapter = None if base is None else read_peft(unread.folder, base)

    def read(self, names: Sequence[str], width: int, first: int, into: Tensor) -> None:
        """Fill `into` (contiguous) with elements from number `first` on, in row-major order; rows of the
        tensor have `width` elements.
        """
        self._parts.read(self._names[names[0]], first, into)
        require_numbers(self._folder, [(names[0], into)])
        for name in names if self._adapter is not None else ():
            self._add(name, width, first, into.view(-1))

    def _add(self, name: str, width: int, first: int, into: Tensor) -> None:
        adapter = self._adapter
        if adapter is None or name not in adapter.pairs or not into.numel():
            return
        row, begin = divmod(first, width)
        stop = -(-(first + into.numel()) // width)
        a, b = (part.to(into.device) for part in adapter.pairs[name])
        rows = into.new_zeros(stop - row, width)  # a part may begin and end within a row
        part = rows.view(-1)[begin : begin + into.numel()]
        part.copy_(into)
        into.copy_(merged(rows, a, b[row:stop], adapter.scaling).view(-1)[begin : begin + into.numel()])


def stored_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """`model.weights()` of one that `open_empty` gave, each read from its folder when it is its turn; the
    model stays without them. Whoever walks them has compared the folder's files with their digests.
    """
    if model.unread is None:
        yield from model.weights()
        return
    stored = Stored(model.unread)
    by_name = {name: names for names, _ in own_tensors(model.module) for name in names}
    for name, tensor in model.weights():
        if tensor.is_meta:
            room = torch.empty_like(tensor, device=model.unread.device)
            stored.read(by_name[name], width_of(tensor.shape), 0, room)
            yield name, room
        else:
            yield name, tensor


def read_together(model: CausalLM, ranks: Ranks, read: Callable[[Stored], None]) -> None:
    """`read` this rank's share of the weights of `model`, which `open_empty` gave, after its folder's files
    were compared with their digests; all `ranks` call it together, and say `filled` when layers have them.

    Raises on every rank what one has met: `CheckpointError` for a file that is not what its folder says, or
    that changes meanwhile.
    """
    unread = model.unread
    assert unread is not None
    folder = adapter_base(unread.folder) or unread.folder
    checksums = read_checksums(folder)
    known = {name: checksums[name] for name in weight_files(folder) if name in checksums}
    before = {name: file_state(folder / name) for name in known}
    compare_together(ranks, folder, known, MEND, CheckpointError)

    def unchanged() -> None:
        read(Stored(unread))
        changed = [name for name, state in before.items() if file_state(folder / name) != state]
        if changed:
            raise CheckpointError(
                f"{folder / changed[0]} changed while it was read; start again once nobody writes it."
            )

    ranks.agreed(unchanged, "the weights of a model")


@torch.no_grad()
def fill(model: CausalLM, ranks: Ranks) -> None:
    """`read_together` of a model that FSDP2 has cut. In memory are the share and, where the files have
    another dtype, a few MiB. Raises `ModelError` too, for a share that there is no memory for.
    """
    unread = model.unread
    assert unread is not None
    empty = {names[0] for names, tensor in own_tensors(model.module) if tensor.is_meta}

    def read(stored: Stored) -> None:
        nbytes = sum(local_part(tensor)[0].nbytes for _, tensor in own_tensors(model.module))
        with _room_for_share(unread.folder, ranks.rank, nbytes):
            _make_room(model.module, unread.device)
        for names, tensor in own_tensors(model.module):
            if names[0] in empty or not isinstance(tensor, nn.Parameter):  # others were made since
                local, start = local_part(tensor)
                stored.read(names, width_of(tensor.shape), start, local)

    read_together(model, ranks, read)
    model.filled()


def width_of(shape: Sequence[int]) -> int:
    """Elements in a row of a tensor."""
    return math.prod(shape[1:])


@contextmanager
def _room_for_share(folder: Path, rank: int, nbytes: int) -> Iterator[None]:
    """Around the taking of memory for `nbytes`: `ModelError` where there is not so much."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise ModelError(
            f"rank {rank} has no memory for its share of {folder}, {nbytes} bytes"
            f" ({reason_of(error)[-120:]}); start more ranks, or free some memory."
        ) from error


def need_room(model: CausalLM, ranks: Ranks, numbers: int, each: int) -> None:
    """Raise `ModelError` on all ranks where one has no memory for its `numbers` of the weights, of which each
    takes `each` bytes with all that is kept of it.
    """
    unread = model.unread
    assert unread is not None

    def ask() -> None:
        with _room_for_share(unread.folder, ranks.rank, numbers * each):
            torch.empty(numbers * each, dtype=torch.uint8, device=unread.device)

    ranks.agreed(ask, "the memory for a model")


@torch.no_grad()
def put_in_file(model: CausalLM, folder: Path, *, read: bool = False) -> None:
    """Give the weights of `model`, which `open_empty` gave, room in a file without a name in `folder`, in
    place of memory: the system writes what they hold there when it needs theirs. What they are is the
    caller's to say, unless they are `read` from the model's folder. Raises `OSError` if the disk has no room
    for them.
    """
    unread = model.unread
    assert unread is not None
    empty = [(names, tensor.shape) for names, tensor in own_tensors(model.module) if tensor.is_meta]
    with tempfile.TemporaryFile(dir=folder) as file:

        def room(old: nn.Parameter) -> nn.Parameter:
            begin, size = os.fstat(file.fileno()).st_size, max(1, old.nbytes)
            size += -size % mmap.ALLOCATIONGRANULARITY
            # A page that the disk has no room for when it is written ends the process; this is an error.
            os.posix_fallocate(file.fileno(), begin, size)
            # Each is mapped by itself: of tensors in one storage a copy is made when they are written.
            pages = torch.frombuffer(mmap.mmap(file.fileno(), size, offset=begin), dtype=torch.uint8)
            found = pages[: old.nbytes].view(old.dtype).view(old.shape)
            return nn.Parameter(found, requires_grad=old.requires_grad)

        replace_empty(model.module, torch.device("cpu"), room)
    if read:
        stored = Stored(unread)
        made = {name: tensor for names, tensor in own_tensors(model.module) for name in names}
        for names, shape in empty:
            stored.read(names, width_of(shape), 0, made[names[0]])
    model.filled()


def _make_room(module: nn.Module, device: torch.device) -> None:
    """Give every parameter that is still on the meta device memory on `device`."""

    def room(old: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)

    replace_empty(module, device, room)


def replace_empty(
    module: nn.Module, device: torch.device, make: Callable[[nn.Parameter], nn.Parameter]
) -> None:
    """Put what `make` gives in place of every parameter that is still on the meta device, one after another,
    and buffers on `device`; tied parameters stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if old.is_meta:
                if id(old) not in made:
                    made[id(old)] = make(old)
                part._parameters[name] = made[id(old)]
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def own_tensors(module: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Every tensor of the state with all its names as a folder has them; tied ones once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name.replace(_BASE_LAYER, "."))
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _parts(folder: Path) -> TensorParts:
    return TensorParts(folder / name for name in weight_files(folder))


def compare_together(
    ranks: Ranks, root: Path, digests: Mapping[str, str], mend: str, kind: type[OpdError]
) -> None:
    """`check_files` of all `ranks`, with the same answer on each: a rank hashes its part of the files that it
    and others see alike, so a machine reads each once.
    """
    seen = [_BOOT.read_text() if _BOOT.exists() else os.uname().nodename]
    seen += [repr(file_state(root / name)) for name in digests]
    everyone = ranks.gather_json(seen, "the files of a model")
    peers = [rank for rank, other in enumerate(everyone) if other == seen]
    mine = sorted(digests)[peers.index(ranks.rank) :: len(peers)]
    ranks.agreed(
        lambda: check_files(root, {name: digests[name] for name in mine}, mend, kind),
        "the digests of a model",
    )
