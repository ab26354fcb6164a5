"""All front-end processes of the service: they share one address and one secret, and are watched and stopped together.

Owns the address, and the secret with which a front end proves that this service started it. Does not know requests.
"""

import math
import secrets
import threading
import time
from collections.abc import Sequence

from scheduler_svc.processes.address import NOTHING_GIVEN, HeldAddress, ListenError, hold
from scheduler_svc.processes.frontend_process import READY, SILENCE_SECONDS, STOP_SECONDS, FrontendProcess
from tandem_contract.logs import announce

SECRET_BYTES = 32


class FrontendProcesses:
    """`count` front ends at one address. Announces the address when all listen, and again after a replacement."""

    def __init__(
        self,
        count: int,
        *,
        listen: str,
        flags: list[str],
        missing: Sequence[str] = NOTHING_GIVEN,
        health_listen: str = "",
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Holds the addresses and starts no process; `watch` does. Raises ListenError if one cannot be used.

        `missing` has the flags without which only a loopback address is allowed. The health address needs none.

        A front end that listens and prints nothing for `silence_seconds` is replaced.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._held: list[HeldAddress] = []
        held = hold(listen, num_sharing=count, missing=missing)
        if held is not None:
            self._held.append(held)
            listen, flags = held.listen, [*flags, "--share-port"]
        if health_listen:
            try:
                held = hold(health_listen, num_sharing=count, missing=(), flag="--health-listen")
            except ListenError:
                self._release()
                raise
            if held is not None:
                self._held.append(held)
                health_listen = held.listen
            flags = [*flags, "--health-listen", health_listen]
        self._health_listen = health_listen
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
        self._is_stopping = False

    @property
    def listen(self) -> str:
        """The address that callers reach, host:port. Outside Linux a port 0 is replaced once a front end listens."""
        return self._children[0].listen

    def _start_sharing(self) -> None:
        for held in self._held:
            held.start_sharing()

    def _announce(self) -> None:
        if all(child.is_listening for child in self._children):
            for held in self._held:
                held.stop_sharing()
            if self._health_listen:
                announce("health listening on %s", self._health_listen)
            announce("%s%s", READY, self.listen)

    def watch(self, *, restart: bool) -> None:
        """Starts, checks and restarts each front end; see `FrontendProcess.watch`."""
        for child in self._children:
            child.watch(restart=restart)

    def kill(self, frontend: str) -> None:
        """Kills a front end (f-<pid>-…) that the core lost, in case it hangs; `watch` replaces it."""
        pid = frontend.partition("-")[2].partition("-")[0]
        for child in self._children:
            if child.process.pid and str(child.process.pid) == pid:
                child.process.kill()

    @property
    def is_running(self) -> bool:
        """Whether at least one front end ran at the last `watch`."""
        return any(child.process.pid for child in self._children)

    def ask_to_stop(self) -> None:
        """Asks each front end to end after its streams. Later calls do nothing."""
        if not self._is_stopping:
            self._is_stopping = True
            for child in self._children:
                child.terminate()

    def stop(self) -> None:
        """Asks all front ends to end, kills those that take too long, and frees the address."""
        woken = threading.Event()
        for child in self._children:
            child.process.wake = woken.set
            # It may have ended before it could wake this thread.
            child.process.look()
        self.ask_to_stop()
        limit = time.monotonic() + STOP_SECONDS
        while running := [child for child in self._children if child.process.pid]:
            seconds = limit - time.monotonic()
            if seconds <= 0:
                limit = math.inf
                for child in running:
                    child.kill_late()
            woken.wait(max(0.0, seconds) if limit < math.inf else None)
            woken.clear()
            for child in running:
                child.process.look()
        self._release()

    def _release(self) -> None:
        for held in self._held:
            held.close()
