"""Owns the binding of the gRPC server to its address. Knows nothing of services."""

import grpc.aio

from scheduler_svc.processes.address import split, taken


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds `host:port` and returns it with the port that was bound (0: the system chooses). Raises ListenError."""
    host, port = split(listen)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise taken(listen) from None
    return f"{host}:{bound}"
