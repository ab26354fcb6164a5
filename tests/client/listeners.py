"""TCP listeners that accept a connection and answer late or never.

They own their sockets and threads. They pass bytes on without reading gRPC.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def silent_listener() -> Iterator[str]:
    """Yields an address that completes TCP's handshake and sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class Proxy:
    """Passes bytes between callers and the service at `address`; closes nothing before its `with` block ends."""

    def __init__(self, address: str, *, delay_seconds: float = 0.0) -> None:
        """The first answer of each connection is delayed."""
        host, _, port = address.rpartition(":")
        self._service, self._delay_seconds = (host, int(port)), delay_seconds
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._sockets = ExitStack()
        self._threads: list[threading.Thread] = []
        # Of each connection, set when its bytes go nowhere.
        self._cut: list[threading.Event] = []
        self._num_swallowed = 0
        self._listener = self._sockets.enter_context(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, *, swallowed: int = 0) -> None:
        """Bytes of all connections go nowhere from now on, and so do those of the next `swallowed` connections."""
        with self._lock:
            self._num_swallowed = swallowed
            for each in self._cut:
                each.set()

    def __enter__(self) -> "Proxy":
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for each in self._cut:
                each.set()
        self._threads[0].join()
        self._sockets.close()
        for thread in self._threads:
            thread.join()

    def _spawn(self, work: Callable[..., None], *values: object) -> None:
        thread = threading.Thread(target=work, args=values)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._stop.is_set():
                near, _ = self._listener.accept()
                far = socket.create_connection(self._service)
                cut = threading.Event()
                with self._lock:
                    self._cut.append(cut)
                    if self._num_swallowed:
                        self._num_swallowed -= 1
                        cut.set()
                for one in (near, far):
                    # A thread that reads the socket wakes up.
                    self._sockets.callback(one.close)
                    self._sockets.callback(_shut_down, one)
                self._spawn(self._copy, near, far, cut, 0.0)
                self._spawn(self._copy, far, near, cut, self._delay_seconds)

    def _copy(self, source: socket.socket, sink: socket.socket, cut: threading.Event, delay: float) -> None:
        # A reset or a closed socket ends a connection like an end of its data.
        with suppress(OSError):
            while data := source.recv(65536):
                self._stop.wait(delay)
                delay = 0
                if not cut.is_set():
                    sink.sendall(data)
        if not cut.is_set():
            _shut_down(sink, socket.SHUT_WR)


def _shut_down(one: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):
        one.shutdown(how)
