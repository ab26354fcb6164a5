"""The front ends as child processes: started, watched, each started again when it dies or hangs, stopped at the end.

Owns the children and the address that they share. Knows nothing of requests. The address of the first start is kept,
so that a front end which comes back listens where callers expect it, also where the port was chosen by the system.
"""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from scheduler_svc.address import HeldAddress

log = logging.getLogger("tandem.core")

_READY = "frontend listening on "
# What its event loop prints every second. One that hangs keeps its share of the port, so callers that the kernel sends
# there would wait for ever.
_ALIVE = "frontend alive"
_SILENCE_SECONDS = 15.0
# Of this process: then nobody's silence means anything.
_UNWATCHED_SECONDS = 1.0
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.1, 5.0
# Who ran for so long is started again at once, whatever became of those before it.
_STEADY_SECONDS = 10.0
_STOP_SECONDS = 5.0


class FrontendProcess:
    """One of them. `flags` are its own, without --listen; `on_ready` is called in a thread, whenever it listens."""

    def __init__(
        self, name: str, *, listen: str, flags: list[str], on_ready: Callable[[], None], silence_seconds: float
    ) -> None:
        self.listen = listen
        self.is_listening = False
        self._name = name
        self._flags = flags
        self._on_ready = on_ready
        self._silence_seconds = silence_seconds
        self._heard_at = self._watched_at = self._ready_at = 0.0
        self._was_ready = False
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._start_at = 0.0
        self._child: subprocess.Popen[str] | None = None

    def watch(self, *, restart: bool) -> None:
        """Starts it where it does not run. Raises SystemExit where it never came up: the reason stands above.

        Without `restart` one that ended stays so: the service is stopping, and nobody new is to be heard.
        """
        child, now = self._child, time.monotonic()
        if child is not None:
            if (code := child.poll()) is None:
                self._check_alive(child, now)
                return
            if self.is_listening and now - self._ready_at >= _STEADY_SECONDS:
                self._backoff_seconds = _FIRST_BACKOFF_SECONDS
            self._child, self.is_listening = None, False
            if restart and not self._was_ready:
                raise SystemExit(f"scheduler_svc: {self._name} ended with code {code} before it listened; see above")
            if restart:
                log.warning("%s ended with code %d; starting it again in %g s", self._name, code, self._backoff_seconds)
            self._back_off(now)
        if restart and now >= self._start_at:
            self._start(now)

    def _check_alive(self, child: subprocess.Popen[str], now: float) -> None:
        if now - self._watched_at > _UNWATCHED_SECONDS:
            self._heard_at = now
        self._watched_at = now
        if self.is_listening and now - self._heard_at > self._silence_seconds:
            log.warning("%s has been silent for %g s; killing it", self._name, self._silence_seconds)
            # Its end is seen in a later turn.
            self._heard_at = now
            child.kill()

    def _back_off(self, now: float) -> None:
        self._start_at = now + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LAST_BACKOFF_SECONDS)

    def _start(self, now: float) -> None:
        command = [sys.executable, "-m", "scheduler_svc.frontend", "--listen", self.listen, *self._flags]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            # A machine that has no room for a process now; the others serve on.
            if not self._was_ready:
                raise SystemExit(f"scheduler_svc: {self._name} cannot be started: {error.strerror}") from None
            log.warning("%s cannot be started: %s; again in %g s", self._name, error.strerror, self._backoff_seconds)
            self._back_off(now)
            return
        threading.Thread(target=self._read, args=(self._child,), daemon=True).start()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                if line.startswith(_READY) and child is self._child:
                    self._heard_at = self._ready_at = time.monotonic()
                    self.listen = line.removeprefix(_READY).strip()
                    self._was_ready = self.is_listening = True
                    self._on_ready()
                elif line.rstrip() == _ALIVE:
                    self._heard_at = time.monotonic()
                elif not line.startswith(_READY):
                    print(line, end="", flush=True)

    def is_pid(self, pid: str) -> bool:
        """Whether it runs under this process id."""
        return self._child is not None and pid == str(self._child.pid)

    def kill(self) -> None:
        """At once; `watch` replaces it."""
        if self._child is not None:
            self._child.kill()

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    def terminate(self) -> None:
        """Lets it end once its streams have."""
        if self._child is not None:
            self._child.terminate()

    def wait(self, seconds: float) -> None:
        """Until it has ended; killed where that takes longer."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within %g s; killing it", self._name, _STOP_SECONDS)
            child.kill()
            child.wait()


class FrontendProcesses:
    """`count` of them at one address. Says where they listen once all do, and again when one came back."""

    def __init__(self, count: int, *, listen: str, flags: list[str], silence_seconds: float = _SILENCE_SECONDS) -> None:
        """Raises address.ListenError where several cannot share the address; one alone finds out by itself.

        One that listens and has said nothing for `silence_seconds` is replaced.
        """
        self._held = HeldAddress(listen) if count > 1 else None
        if self._held is not None:
            listen, flags = self._held.listen, [*flags, "--share-port"]
        self._children = [
            FrontendProcess(
                f"front end {number} of {count}" if count > 1 else "the front end",
                listen=listen,
                flags=flags,
                on_ready=self._announce,
                silence_seconds=silence_seconds,
            )
            for number in range(1, count + 1)
        ]
        self._announcing = threading.Lock()
        self._is_asked = False

    def _announce(self) -> None:
        with self._announcing:
            if all(child.is_listening for child in self._children):
                print(f"{_READY}{self._children[0].listen}", flush=True)

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
    def listen(self) -> str:
        """The address that they share; port 0 until the first listens, where the system chooses."""
        return self._children[0].listen

    @property
    def is_running(self) -> bool:
        """Whether one of them runs."""
        return any(child.is_running for child in self._children)

    def ask_to_stop(self) -> None:
        """Lets each end once its streams have; only the first call does anything."""
        if not self._is_asked:
            self._is_asked = True
            for child in self._children:
                child.terminate()

    def stop(self) -> None:
        """Ends them: asked first, then killed."""
        self.ask_to_stop()
        limit = time.monotonic() + _STOP_SECONDS
        for child in self._children:
            child.wait(max(0.0, limit - time.monotonic()))
        if self._held is not None:
            self._held.close()
