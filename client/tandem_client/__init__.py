"""A typed client of Tandem's gRPC service: `Client` blocks, `AsyncClient` does not.

Errors live in `tandem_client.errors`, the service's answers in `tandem_client.types`.
"""

import tandem_client.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_client.async_client import AsyncClient
    from tandem_client.connection import TlsSettings
    from tandem_client.sync_client import Client

__all__ = ["AsyncClient", "Client", "TlsSettings", "__version__"]

__version__: str

# Hidden from type checkers, which would take any name for a string.
if not TYPE_CHECKING:
    _MODULES = {"AsyncClient": "async_client", "Client": "sync_client", "TlsSettings": "connection"}

    def __getattr__(name: str) -> object:
        # Found at first use: an import reads no files, and what uses one module alone waits for no gRPC.
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        if name == "__version__":
            from tandem_contract.version import version

            return version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
