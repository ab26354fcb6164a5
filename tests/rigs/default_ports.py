"""The default ports of the programs, held while tests run, as by a service that runs beside them.

So a test fails that starts a program at its default address, or asks a service there. `tests/architecture` checks that
the list is complete.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

DEFAULT_PORTS = (8000, 50051)


@contextmanager
def held_ports() -> Iterator[None]:
    """Listens on every default port that is free, and answers no caller."""
    with ExitStack() as stack:
        for port in DEFAULT_PORTS:
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield
