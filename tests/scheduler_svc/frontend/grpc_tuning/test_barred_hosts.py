"""The kernel's filter: run here instruction by instruction, and set on real listening sockets."""

import ipaddress
import random
import socket
import struct

import pytest

from scheduler_svc.frontend.grpc_tuning.sockets import (
    BAR_SECONDS,
    MAX_BARRED,
    BarredHosts,
    Network,
    network_of,
    program,
)


def is_dropped(networks: list[Network], source: str) -> bool:
    """What the program answers to a packet from this address, by the rules of linux/filter.h."""
    address = ipaddress.ip_address(source)
    start = 12 if address.version == 4 else 8
    header = bytearray([address.version << 4 | 5]) + bytes(start - 1) + address.packed + bytes(16)
    instructions, at, value = program(networks), 0, 0
    assert len(instructions) <= 4096
    while True:
        code, if_true, if_false, number = instructions[at]
        at += 1
        match code:
            case 0x30:
                value = header[number - 0xFFF00000]
            case 0x20:
                (value,) = struct.unpack_from(">I", header, number - 0xFFF00000)
            case 0x74:
                value >>= number
            case 0x15:
                at += if_true if value == number else if_false
            case _:
                assert code == 0x06
                return number == 0


def test_the_program_drops_the_barred_networks_alone():
    draw = random.Random(1)
    for num in [0, 1, 2, 7, MAX_BARRED]:
        barred = list[Network]()
        for _ in range(num):
            if draw.random() < 0.5:
                barred.append(ipaddress.IPv4Network(draw.randrange(1 << 32)))
            else:
                barred.append(ipaddress.IPv6Network((draw.randrange(1 << 64) << 64, 64)))
        for network in barred:
            inside = network.network_address + (draw.randrange(1 << 64) if network.version == 6 else 0)
            assert is_dropped(barred, str(inside))
            # Neither a network that shares a word with it, nor the neighbour.
            for bit in (0, 31, 32, 63):
                shift = network.max_prefixlen - 1 - bit
                other = ipaddress.ip_address(int(inside) ^ (1 << shift)) if shift >= 0 else None
                if other is not None and not any(other in one for one in barred):
                    assert not is_dropped(barred, str(other))
        assert not is_dropped(barred, "192.0.2.1") and not is_dropped(barred, "2001:db8::1")


def can_connect(listener: socket.socket, source: str) -> bool:
    """Over loopback a connection is there when `connect` returns, unless its packet was dropped."""
    with socket.socket() as caller:
        caller.bind((source, 0))
        caller.setblocking(False)
        caller.connect_ex(("127.0.0.1", listener.getsockname()[1]))
        try:
            caller.getpeername()
        except OSError:
            return False
        listener.accept()[0].close()
        return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_barred_host_opens_no_connection_until_the_time_is_over(family: socket.AddressFamily):
    now = [0.0]
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as old:
            server = listener.accept()[0]
            barred = BarredHosts(lambda: now[0])
            network = network_of("ipv4:127.0.0.2:1")
            assert network is not None
            barred.bar(network, port)
            assert not can_connect(listener, "127.0.0.2") and can_connect(listener, "127.0.0.3")
            # What was open stays so.
            old.sendall(b"a")
            assert server.recv(1) == b"a"
            server.close()
        now[0] = BAR_SECONDS - 1
        barred.sweep()
        assert not can_connect(listener, "127.0.0.2")
        now[0] = BAR_SECONDS
        barred.sweep()
        assert can_connect(listener, "127.0.0.2")


def test_one_bar_too_many_ends_the_oldest():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        barred = BarredHosts()
        for host in range(2, MAX_BARRED + 3):
            barred.bar(ipaddress.IPv4Network(f"127.0.0.{host}"), listener.getsockname()[1])
        assert can_connect(listener, "127.0.0.2") and not can_connect(listener, "127.0.0.3")
        assert not can_connect(listener, f"127.0.0.{MAX_BARRED + 2}")
