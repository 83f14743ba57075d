"""A folder of safetensors: the files with the model's weights, and the position of each tensor.

All readers of such a folder use this module, so that all of them read the same. If two programs could take
different files or values for the weights, the folder is refused: an index beside other weights, a tensor in
two files or in another than the index says, files that nothing names.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from opd.errors import CheckpointError, OpdError, StorageError, limit_fix, reason_of
from opd.storage.files import file_fix, fill_from, read_object
from opd.storage.manifest import DTYPE_BYTES
from opd.untrusted import bounded_integer, indexed_files, read_document, safe_excerpt

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FOLLOWING = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias|(^|\.)position_ids)$")
"""Names of buffers that older releases saved and that follow from the configuration: no weights."""
_OTHER_PROGRAMS = re.compile(r"consolidated[-.\w]*\.safetensors")
"""The same weights for Mistral's own programs. Mistral publishes both in one folder."""
_MAX_HEADER = 100 * 2**20


def weight_files(folder: Path) -> list[str]:
    """Return the files of the weights in `folder`, in order, or none if it has neither `INDEX` nor `SINGLE`.

    Raises `CheckpointError` for an invalid index, and if other safetensors lie beside these files.
    """
    present = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file():
        path = folder / INDEX
        index = read_object(path, "copy it again from its source.", CheckpointError)
        try:
            names = indexed_files(index)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is no index of weights: {error}; copy it again from the model's source."
            ) from None
        refuse_both(folder, names, present)
    else:
        names = [SINGLE] if (folder / SINGLE).is_file() else []
    others = sorted(name for name in present - set(names) if not _OTHER_PROGRAMS.fullmatch(name))
    if others and present.issuperset(names) and names:
        has_index = (folder / INDEX).is_file()
        fault = f"{INDEX} does not name it" if has_index else f"is not part of {SINGLE}"
        raise CheckpointError(
            f"{folder / safe_excerpt(others[0])} lies beside the weights and {fault}, so some programs"
            " would read it and others not; move it elsewhere."
        )
    return names


def refuse_both(folder: object, names: list[str], present: Collection[str]) -> None:
    """Raise `CheckpointError` if `SINGLE` is `present` in `folder` beside an index with other `names`."""
    if SINGLE in present and names != [SINGLE]:
        other = next(name for name in names if name != SINGLE)
        raise CheckpointError(
            f"{folder} holds {SINGLE} and an {INDEX} that names {safe_excerpt(other)}, so programs take"
            " different weights for its own; move away the one that is not the model's."
        )


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Position of a tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@contextmanager
def convert_read_errors(path: Path, kind: type[OpdError]) -> Iterator[None]:
    """Convert errors of opening and reading `path` of a model to `kind`."""
    try:
        yield
    except OpdError:
        raise
    except EOFError as error:
        raise kind(f"{path} became shorter while it was read; copy it again.") from error
    except OSError as error:
        mend = limit_fix(error, "copy it again")
        raise kind(f"{path} cannot be read ({error.strerror or error}); {mend}.") from error


def read_header(path: Path, metadata: dict[str, Any] | None = None) -> dict[str, TensorSource]:
    """Return every tensor of one safetensors file, by name, and add the file's metadata to `metadata`. Raises
    `StorageError` naming a file that is missing, truncated or not safetensors.
    """
    try:
        with path.open("rb") as file:
            return sources_in(file, path, metadata)
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing; copy it again from the model's source.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is truncated or is no safetensors file ({reason_of(error)});"
            f" {file_fix(path, 'copy it again from its source')}."
        ) from error


def sources_in(file: BinaryIO, path: Path, metadata: dict[str, Any] | None = None) -> dict[str, TensorSource]:
    """`read_header` for an open file. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it
    is no complete safetensors file.
    """
    total = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if total < 8 or length > min(_MAX_HEADER, total - 8):
        raise ValueError("its header is cut off")
    header = read_document(file.read(length), _MAX_HEADER)
    file_metadata = header.pop("__metadata__", None) or {}
    if metadata is not None:
        metadata.update(file_metadata)
    base = 8 + length
    sources: dict[str, TensorSource] = {}
    for name, entry in header.items():
        start, stop = (bounded_integer(at, 0, 2**62, f"a place of {name}") for at in entry["data_offsets"])
        sides = [bounded_integer(side, 0, 2**48, f"a side of {name}") for side in entry["shape"]]
        nbytes = DTYPE_BYTES.get(entry["dtype"], 0) * math.prod(sides)
        if not 0 <= start <= stop <= total - base:
            raise ValueError(f"the data of {name} ends beyond the file")
        if entry["dtype"] in DTYPE_BYTES and nbytes != stop - start:
            raise ValueError(f"{name} has {stop - start} bytes where its shape asks for {nbytes}")
        sources[name] = TensorSource(path, entry["dtype"], tuple(entry["shape"]), base + start, stop - start)
    return sources


