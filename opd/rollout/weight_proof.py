"""Verification that a server holds the weights it was given."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.errors import RolloutError
from opd.models.causal_lm import DTYPES, bytes_of, raw_bytes
from opd.models.quantisation import KEYS
from opd.served.scoring import HALF
from opd.storage.files import read_object

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused tensor of a server -> the tensors it consists of."""
EXPERTS = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Tensor of a server for all experts of a layer -> the tensors that files have of each expert, by either of
their names."""
VOCABULARY_ROWS = 64
DIGITS = 16
"""Least hexadecimal digits of a tensor's checksum."""
RELEASE = "SGLang 0.5.23 or vLLM 0.32.0"
"""Releases whose checksums are known here."""
FORM = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Keys on which configurations of models with the same tensors agree."""


def check_form(
    url: str, info: Mapping[str, object], reported: Iterable[str], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise `RolloutError` if a server holds tensors that are not in `weights`, or lacks some. Weights of
    another form would end its process.

    Args:
        info: Its facts about its model.
        reported: Names of its tensors.
        weights: The weights it is to be given.
    """
    tensors, used = dict(weights), set()
    for name in reported:
        parts = _source_names(name, tensors)
        if parts is None and not _is_computed(name):
            raise RolloutError(
                f"{url} serves {info.get('model_path')} with a tensor {name}, which the student has not;"
                " serve the student's own architecture."
            )
        used.update(parts or ())
    missing = tensors.keys() - used
    if missing:
        raise RolloutError(
            f"{url} serves {info.get('model_path')} without {min(missing)}, which the student has; serve the"
            " student's own architecture."
        )


def check_config(url: str, info: Mapping[str, object], config: Mapping[str, object]) -> None:
    """Raise `RolloutError` if a server's model has another form than the student's Hugging Face `config`, or
    began with quantised weights. Sizes are compared if its folder can be read here. The server reports the
    kind itself.
    """
    theirs = {key: info.get(key) for key in FORM}
    file = Path(str(info.get("model_path"))) / "config.json"
    if file.is_file():
        mend = "serve a model whose configuration can be read, or from a machine of its own."
        theirs |= read_object(file, mend, RolloutError)
    if theirs.get(KEYS[0]) is not None:
        raise RolloutError(
            f"{url} serves {info.get('model_path')}, whose weights are quantised, and is to be sent numbers;"
            " serve the student's plain folder."
        )
    for key in FORM:
        served, expected = theirs.get(key), config.get(key)
        if served is not None and expected is not None and served != expected:
            raise RolloutError(
                f"{url} serves {info.get('model_path')} with {key} {served}, the student has {expected};"
                " serve the student's own architecture."
            )


