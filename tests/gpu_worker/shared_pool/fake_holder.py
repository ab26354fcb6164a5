"""The holder within the process of a test: it grants the pools that the test calls dead."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_worker.shared_pool.messages import HolderError


@dataclass(slots=True)
class FakeHolder:
    """Grants the pools in `dead`, and keeps descriptors of every pool."""

    memories: dict[bytes, int] = field(default_factory=dict[bytes, int])
    # Descriptor and bytes of the device memory of pools on a GPU.
    on_device: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    dead: set[bytes] = field(default_factory=set[bytes])
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def create(self, num_bytes: int, *, device: str = "", pages: int = 0) -> tuple[bytes, int]:
        assert bool(device) == bool(pages)
        pool_id = next(self._ids).to_bytes(16, "big")
        self.memories[pool_id] = os.memfd_create("test")
        os.ftruncate(self.memories[pool_id], num_bytes)
        return pool_id, os.dup(self.memories[pool_id])

    def attach(self, pool_id: bytes, memory: int, num_bytes: int) -> None:
        if pool_id in self.on_device:
            os.close(self.on_device[pool_id][0])
        self.on_device[pool_id] = os.dup(memory), num_bytes

    def take(self, pool_id: bytes, num_bytes: int, device_bytes: int = 0) -> list[int]:
        if pool_id not in self.dead:
            raise HolderError("process 7 still uses the pool", is_busy=True)
        memories = [self.memories[pool_id]]
        if device_bytes:
            if pool_id not in self.on_device:
                raise HolderError("the pool has no memory on a device: its worker died before it served")
            memory, has = self.on_device[pool_id]
            if has != device_bytes:
                raise HolderError(f"the pool has {has} bytes; {device_bytes} are needed")
            memories.append(memory)
        assert os.fstat(memories[0]).st_size == num_bytes
        return [os.dup(memory) for memory in memories]

    def free_unused(self, device: str) -> None:
        for pool_id in self.dead & self.on_device.keys():
            self._free(pool_id)

    def give_back(self, pool_id: bytes) -> None:
        self._free(pool_id)

    def close(self) -> None:
        for pool_id in list(self.memories):
            self._free(pool_id)

    def _free(self, pool_id: bytes) -> None:
        os.close(self.memories.pop(pool_id))
        if pool_id in self.on_device:
            os.close(self.on_device.pop(pool_id)[0])
        self.dead.discard(pool_id)
