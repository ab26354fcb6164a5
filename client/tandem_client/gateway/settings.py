"""The gateway's settings: names, defaults, bounds and help. `tandem_contract.settings` reads them."""

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem_client.address import DEFAULT_ADDRESS, dialled, is_local
from tandem_contract.address import host_and_port
from tandem_contract.logs import LogFormat
from tandem_contract.settings import Program, file, number

if TYPE_CHECKING:
    from tandem_client.connection import TlsSettings

ANY_ORIGIN = "*"
# Browsers leave out these ports.
_PORTS = {"http": 80, "https": 443}


class Settings(BaseModel):
    """All settings of the gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field(
        "127.0.0.1:8000", title="HOST:PORT", description="address of the HTTP server; other than loopback: with TLS"
    )
    address: str = Field(
        DEFAULT_ADDRESS, title="HOST:PORT", description="address of the service; other than loopback: with TLS"
    )
    cors_origins: str = Field(
        "",
        title="ORIGIN,...",
        description="web pages of other sites that may call, by their origins, such as https://app.example; *: pages of"
        " every site. Unset: browsers keep all of them out",
    )
    processes: int = number(1, 1, 64, "N", "processes that share the address")
    tls_cert: Path | None = file("certificate chain of the HTTP server, PEM")
    tls_key: Path | None = file("private key of --tls-cert, PEM")
    service_tls: bool = Field(False, description="use TLS to the service, with the public authorities")
    service_ca: Path | None = file("authority of the service's certificate, PEM; use TLS to the service")
    service_cert: Path | None = file("certificate that the gateway shows the service, PEM")
    service_key: Path | None = file("private key of --service-cert, PEM")
    service_name: str = Field(
        "", title="NAME", description="name in the service's certificate, if it is not the host of --address"
    )
    health_address: str = Field(
        "", title="HOST:PORT", description="the service's --health-listen, for /health without a token"
    )
    max_requests: int = number(4096, 1, 1_000_000, "N", "requests in work in one process")
    max_connections: int = number(4096, 1, 1_000_000, "N", "open connections of one process")
    address_connections: int = number(
        0,
        0,
        1_000_000,
        "N",
        "connections of one address without known callers; 0: 100, or with --listen on loopback any number."
        " Behind a proxy, which all callers have in common, set as many as --max-connections",
    )
    address_handshakes: int = number(
        0, 0, 1_000_000, "N", "TLS handshakes of one address per second; 0: 20, or with --listen on loopback any number"
    )
    max_body_bytes: int = number(4 << 20, 1024, 1 << 30, "BYTES", "largest body of a request")
    head_seconds: float = number(5.0, 0.1, 3600, "SECONDS", "time for a TLS handshake and the headers of a request")
    body_seconds: float = number(
        60.0, 0.1, 3600, "SECONDS", "time for the body of a request; it must also come at 16 KiB/s"
    )
    ping_seconds: float = number(
        15.0, 0.1, 3600, "SECONDS", "silence after which a stream gets a ping; a reader may stall four times as long"
    )
    idle_seconds: float = number(75.0, 1, 3600, "SECONDS", "time that a connection may wait for its next request")
    grace_seconds: float = number(30.0, 0, 3600, "SECONDS", "time for open requests after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", title="LEVEL", description="debug, info, warning or error"
    )
    log_format: LogFormat = Field("text", title="FORMAT", description="text or json")
    config: Path | None = file("TOML file with any of these settings")
    exit_with_parent: bool = Field(False, description="end when the parent process ends; Linux only")
    # Set for a process among several: the table of their counters, and its row.
    table: Path | None = None
    row: int = Field(0, ge=0, le=63)

    @model_validator(mode="after")
    def _together(self) -> Self:
        for flag, address in (("--listen", self.listen), ("--address", self.address)):
            try:
                host_and_port(address, "127.0.0.1:8000")
            except ValueError as error:
                raise ValueError(f"{flag} {error}") from None
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "--tls-key" if self.tls_key is None else "--tls-cert"
            raise ValueError(f"{missing} is missing; TLS needs a certificate and its key")
        if self.is_public and self.tls_cert is None:
            raise ValueError(
                "--tls-cert and --tls-key are missing: without TLS the gateway listens on loopback addresses only"
                f" (127.0.0.1, [::1] or localhost); it cannot listen on {self.listen}"
            )
        if self.service_tls_settings is None and not is_local(dialled(self.address)):
            raise ValueError(
                f"callers' tokens would be sent to {self.address} without encryption; give --service-ca or"
                " --service-tls, or an --address of this machine"
            )
        for origin in self.origins - {ANY_ORIGIN, "null"}:
            if origin != (sent := _as_sent(origin)):
                needed = f"browsers send {sent}" if sent else "an origin is SCHEME://HOST or SCHEME://HOST:PORT"
                raise ValueError(f"--cors-origins has {origin}; {needed}")
        return self

    @property
    def origins(self) -> Set[str]:
        """The origins of --cors-origins; `*` stands for all."""
        return {origin for part in self.cors_origins.split(",") if (origin := part.strip())}

    def allows(self, origin: str) -> bool:
        return not self.origins.isdisjoint((origin, ANY_ORIGIN))

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_local(self.listen)

    @property
    def bounds_of_address(self) -> tuple[int, int]:
        """Connections, and handshakes per second; 0: no bound. On loopback all addresses are those of one machine."""
        connections, handshakes = (100, 20) if self.is_public else (0, 0)
        return self.address_connections or connections, self.address_handshakes or handshakes

    @property
    def service_tls_settings(self) -> "TlsSettings | None":
        """TLS of the connection to the service; None without."""
        if not (self.service_tls or self.service_ca or self.service_cert):
            return None
        # `tandem serve`, which reads the settings first, waits for no gRPC.
        from tandem_client.connection import TlsSettings

        return TlsSettings(
            ca=self.service_ca, cert=self.service_cert, key=self.service_key, server_name=self.service_name or None
        )


def _as_sent(origin: str) -> str:
    """An origin as browsers send it: without a path, in small letters, and without its scheme's own port."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return ""
    if not parts.scheme or not parts.hostname:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port in (None, _PORTS.get(parts.scheme)) else f":{port}")


PROGRAM = Program(
    command="python -P -m tandem_client.gateway",
    model=Settings,
    description="Runs the OpenAI-compatible HTTP gateway of a Tandem service. Callers' bearer tokens go on to the"
    " service; its token file is the only one.",
    prefix="TANDEM_GATEWAY_",
    # The client's variable.
    shared={"address": ("TANDEM_ADDRESS",)},
)
