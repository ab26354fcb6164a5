"""Owns the address that callers reach: which are allowed, and binding one. Knows nothing of services."""

import ipaddress

import grpc.aio


class ListenError(Exception):
    """The address cannot be used; the message says why, the address last."""


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds `host:port` and returns it with the port that was bound (0: the system chooses). Raises ListenError.

    Only loopback addresses: anybody who reaches the port may use the service, until TLS and tokens are built.
    """
    host, port = _split(listen)
    if not _is_loopback(host):
        raise ListenError(
            f"this version has neither TLS nor tokens, so it listens on loopback addresses only"
            f" (127.0.0.1, [::1], localhost), not on {listen}"
        )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise ListenError(
            f"the port is taken, or the address is not this machine's; choose another with --listen (127.0.0.1:0 lets"
            f" the system choose): cannot listen on {listen}"
        ) from None
    return f"{host}:{bound}"


def _split(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ListenError(
            f"an address looks like 127.0.0.1:50051, with a port between 0 and 65535; this does not: {listen}"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
