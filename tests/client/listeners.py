"""TCP listeners that accept a connection and answer late or never.

They own their sockets and threads. They pass bytes on without reading gRPC.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


def closed_address() -> str:
    """Yields an address that refuses connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def silent_listener() -> Iterator[str]:
    """Yields an address that completes TCP's handshake and sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def slow_proxy(address: str, *, delay_seconds: float) -> Iterator[str]:
    """Passes bytes to and from the service at `address`, the first answer of each connection after a delay."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def spawn(*work: object) -> None:
        thread = threading.Thread(target=work[0], args=work[1:])  # type: ignore[arg-type]
        threads.append(thread)
        thread.start()

    def copy(source: socket.socket, sink: socket.socket, delay: float) -> None:
        # A reset or a closed socket ends a connection like an end of its data.
        with suppress(OSError):
            while data := source.recv(65536):
                stop.wait(delay)
                delay = 0
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with ExitStack() as sockets, socket.socket() as listener:

        def accept() -> None:
            with suppress(OSError):
                while not stop.is_set():
                    near, _ = listener.accept()
                    far = socket.create_connection((host, int(port)))
                    for one in (near, far):
                        sockets.callback(one.close)
                    spawn(copy, near, far, 0.0)
                    spawn(copy, far, near, delay_seconds)

        host, _, port = address.rpartition(":")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        spawn(accept)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
