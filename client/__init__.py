"""A typed client of Tandem's gRPC service: `Client` blocks, `AsyncClient` does not.

Errors live in `client.errors`, what the service answers in `client.types`.
"""

from client.async_client import AsyncClient
from client.sync_client import Client

__all__ = ["AsyncClient", "Client"]
