"""The scheduler service's settings: flags over environment (TANDEM_SCHEDULER_…) over a TOML file over defaults.

Owns names, defaults and bounds. Unknown flags, file keys and TANDEM_SCHEDULER_ variables are refused by name. The
worker has a prefix of its own, so one environment can serve both programs; a few variables without the name of a
program (TANDEM_LOG_LEVEL) set both.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from scheduler_svc import flags
from scheduler_svc.flags import SettingError
from tandem_contract.log_lines import LogFormat
from tandem_contract.runtime_dir import default_runtime_dir
from tandem_contract.service_links import service_link_warnings, without_service_links
from tandem_contract.version import version

ENV_PREFIX = "TANDEM_SCHEDULER_"
SHARED_PREFIX = "TANDEM_"
SHARED_SETTINGS = frozenset({"exit_with_parent", "log_format", "log_level", "runtime_dir"})
"""The worker has these settings too: TANDEM_RUNTIME_DIR sets it for both programs."""
# Variables of the worker, the gateway and the client.
_OTHER_PROGRAMS = ("TANDEM_WORKER_", "TANDEM_GATEWAY_", "TANDEM_ADDRESS", "TANDEM_TLS_")
_OF_CLIENT = {"TANDEM_TLS", "TANDEM_TOKEN", "TANDEM_TOKEN_FILE"}

_PROGRAM = "python -m scheduler_svc"
_DESCRIPTION = f"""\
Runs Tandem's scheduler service: the scheduler and its gRPC front ends. Each flag is also an environment variable
({ENV_PREFIX}MAX_WAITING) and a key of the TOML file (max_waiting); flags win over variables, variables over the
file. {", ".join(f"{SHARED_PREFIX}{name.upper()}" for name in sorted(SHARED_SETTINGS))} set the worker too."""


def _absolute_folders(text: str) -> str:
    for folder in filter(None, text.split(",")):
        if not folder.startswith("/") or ".." in folder.split("/"):
            raise ValueError(f"{folder!r} must be an absolute path without '..'")
    return text


class SchedulerSettings(BaseModel):
    """All settings of `python -m scheduler_svc`."""

    model_config = ConfigDict(extra="forbid")

    listen: Annotated[
        str,
        Field(title="HOST:PORT", description="address of the gRPC services; other than loopback: with TLS and tokens"),
    ] = "127.0.0.1:50051"
    tokens: Annotated[
        Path | None, Field(title="FILE", description="TOML file of tenants, their tokens and limits; see README.md")
    ] = None
    tls_cert: Annotated[Path | None, Field(title="FILE", description="the service's certificate chain, PEM")] = None
    tls_key: Annotated[Path | None, Field(title="FILE", description="the private key of --tls-cert, PEM")] = None
    tls_client_ca: Annotated[
        Path | None, Field(title="FILE", description="mTLS: clients need a certificate of this authority, PEM")
    ] = None
    health_listen: Annotated[
        str, Field(title="HOST:PORT", description="second address, any: grpc.health.v1 alone, in plaintext")
    ] = ""
    metrics_listen: Annotated[
        str, Field(title="HOST:PORT", description="address of the Prometheus page /metrics; rules as for --listen")
    ] = ""
    runtime_dir: Annotated[
        Path,
        Field(
            title="DIR",
            default_factory=default_runtime_dir,
            description="folder of the sockets, mode 0700 (default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>)",
        ),
    ]
    workers_listen: Annotated[
        str, Field(title="tcp://HOST:PORT", description="address for workers of other hosts; needs --workers-keys")
    ] = ""
    workers_keys: Annotated[
        Path | None, Field(title="DIR", description="folder of CURVE keys that `tandem keys DIR` has made")
    ] = None
    config: Annotated[Path | None, Field(title="FILE", description="TOML file with any of these settings")] = None
    frontends: Annotated[
        int,
        Field(ge=1, le=64, title="N", description="front-end processes that share the address; above 1: Linux only"),
    ] = 1
    max_waiting: Annotated[
        int, Field(ge=1, le=1_000_000, title="N", description="requests that may wait in the queue")
    ] = 1024
    max_waiting_tokens: Annotated[
        int, Field(ge=1, le=1 << 40, title="N", description="tokens of all requests that wait in the queue")
    ] = 4_194_304
    max_streams: Annotated[
        int, Field(ge=1, le=1_000_000, title="N", description="samples of open requests in one front end")
    ] = 8192
    max_worker_wait_seconds: Annotated[
        float,
        Field(
            ge=1,
            le=86_400,
            title="SECONDS",
            description="how long a request waits for a worker with enough capacity before it ends with UNAVAILABLE",
        ),
    ] = 600.0
    quarantine_seconds: Annotated[
        float,
        Field(ge=0, le=604_800, title="SECONDS", description="how long a request that killed its workers is refused"),
    ] = 3600.0
    default_max_new_tokens: Annotated[
        int, Field(ge=1, le=1 << 30, title="N", description="max_new_tokens of a request that does not set it")
    ] = 256
    max_message_bytes: Annotated[
        int, Field(ge=1024, le=1 << 30, title="BYTES", description="largest gRPC message that is accepted")
    ] = 4 << 20
    weights_folders: Annotated[
        str,
        AfterValidator(_absolute_folders),
        Field(
            title="DIR[,DIR]",
            description="workers may be told to load new weights from here; default: updates of weights are off",
        ),
    ] = ""
    reflection: Annotated[bool, Field(description="serve gRPC reflection")] = False
    record: Annotated[
        Path | None, Field(title="FILE", description="write every event of the scheduler to this new file")
    ] = None
    steps: Annotated[
        Path | None, Field(title="FILE", description="write one CSV line per step to this new file, for tandem plot")
    ] = None
    flight: Annotated[
        Literal["on", "off", "tokens"],
        Field(title="WHAT", description="write the last steps and events when something dies: on, off, or with tokens"),
    ] = "on"
    flight_dir: Annotated[
        Path | None, Field(title="DIR", description="folder of these files (default: flight in the runtime folder)")
    ] = None
    journal: Annotated[
        Path | None,
        Field(title="DIR", description="folder of a journal, from which requests with resume go on after a crash"),
    ] = None
    journal_sync: Annotated[
        Literal["off", "second", "step"],
        Field(title="WHEN", description="when the journal is forced to the disk: off, second or step"),
    ] = "off"
    journal_bytes: Annotated[
        int, Field(ge=1 << 20, le=1 << 40, title="BYTES", description="largest size of the journal")
    ] = 1 << 30
    grace_seconds: Annotated[
        float, Field(ge=0, le=3600, title="SECONDS", description="how long running streams may continue after SIGTERM")
    ] = 30.0
    step_timeout_seconds: Annotated[
        float,
        Field(gt=0, le=3600, title="SECONDS", description="a worker whose step takes longer is lost, at the latest"),
    ] = 120.0
    silence_timeout_seconds: Annotated[
        float,
        Field(gt=0, le=3600, title="SECONDS", description="an idle worker that is silent longer is treated as lost"),
    ] = 3.0
    exit_with_parent: Annotated[bool, Field(description="exit when the parent process exits; Linux only")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(title="LEVEL", description="lowest level that is logged: debug, info, warning or error"),
    ] = "info"
    log_format: Annotated[
        LogFormat, Field(title="FORMAT", description="text, or json for one JSON object per line")
    ] = "text"
    response_template: Annotated[
        Path | None, Field(title="FILE", description="how answers of chats are parsed, instead of by the model's own")
    ] = None
    log_requests: Annotated[
        Literal["on", "off", "address"],
        Field(
            title="WHICH", description="a log line per ended request: on, off, or address: with the caller's address"
        ),
    ] = "on"
    grpc_tuning: Annotated[
        Literal["on", "off"],
        Field(title="WHICH", description="on, or off: front ends use no private parts of gRPC, and cost more CPU"),
    ] = "on"


def load(arguments: list[str]) -> SchedulerSettings:
    """Reads flags, environment and file. Raises SettingError with one line for each setting that is wrong."""
    fields = SchedulerSettings.model_fields
    _refuse_unknown_variables(os.environ)
    named = flags.parse(_PROGRAM, f"tandem {version()}", _DESCRIPTION, fields, arguments)
    values = _variables(os.environ) | named
    try:
        return SchedulerSettings.model_validate(_file(values.get("config")) | values)
    except ValidationError as error:
        raise SettingError("\n".join(flags.message(problem, fields) for problem in error.errors())) from None


def _variables(environ: Mapping[str, str]) -> dict[str, object]:
    """Returns the settings whose variables are not empty; this program's own variables win over shared ones."""
    names = {SHARED_PREFIX: SHARED_SETTINGS, ENV_PREFIX: SchedulerSettings.model_fields}
    every = ((name, environ.get(f"{prefix}{name.upper()}")) for prefix, each in names.items() for name in each)
    return {name: value for name, value in every if value}


