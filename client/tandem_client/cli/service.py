"""The flags that say which service a command talks to and how it proves who it is. Shared by all commands that call.

A token comes from a file or from a variable, never from the command line, which other users of the machine can read.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tandem_client.async_client import AsyncClient
from tandem_client.cli.flags import CONNECTION, Address, option, parameter
from tandem_client.connection import DEFAULT_ADDRESS, TlsSettings
from tandem_client.sync_client import Client

TOKEN_VARIABLE = "TANDEM_TOKEN"
_MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service that a command talks to, as its flags say."""

    address: str
    token_file: str | None
    tls: bool
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_server_name: str | None

    def client(self, *, max_retries: int = 3) -> Client:
        """Returns a client. Raises OSError, and ValueError if the flags do not fit together."""
        return Client(self.address, max_retries=max_retries, token=self._token(), tls=self._tls())

    def async_client(self) -> AsyncClient:
        """Returns a client for an event loop. Raises as `client` does."""
        return AsyncClient(self.address, token=self._token(), tls=self._tls())

    def _tls(self) -> TlsSettings | None:
        names = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        if not self.tls and not any(names):
            return None
        return TlsSettings(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name)

    def _token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE) or None
        with Path(self.token_file).open("rb") as file:
            return file.read(_MAX_TOKEN_BYTES).decode(errors="replace").strip()


def _file(flag: str, description: str) -> Any:
    variable = f"TANDEM_{flag.removeprefix('--').upper().replace('-', '_')}"
    return Annotated[str | None, option(CONNECTION, f"{flag} FILE", description, envvar=variable)]


_SERVER_NAME = option(
    CONNECTION,
    "--tls-server-name NAME",
    "Name in the service's certificate, if it is not the address's.",
    envvar="TANDEM_TLS_SERVER_NAME",
)
_FLAGS = (
    parameter("address", Address, DEFAULT_ADDRESS),
    parameter("token_file", _file("--token-file", f"File with the token; or the token in {TOKEN_VARIABLE}.")),
    parameter(
        "tls",
        Annotated[bool, option(CONNECTION, "--tls", "Use TLS, which the next flags imply.", envvar="TANDEM_TLS")],
        False,
    ),
    parameter("tls_ca", _file("--tls-ca", "Authority of the service's certificate, PEM; default: the public ones.")),
    parameter("tls_cert", _file("--tls-cert", "Own certificate, PEM, for a service that asks for one.")),
    parameter("tls_key", _file("--tls-key", "Key of --tls-cert, PEM.")),
    parameter("tls_server_name", Annotated[str | None, _SERVER_NAME]),
)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of a service in place of its parameter `service`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in _FLAGS}
        command(service=Service(**given), **values)

    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        found = _FLAGS if each.name == "service" else (each.replace(kind=inspect.Parameter.KEYWORD_ONLY),)
        parameters += found
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return run
