"""TLS and tokens for a service: certificates, a token file, the service's flags. Owns files in a folder."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rigs.authorities import Authority


def token_file(
    folder: Path, tokens: Mapping[str, str], *, rights: Sequence[str] = ("inference",), more: str = ""
) -> Path:
    """Writes a file with one token for each tenant, by its name. `more`: a further line of each tenant."""
    path, lines = folder / "tokens.toml", list[str]()
    for tenant, token in tokens.items():
        digest = hashlib.sha256(token.encode()).hexdigest()
        own = f'tokens = [{{ hash = "sha256:{digest}", rights = {json.dumps(list(rights))} }}]'
        lines += [f"[tenants.{tenant}]", own, more]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


class Door:
    """The files and flags of one caller with a token."""

    def __init__(
        self, folder: Path, token: str = "tandem_benchmark", rights: Sequence[str] = ("inference", "control")
    ) -> None:
        authority = Authority(folder)
        pair = authority.issue("service", "IP:127.0.0.1")
        tokens = token_file(folder, {"caller": token}, rights=rights)
        files = {"tls-cert": pair.certificate, "tls-key": pair.key, "tokens": tokens}
        self.service_flags = [f"--{flag}={path}" for flag, path in files.items()]
        self.token, self.authority = token, authority.certificate
