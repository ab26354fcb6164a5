"""The memory of shared pools: creates it, grants it to one process at a time, and frees it.

Owns the memory and the rule which process may have it: memfds, and descriptors of memory of GPUs, which workers hand
over. A process has a pool from the grant until it has given the pool back or is dead. Dead means that its pidfd is
readable: a worker that hangs and wakes up still writes to its pages, so no other process gets them before. Knows
nothing of sockets, and nothing of CUDA.
"""

import fcntl
import os
import secrets
import select
from dataclasses import dataclass

from gpu_worker.shared_pool.messages import POOL_ID_BYTES, HolderError
from tandem_contract.plural import numbered

HOLD_SECONDS = 600.0
"""An unused pool is freed after this time. The scheduler forgets it earlier."""
MAX_UNUSED = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True, kw_only=True)
class User:
    """A process by its pidfd, which identifies it even if its number is used again. Owns the pidfd."""

    pid: int
    pidfd: int

    def __del__(self) -> None:
        os.close(self.pidfd)

    def is_dead(self) -> bool:
        """Whether the process and all of its threads have ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


@dataclass(slots=True, kw_only=True)
class _Pool:
    memory: int
    num_bytes: int
    user: User | None
    # When, on the monotonic clock, it lost its last user.
    unused_since: float
    # For a pool on a GPU; its header is `memory`: the GPU, the number of pages, the descriptor of their memory, bytes.
    device: str = ""
    num_pages: int = 0
    device_memory: int | None = None
    device_bytes: int = 0


class Pools:
    """All pools of one holder, `max_bytes` at most. `now` is the time of a monotonic clock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # In the order in which they were created.
        self._pools: dict[bytes, _Pool] = {}

    def create(
        self, num_bytes: int, user: User, now: float, *, device: str = "", num_pages: int = 0
    ) -> tuple[bytes, int]:
        """Returns the id and the descriptor of a new pool of zeros. Frees unused pools if they are in the way.

        device: the GPU that has its pages; the memory is their header. Raises HolderError if it would exceed the limit,
        which is one of host memory.
        """
        self.collect(now)
        while self._total() + num_bytes > self._max_bytes and (unused := self._unused()):
            self._free(unused[0])
        if self._total() + num_bytes > self._max_bytes:
            raise HolderError(
                f"a pool of {numbered(num_bytes, 'byte')} does not fit: pools in use have "
                f"{numbered(self._total(), 'byte')}, and the limit is {self._max_bytes} (max_bytes)"
            )
        pool_id = secrets.token_bytes(POOL_ID_BYTES)
        memory = os.memfd_create("tandem-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(memory, 0o600)
            os.ftruncate(memory, num_bytes)
            # A process with a mapping of memory that shrinks is killed by the system.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(memory)
            raise
        self._pools[pool_id] = _Pool(
            memory=memory, num_bytes=num_bytes, user=user, unused_since=now, device=device, num_pages=num_pages
        )
        return pool_id, memory

    def attach(self, pool_id: bytes, user: User, memory: int, num_bytes: int) -> None:
        """Keeps a descriptor of the device memory of a pool; it is the holder's from now on. Raises HolderError."""
        pool = self._own(pool_id, user, "attach memory to a pool")
        if not pool.device:
            raise HolderError("the pool is in host memory")
        if pool.device_memory is not None:
            os.close(pool.device_memory)
        pool.device_memory, pool.device_bytes = memory, num_bytes

    def take(self, pool_id: bytes, user: User, now: float) -> tuple[list[int], dict[str, int]]:
        """Returns descriptors and bytes of a pool with a dead last user: of its memory, and on a GPU of its pages'.

        Raises HolderError.
        """
        self.collect(now)
        pool = self._pools.get(pool_id)
        if pool is None:
            raise HolderError("the holder has no such pool")
        if pool.user is not None and pool.user.pid != user.pid:
            raise HolderError(f"process {pool.user.pid} still uses the pool", is_busy=True)
        if pool.device and pool.device_memory is None:
            raise HolderError("the pool has no memory on a device: its worker died before it served")
        pool.user = user
        memories, sizes = [pool.memory], {"bytes": pool.num_bytes}
        if pool.device_memory is not None:
            memories, sizes = [*memories, pool.device_memory], {**sizes, "device_bytes": pool.device_bytes}
        return memories, sizes

    def give_back(self, pool_id: bytes, user: User) -> None:
        """Frees a pool that its user needs no longer. Raises HolderError for another process."""
        self._own(pool_id, user, "give a pool back")
        self._free(pool_id)

    def collect(self, now: float) -> None:
        """Notes which users are dead, and frees pools that were unused for long, and the oldest of too many."""
        for pool in self._pools.values():
            if pool.user is not None and pool.user.is_dead():
                pool.user, pool.unused_since = None, now
        unused = self._unused()
        late = [pool_id for pool_id in unused if now - self._pools[pool_id].unused_since >= HOLD_SECONDS]
        for pool_id in dict.fromkeys([*late, *unused[:-MAX_UNUSED]]):
            self._free(pool_id)

    def unused_on(self, device: str) -> tuple[int, int]:
        """Memory of a GPU that unused pools occupy, and the number of pages of the newest of them.

        Without a device, host memory and 0. Pages there that were never touched take none.
        """
        if not device:
            return sum(512 * os.fstat(self._pools[pool_id].memory).st_blocks for pool_id in self._unused()), 0
        pools = [self._pools[pool_id] for pool_id in self._unused_on(device)]
        return sum(pool.device_bytes for pool in pools), pools[-1].num_pages if pools else 0

    def free_unused(self, device: str) -> int:
        """Frees the unused pools with memory of a GPU, and returns their number."""
        unused = self._unused_on(device)
        for pool_id in unused:
            self._free(pool_id)
        return len(unused)

    def _unused_on(self, device: str) -> list[bytes]:
        unused = ((pool_id, self._pools[pool_id]) for pool_id in self._unused())
        return [pool_id for pool_id, pool in unused if pool.device == device and pool.device_memory is not None]

    def close(self) -> None:
        """Frees all pools. Processes that have one mapped keep it until they end."""
        for pool_id in list(self._pools):
            self._free(pool_id)

    def _own(self, pool_id: bytes, user: User, wish: str) -> _Pool:
        pool = self._pools.get(pool_id)
        if pool is None or pool.user is None or pool.user.pid != user.pid:
            raise HolderError(f"only its user can {wish}")
        return pool

    def _unused(self) -> list[bytes]:
        """Pools without a user, the longest unused first."""
        unused = [pool_id for pool_id, pool in self._pools.items() if pool.user is None]
        return sorted(unused, key=lambda pool_id: self._pools[pool_id].unused_since)

    def _total(self) -> int:
        return sum(pool.num_bytes for pool in self._pools.values())

    def _free(self, pool_id: bytes) -> None:
        pool = self._pools.pop(pool_id)
        os.close(pool.memory)
        if pool.device_memory is not None:
            # The driver frees the memory when no process has it mapped any more.
            os.close(pool.device_memory)
