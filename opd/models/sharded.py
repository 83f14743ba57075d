"""A model of which every rank holds its share: made without weights, cut by FSDP2, then filled.

Nobody holds all of it at any time. `open_empty` makes the module with its parameters on the meta device; once
they are `DTensor`s, `fill` gives each rank memory for its rows and reads those rows of the safetensors files
into them. Before that the files are compared with their digests: ranks that see the same files hash each file
once between them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.errors import CheckpointError, ModelError, OpdError, reason_of
from opd.models.causal_lm import CausalLM, Unread, torch_device, torch_dtype
from opd.models.hf_folder import MEND, adapter_base, check_folder, read_checksums, weight_files
from opd.models.hf_weights import PeftAdapter, empty_module, merged, read_peft
from opd.ranks import Ranks
from opd.storage.files import check_files, file_state
from opd.storage.tensors import TensorParts

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
    module = empty_module(folder, torch_dtype(dtype))
    parts, stored = _parts(adapter_base(folder) or folder), {}
    for names, tensor in _own_tensors(module):
        found = [name for name in names if name in parts and parts.shape(name) == tuple(tensor.shape)]
        if not found:
            return CausalLM.from_pretrained(folder, dtype=dtype, device=device)
        stored |= dict.fromkeys(names, found[0])
    return CausalLM(module, Unread(folder, torch_device(device), stored))


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


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with the parts of all ranks, which call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(model: CausalLM, ranks: Ranks) -> None:
    """Read this rank's share of the weights of `model`, which `open_empty` gave and FSDP2 has cut; all
    `ranks` call it together. In memory are the share and, where the files have another dtype, a few MiB.

    Raises on every rank what one has met: `CheckpointError` for a file that is not what its folder says, or
    `ModelError` for a share that there is no memory for.
    """
    unread = model.unread
    assert unread is not None
    folder = adapter_base(unread.folder) or unread.folder
    checksums = read_checksums(folder)
    known = {name: checksums[name] for name in weight_files(folder) if name in checksums}
    before = {name: file_state(folder / name) for name in known}
    compare_together(ranks, folder, known, MEND, CheckpointError)

    def read() -> None:
        _read(model.module, unread, ranks.rank)
        changed = [name for name, state in before.items() if file_state(folder / name) != state]
        if changed:
            raise CheckpointError(
                f"{folder / changed[0]} changed while it was read; start again once nobody writes it."
            )

    ranks.agreed(read, "the weights of a model")
    model.filled()


def _read(module: nn.Module, unread: Unread, rank: int) -> None:
    missing = {names[0] for names, tensor in _own_tensors(module) if tensor.is_meta}
    try:
        _make_room(module, unread.device)
    except (RuntimeError, MemoryError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        nbytes = sum(local_part(tensor)[0].nbytes for _, tensor in _own_tensors(module))
        raise ModelError(
            f"rank {rank} has no memory for its share of {unread.folder}, {nbytes} bytes of weights"
            f" ({reason_of(error)[-120:]}); start more ranks, or free some memory."
        ) from error
    base = adapter_base(unread.folder)
    parts = _parts(base or unread.folder)
    adapter = None if base is None else read_peft(unread.folder)
    for names, tensor in _own_tensors(module):
        if names[0] not in missing and isinstance(tensor, nn.Parameter):
            continue  # made since: an adapter, a head of values
        local, start = local_part(tensor)
        parts.read(unread.stored[names[0]], start, local)
        if adapter is not None:
            for name in names:
                _add(adapter, name, local, start // (tensor.numel() // max(1, tensor.shape[0])))


def _add(adapter: PeftAdapter, name: str, rows: Tensor, first: int) -> None:
    """Merge into `rows` of the weight `name`, from row `first` on, what `adapter` has for it."""
    if name in adapter.pairs:
        a, b = (part.to(rows.device) for part in adapter.pairs[name])
        rows.copy_(merged(rows, a, b[first : first + len(rows)], adapter.scaling))


def put_in_file(model: CausalLM, folder: Path) -> None:
    """Give the weights of `model`, which `open_empty` gave, room in a file without a name in `folder`, in
    place of memory: the system writes what they hold there when it needs theirs. What they are is the
    caller's to say. Raises `OSError` if the disk has no room for them.
    """
    with tempfile.TemporaryFile(dir=folder) as file:

        def room(old: Tensor) -> Tensor:
            begin, size = os.fstat(file.fileno()).st_size, max(1, old.nbytes)
            size += -size % mmap.ALLOCATIONGRANULARITY
            # A page that the disk has no room for when it is written ends the process; this is an error.
            os.posix_fallocate(file.fileno(), begin, size)
            # Each is mapped by itself: of tensors in one storage a copy is made when they are written.
            pages = torch.frombuffer(mmap.mmap(file.fileno(), size, offset=begin), dtype=torch.uint8)
            return pages[: old.nbytes].view(old.dtype).view(old.shape)

        _make_room(model.module, torch.device("cpu"), room)
    model.filled()


def _make_room(
    module: nn.Module, device: torch.device, make: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Give every parameter that is still on the meta device memory on `device`, or what `make` gives for it;
    tied ones stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if old.is_meta:
                if id(old) not in made:
                    room = torch.empty_like(old, device=device) if make is None else make(old)
                    made[id(old)] = nn.Parameter(room, requires_grad=old.requires_grad)
                part._parameters[name] = made[id(old)]
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def _own_tensors(module: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
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
