"""The address of a service: how it is written, and whether it is of this machine. Knows nothing of gRPC."""

import ipaddress
import re

DEFAULT_ADDRESS = "127.0.0.1:50051"
# Targets of gRPC, which its library reads itself.
_TARGETS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MAX_SHOWN = 60


def problem_of(address: str) -> str:
    """What is wrong with an address, behind its name, and the address that would work; empty if it can be called."""
    if address.startswith(_TARGETS) and not any(char.isspace() for char in address):
        return ""
    scheme = _SCHEME.match(address)
    rest = address[scheme.end() :] if scheme else address
    bare = "".join(rest.split()).partition("/")[0].partition("?")[0]
    host, colon, port = bare.rpartition(":")
    if bare.endswith("]") or not colon:
        host, port = bare, ""
    elif ":" in host and not host.startswith("["):
        # Without brackets, the last part of an IPv6 address looks like a port.
        whole = isinstance(_ip(bare), ipaddress.IPv6Address)
        host, port = f"[{bare if whole else host}]", "" if whole else port
    has_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65_535
    if address == f"{host}:{port}" and host and has_port:
        return ""
    works = f"{host or '127.0.0.1'}:{port if has_port else DEFAULT_ADDRESS.rpartition(':')[2]}"
    why = ""
    if scheme and scheme[0].lower().startswith("http"):
        why = "; a URL is the address of the HTTP gateway, and the service has another port"
    elif port and not has_port:
        why = "; a port is a number from 1 to 65535"
    shown = address if len(address) <= _MAX_SHOWN else f"{address[:_MAX_SHOWN]}…"
    return f"is {shown!r}; it must be HOST:PORT, such as {works}{why}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The host, with or without brackets, if it is a number."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_local(address: str) -> bool:
    """Whether the address is of this machine. A name is not, except localhost: 127.example.org is anywhere."""
    host = address.rpartition(":")[0]
    ip = _ip(host)
    return host in ("localhost", "[localhost]") or address.startswith("unix:") or (ip is not None and ip.is_loopback)


def dialled(address: str) -> str:
    """Where to call a service that listens at `host:port`: for a wildcard, all addresses of this machine, loopback."""
    host, _, port = address.rpartition(":")
    ip = _ip(host)
    if ip is None or not ip.is_unspecified:
        return address
    # A service at [::] may be reached by IPv4 alone.
    return f"{'127.0.0.1' if ip.version == 4 else 'localhost'}:{port}"
