"""How a client proves who it is, and how its connection is encrypted.

Owns the TLS settings and the rule that a token is sent only where nobody else can read it. Knows nothing of calls.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from tandem_client.connection import channel_options, dialled, is_local

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS of a connection. The files are PEM."""

    # The authority of the service's certificate; None: those that gRPC knows, which sign public sites.
    ca: str | os.PathLike[str] | None = None
    # The client's own certificate and its key, for a service that asks for one (mTLS).
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    # The name that the service's certificate must have, if it is not the host of the address.
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError, and ValueError if only one of certificate and key is set."""
        if (self.cert is None) != (self.key is None):
            missing = "tls.key" if self.key is None else "tls.cert"
            raise ValueError(f"{missing} is missing; a client's certificate needs both tls.cert and tls.key")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Access:
    """The address of a service, and what a client needs to enter."""

    address: str
    token: str | None = None
    tls: TlsSettings | None = None
    # Whether http_proxy, https_proxy and grpc_proxy count. They do not for what belongs to the service itself.
    proxy: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError if the token would be sent in plaintext to another machine, or is no header's value."""
        if self.token is None:
            return
        if not self.token or not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise ValueError("token must be printable ASCII without blanks, as `tandem token new` prints it")
        if self.tls is None and not is_local(self._target):
            raise ValueError(
                f"token would be sent to {self.address} without encryption; give tls=TlsSettings(), or use an address "
                "of this machine"
            )

    @property
    def metadata(self) -> Metadata:
        """The metadata of each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def _target(self) -> str:
        return dialled(self.address)

    def channel(self) -> grpc.Channel:
        """Makes the channel of a blocking client. Raises OSError, ValueError for files of TLS."""
        if self.tls is None:
            return grpc.insecure_channel(self._target, options=self._options())
        return grpc.secure_channel(self._target, self.tls.credentials(), options=self._options())

    def aio_channel(self) -> grpc.aio.Channel:
        """Makes the channel of an asynchronous client. Raises OSError, ValueError for files of TLS."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self._target, options=self._options())
        return grpc.aio.secure_channel(self._target, self.tls.credentials(), options=self._options())

    def _options(self) -> Sequence[tuple[str, int | str]]:
        options = [*channel_options(self._target, proxy=self.proxy)]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
