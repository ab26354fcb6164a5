"""Messages between the holder of shared pools and its workers: one JSON object per packet, sometimes with descriptors.

Owns their form and their limits. Knows nothing of pools.
"""

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path

SOCKET_NAME = "holder.sock"
MAX_BYTES = 4096
POOL_ID_BYTES = 16
# With a packet: the memory of a pool, or its header and its device memory.
MAX_DESCRIPTORS = 2
_MAX_DEVICE_CHARACTERS = 64


class MessageError(ValueError):
    """A packet that is not a message; it names what is wrong."""


def holder_socket(folder: Path) -> Path:
    """The path of the holder's socket in the runtime folder."""
    return folder / SOCKET_NAME


def new_socket() -> socket.socket:
    """A socket that keeps the edges of packets."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def encode(message: dict[str, object]) -> bytes:
    """The packet of a message."""
    return json.dumps(message).encode()


def decode(packet: bytes) -> dict[str, object]:
    """The message of a packet. Raises MessageError."""
    if len(packet) > MAX_BYTES:
        raise MessageError(f"a packet has more than {MAX_BYTES} bytes")
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a packet of {len(packet)} bytes is not JSON") from error
    if not isinstance(message, dict):
        raise MessageError("a packet is not a JSON object")
    return message


def number(message: dict[str, object], name: str, low: int, high: int) -> int:
    """A whole number of the message. Raises MessageError, which names the field and its limits."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise MessageError(f"{name} is {str(value)[:40]}; it must be a whole number from {low} to {high}")
    return value


def pool_id(message: dict[str, object]) -> bytes:
    """The id of a pool, which travels as hexadecimal digits. Raises MessageError."""
    value = message.get("pool_id")
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != POOL_ID_BYTES:
        raise MessageError(f"pool_id must be {2 * POOL_ID_BYTES} hexadecimal digits")
    return found


def device_of(message: dict[str, object]) -> str:
    """The name of the GPU that has the pool's pages; empty for a pool in host memory. Raises MessageError."""
    value = message.get("device", "")
    if not isinstance(value, str) or len(value) > _MAX_DEVICE_CHARACTERS:
        raise MessageError(f"device must be a name of at most {_MAX_DEVICE_CHARACTERS} characters")
    return value


def close_all(descriptors: Iterable[int]) -> None:
    """Closes descriptors that came with a packet."""
    for each in descriptors:
        os.close(each)
