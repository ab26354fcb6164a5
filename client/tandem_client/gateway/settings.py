"""The gateway's settings: flags over variables (TANDEM_GATEWAY_…) over defaults.

Owns names, defaults, bounds and their help. Reads no file.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tandem_client.connection import DEFAULT_ADDRESS, dialled, is_local
from tandem_client.credentials import TlsSettings
from tandem_contract.log_lines import LogFormat
from tandem_contract.service_links import service_link_warnings, without_service_links
from tandem_contract.version import version

PREFIX = "TANDEM_GATEWAY_"
# The client's variable.
_ADDRESS = "TANDEM_ADDRESS"
_DESCRIPTION = f"""\
Runs the OpenAI-compatible HTTP gateway of a Tandem service. Each flag is also a variable ({PREFIX}LISTEN).
Callers' bearer tokens go on to the service, whose token file is the only one."""


class SettingsError(Exception):
    """Settings are wrong; the message names the setting and what it must be."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (--help lists the flags)")


@dataclass(frozen=True, slots=True)
class Flag:
    """What --help says of a setting, and the range of a number."""

    placeholder: str
    words: str
    low: float = 0
    high: float = 0


_FLAGS: Mapping[str, Flag] = {
    "listen": Flag("HOST:PORT", "address of the HTTP server; other than loopback: with TLS"),
    "address": Flag("HOST:PORT", "address of the service; other than loopback: with TLS"),
    "processes": Flag("N", "processes that share the address", 1, 64),
    "tls_cert": Flag("FILE", "certificate chain of the HTTP server, PEM"),
    "tls_key": Flag("FILE", "private key of --tls-cert, PEM"),
    "service_tls": Flag("", "use TLS to the service, with the public authorities"),
    "service_ca": Flag("FILE", "authority of the service's certificate, PEM; use TLS to the service"),
    "service_cert": Flag("FILE", "certificate that the gateway shows the service, PEM"),
    "service_key": Flag("FILE", "private key of --service-cert, PEM"),
    "service_name": Flag("NAME", "name in the service's certificate, if it is not the host of --address"),
    "health_address": Flag("HOST:PORT", "the service's --health-listen, for /health without a token"),
    "max_requests": Flag("N", "requests in work in one process", 1, 1_000_000),
    "max_connections": Flag("N", "open connections of one process", 1, 1_000_000),
    "address_connections": Flag(
        "N",
        "connections of one address whose callers are not known; 0: 100, or with --listen on loopback any number."
        " Behind a proxy, which all callers have in common, set as many as --max-connections",
        0,
        1_000_000,
    ),
    "address_handshakes": Flag(
        "N", "TLS handshakes of one address per second; 0: 20, or with --listen on loopback any number", 0, 1_000_000
    ),
    "max_body_bytes": Flag("BYTES", "largest body of a request", 1024, 1 << 30),
    "head_seconds": Flag("SECONDS", "time for a TLS handshake and the headers of a request", 0.1, 3600),
    "body_seconds": Flag("SECONDS", "time for the body of a request; it must also come at 16 KiB/s", 0.1, 3600),
    "ping_seconds": Flag(
        "SECONDS", "silence after which a stream gets a ping; a reader may stall four times as long", 0.1, 3600
    ),
    "idle_seconds": Flag("SECONDS", "time that a connection may wait for its next request", 1, 3600),
    "grace_seconds": Flag("SECONDS", "time for open requests after SIGTERM", 0, 3600),
    "log_level": Flag("LEVEL", "debug, info, warning or error"),
    "log_format": Flag("FORMAT", "text or json"),
    "exit_with_parent": Flag("", "end when the parent process ends; Linux only"),
    # Of a process among several: the table of their counters, and its row.
    "table": Flag("FILE", argparse.SUPPRESS),
    "row": Flag("N", argparse.SUPPRESS, 0, 63),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings; `_FLAGS` describes them."""

    listen: str = "127.0.0.1:8000"
    address: str = DEFAULT_ADDRESS
    processes: int = 1
    tls_cert: Path | None = None
    tls_key: Path | None = None
    service_tls: bool = False
    service_ca: Path | None = None
    service_cert: Path | None = None
    service_key: Path | None = None
    service_name: str = ""
    health_address: str = ""
    max_requests: int = 4096
    max_connections: int = 4096
    address_connections: int = 0
    address_handshakes: int = 0
    max_body_bytes: int = 4 << 20
    head_seconds: float = 5.0
    body_seconds: float = 60.0
    ping_seconds: float = 15.0
    idle_seconds: float = 75.0
    grace_seconds: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    exit_with_parent: bool = False
    table: Path | None = None
    row: int = 0

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_local(self.listen)

    @property
    def bounds_of_address(self) -> tuple[int, int]:
        """Connections, and handshakes per second; 0 is no bound. On loopback all addresses are those of one machine."""
        connections, handshakes = (100, 20) if self.is_public else (0, 0)
        return self.address_connections or connections, self.address_handshakes or handshakes

    @property
    def service_tls_settings(self) -> TlsSettings | None:
        """TLS of the connection to the service; None without."""
        if not (self.service_tls or self.service_ca or self.service_cert):
            return None
        return TlsSettings(
            ca=self.service_ca, cert=self.service_cert, key=self.service_key, server_name=self.service_name or None
        )

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


