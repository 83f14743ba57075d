"""Files and folders that are complete or absent, known by their digests, and a lock that a dead process
cannot hold.

Everything here is durable before it is visible: data is flushed (`fsync`) first, then renamed into place,
then the folder that holds the new name is flushed. A reader never sees half of anything, and neither a `kill
-9` nor a power cut leaves more than a temporary `.NAME.XXXX.tmp`, which the next writer removes.

`MappedFile` is a memory map that costs no file descriptor and cannot be used after its end.

Data written with a digest is read with it. A sealed document is a JSON object whose entry `sha256` covers all
its other entries, in any layout. It may hold the digests of files, among them other lists of digests. So one
seal covers a whole tree, and large files are hashed once, when they are written or loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from opd.errors import OpdError, RunFolderError, StorageError, add_path_note, limit_fix
from opd.untrusted import POINTER, is_pointer, no_constant, object_path, read_document


def file_fix(path: Path, otherwise: str = "copy it again") -> str:
    """Return the fix for the file at `path`, which cannot be read in its expected form."""
    try:
        with path.open("rb") as file:
            return POINTER if is_pointer(file.read(64)) else otherwise
    except OSError:
        return otherwise


def write_atomic(
    path: str | os.PathLike[str], data: bytes, *, durable: bool = True, sweep: bool = True
) -> None:
    """Replace the file at `path` by `data`, durably: afterwards `path` holds all of `data`, before it the old
    content. Missing parent folders are made. Raises `OSError` (disk full, no permission), and `path` is then
    unchanged. Without `durable` a reader still sees a complete file, but nothing waits for the disk: a power
    cut may remove it, or leave half of it. With `sweep` the folder is listed, and temporary files of killed
    writers of `path` are removed.
    """
    with atomic_file(path, durable=durable, sweep=sweep) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(
    path: str | os.PathLike[str], *, durable: bool = True, sweep: bool = True
) -> Iterator[BinaryIO]:
    """Yield a temporary file that becomes `path`, durably, when the block ends without an error: for content
    written in pieces. Guarantees and errors are those of `write_atomic`.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if sweep:
        _sweep_temporaries(target)
    with add_path_note(target):
        while True:
            temporary = _temporary_name(target)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if _claim_entry(temporary, descriptor):
                break
    try:
        with add_path_note(target), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            # Still open, so still locked: a sweeping writer cannot take the file away before it has its name.
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(target.parent)


