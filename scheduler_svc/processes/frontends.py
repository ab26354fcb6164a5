"""Front ends as child processes: they share one address and one secret, and are started, watched and stopped together.

Owns the address, the secret with which a front end proves that this service started it, the form in which it gets its
settings, the meaning of its output, and what is said of its end. Does not know requests. The address of the first start
is kept, so that a restarted front end listens where callers expect it, also if the system chose the port.
"""

import errno
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from scheduler_svc.door.tls_files import TlsFiles
from scheduler_svc.processes.address import CAN_SHARE, NOTHING_GIVEN, HeldAddress, ListenError
from tandem_contract.child import Program, python
from tandem_contract.logs import LogFormat, announce
from tandem_contract.plural import counted
from tandem_contract.processes import NOT_STARTED_WORDS, GiveUp, Heard, OnZero, Policy, State, Supervisor
from tandem_contract.stopping import is_stop

log = logging.getLogger("tandem.core")

# The lines of a front end's stdout.
READY, FAILED, ALIVE = "frontend listening on ", "frontend failed: ", "frontend alive"
# A front end prints ALIVE every second from its event loop. One that hangs keeps its share of the port, and callers
# that the kernel connects to it would wait for ever.
SILENCE_SECONDS = 15.0
STOP_SECONDS = 5.0
SECRET_BYTES = 32
_POLICY = Policy(
    first_pause_seconds=0.1, last_pause_seconds=5.0, jitter=False,
    steady_seconds=10.0, steady_at_once=False, on_zero=OnZero.CRASH,
)  # fmt: skip
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSettings:
    """What a front end gets at its start. A pipe has it, as JSON: its secret is not for a command line."""

    # The core's socket, ipc://...
    endpoint: str
    listen: str
    max_message_bytes: int
    grace_seconds: float
    # Its name in log lines.
    name: str = "frontend"
    share_port: bool = False
    # Whether callers need a token or a known certificate, which the core sends.
    needs_tokens: bool = False
    tls: TlsFiles | None = None
    # The address of the health service alone, in plaintext; "": none.
    health_listen: str = ""
    # Whether requests are measured for the metrics page.
    measures: bool = False
    reflection: bool = False
    max_streams: int = 8192
    log_level: str = "info"
    log_format: LogFormat = "text"
    log_requests: Literal["on", "off", "address"] = "on"
    # Whether private parts of gRPC are used.
    grpc_tuning: Literal["on", "off"] = "on"
    # The folder for the stacks at a fatal signal.
    flight_dir: Path | None = None
    # How answers of chats are parsed, instead of as the checkpoint or its template says.
    response_template: Path | None = None
    # Proves to the core that this process is its front end; no core accepts an empty one.
    secret: bytes = field(default=b"", repr=False)

    def encoded(self) -> bytes:
        """Returns what `decoded` takes."""
        return json.dumps(asdict(self), default=lambda item: item.hex() if type(item) is bytes else str(item)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> "FrontEndSettings":
        """Raises ValueError, TypeError if a value is missing, unknown, or of another type."""
        return _made(cls, json.loads(text))


def _made(kind: type[_Made], given: dict[str, Any]) -> _Made:
    kinds = get_type_hints(kind)
    if differing := sorted(given.keys() ^ kinds.keys()):
        raise ValueError(f"{', '.join(differing)}: missing or unknown")
    return kind(**{name: _value(name, kinds[name], value) for name, value in given.items()})


def _value(name: str, kind: Any, given: Any) -> Any:
    """Returns the value of decoded JSON if it is of this kind. No error has the value, which may be a secret."""
    # For a literal these are its values.
    kinds = get_args(kind) or (kind,)
    if given in kinds or type(given) in kinds:
        return given
    if isinstance(given, str) and kinds[0] in (Path, bytes):
        return Path(given) if kinds[0] is Path else bytes.fromhex(given)
    if isinstance(given, dict) and is_dataclass(kinds[0]):
        return _made(cast(Any, kinds[0]), cast(dict[str, Any], given))
    raise TypeError(f"{name} is not of type {kind}")


class FrontendFailed(Exception):
    """A front end ended before it listened for the first time. The message ends with the cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _FrontEnd:
    """One front end. `name` is what messages call it."""

    def __init__(self, name: str, settings: FrontEndSettings, shared: "FrontendProcesses", silence: float) -> None:
        # After the first start its address is known, also if the system chose the port.
        self.settings = settings
        self.name, self._shared = name, shared
        # What the process that runs, or the last one, has said of its failure.
        self._failure = ""
        self.process = Supervisor(
            name,
            self._program,
            _POLICY,
            hear=self._hear,
            on_change=self._on_change,
            on_end=self._on_end,
            silence_seconds=silence,
            on_silence=lambda: log.warning("%s has been silent for %g s and is killed", name, silence),
            clock=lambda: time.monotonic(),
        )

    def _program(self) -> Program:
        """It inherits a pipe that holds its settings. Raises OSError."""
        self._shared.share(is_on=True)
        self._failure = ""
        content, (reading, writing) = self.settings.encoded(), os.pipe()
        with open(writing, "wb", buffering=0) as pipe:
            # No front end reads yet.
            os.set_blocking(writing, False)
            if pipe.write(content) != len(content):
                os.close(reading)
                raise OSError(errno.E2BIG, f"{counted(len(content), 'byte of settings', 'do')} not fit a pipe")
        return Program(
            argv=python("scheduler_svc.frontend", str(reading)),
            descriptors=(reading,),
            takes_stderr=False,
            has_session=False,
        )

    def _hear(self, line: str) -> Heard:
        if line == ALIVE:
            return Heard.ALIVE
        if line.startswith(READY):
            self.settings = replace(self.settings, listen=line.removeprefix(READY))
            return Heard.SERVES
        if line.startswith(FAILED):
            self._failure = line.removeprefix(FAILED)
        else:
            log.info("%s: %s", self.name, line)
        return Heard.WORDS

    def _on_change(self, process: Supervisor) -> None:
        if process.state == State.SERVING:
            self._shared.announce_when_all_listen()
        elif process.state == State.STOPPED and process.ended is not None and process.ended.is_overdue:
            log.warning("%s %s", self.name, process.ended.how)

    def _on_end(self, process: Supervisor) -> None:
        ended = process.ended
        assert ended is not None, "it has ended"
        was_started = ended.how != NOT_STARTED_WORDS
        cause = f": {self._failure if was_started else ended.cause}".removesuffix(": ")
        how = f"ended with code {ended.status}" if was_started else "cannot be started"
        if isinstance(ended.then, GiveUp):
            before = " before it listened" if was_started else ""
            raise FrontendFailed(f"{self.name} {how}{before}{cause}", ended.status)
        next_one = " and is restarted" if was_started else "; the next attempt is"
        # A signal asked this one alone to stop.
        is_asked = ended.status == 0 or is_stop(ended.status)
        level = logging.INFO if was_started and is_asked else logging.WARNING
        log.log(level, "%s %s%s in %g s%s", self.name, how, next_one, ended.then, cause)


class FrontendProcesses:
    """`count` front ends at one address. Announces the address when all listen, and again after a replacement."""

    def __init__(
        self,
        count: int,
        settings: FrontEndSettings,
        *,
        missing: Sequence[str] = NOTHING_GIVEN,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Holds the addresses of `settings`; `watch` starts processes. Raises ListenError if one cannot be used.

        `missing` has the flags without which only a loopback address is allowed. The health address needs none. A front
        end that listens and prints nothing for `silence_seconds` is replaced.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._held = [HeldAddress(settings.listen, num_sharing=count, missing=missing)]
        try:
            if settings.health_listen:
                held = HeldAddress(settings.health_listen, num_sharing=count, missing=(), flag="--health-listen")
                self._held.append(held)
        except ListenError:
            self._release()
            raise
        listen, self._health_listen = self._held[0].listen, self._held[-1].listen if self._held[1:] else ""
        settings = replace(
            settings, secret=self.secret, listen=listen, health_listen=self._health_listen, share_port=CAN_SHARE
        )
        names = {f"front end {number} of {count}": f"frontend-{number}" for number in range(1, count + 1)}
        if count == 1:
            names = {"the front end": settings.name}
        self._children = [
            _FrontEnd(name, replace(settings, name=in_logs), self, silence_seconds) for name, in_logs in names.items()
        ]
        self._is_stopping = False

    @property
    def listen(self) -> str:
        """The address that callers reach, host:port."""
        return self._children[0].settings.listen

    def share(self, *, is_on: bool) -> None:
        """Lets front ends bind the addresses; off, no process can."""
        for held in self._held:
            held.share(is_on=is_on)

    def announce_when_all_listen(self) -> None:
        """Logs the addresses, unless a front end does not listen yet."""
        if all(child.process.state == State.SERVING for child in self._children):
            self.share(is_on=False)
            if self._health_listen:
                announce("health listening on %s", self._health_listen)
            announce("%s%s", READY, self.listen)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, in any thread, when a front end has said something or has ended: then `watch` is due."""
        for child in self._children:
            child.process.wake = wake

    def watch(self, *, restart: bool) -> None:
        """Starts front ends that do not run, and kills those that are silent. Call it every turn.

        Raises FrontendFailed if one ended before it listened for the first time. Without `restart`, while the service
        stops, none that ended is replaced.
        """
        for child in self._children:
            if not restart:
                child.process.start_no_more()
            child.process.look()

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
                child.process.stop(math.inf)
                child.process.look()

    def stop(self) -> None:
        """Asks all front ends to end, kills those that take too long, and frees the address."""
        woken = threading.Event()
        self.wake_with(woken.set)
        supervisors = [child.process for child in self._children]
        for supervisor in supervisors:
            supervisor.stop(STOP_SECONDS)
        while True:
            woken.clear()
            dues = [due for supervisor in supervisors if (due := supervisor.look()) is not None]
            if not self.is_running:
                break
            woken.wait(min(dues, default=None))
        self._release()

    def _release(self) -> None:
        for held in self._held:
            held.close()
