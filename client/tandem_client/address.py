"""The address of a service: how it is written, and whether it is of this machine. Knows nothing of gRPC."""

import ipaddress

DEFAULT_ADDRESS = "127.0.0.1:50051"


def is_local(address: str) -> bool:
    """Whether the address is of this machine. A name is not, except localhost: 127.example.org is anywhere."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def dialled(address: str) -> str:
    """Where to call a service that listens at `host:port`: for a wildcard, all addresses of this machine, loopback."""
    host, _, port = address.rpartition(":")
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return address
    if not found.is_unspecified:
        return address
    # A service at [::] may be reached by IPv4 alone.
    return f"{'127.0.0.1' if found.version == 4 else 'localhost'}:{port}"
