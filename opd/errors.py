"""Errors a user can meet. Each is one sentence: the fault, its place and the fix.

Every class also inherits the built-in type a caller would expect to catch. The command line prints the
sentence and exits with status 2. `from_system` converts a refusal of the machine (a full disk, no
permission). Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from opd.redact import redact


class OpdError(Exception):
    """Base of every error `opd` raises on purpose. Its sentence holds no secret, wherever it is written."""

    of_own_code = False
    """Whether the user's code is at fault. If so, a run can go on once the user has fixed it."""

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigError(OpdError, ValueError):
    """A recipe, an override or an option is wrong."""


class DataError(OpdError, ValueError):
    """A data set or a domain cannot be used."""


class ModelError(OpdError, ValueError):
    """A model, head or tokenizer cannot be used, or two of them do not fit together."""


class CheckpointError(OpdError, OSError):
    """A checkpoint is missing, incomplete or corrupt."""


class StorageError(OpdError, OSError):
    """A store, published model, log or cache cannot be read or written, or holds wrong bytes."""


class RewardError(OpdError, RuntimeError):
    """A reward function raised, timed out or returned something that is not a finite number."""

    of_own_code = True


class TeacherError(OpdError, RuntimeError):
    """A teacher is missing, unreachable or returned something unusable."""


class RolloutError(OpdError, RuntimeError):
    """The rollout engine cannot serve a request."""


class LaunchError(OpdError, RuntimeError):
    """The processes of a run cannot be placed, reached or kept going."""


class PreemptedError(OpdError, RuntimeError):
    """The run was asked to stop and did. Nothing acknowledged is lost."""


class TrainingError(OpdError, RuntimeError):
    """A training step cannot go on: no signal left, or a number that is not finite."""


class RanksError(OpdError, RuntimeError):
    """The processes of one run cannot go on together: one has ended, hangs, or cannot be reached."""


class TeacherRanksError(TeacherError, RanksError):
    """Teachers that ranks read as a group cannot be read, because a rank is gone."""


class RunFolderError(OpdError, OSError):
    """A run folder exists already, belongs to another run, or does not match the recipe."""


class MissingExtraError(OpdError, ImportError):
    """An optional dependency is needed. The sentence names the extra that brings it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(feature, extra)

    def __str__(self) -> str:
        feature, extra = self.args
        advice = f"install it with `pip install 'opd[{extra}]'`."
        return f"{redact(str(feature))} needs an optional dependency: {advice}"


@contextlib.contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` in the block into `MissingExtraError`: `feature` needs the extra `extra`."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, extra) from error


_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota of the disk is used up; free some space",
    errno.EFBIG: "the file would be larger than this process may write; raise the limit (`ulimit -f`)",
    errno.EACCES: "access is refused; check the permissions",
    errno.EPERM: "access is refused; check the permissions",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ENOTDIR: "there is a file where a folder is needed; move it away, or choose another place",
    errno.EISDIR: "there is a folder where a file is needed; move it away, or choose another place",
    errno.ENXIO: "there is a link, a pipe or a device where a file is needed; move it away, or choose another"
    " place",
    errno.EEXIST: "there is something already; move it away, or choose another place",
    errno.ENOTEMPTY: "the folder is not empty; is another process writing into it?",
    errno.ENOENT: "there is no such file or folder; check the path, and that nobody else removes files there",
    errno.ELOOP: "its links lead in a circle; mend them",
    errno.EIO: "the disk answers with an error; check it, or choose another place",
    errno.ESTALE: "the network's file system has lost it; check the mount",
    errno.EMFILE: "this process has too many files open; raise the limit (`ulimit -n`)",
    errno.ENFILE: "the machine has too many files open; end other processes",
    errno.EAGAIN: "the system gives no more processes or threads; raise the limit (`ulimit -u`), and those of"
    " memory where they are set (`ulimit -d`, `ulimit -v`): each thread takes some",
    errno.ENOMEM: "the machine has no more memory; free some, raise the limit (`ulimit -v`), or use a smaller"
    " batch",
}
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    FileExistsError: errno.EEXIST,
    MemoryError: errno.ENOMEM,
}
"""Error numbers for errors that libraries raise without one."""
_WORDS = {
    "failed to map segment": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "ThreadPoolBuildError": errno.EAGAIN,
}
"""Error numbers for errors with neither a number nor a type of their own: a library that is loaded, a thread,
threads of C++ and of a tokenizer.
"""


def from_system(error: BaseException) -> OpdError | None:
    """Return the machine's refusal as a sentence with the path and the fix, or `None` if `error` is a bug.

    Errors of libraries count too: a compiled one says `(os error 28)` in its text, or ends it with `(28)`.
    """
    if isinstance(error, OpdError):
        return error
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return OpdError("the name of a file holds a NUL character; take it out.")
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if number is None:
        match = re.search(r"\(os error (\d+)\)|^unable to .* \((\d+)\)$", str(error))
        fallback = next((of for kind, of in _NUMBERS.items() if isinstance(error, kind)), None)
        fallback = fallback or next((of for words, of in _WORDS.items() if words in str(error)), None)
        number = int(match[1] or match[2]) if match else fallback
    if number not in _ADVICE:
        return None
    return OpdError(
        f"{_error_path(error)}{_ADVICE[number]}, then run the command again, a run with --resume."
    )


def reason_of(error: BaseException) -> str:
    """Return the text of `error` on one line without the last full stop, for use in a sentence. If the text
    is empty, return the name of its type.
    """
    words = " ".join(str(error).split()).removesuffix(".")
    if type(error) is KeyError and words:
        return f"there is no {words}"
    return words or type(error).__name__


_OF_PROCESS = (errno.EMFILE, errno.ENFILE, errno.EFBIG)


def short_repr(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def limit_fix(error: OSError, otherwise: str) -> str:
    """Return the fix for `error`of a process limit, else `otherwise`, which is about the file."""
    return error_fix(error, otherwise) if error.errno in _OF_PROCESS else otherwise


def error_fix(error: OSError, otherwise: str) -> str:
    """Return the fix for a refusal of the machine, or `otherwise` if none is known."""
    return _ADVICE[error.errno].partition("; ")[2] if error.errno in _ADVICE else otherwise


def is_of_library(error: BaseException) -> bool:
    """Return whether `error` says that a library failed. True for any `Exception` and for the panic of a
    compiled library, which is none. False if the machine refused something.
    """
    panic = type(error).__name__ == "PanicException"
    return (isinstance(error, Exception) or panic) and (
        isinstance(error, OpdError) or from_system(error) is None
    )


def _error_path(error: BaseException) -> str:
    """Return the path that `error`, or a note added to it on the way, names."""
    notes = getattr(error, "__notes__", [])
    names = [note.removeprefix(_WRITING) for note in reversed(notes) if note.startswith(_WRITING)]
    names += [getattr(error, "filename", None), getattr(error, "filename2", None)]
    for name in names:  # the outermost one: in a folder that appears by one rename, names are temporary
        if name is not None and not isinstance(name, int):
            return f"{os.fsdecode(name)}: "
    quoted = re.search(r"(?:^|[\s\"'(<])(/[^\"':\s)>]+)", str(error))
    return f"{quoted[1]}: " if quoted else ""


_WRITING = "while writing "
"""Prefix of the note that names the file or folder which an error has left unwritten."""


@contextlib.contextmanager
def add_path_note(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give errors of the block, which name no file or a temporary one, the path that was being written."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{_WRITING}{os.fspath(path)}")
        raise
