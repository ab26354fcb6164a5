"""The types of the options of `tandem serve`, with their help."""

from enum import StrEnum
from typing import Annotated

import typer

from tandem_client.connection import DEFAULT_ADDRESS

# Each takes the memory of another model.
MAX_STANDBYS = 8


class SharedPool(StrEnum):
    """Whether the KV pool of a worker outlives it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogFormat(StrEnum):
    """The format of the lines of all processes."""

    TEXT = "text"
    JSON = "json"


Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help=f"Address where the service listens; default: {DEFAULT_ADDRESS}."),
]
Model = Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled toy model.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: CUDA if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the device decides.")]
RuntimeDir = Annotated[str | None, typer.Option(help="Folder of the sockets of the service.")]
Journal = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of a journal: streams with resume survive the scheduler's death."),
]
MetricsListen = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Address of the Prometheus page /metrics; default: none.")
]
Tokens = Annotated[str | None, typer.Option(metavar="FILE", help="Tenants and hashes of their tokens.")]
TlsCert = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate chain, PEM: TLS.")]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="Key of --tls-cert, PEM.")]
TlsClientCa = Annotated[str | None, typer.Option(metavar="FILE", help="Clients need a certificate of this authority.")]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the OpenAI-compatible HTTP gateway, with the certificate of --tls-cert; default: none.",
    ),
]
GatewayFlags = Annotated[str, typer.Option(help='More flags of the gateway, such as "--processes 4".')]
HealthListen = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Second address for health alone, in plaintext.")
]
LogLines = Annotated[
    LogFormat | None,
    typer.Option(help="Log lines as text, or one JSON object per line; default: text.", envvar="TANDEM_LOG_FORMAT"),
]
SchedulerFlags = Annotated[
    str, typer.Option(help='More flags of the scheduler service, such as "--reflection --max-waiting 64".')
]
WorkerFlags = Annotated[str, typer.Option(help='More flags of the worker, such as "--page-size 64".')]
Standbys = Annotated[
    int,
    typer.Option(
        min=0, max=MAX_STANDBYS, metavar="N", help="Warm workers that wait until the serving one dies; default: 0."
    ),
]
Pool = Annotated[
    SharedPool,
    typer.Option(
        help="Keep the KV pool of a worker when it dies; auto: with --standby, and on a CPU where shared memory has"
        " huge pages."
    ),
]
