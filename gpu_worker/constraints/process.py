"""The worker's end of its mask server: the process, its socket, and the memory that both share.

Owns them, and starts or replaces the process. Nothing here waits for the server, except `wait`. Knows nothing of rows
or constraints.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gpu_worker.constraints.area import SharedArea, Sizes, new_memory
from gpu_worker.constraints.frames import MAX_BYTES, Frame, Kind, decoded
from gpu_worker.constraints.words import MAX_PACKET

# Before `wait` sleeps.
_SPIN_SECONDS = 0.001


class ServerGone(Exception):
    """The serving process, or the one that forks it, has ended."""


class ServerUnusable(Exception):
    """The process says why it cannot serve this model, in one sentence."""


class ServerProcess:
    """A mask server. `start` and `replace` return before it serves; frames wait in between."""

    def __init__(self, tokenizer_json: bytes, sizes: Sizes, eos_token_ids: Sequence[int]) -> None:
        """Makes the shared memory. Raises OSError."""
        self._eos, self._sizes = tuple(eos_token_ids), sizes
        self._memory = new_memory(sizes)
        self.area = SharedArea(self._memory, sizes)
        self._tokenizer = os.memfd_create("tandem-tokenizer", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(self._tokenizer), "wb") as file:
            file.write(tokenizer_json)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._unsent: deque[bytes] = deque()

    def replace(self) -> None:
        """Kills the serving process and starts another one; frames that it has not answered are lost.

        Raises OSError if no process can be started.
        """
        self._unsent.clear()
        if self._connection is not None:
            self._connection.close()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        with other:
            if self._control is not None:
                try:
                    socket.send_fds(self._control, [b"fork"], [other.fileno()])
                    return
                except OSError:
                    self._end()
            self._spawn()
            assert self._control is not None
            socket.send_fds(self._control, [b"fork"], [other.fileno()])

    def _spawn(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            inherited = (theirs.fileno(), self._memory, self._tokenizer)
            control, memory, tokenizer = map(str, inherited)
            command = [sys.executable, "-P", "-m", "gpu_worker.constraints"]
            command += ["--control", control, "--memory", memory, "--tokenizer", f"/proc/self/fd/{tokenizer}"]
            command += ["--vocab-size", str(self._sizes.vocab_size), "--max-rows", str(self._sizes.max_rows)]
            command += ["--max-length", str(self._sizes.max_length), "--eos", *map(str, self._eos)]
            # The log is the only writer of stderr; the process says on its socket why it cannot serve.
            nothing = subprocess.DEVNULL
            self._process = subprocess.Popen(command, pass_fds=inherited, stdin=nothing, stdout=nothing, stderr=nothing)

    def send(self, frame: Frame) -> None:
        """Sends a frame now, or when the server takes it. Raises ServerGone."""
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
                self._look_at_control()
                raise ServerGone(str(error)) from None
            self._unsent.popleft()

    def receive(self) -> list[Frame]:
        """The frames that have come. Raises ServerGone, ServerUnusable or FrameError."""
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
                self._look_at_control()
                raise ServerGone("the process has ended")
            frames.append(decoded(packet))
        return frames

    def _look_at_control(self) -> None:
        """Raises ServerUnusable or ServerGone if the process that forks has said why it ends, or has ended."""
        assert self._control is not None, "the server was started"
        try:
            reason = _last_words(self._control)
        except BlockingIOError:
            return
        self._end()
        if reason:
            raise ServerUnusable(reason.decode("utf-8", "replace"))
        raise ServerGone("the process that forks has ended")

    def wait(self, seconds: float) -> None:
        """Waits until a frame has come or can be sent, for `seconds` at most."""
        assert self._connection is not None and self._control is not None, "the server was started"
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.register(self._control, select.POLLIN)
        # The answer usually takes less time than it takes to wake up.
        spin_end = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < spin_end:
            if poller.poll(0):
                return
        poller.poll(seconds * 1e3)

    def _end(self) -> None:
        """Ends the process that forks; its child ends with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends the server and gives the memory back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._end()
        for descriptor in (self._memory, self._tokenizer):
            os.close(descriptor)


def _last_words(control: socket.socket) -> bytes:
    """What the process has said; empty if it has ended without. Raises BlockingIOError if it lives."""
    try:
        return control.recv(MAX_PACKET)
    except ConnectionResetError:
        # The kernel reports first that it has not read everything, and then gives what it had sent.
        return control.recv(MAX_PACKET)
