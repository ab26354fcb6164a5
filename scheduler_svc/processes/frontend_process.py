"""One front end as a child process: started, watched, restarted when it dies or hangs, stopped at the end.

Owns the child process and its output. Does not know requests. The address of the first start is kept, so that a
restarted front end listens where callers expect it, also if the system chose the port.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem_contract.parent import PARENT

log = logging.getLogger("tandem.core")

# The lines of a front end's stdout.
READY, FAILED, ALIVE = "frontend listening on ", "frontend failed: ", "frontend alive"
# A front end prints ALIVE every second from its event loop. One that hangs keeps its share of the port, and callers
# that the kernel connects to it would wait for ever.
SILENCE_SECONDS = 15.0
# If this process itself was stalled for this long, it could not read the output of its children.
_UNWATCHED_SECONDS = 1.0
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.1, 5.0
# A front end that listened for this long is restarted with the first backoff.
_STEADY_SECONDS = 10.0
STOP_SECONDS = 5.0


class FrontendFailed(Exception):
    """A front end ended before it listened for the first time. The message ends with the cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True, kw_only=True, eq=False)
class _Start:
    """One start of the front end. Its reader, a thread, writes here alone, so an earlier start says nothing of it."""

    child: subprocess.Popen[str]
    heard_at: float = 0.0
    # When it began to listen; written last of what its line means.
    ready_at: float | None = None
    failure: str = ""


class FrontendProcess:
    """One front end. `flags` are its flags except --listen and --secret-fd."""

    def __init__(
        self,
        name: str,
        *,
        listen: str,
        flags: list[str],
        secret: bytes,
        on_start: Callable[[], None],
        on_ready: Callable[[], None],
        silence_seconds: float,
    ) -> None:
        """`on_start` is called before each start, `on_ready` in a thread each time the front end begins to listen."""
        self.listen = listen
        self._name = name
        self._flags = flags
        self._secret = secret
        self._on_start = on_start
        self._on_ready = on_ready
        self._silence_seconds = silence_seconds
        self._watched_at = 0.0
        self._was_ready = False
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._start_at = 0.0
        self._running: _Start | None = None
        self._reader: threading.Thread | None = None

    def watch(self, *, restart: bool) -> None:
        """Starts the process if it does not run, kills it if it is silent. Call it every turn.

        Raises FrontendFailed if it ended before it listened for the first time. Without `restart`, while the service
        stops, a front end that ended is not replaced.
        """
        running, now = self._running, time.monotonic()
        if running is not None:
            if (code := running.child.poll()) is None:
                self._check_alive(running, now)
                return
            self._ended(running, code, now, restart=restart)
        if restart and now >= self._start_at:
            self._start(now)

    @property
    def is_listening(self) -> bool:
        """Whether the process that runs has begun to listen."""
        running = self._running
        return running is not None and running.ready_at is not None

    def _ended(self, running: _Start, code: int, now: float, *, restart: bool) -> None:
        assert self._reader is not None
        # The cause is its last line.
        self._reader.join(_UNWATCHED_SECONDS)
        if running.ready_at is not None and now - running.ready_at >= _STEADY_SECONDS:
            self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._running = None
        cause = f": {running.failure}" if running.failure else ""
        if restart and not self._was_ready:
            raise FrontendFailed(f"{self._name} ended with code {code} before it listened{cause}", code)
        if restart:
            pause = f"{self._backoff_seconds:g} s"
            log.warning("%s ended with code %d and is restarted in %s%s", self._name, code, pause, cause)
        self._back_off(now)

    def _check_alive(self, running: _Start, now: float) -> None:
        if now - self._watched_at > _UNWATCHED_SECONDS:
            running.heard_at = now
        self._watched_at = now
        if running.ready_at is not None and now - running.heard_at > self._silence_seconds:
            log.warning("%s has been silent for %g s and is killed", self._name, self._silence_seconds)
            # A later call of `watch` sees that it ended.
            running.heard_at = now
            running.child.kill()

    def _back_off(self, now: float) -> None:
        self._start_at = now + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LAST_BACKOFF_SECONDS)

    def _start(self, now: float) -> None:
        self._on_start()
        try:
            self._running = _Start(child=self._popen())
        except OSError as error:
            # The machine cannot start another process now; the other front ends continue.
            if not self._was_ready:
                raise FrontendFailed(f"{self._name} cannot be started: {error.strerror}", 1) from None
            pause = f"{self._backoff_seconds:g} s"
            log.warning("%s cannot be started; the next attempt is in %s: %s", self._name, pause, error.strerror)
            self._back_off(now)
            return
        self._reader = threading.Thread(target=self._read, args=(self._running,), daemon=True)
        self._reader.start()

    def _popen(self) -> subprocess.Popen[str]:
        """Starts the process, which inherits a pipe that holds the secret."""
        reading, writing = os.pipe()
        try:
            os.write(writing, self._secret)
            command = [sys.executable, "-P", "-m", "scheduler_svc.frontend", "--listen", self.listen, *self._flags]
            return subprocess.Popen(
                [*command, "--secret-fd", str(reading)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, PARENT: str(os.getpid())},
                pass_fds=(reading,),
            )
        finally:
            os.close(writing)
            os.close(reading)

    def _read(self, own: _Start) -> None:
        assert own.child.stdout is not None
        with own.child.stdout as lines:
            for line in map(str.rstrip, lines):
                if line == ALIVE:
                    own.heard_at = time.monotonic()
                elif line.startswith(FAILED):
                    own.failure = line.removeprefix(FAILED)
                elif not line.startswith(READY):
                    log.info("%s: %s", self._name, line)
                elif own is self._running:
                    self.listen, self._was_ready = line.removeprefix(READY), True
                    own.heard_at = own.ready_at = time.monotonic()
                    self._on_ready()

    def is_pid(self, pid: str) -> bool:
        """Whether the front end has this process id."""
        return self._running is not None and pid == str(self._running.child.pid)

    def kill(self) -> None:
        """Kills the process; `watch` replaces it."""
        if self._running is not None:
            self._running.child.kill()

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._running is not None and self._running.child.poll() is None

    def terminate(self) -> None:
        """Asks the process to end after its streams."""
        if self._running is not None:
            self._running.child.terminate()

    def wait(self, seconds: float) -> None:
        """Waits until the process has ended; kills it after `seconds`."""
        running, self._running = self._running, None
        if running is None:
            return
        child = running.child
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within %g s and is killed", self._name, STOP_SECONDS)
            child.kill()
            child.wait()
