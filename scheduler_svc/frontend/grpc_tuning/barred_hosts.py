"""Owns which hosts may open no new connection for a time: the kernel drops the packets that would open one.

gRPC accepts every connection, so the bar is a filter on its listening sockets (classic BPF, which needs no rights). It
sees the first packet of a connection and compares its source. Connections that are open are not filtered. A caller's
kernel repeats the packet, so whoever shares the host with the attacker is served when the time is over.
"""

import ctypes
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection

from scheduler_svc.frontend.grpc_tuning.peers import Network, listeners

logger = logging.getLogger(__name__)

BAR_SECONDS = 5.0
# One more takes the place of the oldest. The filter's jumps reach 255 instructions.
MAX_BARRED = 48

# linux/filter.h: load a byte or a word of the packet, shift, jump if equal, jump, return.
_BYTE, _WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
# Offsets from here count from the network header, SKF_NET_OFF.
_HEADER = 0xFFF00000
_SOURCE = {4: _HEADER + 12, 6: _HEADER + 8}
_DROP, _KEEP = 0, 0xFFFFFFFF
# asm-generic/socket.h.
_ATTACH, _DETACH = 26, 27

_Instruction = tuple[int, int, int, int]


class BarredHosts:
    """The hosts barred from this process's ports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By port, the end of each bar, the oldest first.
        self._until: dict[int, dict[Network, float]] = {}

    def bar(self, network: Network, port: int) -> None:
        """Bars the network from the port for BAR_SECONDS."""
        barred = self._until.setdefault(port, {})
        barred.pop(network, None)
        if len(barred) >= MAX_BARRED:
            del barred[next(iter(barred))]
        barred[network] = self._clock() + BAR_SECONDS
        _filter(port, barred)

    def sweep(self) -> None:
        """Ends bars that are over. The owner calls this about once a second."""
        now = self._clock()
        for port, barred in list(self._until.items()):
            over = [network for network, until in barred.items() if until <= now]
            for network in over:
                del barred[network]
            if over:
                _filter(port, barred)
            if not barred:
                del self._until[port]


def program(networks: Collection[Network]) -> list[_Instruction]:
    """The filter that drops packets from these networks."""
    sixth = [*_comparisons([one for one in networks if one.version == 6]), (_RETURN, 0, 0, _KEEP)]
    fourth = [*_comparisons([one for one in networks if one.version == 4]), (_RETURN, 0, 0, _KEEP)]
    return [(_BYTE, 0, 0, _HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, len(fourth), 0, 6), *fourth, *sixth]


def _comparisons(networks: Collection[Network]) -> list[_Instruction]:
    found: list[_Instruction] = []
    for network in networks:
        words = struct.unpack(">I" if network.version == 4 else ">II", network.network_address.packed[:8])
        for idx, word in enumerate(words):
            # After a word that differs, the next network is compared.
            left = 2 * (len(words) - 1 - idx) + 1
            found += [(_WORD, 0, 0, _SOURCE[network.version] + 4 * idx), (_IF_EQUAL, 0, left, word)]
        found.append((_RETURN, 0, 0, _DROP))
    return found


def _filter(port: int, networks: Collection[Network]) -> None:
    instructions = program(networks)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    for one in listeners(port) if sys.platform == "linux" else []:
        with one:
            try:
                if networks:
                    filled = struct.pack("@HP", len(instructions), ctypes.addressof(code))
                    one.setsockopt(socket.SOL_SOCKET, _ATTACH, filled)
                else:
                    one.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            except OSError as error:
                logger.warning("the filter of barred hosts at port %d could not be set: %s", port, error)
