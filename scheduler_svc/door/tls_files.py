"""The files of TLS: the server's certificate and key, and the authority of client certificates. Knows no gRPC.

Their owners follow changes without a restart. Files that cannot be used change nothing but the log.

Owns the command too that tries the service when it is pasted into a shell, with the client's flags of TLS. A token is
never in it: the command takes it from a variable, and the shell says so if the variable is not set.
"""

import logging
import shlex
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tandem_contract.certificates import Followed, own_certificate, shortest

log = logging.getLogger("tandem.tls")

_T = TypeVar("_T")
LOOK_SECONDS = 1.0
# Real chains have some 10 kB.
MAX_FILE_BYTES = 1 << 20


class TlsFileError(ValueError):
    """A file cannot be used. The message names the flag and the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContent:
    """The content of the files, PEM, and a server's context that has it."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The paths. With `client_ca`, every client needs a certificate of that authority (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> TlsContent:
        """Reads and checks the files. Raises TlsFileError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        content = TlsContent(
            certificate=_read("--tls-cert", self.certificate),
            key=_read("--tls-key", self.key),
            client_ca=None if self.client_ca is None else _read("--tls-client-ca", self.client_ca),
            context=context,
        )
        try:
            # An encrypted key would make OpenSSL ask the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = f"{self.key} cannot be used with the certificate {self.certificate}: {_reason(error)}"
            raise TlsFileError(f"--tls-key: {why}; both must be PEM, and the key not encrypted") from None
        if content.client_ca is not None:
            try:
                context.load_verify_locations(cadata=content.client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                why = f"{self.client_ca} has no certificate of an authority in PEM: {_reason(error)}"
                raise TlsFileError(f"--tls-client-ca: {why}") from None
        return content


class FollowedFiles(Followed, Generic[_T]):
    """What `make` makes of the files' content, which may change without a restart. One look a second at most."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsContent], _T], *, whose: str = "") -> None:
        """Reads the files. The lines of the log begin with `whose`. Raises TlsFileError, and so may `make`."""
        self._files, self._make = files, make
        paths = (files.certificate, files.key, files.client_ca)
        super().__init__(paths, self._read, log, whose=whose, pause_seconds=LOOK_SECONDS)
        self._read()

    def newest(self) -> _T:
        self.look()
        return self.value

    def _read(self) -> None:
        # Made of the newest content that could be used.
        self.value = self._make(self._files.read())


def check(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """Returns the files; None if no flag of TLS is given. Raises TlsFileError if one is missing, or of no use."""
    given = {"--tls-cert": certificate, "--tls-key": key, "--tls-client-ca": client_ca}
    present = [flag for flag, path in given.items() if path is not None]
    missing = [flag for flag in ("--tls-cert", "--tls-key") if given[flag] is None]
    if present and missing:
        raise TlsFileError(f"{present[0]} is set, and {' and '.join(missing)} missing; TLS needs certificate and key")
    if certificate is None or key is None:
        return None
    files = TlsFiles(certificate=certificate, key=key, client_ca=client_ca)
    files.read()
    return files


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsFileError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TlsFileError(f"{flag}: {path} has more than {MAX_FILE_BYTES:,} bytes, which is the limit")
    return data


def _reason(error: Exception) -> str:
    """The reason without the content of the file."""
    return (error.reason if isinstance(error, ssl.SSLError) else "") or "its content is not valid"


# The client uses this address by default, so the command needs no --address.
DEFAULT_ADDRESS = "127.0.0.1:50051"
_WILDCARDS = ("0.0.0.0", "[::]")
_TOKEN = "TANDEM_TOKEN=${TANDEM_TOKEN:?is not set} "
_CERTIFICATE = "TANDEM_TLS_CERT=${TANDEM_TLS_CERT:?is not set} TANDEM_TLS_KEY=${TANDEM_TLS_KEY:?is not set} "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCommand:
    """What callers need: TLS if `tls`, a token if `needs_tokens`."""

    tls: TlsFiles | None = None
    needs_tokens: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the address is all that a caller needs."""
        return self.tls is None and not self.needs_tokens

    def at(self, address: str) -> str:
        """The command for a service that listens at `host:port`."""
        variables = ""
        if self.tls is not None and self.tls.client_ca is not None:
            variables = _CERTIFICATE
        elif self.needs_tokens:
            variables = _TOKEN
        flags = self._flags(address)
        return f'{variables}tandem generate{"".join(f" {flag}" for flag in flags)} "Return the"'

    def _flags(self, address: str) -> list[str]:
        host, _, port = address.rpartition(":")
        if self.tls is None:
            return [] if address == DEFAULT_ADDRESS else [f"--address {address}"]
        names = certificate_names(self.tls)
        trust = f"--tls-ca {shlex.quote(str(self.tls.certificate.absolute()))}"
        if host in _WILDCARDS:
            host = next((name for name in ("localhost", "127.0.0.1") if name in names), "127.0.0.1")
        flags = [f"--address {host}:{port}", trust]
        if names and shortest(host) not in names:
            flags.append(f"--tls-server-name {shlex.quote(names[0].replace('*', 'tandem', 1))}")
        return flags


def certificate_names(tls: TlsFiles) -> list[str]:
    """Returns the names that a certificate is for, and behind them its addresses."""
    pairs = [pair for pair in own_certificate(tls.certificate, tls.key).get("subjectAltName", ()) if len(pair) == 2]
    names = [str(value) for kind, value in pairs if kind == "DNS"]
    return names + [shortest(str(value)) for kind, value in pairs if kind == "IP Address"]
