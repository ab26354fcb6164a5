"""The worker's end of its mask server: the process, its socket, and the memory that both share.

Owns the memory and the exchange of frames. Nothing here waits for the server, except `wait`. Knows nothing of rows or
constraints.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from gpu_worker.constraints.frames import MAX_BYTES, Frame, Kind, SharedArea, Sizes, decoded, new_memory
from tandem_contract.fork_server import ForkServer

# Before `wait` sleeps.
_SPIN_SECONDS = 0.001


class ServerGone(Exception):
    """The serving process, or the one that forks it, has ended."""


class ServerUnusable(Exception):
    """The process says why it cannot serve this model, in one sentence."""


class ServerProcess:
    """A mask server. `replace` returns before it serves; frames wait in between."""

    def __init__(self, tokenizer_json: bytes, sizes: Sizes, eos_token_ids: Sequence[int]) -> None:
        """Makes the shared memory. Raises OSError."""
        self._memory = new_memory(sizes)
        self.area = SharedArea(self._memory, sizes)
        self._forks = ForkServer(
            "gpu_worker.constraints",
            {"sizes": asdict(sizes), "eos": list(eos_token_ids)},
            files={"tokenizer": tokenizer_json},
            descriptors={"memory": self._memory},
        )
        self._connection: socket.socket | None = None
        self._unsent: deque[bytes] = deque()

    def replace(self) -> None:
        """Kills the serving process and starts another one; frames that it has not answered are lost.

        Raises OSError if no process can be started.
        """
        self._unsent.clear()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._forks.fork()

    def send(self, frame: Frame) -> None:
        """Sends a frame now, or when the server takes it. Raises ServerGone, ServerUnusable or OSError."""
        self._unsent.append(frame.encoded())
        self._flush()

    def _flush(self) -> None:
        assert self._connection is not None, "the server was started"
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._look_at_forks()
                raise ServerGone(str(error)) from None
            self._unsent.popleft()

    def receive(self) -> list[Frame]:
        """The frames that have come. Raises ServerGone, ServerUnusable, OSError or FrameError."""
        assert self._connection is not None, "the server was started"
        if self._unsent:
            self._flush()
        frames: list[Frame] = []
        while not frames or frames[-1].kind is not Kind.MASKED:
            try:
                packet = self._connection.recv(MAX_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._look_at_forks()
                raise ServerGone("the process has ended")
            frames.append(decoded(packet))
        return frames

    def _look_at_forks(self) -> None:
        """Raises ServerUnusable or ServerGone if the process that forks has said why it ends, or has ended.

        Raises OSError if it could not be started.
        """
        reason = self._forks.last_words()
        if reason is None:
            return
        self._forks.kill()
        if reason:
            raise ServerUnusable(reason)
        raise ServerGone("the process that forks has ended")

    def wait(self, seconds: float) -> None:
        """Waits until a frame has come or can be sent, for `seconds` at most."""
        assert self._connection is not None, "the server was started"
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.register(self._forks, select.POLLIN)
        # The answer usually takes less time than it takes to wake up.
        spin_end = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < spin_end:
            if poller.poll(0):
                return
        poller.poll(seconds * 1e3)

    def close(self) -> None:
        """Ends the server and gives the memory back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._forks.kill()
        os.close(self._memory)
