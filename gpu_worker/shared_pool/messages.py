"""Messages between the holder of shared pools and its workers, and a worker's end of the connection.

One JSON object per packet, sometimes with descriptors. Owns their form, their limits, and the errors of pools; each
message of an error is one sentence for people. Knows nothing of what the memory contains.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem_contract.plural import numbered

MAX_BYTES = 4096
POOL_ID_BYTES = 16
# With a packet: the memory of a pool, or its header and its device memory.
MAX_DESCRIPTORS = 2
_MAX_DEVICE_CHARACTERS = 64
# A dead process that had much memory takes some of this time to end.
_TAKE_SECONDS, _TRY_SECONDS = 1.0, 0.002
# The driver frees the context of a process before the process has ended.
_TAKE_DEVICE_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
MAX_POOL_BYTES = 1 << 48


class PoolError(Exception):
    """The pages are not there or not to be trusted; the scheduler has them computed again."""


class HolderError(PoolError):
    """The holder is gone, or refuses for the reason in the message. If `is_busy`, the pool's last user still lives."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


class PoolDiffers(PoolError):
    """The memory is not a pool of this worker's kind, or newer than expected."""


class PageDamaged(PoolError):
    """A page of a pool that was taken over does not have the content that its last owner wrote."""


class MessageError(ValueError):
    """A packet that is not a message; it names what is wrong."""


def holder_socket(folder: Path) -> Path:
    return folder / "holder.sock"


def new_socket() -> socket.socket:
    """A socket that keeps the edges of packets."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def encode(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode()


def decode(packet: bytes) -> dict[str, object]:
    """The message of a packet. Raises MessageError."""
    if len(packet) > MAX_BYTES:
        raise MessageError(f"a packet has more than {MAX_BYTES} bytes")
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a packet of {numbered(len(packet), 'byte')} is not JSON") from error
    if not isinstance(message, dict):
        raise MessageError("a packet is not a JSON object")
    return message


def number(message: dict[str, object], name: str, low: int, high: int) -> int:
    """A whole number of the message. Raises MessageError, which names the field and its limits."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise MessageError(f"{name} is {str(value)[:40]}; it must be a whole number from {low} to {high}")
    return value


def pool_id_of(message: dict[str, object]) -> bytes:
    """The id of a pool, which travels as hexadecimal digits. Raises MessageError."""
    value = message.get("pool_id")
    try:
        pool_id = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        pool_id = b""
    if len(pool_id) != POOL_ID_BYTES:
        raise MessageError(f"pool_id must be {2 * POOL_ID_BYTES} hexadecimal digits")
    return pool_id


def device_of(message: dict[str, object]) -> str:
    """The name of the GPU that has the pool's pages; empty for a pool in host memory. Raises MessageError."""
    value = message.get("device", "")
    if not isinstance(value, str) or len(value) > _MAX_DEVICE_CHARACTERS:
        raise MessageError(f"device must be a name of at most {_MAX_DEVICE_CHARACTERS} characters")
    return value


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class HolderClient:
    """Connects at the first call, and again if the holder was started again."""

    def __init__(self, folder: Path) -> None:
        self._path = holder_socket(folder)
        self._socket: socket.socket | None = None

    def create(self, num_bytes: int, *, device: str = "", pages: int = 0) -> tuple[bytes, int]:
        """Returns the id and a descriptor of a new pool of zeros; the caller closes it. Raises HolderError.

        device: names the GPU that has the pool's `pages` pages; the new memory is then their header.
        """
        answer, memories = self._ask({"want": "create", "bytes": num_bytes, "device": device, "pages": pages})
        [memory] = _descriptors(answer, memories, {"bytes": num_bytes})
        return pool_id_of(answer), memory

    def attach(self, pool_id: bytes, memory: int, num_bytes: int) -> None:
        """Lets the holder keep a descriptor of the device memory of a pool of this process. Raises HolderError."""
        self._ask({"want": "attach", "pool_id": pool_id.hex(), "bytes": num_bytes}, [memory])

    def take(self, pool_id: bytes, num_bytes: int, device_bytes: int = 0) -> list[int]:
        """Returns a descriptor of a pool after the death of its last user, for which it waits. Raises HolderError.

        device_bytes: of a pool on a GPU; its memory is a second descriptor; the first is that of its header.
        """
        sizes = {"bytes": num_bytes} | ({"device_bytes": device_bytes} if device_bytes else {})
        until = time.monotonic() + (_TAKE_DEVICE_SECONDS if device_bytes else _TAKE_SECONDS)
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

    def unused_on(self, device: str) -> tuple[int, int]:
        """Bytes of unused pools on a GPU, and pages of the newest; of "" in host memory. Raises HolderError."""
        answer, _ = self._ask({"want": "unused", "device": device})
        return number(answer, "bytes", 0, MAX_POOL_BYTES), number(answer, "pages", 0, MAX_POOL_BYTES)

    def free_unused(self, device: str) -> None:
        """Lets the holder free the pools without a user on a GPU. Raises HolderError."""
        self._ask({"want": "free", "device": device})

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


def _descriptors(answer: dict[str, object], files: list[int], sizes: dict[str, int]) -> list[int]:
    """Returns the descriptors that came with an answer: one for each size, the first of host memory.

    Raises HolderError, and closes them, if their number or a size is not as needed.
    """
    try:
        if len(files) != len(sizes):
            raise HolderError(f"the holder's answer has {numbered(len(files), 'descriptor')}; {len(sizes)} are needed")
        # The size of device memory shows only when it is mapped.
        given = [os.fstat(files[0]).st_size, *(number(answer, name, 1, MAX_POOL_BYTES) for name in sizes)]
        for size, needed in zip(given, [sizes["bytes"], *sizes.values()], strict=True):
            if size != needed:
                raise HolderError(f"the pool has {numbered(size, 'byte')}; {needed} are needed")
    except (HolderError, MessageError) as error:
        close_all(files)
        raise HolderError(str(error)) from error
    return files
