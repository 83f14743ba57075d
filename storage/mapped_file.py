"""A memory map that costs no file descriptor and cannot be used after its end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """A private map of a whole file; `np.asarray` of it is a `[B]` uint8 view that keeps it alive.

    Python's own `mmap` keeps a descriptor open for each map; thousands of them would exhaust the process's.
    The map is private, so writing to it changes neither the file nor what anybody else sees.
    """

    _unmap = staticmethod(_libc.munmap)

    def __init__(self, descriptor: int, size: int) -> None:
        """`size` is at least 1. Raises `OSError` if the system has no room for another map."""
        self._address = 0
        self._size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_PRIVATE, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = address

    def load(self) -> bool:
        """Read every page; False if the disk cannot, where touching the page would end the process."""
        if _libc.madvise(self._address, self._size, _POPULATE_READ) == 0:
            return True
        return ctypes.get_errno() not in (errno.EFAULT, errno.EIO)  # older systems know no such advice

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, False)}

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self._size)
