"""TLS and a token for the benchmark: certificates, a token file, the flags of both sides. Owns files in a folder."""

import hashlib
from pathlib import Path

from tests.rigs.authorities import Authority

_TOKEN = "tandem_benchmark"


class Door:
    """The files and flags."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        pair = authority.issue("service", "IP:127.0.0.1")
        tokens, token = folder / "tokens.toml", folder / "token"
        digest = hashlib.sha256(_TOKEN.encode()).hexdigest()
        rights = '["inference", "control"]'
        tokens.write_text(f'[[tenants.bench.tokens]]\nhash = "sha256:{digest}"\nrights = {rights}\n')
        tokens.chmod(0o600)
        token.write_text(_TOKEN)
        files = {"tls-cert": pair.certificate, "tls-key": pair.key, "tokens": tokens}
        self.service_flags = [f"--{flag}={path}" for flag, path in files.items()]
        self.token, self.authority = _TOKEN, authority.certificate
        self.client_flags = [f"--tls-ca={authority.certificate}", f"--token-file={token}"]