def read_headers(folder: Path) -> dict[str, TensorSource]:
    """Return every tensor of the folder's `weight_files`, by name.

    Raises `StorageError` naming the file that is missing, truncated or not safetensors, and `CheckpointError`
    for a tensor that occurs twice, or elsewhere than the index says, and for names from inside a wrapper.
    """
    sources: dict[str, TensorSource] = {}
    for name in weight_files(folder) or [SINGLE]:
        for tensor, source in read_header(folder / name).items():
            if tensor in sources:
                raise CheckpointError(
                    f"{safe_excerpt(tensor)} stands in {sources[tensor].path} and in {name} too, and programs"
                    " differ in which they take; write the model again with save_pretrained, or copy it"
                    " again."
                )
            sources[tensor] = source
    for pattern, (wrapper, fix) in _WRAPPERS.items():
        wrapped = next((name for name in sources if re.search(pattern, name)), None)
        if wrapped is not None:
            raise CheckpointError(
                f"{folder} names a tensor {safe_excerpt(wrapped)}, as {wrapper} does around a model: it was"
                f" saved from inside; save the model itself with `{fix}`."
            )
    if (folder / INDEX).is_file():
        placed = read_object(folder / INDEX, "copy it again.", CheckpointError)["weight_map"]
        _refuse_misplaced(folder / INDEX, placed, sources)
    return sources


_WRAPPERS = {
    r"(^|\.)_orig_mod\.": ("torch.compile", "model._orig_mod.save_pretrained(...)"),
    r"(^|\.)_(fsdp_wrapped|fpw)_module\.": (
        "FSDP",
        "accelerator.unwrap_model(model).save_pretrained(..., state_dict=accelerator.get_state_dict(model))",
    ),
    r"(^|\.)_checkpoint_wrapped_module\.": (
        "activation checkpointing",
        "save_pretrained of the model before checkpoint_wrapper",
    ),
    r"^base_model\.model\.": ("peft", "model.merge_and_unload().save_pretrained(...)"),
    r"^_?module\.|^_forward_module\.": (
        "DistributedDataParallel or DeepSpeed",
        "model.module.save_pretrained(...)",
    ),
}
"""Pattern of the name of a tensor saved inside a wrapper -> the wrapper, and the way to save without it."""


def _refuse_misplaced(index: Path, placed: Mapping[str, str], sources: Mapping[str, TensorSource]) -> None:
    """Raise `CheckpointError` for the first tensor that is not where the index says."""
    for tensor in sorted(placed.keys() | sources.keys()):
        file = sources[tensor].path.name if tensor in sources else None
        if file == placed.get(tensor) or (tensor not in placed and FOLLOWING.search(tensor)):
            continue
        if file is None:
            wrong = f"says that {safe_excerpt(tensor)} is in {placed[tensor]}, where it is not"
        elif tensor not in placed:
            wrong = f"does not name {safe_excerpt(tensor)}, which is in {file}"
        else:
            wrong = f"says that {safe_excerpt(tensor)} is in {placed[tensor]}, and it is in {file}"
        raise CheckpointError(
            f"{index} {wrong}: the index and the files are of different models or copies; copy all of them"
            " again from one source."
        )


_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 31 << 10),
    "BF16": ("<u2", 0xFF << 7),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
}
"""The bits of an element that are all set in infinity and NaN, and in no number."""
_LOOKED_BYTES = 8 << 20


def are_numbers(dtype: str, data: bytes | bytearray | memoryview) -> bool:
    """Return whether `data`, of a safetensors type, holds neither NaN nor infinity. Integers never do."""
    import numpy as np  # late: run folders are opened, and refused, without it

    if dtype not in _EXPONENTS:
        return True
    width, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=width)
    return not bool(((bits & bits.dtype.type(mask)) == mask).any())


def no_number(folder: Path, name: str) -> CheckpointError:
    """Return the error for a tensor that holds NaN or infinity."""
    return CheckpointError(
        f"{folder} holds NaN or infinity in {safe_excerpt(name)}, as after a training that diverged or a"
        " conversion that overflowed; give a model whose weights are numbers, such as an earlier checkpoint."
    )


def check_numbers(folder: Path, most: int | None = None) -> None:
    """Read the weights in `folder` and raise `CheckpointError` naming a tensor that holds NaN or infinity.

    With `most`, read at most about so many bytes: the beginning of each tensor.
    """
    sources = read_headers(folder)
    each = None if most is None else most // max(1, len(sources)) // 8 * 8
    for name, source in sources.items():
        count = source.nbytes if each is None else min(source.nbytes, each)
        with convert_read_errors(source.path, StorageError), source.path.open("rb", buffering=0) as file:
            for start in range(0, count if source.dtype in _EXPONENTS else 0, _LOOKED_BYTES):
                data = bytearray(min(_LOOKED_BYTES, count - start))
                fill_from(file.fileno(), source.start + start, memoryview(data))
                if not are_numbers(source.dtype, data):
                    raise no_number(folder, name)
