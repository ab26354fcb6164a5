"""The first part of a shared pool: what the memory is, and for each page whether it is whole.

    bytes 0 to 4,095   magic, version, generation, pool id, layout hash, identity hash
    then               uint64 for each page: the step that filled it, 0 if it is not whole
    then               uint64 for each page: its checksum
    then               from the next multiple of 2 MiB on, K and V of each layer

A worker that dies leaves this behind. The next one checks it before it believes a page.
"""

import hashlib
import struct

from gpu_worker.shared_pool.errors import PoolDiffers
from gpu_worker.shared_pool.region import HUGE_PAGE_BYTES

MAGIC, VERSION = b"TandemKV", 1
_HEADER = struct.Struct("<8sQQ16s32s32s")
_HEADER_BYTES = 4096
_GENERATION_OFFSET = 16


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
        magic, version, newest, *found = _HEADER.unpack_from(self._memory, 0)  # type: ignore[arg-type]
        if (magic, version) != (MAGIC, VERSION):
            raise PoolDiffers(f"the memory is not a KV pool of version {VERSION}")
        for name, own, wanted in zip(("id", "layout", "model"), found, (pool_id, layout, identity), strict=True):
            if own != wanted:
                raise PoolDiffers(f"the {name} of the pool is {own.hex()[:12]}; {wanted.hex()[:12]} is needed")
        if newest > generation:
            raise PoolDiffers(f"generation {newest} has written to the pool; {generation} is the last one expected")

    def begin_generation(self, generation: int) -> None:
        """Records the generation whose plans write from now on."""
        struct.pack_into("<Q", self._memory, _GENERATION_OFFSET, generation)  # type: ignore[arg-type]
