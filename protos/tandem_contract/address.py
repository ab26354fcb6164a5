"""The address at which a program listens, as operators write it: `host:port`, an IPv6 host in brackets."""

import ipaddress
from contextlib import suppress


def host_and_port(address: str, example: str) -> tuple[str, int]:
    """Returns the two parts. Raises ValueError, whose text continues the name of the setting; `example` is in it."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ValueError(f"is {address}; it must be HOST:PORT with a port from 0 to 65535, like {example}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        # Without brackets the last part of an IPv6 address looks like a port.
        written = f"[{address}]:PORT"
        with suppress(ValueError):
            written = f"[{ipaddress.ip_address(host)}]:{port}"
        raise ValueError(f"is {address}; an IPv6 address needs brackets: write {written}")
    return host, int(port)
