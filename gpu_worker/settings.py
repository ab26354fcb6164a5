"""The worker's settings: names, defaults, limits and help texts.

Owns `WorkerSettings`. `command_line.py` reads them from flags, environment and file.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

ENV_PREFIX = "TANDEM_WORKER_"
OLD_PREFIX = "TANDEM_"
SHARED_SETTINGS = frozenset({"exit_with_parent", "log_format", "log_level", "runtime_dir"})
"""The scheduler service has these settings too: TANDEM_RUNTIME_DIR sets it for both programs, without a warning."""
BUNDLED_MODEL = Path(__file__).parent / "bundled" / "model"

PositiveInt = Annotated[int, Field(ge=1)]
# Each of these decides the size of the page pool, so at most one of them is set.
POOL_SETTINGS = ("num_pages", "pool_bytes", "keep_free_bytes")


def _plain_size(size: ByteSize) -> int:
    if size < 0:
        raise ValueError("must not be negative")
    return int(size)


def _device_name(name: str) -> str:
    if name and re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError("must be cpu, cuda or cuda:N")
    return name


# 2GiB, "1.5 GB", 512MiB, or bytes.
Size = Annotated[ByteSize, AfterValidator(_plain_size)]
DeviceName = Annotated[str, AfterValidator(_device_name)]


class SettingsRefused(ValueError):
    """Settings are invalid; the message names each of them."""


def default_runtime_dir() -> Path:
    """Returns the default folder of the sockets: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


class WorkerSettings(BaseSettings):
    """A Tandem worker: it runs one model on one device for one scheduler."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", protected_namespaces=()
    )

    model: Annotated[str, Field(description="local folder or hub name; default: the bundled model")] = str(
        BUNDLED_MODEL
    )
    served_name: Annotated[str, Field(description="name that callers see; default: the model's own")] = ""
    device: Annotated[DeviceName, Field(description="cpu, cuda or cuda:N; default: cuda if there is one")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="type of weights and cache; default: auto, float32 on a CPU and bfloat16 on a GPU"),
    ] = "auto"
    page_size: Annotated[
        PositiveInt | None, Field(description="tokens per page, a power of two; default: 64 on a CPU, 128 on a GPU")
    ] = None
    num_pages: Annotated[
        PositiveInt | None,
        Field(description="pages in the KV pool, the reserved one included; default: as many as fit"),
    ] = None
    pool_bytes: Annotated[
        Size | None, Field(description="size of the KV pool; default: 1GiB on a CPU, all free memory on a GPU")
    ] = None
    keep_free_bytes: Annotated[
        Size | None, Field(description="memory that the KV pool leaves free; default: 1GiB on a GPU")
    ] = None
    host_pool_bytes: Annotated[
        Size, Field(description="host memory for pages of preempted requests; default: none")
    ] = 0
    max_rows: Annotated[
        PositiveInt | None, Field(description="sequences that run at once; default: 32 on a CPU, 256 on a GPU")
    ] = None
    max_length: Annotated[
        PositiveInt | None, Field(description="tokens of one sequence, prompt included; default: the model's")
    ] = None
    token_budget: Annotated[
        PositiveInt | None, Field(description="tokens per step; default: 512 on a CPU, 4096 on a GPU")
    ] = None
    window: Annotated[
        PositiveInt | None,
        Field(description="last positions that full-attention layers see; default: all positions"),
    ] = None
    window_sinks: Annotated[
        int, Field(ge=0, description="first positions that full-attention layers also see; default: none")
    ] = 0
    threads: Annotated[PositiveInt | None, Field(description="CPU threads; default: physical cores minus one")] = None
    runtime_dir: Annotated[
        Path, Field(description="folder of the sockets; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>")
    ] = Field(default_factory=default_runtime_dir)
    exit_with_parent: Annotated[bool, Field(description="exit when the parent process exits; default: no")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="lowest level that is logged: debug, info, warning or error; default: info"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Field(description="text, or json for one JSON object per line; default: text")
    ] = "text"
    config: Annotated[Path | None, Field(description="TOML file with any of these settings; default: none")] = None

    @model_validator(mode="after")
    def _one_size_of_the_pool(self) -> Self:
        given = [f"{name} is {value}" for name in POOL_SETTINGS if (value := getattr(self, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}; set only one of them, because each decides the size of the pool")
        return self

    @model_validator(mode="after")
    def _sinks_beside_a_window(self) -> Self:
        if self.window_sinks and self.window is None:
            raise ValueError(f"window_sinks is {self.window_sinks} and window is not set; set window too")
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
        """Returns the sources, the strongest first: flags (as init arguments), environment, its old names, file."""
        old_names = EnvSettingsSource(settings_cls, env_prefix=OLD_PREFIX)
        return init_settings, env_settings, old_names, TomlConfigSettingsSource(settings_cls)
