"""Sharded models: made without weights, sharded over ranks, then filled.

No rank holds all of it at any time. `open_empty` makes the module with its parameters on the meta device.
FSDP2 makes them `DTensor`s. `fill_shards` then gives each rank memory for its rows and reads those rows of
the safetensors files. Other back ends shard it in their own ways, and read their share by `read_on_ranks`.
The files are compared with their digests first. Ranks that see the same files hash each file once between
them.
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
from opd.models.architecture import check_architecture, check_pieces
from opd.models.causal_lm import CausalLM, StoredName, UnreadWeights, torch_device, torch_dtype
from opd.models.expert_parallel import ExpertParallel, share_experts, shares_experts
from opd.models.hf_folder import MEND, adapter_base, check_folder, read_checksums, read_config, weight_files
from opd.models.hf_weights import empty_module
from opd.models.peft_folder import merge_weight, read_peft
from opd.models.quantised_weights import folder_parts
from opd.models.stored_form import StoredForm
from opd.ranks import Ranks
from opd.storage.files import check_files, file_state
from opd.storage.tensors import require_numbers

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BASE_LAYER = ".base_layer."
"""peft's infix in the name of an adapted weight."""


def open_empty(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu") -> CausalLM:
    """`CausalLM.from_pretrained` without weights, which `fill_shards` reads. Neither they nor the forward are
    checked yet. It loads the weights if files hold others than the module's tensors and the parts of experts.
    Raises the errors of `CausalLM.from_pretrained` for files that are missing or do not match.
    """
    folder = Path(path)
    check_folder(folder, digests=False)
    check_architecture(read_config(folder), folder)
    module = empty_module(folder, torch_dtype(dtype))
    parts, form = folder_parts(adapter_base(folder) or folder), StoredForm(module)
    experts: dict[str, list[list[str]]] = form.one_by_one(parts)
    whole = {form.place(name): name for name in parts if not form.merges(name)}
    stored: dict[str, StoredName] = {}
    for names, tensor in own_tensors(module):
        shape = tuple(tensor.shape)
        files = (whole.get(name, name) for name in names)
        matches = [name for name in files if name in parts and parts.shape(name) == shape]
        matches += [experts[name] for name in names if name in experts]
        if not matches:
            return CausalLM.from_pretrained(folder, dtype=dtype, device=device)
        stored |= dict.fromkeys(names, matches[0])
    return CausalLM(module, UnreadWeights(folder, torch_device(device), stored, form))


class ForwardRoot(nn.Module):
    """Runs a function instead of a forward.

    The loss reads the head's weight outside of any module's forward, but FSDP2 and ZeRO-3 gather weights only
    around one. Inside this one the weights of `module` outside layers are gathered.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def layers_to_cut(model: CausalLM) -> list[nn.Module]:
    """Return the decoder's layers. Raises `ModelError` if it has no list of them."""
    if not model.layers:
        raise ModelError(
            f"{type(model.decoder).__name__} does not keep its layers as one list, so its weights cannot be"
            " sharded layer by layer; use it with one rank."
        )
    return model.layers


def shard_model(
    model: CausalLM,
    ranks: Ranks,
    compute_dtype: torch.dtype | None = None,
    expert_parallel: ExpertParallel = "auto",
    *,
    pieces: bool = False,
) -> ForwardRoot:
    """Shard `model` by FSDP2 over all `ranks`, layer by layer; all ranks call it together. A model from
    `open_empty` is then filled and checked. Its forwards run inside the returned root.

    `compute_dtype` is the layers' dtype, if it is not the model's. With `expert_parallel` the ranks share the
    experts of its layers, unless long sequences run in `pieces`: ranks run unequal numbers of them. Raises
    the errors of `fill_shards`, and `ModelError` for an architecture that cannot be used, sharded or shared.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    root, empty = ForwardRoot(model.module), model.unread is not None
    mesh = init_device_mesh(model.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers, shared = layers_to_cut(model), set()
    if shares_experts(model.module, expert_parallel, ranks.size) and not pieces:
        shared = share_experts(model.module, mesh)
    for part in [*layers, root]:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=shared)
    if empty:
        fill_shards(model, ranks)
        with torch.no_grad(), ranks.name_missing_ranks("the first pass of a model"):
            root(model.check)  # all ranks compute the same
    if pieces:  # now, together: later one rank may need the check alone
        with torch.no_grad(), ranks.name_missing_ranks("the first pass in pieces"):
            root(lambda: check_pieces(model))
    if empty or pieces:
        close_up(root)
    return root


def close_up(root: ForwardRoot) -> None:
    """Free the gathered weights outside layers after a forward of `root`."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, FSDPModule)  # `cut` has made it one
    root.reshard()


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's part of `tensor`, and the index of its first element in row-major order. A `DTensor`
    is split by rows, as by FSDP2. Other tensors are complete on every rank.
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


def local_parts(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield `model.weights()` with this rank's part of each."""
    return ((name, local_part(tensor)[0]) for name, tensor in model.weights())


def gather_full(tensor: Tensor) -> Tensor:
    """Gather `tensor` from all ranks, which call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class StoredWeights:
    """The missing weights of a model, in its folder. If that is an adapter's, they are merged with it.

    A tensor is named by all its names in the module. Only the requested range is read.
    """

    def __init__(self, unread: UnreadWeights) -> None:
        base = adapter_base(unread.folder)
        self._names, self._form = unread.stored, unread.form
        self._folder = base or unread.folder
        self._parts = folder_parts(self._folder)
        self._adapter = None if base is None else read_peft(unread.folder, base)

    def read(self, names: Sequence[str], width: int, first: int, into: Tensor) -> None:
        """Fill `into` (contiguous) with elements from index `first`, in row-major order. Rows of the tensor
        have `width` elements.
        """
        name = self._names[names[0]]
        if isinstance(name, str):
            self._parts.read(name, first, into)
        else:
            self._read_experts(name, width, first, into.view(-1))
        require_numbers(self._folder, [(names[0], into)])
        if self._adapter is None or not into.numel():
            return
        into = into.view(-1)
        row, offset = divmod(first, width)
        stop = -(-(first + len(into)) // width)
        for name in names:
            if name not in self._adapter.pairs:
                continue
            a, b = (part.to(into.device) for part in self._adapter.pairs[name])
            rows = into.new_zeros(stop - row, width)  # a range may begin and end within a row
            part = rows.view(-1)[offset : offset + len(into)]
            part.copy_(into)
            merged = merge_weight(rows, a, b, self._adapter.scaling, slice(row, stop)).view(-1)
            into.copy_(merged[offset : offset + len(into)])

    def read_expert(self, name: str, start: int, size: int, first: int, into: Tensor) -> None:
        """Fill `into` with elements from index `first` of a part of an expert. The part has `size` elements
        and begins at `start` in the tensor `name` of all experts.
        """
        stored = self._names[name]
        if isinstance(stored, str):
            self._parts.read(stored, start + first, into)
        else:
            number, part = divmod(start // size, len(stored[0]))
            self._parts.read(stored[number][part], first, into)
        require_numbers(self._folder, [(name, into)])

    def _read_experts(self, parts: list[list[str]], width: int, first: int, into: Tensor) -> None:
        """`read` of a tensor whose experts, of `width` elements each, are put together from their `parts`.
        One expert is in memory at a time.
        """
        stop = first + len(into)
        for number in range(first // width, -(-stop // width)):
            tensors = {
                name: torch.empty(self._parts.shape(name), dtype=into.dtype, device=into.device)
                for name in parts[number]
            }
            for name, tensor in tensors.items():
                self._parts.read(name, 0, tensor)
            [expert] = self._form.of_module(tensors).values()
            start = number * width
            low, high = max(first, start), min(stop, start + width)
            into[low - first : high - first] = expert.reshape(-1)[low - start : high - start]


def stored_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield `model.weights()` of a model from `open_empty`, each read from its folder when it is yielded. The
    model stays empty. The caller has compared the folder's files with their digests.
    """
    if model.unread is None:
        yield from model.weights()
        return
    stored = StoredWeights(model.unread)
    by_name = {name: names for names, _ in own_tensors(model.module) for name in names}
    for name, tensor in model.weights():
        if tensor.is_meta:
            buffer = torch.empty_like(tensor, device=model.unread.device)
            stored.read(by_name[name], width_of(tensor.shape), 0, buffer)
            yield name, buffer
        else:
            yield name, tensor


def read_on_ranks(model: CausalLM, ranks: Ranks, read: Callable[[StoredWeights], None]) -> None:
    """Call `read` for this rank's share of the weights of `model` (from `open_empty`), after its folder's
    files were compared with their digests. All `ranks` call it together, and `CausalLM.mark_filled`
    afterwards.

    Raises on every rank the error of any: `CheckpointError` for a file that differs from its digest, or
    changes meanwhile.
    """
    unread = model.unread
    assert unread is not None
    folder = adapter_base(unread.folder) or unread.folder
    checksums = read_checksums(folder)
    digests = {name: checksums[name] for name in weight_files(folder) if name in checksums}
    states = {name: file_state(folder / name) for name in digests}
    compare_together(ranks, folder, digests, MEND, CheckpointError)

    def read_unchanged() -> None:
        read(StoredWeights(unread))
        changed = [name for name, state in states.items() if file_state(folder / name) != state]
        if changed:
            raise CheckpointError(
                f"{folder / changed[0]} changed while it was read; start again once nobody writes it."
            )

    ranks.run_on_ranks(read_unchanged, "the weights of a model")


@torch.no_grad()
def fill_shards(model: CausalLM, ranks: Ranks) -> None:
    """`read_on_ranks` of a model sharded by FSDP2. It takes the share's memory and, if the files have another
    dtype, a few MiB. Raises `ModelError` also for a share without enough memory.
    """
    unread = model.unread
    assert unread is not None
    empty = {names[0] for names, tensor in own_tensors(model.module) if tensor.is_meta}

    def allocate_parameter(old: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(old, device=unread.device), requires_grad=old.requires_grad)

    def read_share(stored: StoredWeights) -> None:
        nbytes = sum(local_part(tensor)[0].nbytes for _, tensor in own_tensors(model.module))
        with _share_memory(unread.folder, ranks.rank, nbytes):
            replace_empty(model.module, unread.device, allocate_parameter)
        for names, tensor in own_tensors(model.module):
            if names[0] in empty or not isinstance(tensor, nn.Parameter):  # others were made since
                local, start = local_part(tensor)
                stored.read(names, width_of(tensor.shape), start, local)

    read_on_ranks(model, ranks, read_share)
    model.mark_filled()


def width_of(shape: Sequence[int]) -> int:
    """Return the number of elements in a row."""
    return math.prod(shape[1:])


@contextmanager
def _share_memory(folder: Path, rank: int, nbytes: int) -> Iterator[None]:
    """Raise `ModelError` if the block cannot allocate `nbytes`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise ModelError(
            f"rank {rank} has no memory for its share of {folder}, {nbytes} bytes"
            f" ({reason_of(error)[-120:]}); start more ranks, or free some memory."
        ) from error


def require_memory(model: CausalLM, ranks: Ranks, numbers: int, each: int) -> None:
    """Raise `ModelError` on all ranks if one lacks memory for its `numbers` of the weights, at `each` bytes
    per number with all their state.
    """
    unread = model.unread
    assert unread is not None

    def allocate_share() -> None:
        with _share_memory(unread.folder, ranks.rank, numbers * each):
            torch.empty(numbers * each, dtype=torch.uint8, device=unread.device)

    ranks.run_on_ranks(allocate_share, "the memory for a model")


@torch.no_grad()
def put_in_file(model: CausalLM, folder: Path, *, read: bool = False) -> None:
    """Map the weights of `model` (from `open_empty`) to a file without a name in `folder`, instead of memory.
    The system writes them there when it needs memory. The caller sets their values, unless they are `read`
    from the model's folder. Raises `OSError` if the disk has no space for them.
    """
    unread = model.unread
    assert unread is not None
    empty = [(names, tensor.shape) for names, tensor in own_tensors(model.module) if tensor.is_meta]
    with tempfile.TemporaryFile(dir=folder) as file:

        def map_parameter(old: nn.Parameter) -> nn.Parameter:
            offset, size = os.fstat(file.fileno()).st_size, max(1, old.nbytes)
            size += -size % mmap.ALLOCATIONGRANULARITY
            # Without this, writing a page that the disk has no space for would end the process.
            os.posix_fallocate(file.fileno(), offset, size)
            # Each is mapped by itself: tensors that share a storage would be copied when they are saved.
            pages = torch.frombuffer(mmap.mmap(file.fileno(), size, offset=offset), dtype=torch.uint8)
            values = pages[: old.nbytes].view(old.dtype).view(old.shape)
            return nn.Parameter(values, requires_grad=old.requires_grad)

        replace_empty(model.module, torch.device("cpu"), map_parameter)
    if read:
        stored = StoredWeights(unread)
        by_name = {name: tensor for names, tensor in own_tensors(model.module) for name in names}
        for names, shape in empty:
            stored.read(names, width_of(shape), 0, by_name[names[0]])
    model.mark_filled()


def replace_empty(
    module: nn.Module, device: torch.device, make: Callable[[nn.Parameter], nn.Parameter]
) -> None:
    """Replace every parameter on the meta device by `make(old)`, one after another, and move buffers to
    `device`. Tied parameters stay tied.
    """
    replacements: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if old.is_meta:
                if id(old) not in replacements:
                    replacements[id(old)] = make(old)
                part._parameters[name] = replacements[id(old)]
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def own_tensors(module: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Yield every tensor of the state with all its names in a folder; tied ones once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name.replace(_BASE_LAYER, "."))
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def compare_together(
    ranks: Ranks, root: Path, digests: Mapping[str, str], mend: str, kind: type[OpdError]
) -> None:
    """Run `check_files` on all `ranks`, with the same answer on each. A rank hashes its share of the files
    that it and others see alike, so a machine reads each once.
    """
    view = [_BOOT.read_text() if _BOOT.exists() else os.uname().nodename]
    view += [repr(file_state(root / name)) for name in digests]
    everyone = ranks.gather_json(view, "the files of a model")
    peers = [rank for rank, other in enumerate(everyone) if other == view]
    mine = sorted(digests)[peers.index(ranks.rank) :: len(peers)]
    ranks.run_on_ranks(
        lambda: check_files(root, {name: digests[name] for name in mine}, mend, kind),
        "the digests of a model",
    )
