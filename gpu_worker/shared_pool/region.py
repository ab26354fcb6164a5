"""A range of addresses whose memory can be replaced: tensors and recorded kernels keep pointing to it.

Owns the mapping of one shared memory object. `MAP_FIXED` puts another object at the same addresses in one step, as
CUDA's virtual memory management would with an imported handle.
"""

import ctypes
import mmap
import os
from contextlib import suppress

HUGE_PAGE_BYTES = 2 << 20
# Linux, from mman-common.h and mman.h; Python's mmap has no names for them.
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value


class Region:
    """`num_bytes` of shared memory, a multiple of HUGE_PAGE_BYTES, at addresses that stay for the process's life."""

    def __init__(self, memory: int, num_bytes: int) -> None:
        """Maps the object behind the descriptor `memory`. Raises OSError."""
        assert num_bytes % HUGE_PAGE_BYTES == 0
        self.num_bytes = num_bytes
        self._libc = _libc()
        # More addresses than needed, so that a multiple of the system's huge pages is among them.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        reserved = self._mmap(None, num_bytes + HUGE_PAGE_BYTES, _PROT_NONE, flags, -1)
        self.address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.replace(memory)

    def replace(self, memory: int) -> None:
        """Maps another object of the same size at the same addresses. Raises OSError."""
        self._mmap(self.address, self.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, memory)
        # Systems without huge pages for shared memory refuse the advice.
        with suppress(OSError):
            self._madvise(getattr(mmap, "MADV_HUGEPAGE", 14))

    def zero(self) -> None:
        """Frees the memory, which reads as zeros from then on. Raises OSError."""
        self._madvise(_MADV_REMOVE)

    def bytes_at(self, offset: int, num_bytes: int) -> "ctypes.Array[ctypes.c_char]":
        """A buffer over a part of the region, for numpy and torch."""
        assert offset >= 0 and offset + num_bytes <= self.num_bytes
        return (ctypes.c_char * num_bytes).from_address(self.address + offset)

    def _mmap(self, address: int | None, num_bytes: int, protection: int, flags: int, memory: int) -> int:
        found = self._libc.mmap(address, num_bytes, protection, flags, memory, 0)
        if found == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"a KV pool of {num_bytes} bytes cannot be mapped: {os.strerror(number)}")
        return int(found)

    def _madvise(self, advice: int) -> None:
        if self._libc.madvise(self.address, self.num_bytes, advice) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise({advice}) failed: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
