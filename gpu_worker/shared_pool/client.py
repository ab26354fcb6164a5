"""A worker's connection to the holder: asks for memory and gets it as a descriptor.

Owns one connection. Knows nothing of what the memory contains.
"""

import os
import socket
import time
from pathlib import Path

from gpu_worker.shared_pool.errors import HolderError
from gpu_worker.shared_pool.messages import MAX_BYTES, MessageError, decode, encode, holder_socket, new_socket, number
from gpu_worker.shared_pool.messages import pool_id as id_of

# A dead process that had much memory takes some of this time to end.
_TAKE_SECONDS, _TRY_SECONDS = 1.0, 0.002
_ANSWER_SECONDS = 5.0
_MAX_POOL_BYTES = 1 << 48


class HolderClient:
    """Connects at the first call, and again if the holder was started again."""

    def __init__(self, folder: Path) -> None:
        self._path = holder_socket(folder)
        self._socket: socket.socket | None = None

    def create(self, num_bytes: int) -> tuple[bytes, int]:
        """Returns the id and a descriptor of a new pool of zeros; the caller closes it. Raises HolderError."""
        answer, memory = self._ask({"want": "create", "bytes": num_bytes})
        return id_of(answer), self._memory(answer, memory, num_bytes)

    def take(self, pool_id: bytes, num_bytes: int) -> int:
        """Returns a descriptor of a pool whose last user is dead; waits for its end a moment. Raises HolderError."""
        until = time.monotonic() + _TAKE_SECONDS
        while True:
            try:
                answer, memory = self._ask({"want": "take", "pool_id": pool_id.hex()})
                return self._memory(answer, memory, num_bytes)
            except HolderError as error:
                if not error.is_busy or time.monotonic() > until:
                    raise
            time.sleep(_TRY_SECONDS)

    def give_back(self, pool_id: bytes) -> None:
        """Lets the holder free the pool, which this process uses no longer. Raises HolderError."""
        self._ask({"want": "give back", "pool_id": pool_id.hex()})

    def unused_bytes(self) -> int:
        """Memory of pools without a user. Raises HolderError."""
        answer, _ = self._ask({"want": "unused"})
        return number(answer, "bytes", 0, _MAX_POOL_BYTES)

    def _memory(self, answer: dict[str, object], memory: int | None, num_bytes: int) -> int:
        if memory is None:
            raise HolderError("the holder's answer has no descriptor")
        found = os.fstat(memory).st_size
        if number(answer, "bytes", 1, _MAX_POOL_BYTES) != num_bytes or found != num_bytes:
            os.close(memory)
            raise HolderError(f"the pool has {found} bytes; {num_bytes} are needed")
        return memory

    def _ask(self, message: dict[str, object]) -> tuple[dict[str, object], int | None]:
        is_new = self._socket is None
        try:
            return self._exchange(message)
        except (OSError, MessageError) as error:
            self.close()
            if is_new:
                raise HolderError(f"no answer from the holder at {self._path}: {error}") from error
        # The holder may have been started again since the last call.
        return self._ask(message)

    def _exchange(self, message: dict[str, object]) -> tuple[dict[str, object], int | None]:
        if self._socket is None:
            self._socket = new_socket()
            self._socket.settimeout(_ANSWER_SECONDS)
            self._socket.connect(str(self._path))
        self._socket.send(encode(message))
        packet, memories, _, _ = socket.recv_fds(self._socket, MAX_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
        memory = memories[0] if memories else None
        try:
            if not packet:
                raise MessageError("it has ended the connection")
            answer = decode(packet)
            if "error" in answer:
                raise HolderError(str(answer["error"])[:500], is_busy=answer.get("is_busy") is True)
        except (MessageError, HolderError):
            if memory is not None:
                os.close(memory)
            raise
        return answer, memory

    def close(self) -> None:
        """Ends the connection. The process stays the user of its pools."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