@contextlib.contextmanager
def atomic_folder(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error.

    All files below it are flushed before the rename. On an error nothing is left and `target` is unchanged.
    With `replace`, an existing `target` is moved aside first and removed afterwards: a reader may, for one
    moment, find neither, but never a mixture. Raises `FileExistsError` if `target` exists without `replace`.
    """
    final = Path(target)
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep_temporaries(final)
    if final.exists() and not replace:
        raise FileExistsError(f"{final} exists already; remove it or choose another place")
    with add_path_note(final):
        temporary, descriptor = _open_temporary_folder(final)
    try:
        with add_path_note(final):
            yield temporary
            for folder, _, names in os.walk(temporary):
                for name in names:
                    file = os.open(os.path.join(folder, name), os.O_RDONLY)
                    try:
                        os.fsync(file)
                    finally:
                        os.close(file)
                fsync_folder(folder)
            _replace_target(temporary, final, replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def permit_as(model: Path, folder: Path) -> None:
    """Give `folder` and all below it the permissions of the new file `model`. Some libraries write files and
    folders that nobody else may read, whatever the user's umask says.
    """
    mode = stat.S_IMODE(model.stat().st_mode)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open the file at `path` with `flags` at once and return its descriptor. Nothing else is read, written
    or waited for. Raises `OSError` with EISDIR for a folder in place of the file, and with ENXIO for a link
    (unless `follow`), a pipe or a device.
    """
    still = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags | still, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow and os.path.islink(path):
            raise _no_plain_file(errno.ENXIO, path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _no_plain_file(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, path)
    return descriptor


def _no_plain_file(number: int, path: str | os.PathLike[str]) -> OSError:
    return OSError(number, "it is no plain file", str(path))


def fill_from(descriptor: int, start: int, into: memoryview) -> None:
    """Read `into`, of bytes, from byte `start` of an open file on. `EOFError` if the file is too short."""
    done = 0
    while done < len(into):
        received = os.preadv(descriptor, [into[done:]], start + done)
        if not received:
            raise EOFError
        done += received


def write_at(descriptor: int, start: int, data: bytes | memoryview) -> None:
    """Write all of `data` to an open file from byte `start` on. Raises `OSError`."""
    unwritten = memoryview(data)
    while unwritten:
        written = os.pwrite(descriptor, unwritten, start)
        unwritten, start = unwritten[written:], start + written


def read_plain(path: str | os.PathLike[str], *, follow: bool = False) -> bytes:
    """Return the bytes of the file at `path`, opened as `open_plain` does."""
    with os.fdopen(open_plain(path, follow=follow), "rb") as file:
        return file.read()


LINGERS = 5.0
"""Seconds for which remains of a killed process may hold its lock."""


class FileLock:
    """An exclusive lock between processes, released by the system when its holder dies (`flock`).

    The file stays behind: removing it would let two processes lock two different files of one name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. If a living process holds it, raise `RunFolderError` naming the process at once."""
        if self._descriptor is not None:
            raise RunFolderError(f"{self.path} is locked by this process already; release it first")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._lock_descriptor(descriptor, fcntl.LOCK_EX)
        except BlockingIOError:
            error = self._locked_error(descriptor)
            os.close(descriptor)
            raise error from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor

    def refuse_locked(self) -> None:
        """Raise as `acquire` would while another process holds the lock. Nothing is written."""
        if not self.path.is_file():
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._lock_descriptor(descriptor, fcntl.LOCK_SH)
        except BlockingIOError:
            raise self._locked_error(descriptor) from None
        finally:
            os.close(descriptor)

    def _lock_descriptor(self, descriptor: int, how: int) -> None:
        """Lock the file, and wait for a child that a killed holder had just forked: it has the lock until it
        begins its own program.
        """
        until = time.monotonic() + LINGERS
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                is_gone = False  # whether the process that took the lock is gone from this machine
                try:
                    os.kill(int(self._read_holder(descriptor)), 0)
                except ProcessLookupError:
                    is_gone = True
                except (ValueError, OSError, OverflowError):  # nobody is named, or it is another user's
                    pass
                if time.monotonic() > until or not is_gone:
                    raise
                time.sleep(0.01)
            else:
                return

    @staticmethod
    def _read_holder(descriptor: int) -> str:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()

    def _locked_error(self, descriptor: int) -> RunFolderError:
        holder = self._read_holder(descriptor)
        who = f"process {holder}" if holder else "another process"
        return RunFolderError(
            f"{self.path.parent} is in use by {who}, which holds {self.path.name}; wait for it or stop it"
        )

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # somebody has closed it, which releases it too
                os.ftruncate(self._descriptor, 0)
                os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Remove all of `folder`, whatever was made in it. Folders are moved up to it, so that neither a path nor
    a stack grows, and no link is followed. Nobody else may be writing to it. Raises `OSError`.
    """
    moved, unlike_any, top = 0, secrets.token_hex(8), os.fspath(folder)
    os.chmod(top, 0o700)
    while inside := list(os.scandir(top)):
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if not below.is_dir(follow_symlinks=False):
                    os.unlink(below.path)
                    continue
                moved += 1
                os.chmod(below.path, 0o700)
                os.rename(below.path, os.path.join(top, f"{unlike_any}-{moved}"))
            os.rmdir(entry.path)
    os.rmdir(top)


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's list of names, so that a rename or a new file in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _open_temporary_folder(target: Path) -> tuple[Path, int]:
    while True:
        path = _temporary_name(target)
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept between its making and its opening
            continue
        if _claim_entry(path, descriptor):
            return path, descriptor


def _claim_entry(path: Path, descriptor: int) -> bool:
    """Lock a fresh temporary entry. False if another writer's sweep removed it before the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if _is_open_at(path, descriptor):
        return True
    os.close(descriptor)
    return False


def _is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _replace_target(temporary: Path, target: Path, replace: bool) -> None:
    """Rename `temporary` to `target`. An old `target` gets a temporary name first, which a sweep removes."""
    aside = _temporary_name(target)
    if replace and os.path.lexists(target):
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        if os.path.lexists(aside):
            os.rename(aside, target)
        raise
    fsync_folder(target.parent)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def _sweep_temporaries(target: Path) -> None:
    """Remove temporary entries of `target` whose writer is dead: nobody holds them locked."""
    pattern_start, pattern_end = f".{target.name}.", ".tmp"
    for path in list(target.parent.iterdir()):
        name = path.name
        if not (name.startswith(pattern_start) and name.endswith(pattern_end)):
            continue
        if len(name) != len(pattern_start) + 8 + len(pattern_end):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner's rename may have ended the wait for the lock: then the name is gone and is not ours.
            if _is_open_at(path, descriptor):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)


_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """A map of a file. `np.asarray` of it is a `[B]` uint8 view that keeps it alive.

    Python's own `mmap` keeps a descriptor open for each map. Thousands of them would exhaust the process's.
    The map is private, so writing to it changes neither the file nor other maps. With `shared` it cannot be
    written to, and takes none of the memory the system may promise, however large it is.
    """

    _unmap = staticmethod(_libc.munmap)

    def __init__(self, descriptor: int, size: int, *, shared: bool = False) -> None:
        """Map `size` bytes, at least 1. Raises `OSError` if the system has no capacity for another map."""
        self._address = 0
        self.size = size
        self._shared = shared
        protection = mmap.PROT_READ if shared else mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _libc.mmap(None, size, protection, kind, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = self.address = address

    def load(self, start: int = 0, stop: int | None = None) -> bool:
        """Read every page that holds one of the bytes `start ... stop - 1`. Return False if the disk cannot
        read it: touching the page would end the process.
        """
        if self._advise_pages(_POPULATE_READ, start, stop) == 0:
            return True
        return ctypes.get_errno() not in (errno.EFAULT, errno.EIO)  # older systems know no such advice

    def release_pages(self, start: int = 0, stop: int | None = None) -> None:
        """Free the memory of those pages until they are touched. Changes to a private map are lost."""
        self._advise_pages(mmap.MADV_DONTNEED, start, stop)

    def _advise_pages(self, advice: int, start: int, stop: int | None) -> int:
        first = start - start % mmap.PAGESIZE
        length = (self.size if stop is None else stop) - first
        return _libc.madvise(self._address + first, length, advice) if length > 0 else 0

    @property
    def __array_interface__(self) -> dict[str, object]:
        data = (self._address, self._shared)
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": data}

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self.size)


SEAL = "sha256"
_MAX_BYTES = 256 * 2**20
"""Limit of a JSON file. Models' tokenizers are the largest."""
FLOAT = "__float__"
"""The key that transformers writes in place of a number that JSON lacks."""
_SETTLED = 2.0
"""Seconds after which another change of a file shows in its time stamps, on every file system."""
_digests: dict[tuple[int, ...], str] = {}
"""Digests of files this process has read, by the state that the system changes with a file."""


def digest_of(value: object) -> str:
    """Return sha256 (hex) of a JSON value. The order of keys and white space do not count."""
    plain = json.loads(json.dumps(value, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_sealed(path: str | os.PathLike[str], document: Mapping[str, object]) -> None:
    """Replace the file at `path`, durably, by `document` and its digest.

    Raises `ValueError` or `TypeError` for values JSON cannot hold, and `OSError`.
    """
    sealed = {**document, SEAL: digest_of(document)}
    write_atomic(path, json_bytes(sealed))


def json_bytes(document: Mapping[str, object]) -> bytes:
    """Return `document` as a readable file. Half of a character, which UTF-8 cannot hold, is a JSON escape,
    and so comes back unchanged.

    Raises `ValueError` or `TypeError` for values JSON cannot hold.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def read_object(
    path: Path,
    mend: str,
    kind: type[OpdError] = RunFolderError,
    constant: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON object in the file `path`, sealed or not. Raises `kind`, with the fix `mend`.
    `constant`: see `read_document`.
    """
    try:
        data = read_document(read_plain(path, follow=True), _MAX_BYTES, constant)
    except OSError as error:
        raise kind(f"{path} cannot be read ({error.strerror or error}); {limit_fix(error, mend)}") from None
    except ValueError as error:
        raise kind(f"{path} cannot be read as JSON ({error}); {file_fix(path, mend.rstrip('.'))}.") from None
    if not isinstance(data, dict):
        raise kind(f"{path} holds no JSON object; {mend}")
    return data


def read_description(path: Path, mend: str, kind: type[OpdError]) -> dict[str, Any]:
    """`read_object` a file that describes a model. Infinity, which older releases of transformers wrote bare,
    reads as newer ones write it, `{"__float__": "Infinity"}`.
    """
    return read_object(path, mend, kind, _tag_constant)


def _tag_constant(constant: str) -> dict[str, str]:
    if constant == "NaN":
        no_constant(constant)
    return {FLOAT: constant}


def read_sealed(path: Path, mend: str, kind: type[OpdError] = RunFolderError) -> dict[str, Any]:
    """Return the document that `write_sealed` wrote to `path`, without the seal.

    Raises `kind`, with the fix `mend`, if it cannot be read, has no seal, or differs from the sealed
    document.
    """
    return check_seal(path, read_object(path, mend, kind), mend, kind)


def check_seal(
    path: Path, document: dict[str, Any], mend: str, kind: type[OpdError] = RunFolderError
) -> dict[str, Any]:
    """Return `document`, read from `path`, without its seal. `kind` if the seal is missing or wrong."""
    content = dict(document)
    seal = content.pop(SEAL, None)
    if seal is None:
        raise kind(f"{path} has no {SEAL}: it is damaged, or an older release wrote it; {mend}")
    try:
        matches = seal == digest_of(content)
    except ValueError:  # NaN and infinity, which are never written
        matches = False
    if not matches:
        raise kind(f"{path} is not what was written: its {SEAL} differs; {mend}")
    return content


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return sha256 (hex) of a file's bytes. A file that this process has hashed and that has not changed is
    not read again.

    Raises `OSError`.
    """
    with os.fdopen(open_plain(path, follow=True), "rb") as file:
        key = _stat_fields(os.fstat(file.fileno()))
        if key in _digests:
            return _digests[key]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        *_, changed = key
        if key == _stat_fields(os.fstat(file.fileno())) and time.time_ns() - changed > _SETTLED * 1e9:
            _digests[key] = digest
    return digest


def digests_of(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return sha256 of files below `root`, by their names from there."""
    return {path.relative_to(root).as_posix(): file_digest(path) for path in paths}


def check_files(
    root: Path, digests: Mapping[str, str], mend: str, kind: type[OpdError] = RunFolderError
) -> None:
    """Raise `kind`, naming the first file below `root` that is missing or has another digest."""
    for name, expected in digests.items():
        try:
            path = root / object_path(name)
        except StorageError as error:
            raise kind(f"{root}: {error}") from None
        try:
            digest = file_digest(path)
        except FileNotFoundError:
            raise kind(f"{path} is missing; {mend}") from None
        except OSError as error:
            raise kind(
                f"{path} cannot be read ({error.strerror or error}); {limit_fix(error, mend)}"
            ) from None
        if digest != expected:
            raise kind(f"{path} does not have the {SEAL} it was written with; {mend}")


def file_state(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the state of the file at `path`, which changes with the file: its device, number, size and
    times. Return () if it cannot be read.
    """
    try:
        return _stat_fields(os.stat(path))
    except (OSError, ValueError):  # no file has a name with a NUL character
        return ()


def _stat_fields(now: os.stat_result) -> tuple[int, ...]:
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
