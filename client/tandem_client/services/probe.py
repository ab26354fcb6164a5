"""Decides where and how `tandem serve` asks a scheduler for its health, and how a gateway calls it.

The settings may be flags, environment variables or keys of a TOML file; the scheduler reads and checks them itself.
This process has no token, so it needs an address that serves health alone. The gateway has the service's certificate,
and trusts it by itself.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem_client.async_client import AsyncClient
from tandem_client.connection import Access, dialled
from tandem_client.services.handshake import own_names

_PREFIX = "TANDEM_SCHEDULER_"
_DOOR = ("tokens", "tls_cert")
_HEALTH = "health_listen"
_CONFIG = "config"


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
