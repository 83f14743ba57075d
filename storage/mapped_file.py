"""A memory map that costs no file descriptor and cannot be used after its end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_MAP_NORESERVE = 0x4000
_PUNCH_HOLE_KEEP_SIZE = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if hasattr(_libc, "fallocate"):
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch_hole(descriptor: int, start: int, stop: int) -> None:
    """Give back the disk under the whole pages among those bytes, where the file system can; they then read
    as zeros.
    """
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and hasattr(_libc, "fallocate"):
        _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, first, last - first)


class MappedFile:
    """A map of a file from `offset` on; `np.asarray` of it is a `[B]` uint8 view that keeps it alive.

    Python's own `mmap` keeps a descriptor open for each map; thousands of them would exhaust the process's.
    The map is private, so writing to it changes neither the file nor what anybody else sees; with `shared` it
    cannot be written to, and takes none of the memory the system may promise, however large it is.
    """

    _unmap = staticmethod(_libc.munmap)

    def __init__(self, descriptor: int, size: int, offset: int = 0, *, shared: bool = False) -> None:
        """`size` is at least 1, `offset` a multiple of `mmap.ALLOCATIONGRANULARITY`. Raises `OSError` if the
        system has no room for another map.
        """
        self._address = 0
        self.size = size
        self._shared = shared
        protection = mmap.PROT_READ if shared else mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _libc.mmap(None, size, protection, kind, descriptor, offset)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = self.address = address

    def load(self, start: int = 0, stop: int | None = None) -> bool:
        """Read every page that holds one of the bytes `start ... stop - 1`; False if the disk cannot, where
        touching the page would end the process.
        """
        if self._advise(_POPULATE_READ, start, stop) == 0:
            return True
        return ctypes.get_errno() not in (errno.EFAULT, errno.EIO)  # older systems know no such advice

    def forget(self, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of those pages. They are read anew when they are touched again; what was
        written to a private map is lost.
        """
        self._advise(mmap.MADV_DONTNEED, start, stop)

    def _advise(self, advice: int, start: int, stop: int | None) -> int:
        first = start - start % mmap.PAGESIZE
        length = (self.size if stop is None else stop) - first
        return _libc.madvise(self._address + first, length, advice) if length > 0 else 0

    @property
    def __array_interface__(self) -> dict[str, object]:
        place = (self._address, self._shared)
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": place}

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self.size)
