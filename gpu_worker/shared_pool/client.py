"""A worker's connection to the holder: asks for memory and gets it as a descriptor.

Owns one connection. Knows nothing of what the memory contains.
"""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_worker.shared_pool.errors import HolderError
from gpu_worker.shared_pool.messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    MessageError,
    close_all,
    decode,
    encode,
    holder_socket,
    new_socket,
    number,
)
from gpu_worker.shared_pool.messages import pool_id as id_of

# A dead process that had much memory takes some of this time to end.
_TAKE_SECONDS, _TRY_SECONDS = 1.0, 0.002
# The driver frees the context of a process before the process has ended.
_TAKE_DEVICE_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_MAX_POOL_BYTES = 1 << 48


class HolderClient:
    """Connects at the first call, and again if the holder was started again."""

    def __init__(self, folder: Path) -> None:
        self._path = holder_socket(folder)
        self._socket: socket.socket | None = None

    def create(self, num_bytes: int, *, device: str = "", pages: int = 0) -> tuple[bytes, int]:
        """Returns the id and a descriptor of a new pool of zeros; the caller closes it. Raises HolderError.

        device: names the GPU that has the pool's pages, whose number is `pages`; the new memory is then their header.
        """
        of_device = {"device": device, "pages": pages} if device else {}
        answer, memories = self._ask({"want": "create", "bytes": num_bytes, **of_device})
        [memory] = _descriptors(answer, memories, {"bytes": num_bytes})
        return id_of(answer), memory

    def attach(self, pool_id: bytes, memory: int, num_bytes: int) -> None:
        """Lets the holder keep a descriptor of the device memory of a pool of this process. Raises HolderError."""
        self._ask({"want": "attach", "pool_id": pool_id.hex(), "bytes": num_bytes}, [memory])

    def take(self, pool_id: bytes, num_bytes: int) -> int:
        """Returns a descriptor of a pool whose last user is dead; waits for its end a moment. Raises HolderError."""
        [memory] = self._take(pool_id, {"bytes": num_bytes}, _TAKE_SECONDS)
        return memory

    def take_device(self, pool_id: bytes, header_bytes: int, num_bytes: int) -> tuple[int, int]:
        """The same for a pool on a GPU: descriptors of its header and of its device memory. Raises HolderError."""
        header, memory = self._take(pool_id, {"bytes": header_bytes, "device_bytes": num_bytes}, _TAKE_DEVICE_SECONDS)
        return header, memory

    def _take(self, pool_id: bytes, sizes: dict[str, int], seconds: float) -> list[int]:
        until = time.monotonic() + seconds
        while True:
            try:
                answer, memories = self._ask({"want": "take", "pool_id": pool_id.hex()})
                return _descriptors(answer, memories, sizes)
            except HolderError as error:
                if not error.is_busy or time.monotonic() > until:
                    raise
            time.sleep(_TRY_SECONDS)

    def give_back(self, pool_id: bytes) -> None:
        """Lets the holder free the pool, which this process uses no longer. Raises HolderError."""
        self._ask({"want": "give back", "pool_id": pool_id.hex()})

    def unused_bytes(self) -> int:
        """Host memory of pools without a user. Raises HolderError."""
        return self._unused("")[0]

    def unused_on(self, device: str) -> tuple[int, int]:
        """Device memory of pools without a user on a GPU, and the pages of the newest of them. Raises HolderError."""
        return self._unused(device)

    def free_unused(self, device: str) -> None:
        """Lets the holder free the pools without a user on a GPU. Raises HolderError."""
        self._ask({"want": "free", "device": device})

    def _unused(self, device: str) -> tuple[int, int]:
        answer, _ = self._ask({"want": "unused", "device": device})
        return number(answer, "bytes", 0, _MAX_POOL_BYTES), number(answer, "pages", 0, _MAX_POOL_BYTES)

    def _ask(self, message: dict[str, object], sent: Sequence[int] = ()) -> tuple[dict[str, object], list[int]]:
        """Sends descriptors with the message; returns the answer and those that came with it."""
        is_new = self._socket is None
        try:
            return self._exchange(message, sent)
        except (OSError, MessageError) as error:
            self.close()
            if is_new:
                raise HolderError(f"no answer from the holder at {self._path}: {error}") from error
        # The holder may have been started again since the last call.
        return self._ask(message, sent)

    def _exchange(self, message: dict[str, object], sent: Sequence[int]) -> tuple[dict[str, object], list[int]]:
        if self._socket is None:
            self._socket = new_socket()
            self._socket.settimeout(_ANSWER_SECONDS)
            self._socket.connect(str(self._path))
        socket.send_fds(self._socket, [encode(message)], sent)
        packet, memories, _, _ = socket.recv_fds(self._socket, MAX_BYTES + 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not packet:
                raise MessageError("it has ended the connection")
            answer = decode(packet)
            if "error" in answer:
                raise HolderError(str(answer["error"])[:500], is_busy=answer.get("is_busy") is True)
        except (MessageError, HolderError):
            close_all(memories)
            raise
        return answer, memories

    def close(self) -> None:
        """Ends the connection. The process stays the user of its pools."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _descriptors(answer: dict[str, object], found: list[int], sizes: dict[str, int]) -> list[int]:
    """Returns the descriptors that came with an answer: one for each size, the first of host memory.

    Raises HolderError, and closes them, if their number or a size is not as needed.
    """
    try:
        if len(found) != len(sizes):
            raise HolderError(f"the holder's answer has {len(found)} descriptors; {len(sizes)} are needed")
        # The size of device memory shows only when it is mapped.
        given = {"its memory": os.fstat(found[0]).st_size}
        given |= {name: number(answer, name, 1, _MAX_POOL_BYTES) for name in sizes}
        for size, needed in zip(given.values(), [next(iter(sizes.values())), *sizes.values()], strict=True):
            if size != needed:
                raise HolderError(f"the pool has {size} bytes; {needed} are needed")
    except (HolderError, MessageError) as error:
        close_all(found)
        raise HolderError(str(error)) from error
    return found