_CHOICES = {"log_level": ("debug", "info", "warning", "error"), "log_format": ("text", "json")}


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Returns the settings. Raises SettingsError; --help and --version print and raise SystemExit."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    given = _variables(environ, fields)
    parser = _Parser(
        prog="python -P -m tandem_client.gateway",
        description=_DESCRIPTION,
        allow_abbrev=False,
        usage="%(prog)s [FLAG ...]",
    )
    parser.add_argument("--version", action="version", version=f"tandem {version()}")
    for name, field in fields.items():
        flag, words = f"--{name.replace('_', '-')}", _FLAGS[name].words
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=words)
            continue
        metavar = _FLAGS[name].placeholder
        # argparse hides a flag only if its help is this very object.
        if words is not argparse.SUPPRESS and field.default not in (None, ""):
            words = f"{words} (default: {field.default})"
        parser.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=words)
    given |= vars(parser.parse_args(arguments))
    values: dict[str, Any] = {name: _value(name, fields[name], value) for name, value in given.items()}
    settings = Settings(**values)
    _check(settings)
    return settings


def _variables(environ: Mapping[str, str], fields: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {"address": environ[_ADDRESS]} if environ.get(_ADDRESS) else {}
    for variable, value in without_service_links(environ).items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name not in fields:
                raise SettingsError(f"there is no setting {variable} (--help lists the flags)")
            found[name] = value
    return found


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """Returns one line if there are variables of Kubernetes that begin as this program's do."""
    return service_link_warnings(environ, PREFIX)


def _value(name: str, field: "dataclasses.Field[Any]", given: object) -> object:
    """Returns a value of the field's type. Raises SettingsError."""
    if isinstance(given, bool) or not isinstance(given, str):
        return given
    flag = f"--{name.replace('_', '-')}"
    if name in _CHOICES and given not in _CHOICES[name]:
        raise SettingsError(f"{flag} is {given!r}; it must be one of {', '.join(_CHOICES[name])}")
    if field.type is bool:
        if given.lower() not in ("true", "false", "1", "0"):
            raise SettingsError(f"{flag} is {given!r}; it must be true or false")
        return given.lower() in ("true", "1")
    if field.type is str:
        return given
    if field.type in (int, float):
        low, high = _FLAGS[name].low, _FLAGS[name].high
        try:
            number = field.type(given)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            kind = "a whole number" if field.type is int else "a number"
            raise SettingsError(f"{flag} is {given}; it must be {kind} from {low:,} to {high:,}")
        return number
    return Path(given)


def _check(settings: Settings) -> None:
    """Checks what several settings decide together. Raises SettingsError."""
    for flag, address in (("--listen", settings.listen), ("--address", settings.address)):
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdecimal() and int(port) < 65_536):
            raise SettingsError(f"{flag} is {address}; it must be HOST:PORT, like 127.0.0.1:8000")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "--tls-key" if settings.tls_key is None else "--tls-cert"
        raise SettingsError(f"{missing} is missing; TLS needs a certificate and its key")
    if settings.is_public and settings.tls_cert is None:
        raise SettingsError(
            "--tls-cert and --tls-key are missing: without TLS the gateway listens on loopback addresses only"
            f" (127.0.0.1, [::1] or localhost); it cannot listen on {settings.listen}"
        )
    if settings.service_tls_settings is None and not is_local(dialled(settings.address)):
        raise SettingsError(
            f"callers' tokens would be sent to {settings.address} without encryption; give --service-ca or"
            " --service-tls, or an --address of this machine"
        )
