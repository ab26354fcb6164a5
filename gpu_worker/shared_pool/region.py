"""The memory of a shared pool in this process: addresses with replaceable memory, and what it says of itself.

Owns the mapping of one shared memory object. `MAP_FIXED` puts another object at the same addresses in one step, as
CUDA's virtual memory management does with an imported handle, so tensors and recorded kernels keep pointing to it. The
memory begins with a header:

    bytes 0 to 4,095   magic, version, generation, pool id, layout hash, identity hash
    then               uint64 for each page: the step that filled it, 0 if it is not whole
    then               uint64 for each page: its checksum
    then               from the next multiple of 2 MiB on, K and V of each layer

A worker that dies leaves this behind. The next one checks it before it believes a page.
"""

import ctypes
import hashlib
import mmap
import os
import struct
from contextlib import suppress

from gpu_worker.shared_pool.messages import PoolDiffers
from tandem_contract.plural import numbered

HUGE_PAGE_BYTES = 2 << 20
# Linux, from mman-common.h and mman.h; Python's mmap has no names for them.
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value
MAGIC, VERSION = b"TandemKV", 1
_HEADER = struct.Struct("<8sQQ16s32s32s")
_HEADER_BYTES = 4096
_GENERATION_OFFSET = 16


class Region:
    """`num_bytes` of shared memory, a multiple of HUGE_PAGE_BYTES, at addresses that stay for the process's life."""

    def __init__(self, memory: int, num_bytes: int) -> None:
        """Maps the object behind the descriptor `memory`. Raises OSError."""
        assert num_bytes % HUGE_PAGE_BYTES == 0
        self.num_bytes = num_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
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
        mapped = self._libc.mmap(address, num_bytes, protection, flags, memory, 0)
        if mapped == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"a KV pool of {numbered(num_bytes, 'byte')} cannot be mapped: {os.strerror(number)}")
        return int(mapped)

    def _madvise(self, advice: int) -> None:
        if self._libc.madvise(self.address, self.num_bytes, advice) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise({advice}) failed: {os.strerror(number)}")


def header_bytes(num_pages: int) -> int:
    """Bytes before the first tensor."""
    return -(-(_HEADER_BYTES + 16 * num_pages) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def identity_hash(identity: str) -> bytes:
    """32 bytes for the identity of a model (`checkpoint/files.py`)."""
    return hashlib.sha256(identity.encode()).digest()


class Header:
    """The header in mapped memory; `memory` is a writable buffer of `header_bytes(num_pages)`."""

    def __init__(self, memory: object, num_pages: int) -> None:
        self._memory = memory
        entries = memoryview(memory).cast("B")[_HEADER_BYTES : _HEADER_BYTES + 16 * num_pages].cast("Q")  # type: ignore[arg-type]
        # Both [num_pages]. A page is whole if its entry of `filled_by` is not 0; its checksum counts only then.
        self.filled_by, self.checksums = entries[:num_pages], entries[num_pages:]

    def write(self, *, pool_id: bytes, layout: bytes, identity: bytes) -> None:
        """Describes a new pool of zeros, in which no page is whole."""
        _HEADER.pack_into(self._memory, 0, MAGIC, VERSION, 0, pool_id, layout, identity)  # type: ignore[arg-type]
        self.filled_by[:] = memoryview(bytes(8 * len(self.filled_by))).cast("Q")

    def check(self, *, pool_id: bytes, layout: bytes, identity: bytes, generation: int) -> None:
        """Raises PoolDiffers unless this is that pool and no generation after `generation` has written to it."""
        magic, version, newest, *hashes = _HEADER.unpack_from(self._memory, 0)  # type: ignore[arg-type]
        if (magic, version) != (MAGIC, VERSION):
            raise PoolDiffers(f"the memory is not a KV pool of version {VERSION}")
        for name, actual, wanted in zip(("id", "layout", "model"), hashes, (pool_id, layout, identity), strict=True):
            if actual != wanted:
                raise PoolDiffers(f"the {name} of the pool is {actual.hex()[:12]}; {wanted.hex()[:12]} is needed")
        if newest > generation:
            raise PoolDiffers(f"generation {newest} has written to the pool; {generation} is the last one expected")

    def begin_generation(self, generation: int) -> None:
        """Records the generation of the plans that write from now on."""
        struct.pack_into("<Q", self._memory, _GENERATION_OFFSET, generation)  # type: ignore[arg-type]
