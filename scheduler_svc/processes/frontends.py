"""All front ends of the service: they share one address and one secret, and are watched and stopped together.

Owns the address and the secret by which a front end proves that it belongs to this service. Knows nothing of requests.
"""

import secrets
import threading
import time

from scheduler_svc.logs import announce
from scheduler_svc.processes.address import hold
from scheduler_svc.processes.frontend_process import READY, SILENCE_SECONDS, STOP_SECONDS, FrontendProcess

SECRET_BYTES = 32


class FrontendProcesses:
    """`count` front ends at one address. Announces the address once all listen, and again when one was replaced."""

    def __init__(self, count: int, *, listen: str, flags: list[str], silence_seconds: float = SILENCE_SECONDS) -> None:
        """Starts nothing yet. Raises ListenError if the address cannot be used.

        A front end that listens and has printed nothing for `silence_seconds` is replaced.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._held = hold(listen, num_sharing=count)
        if self._held is not None:
            listen, flags = self._held.listen, [*flags, "--share-port"]
        self._children = [
            FrontendProcess(
                f"front end {number} of {count}" if count > 1 else "the front end",
                listen=listen,
                flags=[*flags, "--name", f"frontend-{number}" if count > 1 else "frontend"],
                secret=self.secret,
                on_start=self._start_sharing,
                on_ready=self._announce,
                silence_seconds=silence_seconds,
            )
            for number in range(1, count + 1)
        ]
        # Held while it is decided whether the port is shared.
        self._sharing = threading.Lock()
        self._is_asked = False

    @property
    def listen(self) -> str:
        """The address that callers reach, host:port. Outside Linux a port 0 is known only once a front end listens."""
        return self._children[0].listen

    def _start_sharing(self) -> None:
        if self._held is not None:
            with self._sharing:
                self._held.start_sharing()

    def _announce(self) -> None:
        with self._sharing:
            if all(child.is_listening for child in self._children):
                if self._held is not None:
                    self._held.stop_sharing()
                announce("%s%s", READY, self.listen)

    def watch(self, *, restart: bool) -> None:
        """Each as `FrontendProcess.watch`."""
        for child in self._children:
            child.watch(restart=restart)

    def give_up(self, frontend: str) -> None:
        """The core lost this front end (f-<pid>-…). If it lives it reads nothing, so it is killed and replaced."""
        _, _, rest = frontend.partition("-")
        for child in self._children:
            if child.is_pid(rest.partition("-")[0]):
                child.kill()

    @property
    def is_running(self) -> bool:
        """Whether one of them runs."""
        return any(child.is_running for child in self._children)

    def ask_to_stop(self) -> None:
        """Asks each to end once its streams have; only the first call does anything."""
        if not self._is_asked:
            self._is_asked = True
            for child in self._children:
                child.terminate()

    def stop(self) -> None:
        """Ends them: asks first, then kills."""
        self.ask_to_stop()
        limit = time.monotonic() + STOP_SECONDS
        for child in self._children:
            child.wait(max(0.0, limit - time.monotonic()))
        if self._held is not None:
            self._held.close()
