"""The packets between a front end and the child that tries grammars. Pure functions.

A request is its number and the grammar, an answer the number and why the grammar is refused, empty if it is not. The
child's first packet has number 0, its process id, and how slow its machine is.
"""

import struct

_NUMBER = struct.Struct("<Q")
HELLO = 0
MAX_ERROR_CHARS = 1_000
# A grammar has at most 64 KiB.
MAX_PACKET = 1 << 17


def packed(number: int, text: str) -> bytes:
    """Encodes a packet."""
    return _NUMBER.pack(number) + text.encode()


def unpacked(packet: bytes) -> tuple[int, str]:
    """Decodes a packet. Raises ValueError."""
    if len(packet) < _NUMBER.size:
        raise ValueError(f"a packet has {len(packet)} bytes; at least {_NUMBER.size} belong to it")
    return _NUMBER.unpack_from(packet)[0], packet[_NUMBER.size :].decode()
