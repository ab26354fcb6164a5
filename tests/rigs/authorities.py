"""Certificate authorities for tests, made with the openssl command. Owns the files in its folder."""

import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.rigs.waiting import TIMEOUT_SECONDS

# What a strict client asks of an authority (RFC 5280, 4.2.1.3), as Python 3.13's is. Some are a server's own, too.
_USAGE = "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path

    def of_server(self, client_ca: Path | None = None) -> grpc.ServerCredentials:
        """What a gRPC server shows; with an authority of clients, it asks them for certificates."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        root = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_credentials([pair], root, require_client_auth=root is not None)

    def trust(self) -> ssl.SSLContext:
        """What trusts this certificate under every name."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False
        return context


class Authority:
    """Issues certificates. `certificate` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        self._request(self._pair, name, "-x509", "-days", "2", "-addext", _USAGE)

    @property
    def certificate(self) -> Path:
        return self._pair.certificate

    def issue(self, name: str, *alternatives: str, file: str = "") -> Pair:
        """Issues a certificate for a common name and alternative names such as `DNS:localhost`."""
        pair = Pair(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        own = ("-CA", str(self._pair.certificate), "-CAkey", str(self._pair.key))
        named = ("-addext", f"subjectAltName={','.join(alternatives)}") if alternatives else ()
        self._request(pair, name, "-x509", "-days", "2", *own, *named, "-addext", "basicConstraints=critical,CA:FALSE")
        return pair

    def _request(self, pair: Pair, name: str, *words: str) -> None:
        out = ("-keyout", str(pair.key), "-out", str(pair.certificate), "-subj", f"/CN={name}")
        subprocess.run(["openssl", "req", *_CURVE, *out, *words], check=True, capture_output=True)


class MountedCertificate:
    """A certificate of `localhost` and its key, replaced together by a link, as secrets are that a cluster mounts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number, self._issuer = folder, 0, Authority(folder)
        self.authority = self._issuer.certificate
        self.pair = Pair(folder / "current" / "service.pem", folder / "current" / "service.key")
        self.replace()

    def replace(self) -> None:
        """Issues another one, which takes its place."""
        self._number += 1
        name, draft = f"certificate-{self._number}", self._folder / "next"
        (self._folder / name).mkdir()
        self._issuer.issue("service", "DNS:localhost", "IP:127.0.0.1", file=f"{name}/service")
        draft.symlink_to(name)
        draft.replace(self._folder / "current")

    @property
    def newest(self) -> bytes:
        """As `shown_at`."""
        return ssl.PEM_cert_to_DER_cert(self.pair.certificate.read_text())

    def shown_at(self, address: str) -> bytes | None:
        """What a server shows to a new connection, DER."""
        context = ssl.create_default_context(cafile=self.authority)
        # The default from Python 3.13 on.
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            return connection.getpeercert(binary_form=True)
