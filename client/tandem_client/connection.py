"""How a client reaches a service: its channel, proof of identity, encryption, and when a call is tried again.

Owns the options of a channel, the TLS settings, and the rule that a token is sent only where no other can read it.
Knows nothing of the methods that are called.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import grpc
import grpc.aio

from tandem_client.address import dialled, is_local, problem_of
from tandem_client.errors import ClientForked, TandemError, Unavailable

# The limit of one message in each direction. The service's own limit (4 MiB by default) is lower, and its error gives
# the number.
MAX_MESSAGE_BYTES = 64 * 2**20
_RECONNECT_FIRST_MS = 100
_RECONNECT_LAST_MS = 1_000
# The time for TCP's handshake and the first bytes of HTTP/2.
CONNECT_TIMEOUT_MS = 5_000
# A connection with calls that was silent this long gets a ping, and is closed if the ping has no answer in time. A
# stream over a dead connection so ends, or continues elsewhere, within 20 s: ping, answer and one attempt to connect.
# The service allows this rate (scheduler_svc/frontend/rpc/options.py). The answer may wait behind a large request on a
# slow line, so it gets more time than a quick network needs.
KEEPALIVE_MS = 6_000
PING_TIMEOUT_MS = 8_000
# How long a client that closes waits for the Aborts that it has sent.
ABORT_SECONDS = 1.0
# Targets of gRPC that may name several services. Calls take turns over all that answer; any other address is one.
_TARGETS_OF_SEVERAL = ("dns:", "ipv4:", "ipv6:")

Metadata = tuple[tuple[str, str], ...]


def channel_options(address: str, *, proxy: bool) -> Sequence[tuple[str, int | str]]:
    """Returns limits of messages, quick reconnects and keepalive, and how calls are spread over several addresses.

    Also whether variables may name an HTTP proxy. They may not for addresses of this machine, nor for several, to each
    of which the client connects by itself, nor without `proxy`.
    """
    names_several = address.startswith(_TARGETS_OF_SEVERAL)
    return [
        # Each client has its own connection; by default gRPC shares one among all channels of a process. Several front
        # ends may listen on one port, and a connection stays with the one that accepted it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        # Despite its name, this is the time limit of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_LAST_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        # The first name is the documented one; grpcio 1.85.1 looks at the second alone, with a default of 60 s.
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # A client that only reads sends no data between its pings.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", int(proxy and not names_several and not is_local(address))),
        ("grpc.lb_policy_name", "round_robin" if names_several else "pick_first"),
    ]


# gRPC counts nanoseconds in 64 bits, and takes what is longer as a time that is over.
_LONGEST_SECONDS = 1e9


@dataclass(slots=True, kw_only=True)
class Tries:
    """The retries and the time that one call has left.

    A call is retried only if the service is not ready and gives a retry time: it has not accepted the request, so
    nothing runs twice. A full queue is reported to the caller, which can decide what may wait.
    """

    retries_left: int
    # Seconds for all tries together; None: no limit.
    timeout: float | None
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises ValueError for a timeout that is no number."""
        if self.timeout is not None and math.isnan(self.timeout):
            raise ValueError("timeout is nan; it is a number of seconds, or None for no limit")
        if self.timeout is not None and self.timeout > _LONGEST_SECONDS:
            self.timeout = None

    def remaining(self) -> float | None:
        """Seconds left of the timeout, for the next try."""
        return None if self.timeout is None else max(0.0, self.timeout - (time.monotonic() - self._started))

    def pause_seconds(self, error: TandemError) -> float | None:
        """The pause before the next try, which it counts; None if there will not be another."""
        if not isinstance(error, Unavailable) or error.retry_after_seconds is None or self.retries_left <= 0:
            return None
        remaining = self.remaining()
        if remaining is not None and remaining <= error.retry_after_seconds:
            return None
        self.retries_left -= 1
        return error.retry_after_seconds


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
        """Raises ValueError for a malformed address or token, and for a token in plaintext to another machine."""
        if problem := problem_of(self.address):
            raise ValueError(f"address {problem}")
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
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def is_direct(self) -> bool:
        """Whether the address is one host and port, which is called without a proxy."""
        if self.address.startswith(("unix", *_TARGETS_OF_SEVERAL, "vsock:", "xds:")):
            return False
        return is_local(self._target) or not (self.proxy and getproxies().keys() & {"http", "https", "grpc"})

    @property
    def _target(self) -> str:
        return dialled(self.address)

    def channel(self) -> grpc.Channel:
        """Makes the channel of a blocking client. Raises OSError, ValueError for files of TLS; ClientForked."""
        return self._made_by(grpc)

    def aio_channel(self) -> grpc.aio.Channel:
        """Makes the channel of an asynchronous client. Raises as `channel` does."""
        return self._made_by(grpc.aio)

    def _made_by(self, library: Any) -> Any:
        global _process_of_loops
        if _process_of_loops not in (None, os.getpid()):
            raise ClientForked(
                f"process {os.getpid()} is a child of {_process_of_loops}, which used an AsyncClient before the fork, "
                "and gRPC does not work after that; start it with multiprocessing's spawn or forkserver"
            )
        options = [*channel_options(self._target, proxy=self.proxy)]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        credentials = None if self.tls is None else self.tls.credentials()
        if library is grpc.aio:
            # Before gRPC's thread begins.
            _process_of_loops = os.getpid()
        if credentials is None:
            return library.insecure_channel(self._target, options=options)
        return library.secure_channel(self._target, credentials, options=options)


# The process that made a channel for an event loop. A thread of gRPC waits in the library for all of these, so that it
# leaves out what it does at a fork: in the child, calls on any new channel would hang or crash.
_process_of_loops: int | None = None


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
