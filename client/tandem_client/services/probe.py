"""Where and how `tandem serve` asks a scheduler for its health, and the gateway beside it.

The settings may be flags, environment variables or keys of a TOML file; the scheduler reads and checks them itself.
This process has no token, so it needs an address that serves health alone. The gateway has the service's certificate,
and trusts it by itself. It starts when the scheduler listens, and again if the scheduler comes back at another address.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem_client.async_client import AsyncClient
from tandem_client.connection import Access, dialled
from tandem_client.services.handshake import own_names
from tandem_client.services.programs import RESTARTED, OnLine, kept
from tandem_contract.child import Program, python
from tandem_contract.processes import Heard
from tandem_contract.stopping import STOP

_PREFIX = "TANDEM_SCHEDULER_"
_DOOR = ("tokens", "tls_cert")
_HEALTH = "health_listen"
_CONFIG = "config"

PROGRAM = "tandem_client.gateway"
# Its line at each start. Wrong flags end it before.
_LISTENING = "gateway listening on "


class Probe(AsyncClient):
    """A client of the scheduler that this process has started: it asks once, and never through a proxy."""

    def __init__(self, address: str) -> None:
        super().__init__(address, max_retries=0)
        self._access = Access(address=address, proxy=False)


def with_probe(scheduler_flags: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], bool]:
    """Returns the flags, with an address for health if the service asks for proofs, and whether it does."""
    given = _settings(scheduler_flags, environ)
    if not any(given.get(name) for name in _DOOR):
        return list(scheduler_flags), False
    own = [] if given.get(_HEALTH) else ["--health-listen=127.0.0.1:0"]
    return [*scheduler_flags, *own], True


def gateway_flags(scheduler_flags: Sequence[str], address: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The flags of a gateway on this machine for the scheduler with these flags, which listens at `address`."""
    given = _settings(scheduler_flags, environ)
    host, _, port = dialled(address).rpartition(":")
    found = [f"--address={host}:{port}"]
    certificate, key = given.get("tls_cert"), given.get("tls_key")
    if not certificate or not key:
        return found
    found += [f"--tls-cert={certificate}", f"--tls-key={key}", f"--service-ca={certificate}"]
    names = own_names(Path(str(certificate)), Path(str(key)))
    if names and host.strip("[]") not in names:
        found.append(f"--service-name={names[0].replace('*', 'tandem', 1)}")
    return found


def _settings(scheduler_flags: Sequence[str], environ: Mapping[str, str]) -> dict[str, object]:
    """The values of the flags over those of the variables over those of the file. A value may follow its flag."""
    found: dict[str, object] = {
        name.removeprefix(_PREFIX).lower(): value for name, value in environ.items() if name.startswith(_PREFIX)
    }
    for flag, following in zip(scheduler_flags, [*scheduler_flags, ""][1:], strict=True):
        name, has_value, value = flag.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_")] = value if has_value else following
    path = found.get(_CONFIG)
    return {**_file(Path(str(path))), **found} if path else found


def _file(path: Path) -> dict[str, object]:
    """The keys of a TOML file; empty if it cannot be read, which the scheduler reports."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


class Gateway:
    """The gateway's process over all its restarts."""

    def __init__(
        self, flags: Sequence[str], scheduler_flags: Sequence[str], *, on_line: OnLine, say: Callable[[str], None]
    ) -> None:
        self._flags, self._scheduler_flags = list(flags), list(scheduler_flags)
        self._on_line = on_line
        self._address, self._health = "", ""
        self.process = kept("gateway", self._program, RESTARTED, hear=self._hear, say=say)

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
        own = [f"--health-address={self._health}"] if self._health else []
        # The user's own flags come last, so that they count.
        flags = [*gateway_flags(self._scheduler_flags, self._address), *own, *self._flags]
        return Program(argv=python(PROGRAM, *flags))

    def _hear(self, line: str) -> Heard:
        self._on_line(self.process.name, line)
        return Heard.SERVES if _LISTENING in line else Heard.WORDS
