"""The memory of shared pools: creates it, grants it to one process at a time, and frees it.

Owns the memory and the rule which process may have it: memfds, and descriptors of memory of GPUs, which workers hand
over. A process has a pool from the grant until it has given the pool back or is dead, because one that hangs and wakes
up still writes to its pages. Knows nothing of sockets, and nothing of CUDA.
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


@dataclass(slots=True, eq=False)
class _Pool:
    pool_id: bytes
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
        pool = _Pool(pool_id, memory, num_bytes, user, unused_since=now, device=device, num_pages=num_pages)
        self._pools[pool_id] = pool
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
        """Descriptors and bytes of a dead user's pool: its memory, and on a GPU its pages. Raises HolderError."""
        self.collect(now)
        pool = self._pools.get(pool_id)
        if pool is None:
            raise HolderError("the holder has no such pool")
        if pool.user is not None and pool.user.pid != user.pid:
            raise HolderError(f"process {pool.user.pid} still uses the pool", is_busy=True)
        if pool.device and pool.device_memory is None:
            raise HolderError("the pool has no memory on a device: its worker died before it served")
        pool.user = user
        if pool.device_memory is None:
            return [pool.memory], {"bytes": pool.num_bytes}
        return [pool.memory, pool.device_memory], {"bytes": pool.num_bytes, "device_bytes": pool.device_bytes}

    def give_back(self, pool_id: bytes, user: User) -> None:
        """Frees a pool that its user needs no longer. Raises HolderError for another process."""
        self._free(self._own(pool_id, user, "give a pool back"))

    def collect(self, now: float) -> None:
        """Notes which users are dead, and frees pools that were unused for long, and the oldest of too many."""
        for pool in self._pools.values():
            if pool.user is not None and pool.user.is_dead():
                pool.user, pool.unused_since = None, now
        unused = self._unused()
        late = [pool for pool in unused if now - pool.unused_since >= HOLD_SECONDS]
        for pool in dict.fromkeys([*late, *unused[:-MAX_UNUSED]]):
            self._free(pool)

    def unused_on(self, device: str) -> tuple[int, int]:
        """Memory of a GPU that unused pools occupy, and the number of pages of the newest of them.

        Without a device, host memory and 0. Pages there that were never touched take none.
        """
        if not device:
            return sum(512 * os.fstat(pool.memory).st_blocks for pool in self._unused()), 0
        pools = self._unused_on(device)
        return sum(pool.device_bytes for pool in pools), pools[-1].num_pages if pools else 0

    def free_unused(self, device: str) -> int:
        """Frees the unused pools with memory of a GPU, and returns their number."""
        unused = self._unused_on(device)
        for pool in unused:
            self._free(pool)
        return len(unused)

    def _unused_on(self, device: str) -> list[_Pool]:
        return [pool for pool in self._unused() if pool.device == device and pool.device_memory is not None]

    def close(self) -> None:
        """Frees all pools. Processes that have one mapped keep it until they end."""
        for pool in list(self._pools.values()):
            self._free(pool)

    def _own(self, pool_id: bytes, user: User, wish: str) -> _Pool:
        pool = self._pools.get(pool_id)
        if pool is None or pool.user is None or pool.user.pid != user.pid:
            raise HolderError(f"only its user can {wish}")
        return pool

    def _unused(self) -> list[_Pool]:
        """Pools without a user, the longest unused first."""
        return sorted((pool for pool in self._pools.values() if pool.user is None), key=lambda pool: pool.unused_since)

    def _total(self) -> int:
        return sum(pool.num_bytes for pool in self._pools.values())

    def _free(self, pool: _Pool) -> None:
        del self._pools[pool.pool_id]
        os.close(pool.memory)
        if pool.device_memory is not None:
            # The driver frees the memory when no process has it mapped any more.
            os.close(pool.device_memory)
