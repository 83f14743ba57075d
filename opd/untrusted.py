"""Validate untrusted input: names, sizes and JSON from a store, a server or a folder.

Input from there may have been made to lead elsewhere, to fill the memory or to hang. This module has the one
pattern for names and the one reader of small documents. All other input is compared with them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from opd.errors import OpdError, StorageError
from opd.redact import redact

MAX_DEPTH = 64
"""Limit of nested lists and objects in a small document."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_MAX_NAME_BYTES = 255
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error,
)  # fmt: skip


def is_file_name(name: object) -> TypeGuard[str]:
    """Return whether `name` can name a file inside a folder and nothing else. Allowed: at most 128 ASCII
    letters, digits and `. _ -`, beginning with a letter or digit, not ending with a dot, and not the name of
    a device.
    """
    return (
        isinstance(name, str)
        and _FILE_NAME.fullmatch(name) is not None
        and not name.endswith(".")
        and _DEVICE.fullmatch(name) is None
    )


def object_path(path: str) -> str:
    """Return `path` if it stays below its base.

    Raises `StorageError` for an absolute path, an empty part, `.` and `..`, a backslash, unprintable
    characters and a part of more than 255 bytes.
    """
    parts = path.split("/")
    if (
        not path.isprintable()
        or "\\" in path
        or any(part in ("", ".", "..") or len(os.fsencode(part)) > _MAX_NAME_BYTES for part in parts)
    ):
        raise StorageError(
            f"{safe_excerpt(path)!r} names no object below a store; it has parts of at most {_MAX_NAME_BYTES}"
            " bytes between single slashes, none of them `.` or `..`."
        )
    return path


def read_document(data: bytes | str, most: int, constant: Callable[[str], Any] | None = None) -> Any:
    """Parse the JSON in `data`. Raises `ValueError` with the reason if it has more than `most` bytes, is
    nested deeper than `MAX_DEPTH`, is no JSON, or holds NaN or infinity and `constant` does not convert them.
    """
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes where at most {most} are read")
    try:
        value = json.loads(
            data, parse_constant=constant or no_constant, parse_float=_finite_float, parse_int=parse_integer
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None
    if depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def indexed_files(index: dict[str, Any]) -> list[str]:
    """Return the files that an index of safetensors (`model.safetensors.index.json`) names, in order.

    Raises `ValueError` with the reason if it is no list of files in its folder.
    """
    files = index.get("weight_map")
    if files is None:
        raise ValueError("it has no weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"its weight_map is a {type(files).__name__} and no object")
    if not files:
        raise ValueError("its weight_map is empty")
    for tensor, name in files.items():
        if not is_file_name(name):
            fault = (
                f"names {safe_excerpt(name)!r}" if isinstance(name, str) else f"has a {type(name).__name__}"
            )
            raise ValueError(
                f"it {fault} as the file of {safe_excerpt(tensor)!r}, which is no file beside it"
            )
    return sorted(set(files.values()))


_LONGEST_NUMBER = 1000
"""Limit in characters: a longer number is a mistake, and Python's own refusal advises to let it pass."""


POINTER = "it is a pointer of Git LFS in place of the file; fetch the file with `git lfs pull`"
"""The fault of a text for which `is_pointer` holds, and its fix."""


def is_pointer(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a Git LFS pointer in place of a large file."""
    return head.startswith(b"version https://git-lfs")


def is_unset(value: object) -> bool:
    """Return whether a JSON setting requests nothing: null, false, or an empty text, list or object."""
    return value is None or value is False or value in ("", [], {})


def parse_integer(text: str) -> int:
    """Parse the number in `text`, for `json.loads`. Raises `ValueError` if it has thousands of digits."""
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits where {_LONGEST_NUMBER:,} are read")
    return int(text)


@contextlib.contextmanager
def convert_decode_errors(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `refusal(cause)` if decoding in the block fails because the input has another form.

    A correct checksum proves the bytes. It does not prove that the writer knew the form.
    """
    try:
        yield
    except OpdError:
        raise
    except _UNREADABLE as error:
        raise refusal(safe_excerpt(error) or type(error).__name__) from error


def depth_exceeds(value: object, most: int) -> bool:
    """Return whether lists and dictionaries in `value` nest deeper than `most`."""
    level = [value]
    for _ in range(most + 1):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        if not inner:
            return False
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def escape_unprintable(text: str) -> str:
    """Return `text` with unprintable characters escaped, so that none moves a cursor or hides a line."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def escape_controls(text: str, allowed: str = "\n\t") -> str:
    """Return `text` with acting characters escaped, blanks and letters of any script unchanged. Acting are
    control characters except `allowed`, those that change the writing direction, and halves of characters,
    which no file can hold.
    """
    return _ACTING.sub(
        lambda match: match[0] if match[0] in allowed else match[0].encode("unicode_escape").decode(), text
    )


def safe_excerpt(text: object, most: int = 100) -> str:
    """Return `text`, cut, for an error. Characters that a terminal or a log would not print are escaped.
    Secrets are hidden before the cut, because half a secret would not be recognised.
    """
    return escape_unprintable(redact(str(text))[:most])


_CUT = "\n[... {} characters left out ...]\n"


def shorten_text(text: str, most: int) -> str:
    """Return `text`, with its middle replaced by a note if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return text[: most - half] + _CUT.format(f"{len(text) - most:,}") + text[len(text) - half :]


GROUP = Path("/sys/fs/cgroup")
"""Files with the limits of this process's control group."""


def bounded_integer(value: object, least: int, most: int, label: str) -> int:
    """Return `value` if it is an integer from `least` to `most`. Else raise `ValueError` naming `label`."""
    if type(value) is not int or not least <= value <= most:
        # `str` of a number of thousands of digits is an error of its own.
        large = isinstance(value, int) and abs(value) > 10**30
        shown = "too large" if large else safe_excerpt(repr(value), 40)
        raise ValueError(f"{label} is {shown} and must be a whole number from {least} to {most}")
    return value


def require_memory(nbytes: int, subject: str) -> None:
    """Raise `StorageError` if the machine has less memory than `nbytes`, before anything allocates them."""
    have = machine_memory()
    if nbytes > have:
        raise StorageError(
            f"{subject} has {nbytes} bytes and this machine has {have} bytes of memory; check that it is the"
            " model you mean, or use a larger machine."
        )


def core_count() -> int:
    """Return the number of processors this process may use, within the limit of its group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (GROUP / "cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return count


def ranks_here(default: int = 1) -> int:
    """Return the number of ranks on this machine (torchrun's `LOCAL_WORLD_SIZE`), or `default` without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_memory() -> int:
    """Return the machine's memory in bytes, within the limit of the process's group."""
    return min(machine_memory(), _of_group("memory.max"))


def free_memory() -> int:
    """Return the free memory in bytes, within the limit of the process's group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = machine_memory()
    return min(free, max(0, _of_group("memory.max") - _of_group("memory.current", 0)))


def _of_group(name: str, otherwise: int = sys.maxsize) -> int:
    try:
        return int((GROUP / name).read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return otherwise


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {safe_excerpt(text)} is too large")
    return value


def no_constant(name: str) -> NoReturn:
    """Raise `ValueError` for NaN or infinity in JSON."""
    raise ValueError(f"it holds {name}, which is no number of JSON")