class Proof:
    """The checksums of a worker that holds `weights`. They are computed from the trainer's bytes, cast and
    cut as on the worker. Each is computed once for all workers.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._known = dict(weights)
        own_dtypes = {tensor.dtype for tensor in self._known.values() if tensor.is_floating_point()}
        dtypes = [*own_dtypes, *(dtype for dtype in DTYPES.values() if dtype not in own_dtypes)]
        self._forms = [(dtype, how) for dtype in dtypes for how in CHECKSUMS]
        self._found: dict[tuple[str, str, torch.dtype, str], str] = {}
        self._lock = threading.Lock()

    def check(
        self,
        url: str,
        ranks: Iterable[Mapping[str, Any]],
        settings: Mapping[str, Any],
        packed: Collection[str] = (),
    ) -> None:
        """Raise `RolloutError` unless every tensor that a worker's ranks report is the trainer's, and none of
        the trainer's is left out.

        Args:
            url: Names the worker.
            ranks: Its report of each rank: its place and its tensors' checksums.
            settings: Its `dtype` and `device`.
            packed: Names of tensors that it holds in another form and does not report. They must be verified
                in another way.
        """
        dtype, device = DTYPES.get(str(settings.get("dtype"))), str(settings.get("device"))
        with self._lock:
            # The forms that match the worker's settings are tried first.
            self._forms.sort(key=lambda form: (form[0] != dtype) + (form[1] != device))
            used: set[str] = set()
            for rank in ranks:
                places = rank.get("parallelism_info") or [{}]
                # Its draft models are other models. Their names begin with their role.
                roles = tuple(f"{info.get('role', 'target')}." for info in places)
                checksums = {n: s for n, s in rank["checksums"].items() if not n.startswith(roles)}
                used |= self._check_rank(url, checksums, places[0])
            for name in packed:
                used.update(_source_names(name, self._known) or ())
            missing = self._known.keys() - used
        if missing:
            raise RolloutError(
                f"after the push {url} says nothing of {min(missing)}, which the trainer has given it; serve"
                " the student's own architecture."
            )

    def _check_rank(self, url: str, checksums: Mapping[str, str], info: Mapping[str, object]) -> set[str]:
        """Return the verified names of `checksums`. Small tensors come first, to find their form."""
        used, right, wrong = set(), 0, ""
        parts_of = {name: _source_names(name, self._known) for name in checksums if not _is_computed(name)}
        sizes = {n: sum(self._known[p].numel() for p in parts or ()) for n, parts in parts_of.items()}
        for name in sorted(parts_of, key=sizes.__getitem__):
            parts = parts_of[name]
            if parts is None:
                raise RolloutError(
                    f"{url} holds {name}, which was not pushed; serve the student's own architecture."
                )
            if self._checksum_matches(name, parts, checksums[name], info):
                right += 1
                used.update(parts)
            else:
                wrong = wrong or name
            if wrong and right:
                raise RolloutError(
                    f"after the push {url} holds another {wrong} than the trainer; restart it and --resume."
                )
        if wrong:
            raise RolloutError(
                f"after the push {url} proves none of its tensors to be the trainer's, {wrong} among them: it"
                f" holds others, or is no {RELEASE}; restart it with that and --resume."
            )
        return used

    def _checksum_matches(self, name: str, parts: list[str], checksum: str, info: Mapping[str, Any]) -> bool:
        rank, size = int(info.get("tp_rank") or 0), int(info.get("tp_size") or 1)
        for form in self._forms:
            dtype, how = form
            tensors = [self._known[part].to(dtype) for part in parts]
            slices = _expert_slices if name.rpartition(".")[2] in EXPERTS else _rank_slices
            for cut, content in slices(name, tensors, rank, size):
                key = (name, cut, dtype, how)
                if key not in self._found:
                    self._found[key] = CHECKSUMS[how](content())
                if len(checksum) >= DIGITS and self._found[key].startswith(checksum):
                    self._forms.sort(key=lambda other: other != form)  # most likely also the next tensor's
                    return True
        return False


def _rank_slices(
    name: str, parts: list[Tensor], rank: int, size: int
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the ways in which rank `rank` of `size` may hold a tensor, joined from `parts`, each with a name.

    Rows or columns are cut over the ranks, or not at all. Several ranks may hold the same keys and values.
    """
    if "embed_tokens" in name or "lm_head" in name:
        for multiple in dict.fromkeys((VOCABULARY_ROWS, VOCABULARY_ROWS * size)):
            yield f"rows of {multiple}, {rank}/{size}", partial(_padded_rows, parts[0], multiple, rank, size)
        return
    groups = [g for g in range(size, 0, -1) if size % g == 0] if len(parts) == 3 else [size]
    for shared in groups:
        places = [(rank, size), *[(rank * shared // size, shared)] * (len(parts) - 1)]
        if all(len(part) % n == 0 for part, (_, n) in zip(parts, places, strict=True)):
            yield (
                f"rows {rank}/{size}/{shared}",
                lambda at=places: torch.cat(
                    [_row_slice(p, i, n) for p, (i, n) in zip(parts, at, strict=True)]
                ),
            )
    if size > 1 and len(parts) < 3:
        yield "whole", lambda: torch.cat(parts)
    if size > 1 and len(parts) == 1 and parts[0].dim() == 2 and parts[0].shape[1] % size == 0:
        yield f"columns {rank}/{size}", lambda: parts[0].chunk(size, dim=1)[rank].contiguous()


def _expert_slices(
    name: str, parts: list[Tensor], rank: int, size: int
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the ways in which rank `rank` of `size` may hold the experts of a layer, each with a name. They
    are [experts, rows, columns], joined from `parts`: those of the first expert, then of the second. Groups
    of ranks have experts of their own. In a group, rows (`w13`) or columns (`w2`) are cut over its ranks.
    """
    last = name.rpartition(".")[2]
    joined, axis = len(EXPERTS[last][0]), 0 if last == "w13_weight" else 1
    experts = len(parts) // joined
    for groups in (g for g in range(1, size + 1) if size % g == 0 and experts % g == 0):
        group, cuts = rank // (size // groups), size // groups
        if parts[0].shape[axis] % cuts:
            continue
        chosen = parts[group * len(parts) // groups : (group + 1) * len(parts) // groups]
        place = rank % cuts
        yield (
            f"experts {group}/{groups}, {place}/{cuts}",
            lambda chosen=chosen, cuts=cuts, place=place: torch.stack(
                [
                    torch.cat([part.chunk(cuts, axis)[place] for part in chosen[at : at + joined]])
                    for at in range(0, len(chosen), joined)
                ]
            ),
        )


def _padded_rows(weight: Tensor, multiple: int, index: int, count: int) -> Tensor:
    """A server pads the rows of embedding and head with zeros to a multiple."""
    missing = -len(weight) % multiple
    return _row_slice(torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]), index, count)


def _row_slice(tensor: Tensor, index: int, count: int) -> Tensor:
    rows = len(tensor) // count
    return tensor[index * rows : (index + 1) * rows]


def _is_computed(name: str) -> bool:
    """Return True if a server computes the tensor from the configuration."""
    return "rotary" in name or "cos_sin" in name


def _source_names(name: str, weights: Mapping[str, Tensor]) -> list[str] | None:
    if name in weights:
        return [name]
    if name == "lm_head.weight" and "model.embed_tokens.weight" in weights:
        return ["model.embed_tokens.weight"]
    block, _, last = name.replace(".routed_experts.", ".").rpartition(".")  # of vLLM
    for singles in EXPERTS.get(last, ()):
        names = (tuple(f"{block}.{number}.{single}.weight" for single in singles) for number in count())
        experts = list(takewhile(lambda expert: all(one in weights for one in expert), names))
        if experts:
            return [one for expert in experts for one in expert]
    for fused, singles in FUSED.items():
        parts = [name.replace(fused, single) for single in singles]
        if fused in name and all(part in weights for part in parts):
            return parts
    return None


def _of_cpu(tensor: Tensor) -> str:
    """The checksum of a server on a CPU, or more digits of it: the sha256 of the tensor's bytes."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


_TILE = 8192
"""32-bit words per tile of a hash."""
_AT_ONCE = 512 * _TILE
_WORD, _LONG = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88
_LANES = (
    (_SEED, 0x27D4EB2D, 15),
    (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD, 0x165667B1, 13),
)
"""Seed, multiplier of the position and its rotation, of the two halves of a hash."""


def _of_cuda(tensor: Tensor) -> str:
    """The checksum of a server on a GPU: SGLang's own hash, 16 hexadecimal digits.

    Each 32-bit word is mixed with its position. The words of a tile are summed and mixed with the length, and
    the tiles are summed again: `sglang/kernels/ops/memory/gpu_tensor_hash.py`, in wrapping int32.
    """
    content = raw_bytes(tensor.cpu())
    words = torch.nn.functional.pad(content, (0, -len(content) % 4)).view(torch.int32)
    if not len(words):
        return f"{0:016x}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, total = _wrap_int32(4 * len(words) & _WORD), 0
    for start in range(0, len(words), _AT_ONCE):
        some = words[start : start + _AT_ONCE].to(device)
        position = torch.arange(start, start + len(some), device=device).to(torch.int32)
        halves = []
        for seed, factor, turn in _LANES:
            rotated = (position << turn) | _shift_right(position, 32 - turn)
            mixed = _mix_bits(some ^ ((position * _wrap_int32(factor) + _wrap_int32(seed)) ^ rotated))
            tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE)
            halves.append(_mix_bits(tiles.sum(1).to(torch.int32) ^ length).long() & _WORD)
        total += int(((halves[0] << 32) | halves[1]).sum())
    value = total & _LONG  # mixed by the last step of splitmix64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _LONG
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _LONG
    return f"{value ^ value >> 31:016x}"


def _mix_bits(words: Tensor) -> Tensor:
    """Apply MurmurHash3's last step to int32 words."""
    words = (words ^ _shift_right(words, 16)) * _wrap_int32(0x85EBCA6B)
    words = (words ^ _shift_right(words, 13)) * _wrap_int32(0xC2B2AE35)
    return words ^ _shift_right(words, 16)


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Shift int32 words right without their sign."""
    return (words >> count) & ((1 << (32 - count)) - 1)


def _wrap_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


CHECKSUMS: dict[str, Callable[[Tensor], str]] = {"cpu": _of_cpu, "cuda": _of_cuda}
"""By the device a server runs on."""


def apart_at_most(theirs: float, weights: Iterable[tuple[str, Tensor]]) -> float:
    """Nats by which a server's log-probabilities may differ from those computed here with `weights`. `theirs`
    is the tolerance of its own dtype. The coarser of the two dtypes counts.
    """
    return theirs if all(tensor.dtype == torch.float32 for _, tensor in weights) else max(theirs, HALF)
