"""The HTTP gateway beside a scheduler, and the address where a scheduler is asked for its health.

The gateway has the service's certificate, and trusts it by itself. It starts when the scheduler listens, and again if
the scheduler comes back at another address. `tandem serve` has no token, so a scheduler that wants proofs needs an
address that serves health alone.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tandem_client.address import dialled
from tandem_client.peer import own_names
from tandem_client.services.programs import RESTARTED, OnEnd, OnLine
from tandem_client.services.settings import Settings
from tandem_contract.certificates import shortest
from tandem_contract.child import Program, python
from tandem_contract.processes import Heard, Supervisor
from tandem_contract.stopping import STOP

PROGRAM = "tandem_client.gateway"
# Its line when it serves, with its URL.
_LISTENING = re.compile(r"\bgateway listening on ([^\s\"]+)")


def asks_for_proofs(scheduler: Settings) -> bool:
    """Whether a scheduler with these settings answers only callers that prove their identity."""
    return any(scheduler[name] for name in ("tokens", "tls_cert"))


def health_flags(scheduler: Settings) -> list[str]:
    """The flags that give a scheduler with these settings an address for health alone, if it needs one."""
    needs_one = asks_for_proofs(scheduler) and not scheduler["health_listen"]
    return ["--health-listen=127.0.0.1:0"] if needs_one else []


def gateway_flags(scheduler: Settings, address: str) -> list[str]:
    """The flags of a gateway on this machine for the scheduler with these settings, which listens at `address`."""
    host, _, port = dialled(address).rpartition(":")
    flags = [f"--address={host}:{port}"]
    certificate, key = scheduler["tls_cert"], scheduler["tls_key"]
    if not certificate or not key:
        return flags
    flags += [f"--tls-cert={certificate}", f"--tls-key={key}", f"--service-ca={certificate}"]
    names = own_names(Path(certificate), Path(key))
    if names and shortest(host) not in names:
        flags.append(f"--service-name={names[0].replace('*', 'tandem', 1)}")
    return flags


class Gateway:
    """The gateway's process over all its restarts."""

    def __init__(self, flags: Sequence[str], scheduler: Settings, *, on_line: OnLine, on_end: OnEnd) -> None:
        self._flags, self._scheduler = list(flags), scheduler
        self._on_line, self._on_end = on_line, on_end
        self._address, self._health = "", ""
        # Where it listens; empty while it does not.
        self.url = ""
        self.process = Supervisor("gateway", self._program, RESTARTED, hear=self._hear, on_end=self._ended)

    def follow(self, address: str, health: str) -> None:
        """Takes the address of the scheduler that listens now, and that of its health; empty without one."""
        if address == self._address:
            return
        is_first = not self._address
        self._address, self._health = address, health
        if is_first:
            self.process.hurry()
        else:
            self.process.signal(STOP)

    def _program(self) -> Program | None:
        if not self._address:
            return None
        of_health = [f"--health-address={self._health}"] if self._health else []
        # The user's own flags come last, so that they count.
        flags = [*gateway_flags(self._scheduler, self._address), *of_health, *self._flags]
        return Program(argv=python(PROGRAM, *flags))

    def _hear(self, line: str) -> Heard:
        self._on_line(self.process.name, line)
        if (listening := _LISTENING.search(line)) is None:
            return Heard.WORDS
        self.url = listening[1]
        return Heard.SERVES

    def _ended(self, process: Supervisor) -> None:
        self.url = ""
        self._on_end(process)
