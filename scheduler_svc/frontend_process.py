"""The front end as a child process: started, watched, started again when it dies, stopped at the end.

Owns the child. Knows nothing of requests. The address of the first start is kept, so that a front end which comes back
listens where callers expect it, also where the port was chosen by the system.
"""

import logging
import subprocess
import sys
import threading
import time

log = logging.getLogger("tandem.core")

_READY = "frontend listening on "
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.1, 5.0
_STOP_SECONDS = 5.0


class FrontendProcess:
    """`flags` are the front end's, without --listen."""

    def __init__(self, *, listen: str, flags: list[str]) -> None:
        self._listen = listen
        self._flags = flags
        self._was_ready = False
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._start_at = 0.0
        self._child: subprocess.Popen[str] | None = None
        self._is_asked = False

    def watch(self, *, restart: bool) -> None:
        """Starts it where it does not run. Raises SystemExit where it never came up: the reason stands above.

        Without `restart` one that ended stays so: the service is stopping, and nobody new is to be heard.
        """
        child = self._child
        if child is not None:
            if (code := child.poll()) is None:
                return
            self._child = None
            if restart and not self._was_ready:
                raise SystemExit(f"scheduler_svc: the front end ended with code {code} before it listened; see above")
            if restart:
                log.warning("the front end ended with code %d; starting it again in %g s", code, self._backoff_seconds)
            self._start_at = time.monotonic() + self._backoff_seconds
            self._backoff_seconds = min(2 * self._backoff_seconds, _LAST_BACKOFF_SECONDS)
        if restart and time.monotonic() >= self._start_at:
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "scheduler_svc.frontend", "--listen", self._listen, *self._flags]
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._pass_on, args=(self._child,), daemon=True).start()

    def _pass_on(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(_READY):
                self._listen = line.removeprefix(_READY).strip()
                self._was_ready = True
                self._backoff_seconds = _FIRST_BACKOFF_SECONDS
            print(line, end="", flush=True)

    def give_up(self, frontend: str) -> None:
        """The core lost this front end (f-<pid>-…). If it lives it reads nothing, so it is killed and replaced."""
        child = self._child
        if child is not None and frontend.startswith(f"f-{child.pid}-"):
            child.kill()

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    def ask_to_stop(self) -> None:
        """Lets it end once its streams have; only the first call does anything."""
        if self._child is not None and not self._is_asked:
            self._is_asked = True
            self._child.terminate()

    def stop(self) -> None:
        """Ends it: asked first, then killed."""
        child, self._child = self._child, None
        if child is None:
            return
        if not self._is_asked:
            child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the front end did not stop within %g s; killing it", _STOP_SECONDS)
            child.kill()
            child.wait()
