"""Certificate authorities for tests, made with the openssl command. Owns the files in its folder."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates. `certificate` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        self._request(self._pair, name, "-x509", "-days", "2")

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
