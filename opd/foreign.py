"""What others have written: the names, sizes and JSON that may be taken from a store, a server or a folder.

Whatever is read from there may have been made to lead elsewhere, to fill the memory or to hang. Here is the
one pattern for names and the one way to read small documents; everything else is compared with it.
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
"""Of nested lists and objects in a small document."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_MAX_NAME_BYTES = 255
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error,
)  # fmt: skip


def is_file_name(name: object) -> TypeGuard[str]:
    """Whether `name` can name a file inside a folder and nothing else: letters, digits and `. _ -` of ASCII,
    128 at most, beginning with a letter or digit, not ending with a dot, and no name of a device.
    """
    return (
        isinstance(name, str)
        and _FILE_NAME.fullmatch(name) is not None
        and not name.endswith(".")
        and _DEVICE.fullmatch(name) is None
    )


def object_path(path: str) -> str:
    """`path` if it leads to something below the place it is relative to.

    Raises `StorageError` for an absolute path, an empty part, `.` and `..`, a backslash, what cannot be
    printed and a part of more than 255 bytes.
    """
    parts = path.split("/")
    if (
        not path.isprintable()
        or "\\" in path
        or any(part in ("", ".", "..") or len(os.fsencode(part)) > _MAX_NAME_BYTES for part in parts)
    ):
        raise StorageError(
            f"{shown(path)!r} names no object below a store; it has parts of at most {_MAX_NAME_BYTES} bytes"
            " between single slashes, none of them `.` or `..`."
        )
    return path


def read_document(data: bytes | str, most: int, constant: Callable[[str], Any] | None = None) -> Any:
    """The JSON in `data`. Raises `ValueError`, saying why, if it has more than `most` bytes, is nested deeper
    than `MAX_DEPTH`, is no JSON, or holds NaN or infinity, if `constant` does not say what becomes of those.
    """
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes where at most {most} are read")
    try:
        value = json.loads(
            data, parse_constant=constant or no_constant, parse_float=_finite, parse_int=whole_number
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None
    if depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def indexed_files(index: dict[str, Any]) -> list[str]:
    """Names of the files that an index of safetensors (`model.safetensors.index.json`) names, in order.

    Raises `ValueError`, saying why, if that is no list of files beside it.
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
            said = f"names {shown(name)!r}" if isinstance(name, str) else f"has a {type(name).__name__}"
            raise ValueError(f"it {said} as the file of {shown(tensor)!r}, which is no file beside it")
    return sorted(set(files.values()))


_LONGEST_NUMBER = 1000
"""Characters: what has more is a mistake, and Python's own refusal advises to let it pass."""


POINTER = "it is a pointer of Git LFS in place of the file; fetch the file with `git lfs pull`"
"""What is wrong with a text for which `is_pointer` holds, and how to mend it."""


def is_pointer(begin: bytes) -> bool:
    """Tell whether a file that begins with `begin` is what Git LFS leaves in place of a large file."""
    return begin.startswith(b"version https://git-lfs")


def is_unset(value: object) -> bool:
    """Tell whether a setting of JSON asks for nothing: null, false, or an empty text, list or object."""
    return value is None or value is False or value in ("", [], {})


def whole_number(text: str) -> int:
    """The number in `text`, for `json.loads`. Raises `ValueError` if it has thousands of digits."""
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits where {_LONGEST_NUMBER:,} are read")
    return int(text)


@contextlib.contextmanager
def decoding(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `refusal(cause)` for whatever decoding what has not the form it should have raises in the block.

    A right checksum says that bytes are what was written, not that who wrote them knew the form.
    """
    try:
        yield
    except OpdError:
        raise
    except _UNREADABLE as error:
        raise refusal(shown(error) or type(error).__name__) from error


def depth_exceeds(value: Any, most: int) -> bool:
    """Whether lists and dictionaries in `value` lie more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        if not inner:
            return False
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def printable(text: str) -> str:
    """`text` with what cannot be printed escaped: nothing in it moves a cursor or hides a line."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def visible(text: str, kept: str = "\n\t") -> str:
    """`text` with what acts instead of being read escaped: control signs but those `kept`, signs that turn
    the direction of writing around, and halves of characters, which no file can hold. Blanks and letters of
    any script stay.
    """
    return _ACTING.sub(
        lambda found: found[0] if found[0] in kept else found[0].encode("unicode_escape").decode(), text
    )


def shown(text: object, most: int = 100) -> str:
    """`text`, cut, as an error may show it: what a terminal or a log would not print is escaped, and a secret
    is hidden before the cut leaves half of it, which nobody would know again.
    """
    return printable(redact(str(text))[:most])


GROUP = Path("/sys/fs/cgroup")
"""What the control group of this process says of its limits."""


def whole(value: object, least: int, most: int, what: str) -> int:
    """`value` if it is an integer from `least` to `most`; `ValueError` naming `what` otherwise."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {_number(value)} and must be a whole number from {least} to {most}")
    return value


def require_memory(nbytes: int, what: str) -> None:
    """Raise `StorageError` if the machine has less memory than `nbytes`, before so much is asked for."""
    have = machine_memory()
    if nbytes > have:
        raise StorageError(
            f"{what} has {nbytes} bytes and this machine has {have} bytes of memory; check that it is the"
            " model you mean, or use a larger machine."
        )


def cores() -> int:
    """Processors that this process may use, within the limit of its group."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (GROUP / "cpu.max").read_text().split()
        return max(1, min(found, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return found


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_memory() -> int:
    """Bytes of memory that the machine has, within the limit of the process's group."""
    return min(machine_memory(), _of_group("memory.max"))


def free_memory() -> int:
    """Bytes of memory that are free, within the limit of the process's group."""
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


def _number(value: object) -> str:
    # `str` of a number of thousands of digits is an error of its own.
    large = isinstance(value, int) and abs(value) > 10**30
    return "too large" if large else shown(repr(value), 40)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def no_constant(name: str) -> NoReturn:
    """Raise `ValueError` for NaN or infinity in JSON."""
    raise ValueError(f"it holds {name}, which is no number of JSON")
