"""A typed client of Tandem's gRPC service: `Client` blocks, `AsyncClient` does not.

Errors live in `client.errors`, the service's answers in `client.types`.
"""

from typing import TYPE_CHECKING

from client.async_client import AsyncClient
from client.sync_client import Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__: str

# Hidden from type checkers, which would take any name for a string.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        # Found at first use: an import reads no files.
        if name == "__version__":
            from client.version import version

            return version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
