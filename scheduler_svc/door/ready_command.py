"""Makes the command that tries the service when it is pasted into a shell, with the client's flags of TLS.

A token is never in it: the command takes it from a variable, and the shell says so if the variable is not set.
"""

import ipaddress
import shlex
import ssl
from dataclasses import dataclass

from scheduler_svc.door.tls_files import TlsFiles

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
        return f'{variables}tandem generate{"".join(f" {each}" for each in flags)} "Return the"'

    def _flags(self, address: str) -> list[str]:
        host, _, port = address.rpartition(":")
        if self.tls is None:
            return [] if address == DEFAULT_ADDRESS else [f"--address {address}"]
        names, addresses = certificate_names(self.tls)
        trust = f"--tls-ca {shlex.quote(str(self.tls.certificate.absolute()))}"
        if host in _WILDCARDS:
            local = [name for name in ("localhost", "127.0.0.1") if name in (*names, *addresses)]
            host = local[0] if local else "127.0.0.1"
        if host.strip("[]") in (*names, *addresses):
            return [f"--address {host}:{port}", trust]
        named = [name.replace("*", "tandem", 1) for name in names] + addresses
        return [f"--address {host}:{port}", trust, *(f"--tls-server-name {shlex.quote(name)}" for name in named[:1])]


def certificate_names(tls: TlsFiles) -> tuple[list[str], list[str]]:
    """Returns the names and the addresses that a certificate is for, from a handshake with itself."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_cert_chain(tls.certificate, tls.key, password="")
        client.load_verify_locations(tls.certificate)
        ends = (
            client.wrap_bio(to_client, to_server, server_side=False),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        found = ends[0].getpeercert() or {}
    except (ssl.SSLError, OSError, ValueError):
        # For example, the certificate has expired.
        return [], []
    pairs = [pair for pair in found.get("subjectAltName", ()) if len(pair) == 2]
    addresses = [str(ipaddress.ip_address(str(value).strip())) for kind, value in pairs if kind == "IP Address"]
    return [str(value) for kind, value in pairs if kind == "DNS"], addresses
