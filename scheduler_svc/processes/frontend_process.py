"""One front end as a child process: its start, the meaning of its output, and what is said of its end.

Does not know requests. The address of the first start is kept, so that a restarted front end listens where callers
expect it, also if the system chose the port.
"""

import logging
import math
import os
import time
from collections.abc import Callable

from tandem_contract.child import Program, python
from tandem_contract.processes import NOT_STARTED_WORDS, Ended, GiveUp, Heard, OnZero, Policy, State, Supervisor

log = logging.getLogger("tandem.core")

# The lines of a front end's stdout.
READY, FAILED, ALIVE = "frontend listening on ", "frontend failed: ", "frontend alive"
# A front end prints ALIVE every second from its event loop. One that hangs keeps its share of the port, and callers
# that the kernel connects to it would wait for ever.
SILENCE_SECONDS = 15.0
STOP_SECONDS = 5.0
_POLICY = Policy(
    first_pause_seconds=0.1, last_pause_seconds=5.0, jitter=False,
    steady_seconds=10.0, steady_at_once=False, on_zero=OnZero.CRASH,
)  # fmt: skip


class FrontendFailed(Exception):
    """A front end ended before it listened for the first time. The message ends with the cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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
        """`on_start` is called before each start, `on_ready` each time the front end begins to listen."""
        self.listen = listen
        self._name, self._flags, self._secret = name, flags, secret
        self._on_start, self._on_ready = on_start, on_ready
        self._silence_seconds = silence_seconds
        # What the process that runs, or the last one, has said of its failure.
        self._failure = ""
        self.process = Supervisor(
            name,
            self._program,
            _POLICY,
            hear=self._hear,
            on_change=self._on_change,
            silence_seconds=silence_seconds,
            on_silence=self._on_silence,
            clock=lambda: time.monotonic(),
        )

    def watch(self, *, restart: bool) -> None:
        """Starts the process if it does not run, kills it if it is silent. Call it every turn.

        Raises FrontendFailed if it ended before it listened for the first time. Without `restart`, while the service
        stops, a front end that ended is not replaced.
        """
        if not restart:
            self.process.start_no_more()
        self.process.look()

    @property
    def is_listening(self) -> bool:
        """Whether the process that runs has begun to listen."""
        return self.process.state == State.SERVING

    def terminate(self) -> None:
        """Asks the process to end after its streams."""
        self.process.stop(math.inf)
        self.process.look()

    def kill_late(self) -> None:
        """Kills a process that did not end in time."""
        log.warning("%s did not stop within %g s and is killed", self._name, STOP_SECONDS)
        self.process.kill()

    def _program(self) -> Program:
        """It inherits a pipe that holds the secret."""
        self._on_start()
        self._failure = ""
        reading, writing = os.pipe()
        os.write(writing, self._secret)
        os.close(writing)
        argv = python("scheduler_svc.frontend", "--listen", self.listen, *self._flags, "--secret-fd", str(reading))
        return Program(argv=argv, descriptors=(reading,), takes_stderr=False)

    def _hear(self, line: str) -> Heard:
        if line == ALIVE:
            return Heard.ALIVE
        if line.startswith(READY):
            self.listen = line.removeprefix(READY)
            return Heard.SERVES
        if line.startswith(FAILED):
            self._failure = line.removeprefix(FAILED)
        else:
            log.info("%s: %s", self._name, line)
        return Heard.WORDS

    def _on_silence(self) -> None:
        log.warning("%s has been silent for %g s and is killed", self._name, self._silence_seconds)

    def _on_change(self, process: Supervisor) -> None:
        if process.state == State.SERVING:
            self._on_ready()
        elif process.state in (State.PAUSED, State.GIVEN_UP) and process.ended is not None:
            self._on_end(process.ended)

    def _on_end(self, ended: Ended) -> None:
        was_started = ended.how != NOT_STARTED_WORDS
        cause = f": {self._failure if was_started else ended.cause}".removesuffix(": ")
        if isinstance(ended.then, GiveUp):
            how = f"ended with code {ended.status} before it listened" if was_started else "cannot be started"
            raise FrontendFailed(f"{self._name} {how}{cause}", ended.status)
        how = (
            f"ended with code {ended.status} and is restarted"
            if was_started
            else "cannot be started; the next attempt is"
        )
        log.warning("%s %s in %g s%s", self._name, how, ended.then, cause)
