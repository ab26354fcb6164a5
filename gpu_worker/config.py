"""The worker's settings: flags over environment (TANDEM_<NAME>) over file (--config FILE, TOML).

Owns names, defaults and limits. Unknown flags, file keys and TANDEM_* variables are refused by name; a variable that
belongs to another of Tandem's programs is fine.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

ENV_PREFIX = "TANDEM_"
BUNDLED_MODEL = Path(__file__).parent / "bundled" / "model"
# Settings of the scheduler service and the client, whose variables may be set here too.
OTHER_PROGRAMS_SETTINGS = frozenset(
    {
        "address",
        "config",
        "default_max_new_tokens",
        "frontends",
        "grace_seconds",
        "listen",
        "log_format",
        "log_level",
        "max_message_bytes",
        "max_waiting",
        "max_waiting_tokens",
        "max_worker_wait_seconds",
        "record",
        "reflection",
        "runtime_dir",
        "silence_timeout_seconds",
        "step_timeout_seconds",
        "steps",
    }
)

PositiveInt = Annotated[int, Field(ge=1)]
# What decides the size of the page pool; one of them at most is set.
POOL_SETTINGS = ("num_pages", "pool_bytes", "keep_free_bytes")


def _plain_size(size: ByteSize) -> int:
    if size < 0:
        raise ValueError("a size is 0 or more")
    return int(size)


# 2GiB, "1.5 GB", 512MiB, or bytes.
Size = Annotated[ByteSize, AfterValidator(_plain_size)]


class SettingsRefused(ValueError):
    """Settings that cannot be used; the message names each."""


def default_runtime_dir() -> Path:
    """$XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


class WorkerSettings(BaseSettings):
    """A Tandem worker: one model on one device, serving one scheduler."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="python -m gpu_worker",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    model: Annotated[str, Field(description="a folder or a hub name")] = str(BUNDLED_MODEL)
    served_name: Annotated[str, Field(description="name callers use; default: the model's own")] = ""
    device: Annotated[str, Field(description="cpu, cuda or cuda:N; default: cuda if there is one")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="auto: float32 on a CPU, else bfloat16")
    ] = "auto"
    page_size: Annotated[
        PositiveInt | None, Field(description="tokens per page, a power of two; default 64 on a CPU, else 128")
    ] = None
    num_pages: Annotated[PositiveInt | None, Field(description="pages in the pool, the reserved one included")] = None
    pool_bytes: Annotated[
        Size | None, Field(description="size of the pool, such as 2GiB; default 1GiB on a CPU, else what is free")
    ] = None
    keep_free_bytes: Annotated[
        Size | None, Field(description="the pool takes what is free but for this, such as 1GiB; the GPU's default")
    ] = None
    host_pool_bytes: Annotated[
        Size, Field(description="main memory for pages that rows had to give up, such as 4GiB; default none")
    ] = 0
    max_rows: Annotated[PositiveInt | None, Field(description="sequences at once; default 32 on a CPU, else 256")] = (
        None
    )
    max_length: Annotated[PositiveInt | None, Field(description="tokens of a sequence; default: the model's")] = None
    token_budget: Annotated[
        PositiveInt | None, Field(description="tokens per step; default 512 on a CPU, else 4096")
    ] = None
    window: Annotated[
        PositiveInt | None,
        Field(description="positions that layers which see everything are to see, the last ones; default: all"),
    ] = None
    window_sinks: Annotated[
        int, Field(ge=0, description="with a window: so many first positions are seen as well; default none")
    ] = 0
    threads: Annotated[PositiveInt | None, Field(description="CPU threads; default: physical cores but one")] = None
    runtime_dir: Annotated[
        Path,
        Field(description="where the scheduler's sockets are; default $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>"),
    ] = Field(default_factory=default_runtime_dir)
    exit_with_parent: Annotated[bool, Field(description="be killed when the process that started this one ends")] = (
        False
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    config: Annotated[Path | None, Field(description="a TOML file of settings")] = None

    @model_validator(mode="after")
    def _one_size_of_the_pool(self) -> Self:
        given = [f"{name} is {value}" for name in POOL_SETTINGS if (value := getattr(self, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}; set one of them, each decides the size of the pool")
        return self

    @model_validator(mode="after")
    def _sinks_beside_a_window(self) -> Self:
        if self.window_sinks and self.window is None:
            raise ValueError(f"window_sinks is {self.window_sinks} and there is no window; set window too")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line stands before these; the file comes last. No .env, no secret files."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises SettingsRefused for TANDEM_* variables that no program of Tandem has."""
    known = {name.upper() for name in (*WorkerSettings.model_fields, *OTHER_PROGRAMS_SETTINGS)}
    unknown = [name for name in environ if name.startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :] not in known]
    if unknown:
        raise SettingsRefused(f"unknown environment variable {', '.join(sorted(unknown))}; see --help for the settings")


def load_settings(arguments: Sequence[str]) -> WorkerSettings:
    """The settings of this process. Raises SettingsRefused; argparse's own errors and --help exit."""
    check_environment(os.environ)
    try:
        flags = CliSettingsSource(WorkerSettings, cli_parse_args=list(arguments))
        file = flags().get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        if file and not Path(file).is_file():
            raise SettingsRefused(f"config file {file} does not exist")

        class FromFile(WorkerSettings):
            model_config = SettingsConfigDict(toml_file=file)

        return FromFile(_cli_settings_source=flags)
    except ValidationError as error:
        problems = [": ".join([*map(str, p["loc"][:1]), _plain(p)]) for p in error.errors()]
        raise SettingsRefused("; ".join(problems)) from error
    except TOMLDecodeError as error:
        raise SettingsRefused(f"config file {file} is no TOML: {error}") from error
    except (SettingsError, OSError, ValueError) as error:
        raise SettingsRefused(str(error)) from error


def _plain(problem: Mapping[str, object]) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such setting"
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if str(problem["type"]).startswith("byte_size"):
        return f"a size is a number of bytes, or has a unit such as 512MiB or 2GiB (got {problem['input']!r})"
    return f"{problem['msg']} (got {problem['input']!r})"
