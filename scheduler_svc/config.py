"""The scheduler service's settings: flags over environment (TANDEM_…) over a TOML file over defaults.

Owns names, defaults and bounds. Unknown flags, file keys and TANDEM_ variables are refused by name; a variable that
belongs to another of the programs is fine, so one environment can serve them all.
"""

import os
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

ENV_PREFIX = "TANDEM_"

# What the worker and the client read; the architecture tests hold this list against theirs.
OTHER_PROGRAMS_SETTINGS = frozenset(
    {
        "address",
        "device",
        "dtype",
        "exit_with_parent",
        "host_pool_bytes",
        "keep_free_bytes",
        "max_length",
        "max_rows",
        "model",
        "num_pages",
        "page_size",
        "pool_bytes",
        "served_name",
        "threads",
        "token_budget",
        "window",
        "window_sinks",
    }
)


def default_runtime_dir() -> Path:
    """Where the sockets are unless told: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


class SchedulerSettings(BaseSettings):
    """Every setting of `python -m scheduler_svc`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_prog_name="python -m scheduler_svc",
    )

    listen: Annotated[str, Field(description="address of the gRPC surface; loopback only")] = "127.0.0.1:50051"
    runtime_dir: Annotated[
        Path,
        Field(
            default_factory=default_runtime_dir,
            description="folder of the sockets, mode 0700; default $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>",
        ),
    ]
    config: Annotated[Path | None, Field(description="TOML file with any of these settings")] = None
    frontends: Annotated[
        int, Field(ge=1, le=64, description="front ends that share the address, a process each; several: on Linux")
    ] = 1
    max_waiting: Annotated[int, Field(ge=1, le=1_000_000, description="requests that may wait")] = 1024
    max_waiting_tokens: Annotated[int, Field(ge=1, le=1 << 40, description="tokens that may wait")] = 4_194_304
    default_max_new_tokens: Annotated[
        int, Field(ge=1, le=1 << 30, description="max_new_tokens of a request that sets none")
    ] = 256
    max_message_bytes: Annotated[
        int, Field(ge=1024, le=1 << 30, description="size of one gRPC message that is read")
    ] = 4 << 20
    reflection: Annotated[bool, Field(description="serve gRPC reflection")] = False
    record: Annotated[Path | None, Field(description="write every event of the core to this new file")] = None
    steps: Annotated[
        Path | None, Field(description="write a line per step to this new file, CSV; tandem plot draws it")
    ] = None
    grace_seconds: Annotated[
        float, Field(ge=0, le=3600, description="how long running streams may go on after SIGTERM")
    ] = 30.0
    step_timeout_seconds: Annotated[
        float, Field(gt=0, le=3600, description="a worker whose step takes longer is given up")
    ] = 120.0
    silence_timeout_seconds: Annotated[
        float, Field(gt=0, le=3600, description="an idle worker silent for longer is given up")
    ] = 15.0
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$", description="debug to error")] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (as init arguments), then the environment, then the file."""
        flags = cast("dict[str, object]", cast("Any", init_settings).init_kwargs)
        name = str(flags.get("config") or "") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        if name and not Path(name).is_file():
            raise SystemExit(f"scheduler_svc: config: {name} is no file")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, name or None)


def load(arguments: list[str]) -> SchedulerSettings:
    """Settings from flags, environment and file. Raises SystemExit with one line for each setting that is wrong."""
    _refuse_unknown_variables()
    flags = CliSettingsSource[SchedulerSettings](SchedulerSettings, cli_parse_args=arguments)
    try:
        return SchedulerSettings(**flags())
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc']))}: {_plain(item['type'], item['msg'], item['input'])}"
            for item in error.errors()
        ]
        raise SystemExit("scheduler_svc: " + "\nscheduler_svc: ".join(lines)) from None
    except TOMLDecodeError as error:
        name = flags().get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        raise SystemExit(f"scheduler_svc: config: {name} is no TOML: {error}") from None


def _plain(kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return "there is no such setting; see --help"
    return f"{message} (got {value!r})"


def _refuse_unknown_variables() -> None:
    known = {name.upper() for name in (*SchedulerSettings.model_fields, *OTHER_PROGRAMS_SETTINGS)}
    unknown = sorted(
        name for name in os.environ if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX) not in known
    )
    if unknown:
        raise SystemExit(
            f"scheduler_svc: unknown environment variable {', '.join(unknown)}; see --help for the settings"
        )