def _file(path: object) -> dict[str, object]:
    """Returns the content of the TOML file, nothing if there is no path."""
    if not path:
        return {}
    if not Path(str(path)).is_file():
        raise SettingError(f"config file {path} does not exist, or is not a file")
    try:
        return tomllib.loads(Path(str(path)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"config file {path} is not TOML: {error}") from None
    except OSError as error:
        raise SettingError(f"config file {path} cannot be read: {error.strerror}") from None


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """Returns a line for the TANDEM_ variables that no program reads, and one for those of Kubernetes."""
    own = without_service_links(environ)
    programs = (ENV_PREFIX, *_OTHER_PROGRAMS)
    known = {f"{SHARED_PREFIX}{name.upper()}" for name in SHARED_SETTINGS} | _OF_CLIENT
    ignored = [
        name
        for name in sorted(own)
        if own[name] and name.startswith(SHARED_PREFIX) and not name.startswith(programs) and name not in known
    ]
    warnings: list[str] = []
    if ignored:
        warnings.append(f"ignored {', '.join(ignored)}: variables of this program begin with {ENV_PREFIX}")
    return warnings + service_link_warnings(environ, SHARED_PREFIX, _OTHER_PROGRAMS)


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [name.upper() for name in SchedulerSettings.model_fields]
    problems = [
        f"there is no environment variable {name}{flags.suggestion(name, known, ENV_PREFIX)}"
        for name in sorted(without_service_links(environ))
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX) not in known
    ]
    if problems:
        raise SettingError("\n".join(problems))
