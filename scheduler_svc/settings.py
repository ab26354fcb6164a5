"""The scheduler service's settings: names, defaults, bounds and help. `tandem_contract.settings` reads them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tandem_contract.files import default_runtime_dir
from tandem_contract.logs import LogFormat
from tandem_contract.settings import SHARED, Program, file, number, setting


def _absolute_folders(text: str) -> str:
    for folder in filter(None, text.split(",")):
        if not folder.startswith("/") or ".." in folder.split("/"):
            raise ValueError(f"{folder!r} must be an absolute path without '..'")
    return text


class SchedulerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    listen: str = setting(
        "127.0.0.1:50051", "HOST:PORT", "address of the gRPC services; other than loopback: with TLS and tokens"
    )
    tokens: Path | None = file("TOML file of tenants, their tokens and limits; see scheduler_svc/deploy/README.md")
    tls_cert: Path | None = file("the service's certificate chain, PEM")
    tls_key: Path | None = file("the private key of --tls-cert, PEM")
    tls_client_ca: Path | None = file("mTLS: clients need a certificate of this authority, PEM")
    health_listen: str = setting("", "HOST:PORT", "second address, any: grpc.health.v1 alone, in plaintext")
    metrics_listen: str = setting("", "HOST:PORT", "address of the Prometheus page /metrics; rules as for --listen")
    runtime_dir: Path = Field(
        title="DIR",
        default_factory=default_runtime_dir,
        description="folder of the sockets, mode 0700 (default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>)",
    )
    workers_listen: str = setting("", "tcp://HOST:PORT", "address for workers of other hosts; needs --workers-keys")
    workers_keys: Path | None = setting(None, "DIR", "folder of CURVE keys that `tandem keys DIR` has made")
    config: Path | None = file("TOML file with any of these settings")
    frontends: int = number(1, 1, 64, "N", "front-end processes that share the address; above 1: Linux only")
    max_waiting: int = number(1024, 1, 1_000_000, "N", "requests that may wait in the queue")
    max_waiting_tokens: int = number(4_194_304, 1, 1 << 40, "N", "tokens of all requests that wait in the queue")
    max_streams: int = number(8192, 1, 1_000_000, "N", "samples of open requests in one front end")
    max_worker_wait_seconds: float = number(
        600.0,
        1,
        86_400,
        "SECONDS",
        "how long a request waits for a worker with enough capacity before it ends with UNAVAILABLE",
    )
    quarantine_seconds: float = number(
        3600.0, 0, 604_800, "SECONDS", "how long a request that killed its workers is refused"
    )
    default_max_new_tokens: int | None = number(
        None, 1, 1 << 30, "N", "max_new_tokens of a request that does not set it (default: the rest of the context)"
    )
    max_message_bytes: int = number(4 << 20, 1024, 1 << 30, "BYTES", "largest gRPC message that is accepted")
    weights_folders: Annotated[str, AfterValidator(_absolute_folders)] = setting(
        "", "DIR[,DIR]", "workers may load new weights from here; default: updates of weights are off"
    )
    reflection: bool | None = Field(
        None, description="serve gRPC reflection; default: where listen is a loopback address"
    )
    record: Path | None = file("write every event of the scheduler to this new file")
    steps: Path | None = file("write one CSV line per step to this new file, for tandem plot")
    flight: Literal["on", "off", "tokens"] = setting(
        "on", "WHAT", "write the last steps and events when something dies: on, off, or with tokens"
    )
    flight_dir: Path | None = setting(None, "DIR", "folder of these files (default: flight in the runtime folder)")
    journal: Path | None = setting(
        None, "DIR", "folder of a journal, from which requests with resume go on after a crash"
    )
    journal_sync: Literal["off", "second", "step"] = setting(
        "off", "WHEN", "when the journal is forced to the disk: off, second or step"
    )
    journal_bytes: int = number(1 << 30, 1 << 20, 1 << 40, "BYTES", "largest size of the journal")
    grace_seconds: float = number(30.0, 0, 3600, "SECONDS", "how long running streams may continue after SIGTERM")
    step_timeout_seconds: float = setting(
        120.0, "SECONDS", "a worker is lost, at the latest, if a step takes longer", gt=0, le=3600
    )
    silence_timeout_seconds: float = setting(
        3.0, "SECONDS", "an idle worker that is silent longer is treated as lost", gt=0, le=3600
    )
    exit_with_parent: bool = Field(False, description="exit when the parent process exits; Linux only")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "LEVEL", "lowest level that is logged: debug, info, warning or error"
    )
    log_format: LogFormat = setting("text", "FORMAT", "text, or json for one JSON object per line")
    response_template: Path | None = file("how answers of chats are parsed, instead of by the model's own")
    log_requests: Literal["on", "off", "address"] = setting(
        "on", "WHICH", "a log line per ended request: on, off, or address: with the caller's address"
    )
    grpc_tuning: Literal["on", "off"] = setting(
        "on", "WHICH", "on, or off: front ends use no private parts of gRPC, and cost more CPU"
    )


PROGRAM = Program(
    command="python -m scheduler_svc",
    model=SchedulerSettings,
    description="Runs Tandem's scheduler service: the scheduler and its gRPC front ends.",
    prefix="TANDEM_SCHEDULER_",
    shared=SHARED,
)
