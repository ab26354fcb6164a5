"""The worker's settings: names, defaults, limits and help texts. `tandem_contract.settings` reads them."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tandem_contract.files import default_runtime_dir
from tandem_contract.settings import SHARED, Program, Size, file, number, setting

BUNDLED_MODEL = Path(__file__).parent / "bundled" / "model"

Count = Annotated[int, Field(ge=1)] | None
# Each of these decides the size of the page pool, so at most one of them is set.
POOL_SETTINGS = ("num_pages", "pool_bytes", "keep_free_bytes")


def _device_name(name: str) -> str:
    if name and re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError("it must be cpu, cuda or cuda:N")
    return name


def _threads_or_none(value: object) -> object:
    if isinstance(value, str) and value != "auto" and not value.isdecimal():
        raise ValueError("it must be auto or a whole number")
    return None if value == "auto" else value


# None stands for auto.
Threads = Annotated[Count, BeforeValidator(_threads_or_none)]
DeviceName = Annotated[str, AfterValidator(_device_name)]


class WorkerSettings(BaseModel):
    """All settings of `python -m gpu_worker`."""

    model_config = ConfigDict(extra="forbid")

    model: str = setting(str(BUNDLED_MODEL), "NAME", "local folder or hub name; default: the bundled model")
    # As the scheduler takes it in Join.
    served_name: str = setting("", "NAME", "name that callers see; default: the model's own", max_length=512)
    device: DeviceName = setting("", "DEVICE", "cpu, cuda or cuda:N; default: cuda if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "TYPE", "type of weights and cache; default: auto, float32 on a CPU and bfloat16 on a GPU"
    )
    page_size: Count = setting(None, "N", "tokens per page, a power of two; default: 64 on a CPU, 128 on a GPU")
    num_pages: Count = setting(None, "N", "pages in the KV pool, the reserved one included; default: see pool_bytes")
    pool_bytes: Size | None = setting(
        None, "SIZE", "size of the KV pool; default: for max_rows full sequences, at most 1GiB on a CPU"
    )
    keep_free_bytes: Size | None = setting(None, "SIZE", "memory that the KV pool leaves free; default: 1GiB on a GPU")
    host_pool_bytes: Size = setting(0, "SIZE", "host memory for pages of preempted requests; default: none")
    max_rows: Count = setting(None, "N", "sequences that run at once; default: 32 on a CPU, 256 on a GPU")
    max_length: Count = setting(None, "N", "tokens of one sequence, prompt included; default: the model's")
    token_budget: Count = setting(None, "N", "tokens per step; default: 512 on a CPU, 4096 on a GPU")
    ranks: int = number(1, 1, 64, "N", "processes that share the model, one per device (tensor parallel); default: 1")
    nnodes: int = number(1, 1, 64, "N", "hosts that share the ranks, equally; start the worker on each; default: 1")
    rdzv_endpoint: str = setting(
        "", "HOST:PORT", "HOST:PORT where the hosts of a group meet; HOST is one of them; default: none"
    )
    rdzv_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")] = setting(
        "default", "NAME", "name of the group, if several meet at rdzv_endpoint; default: default"
    )
    local_addr: str = setting(
        "", "ADDRESS", "IPv4 address at which the group reaches this host; default: the one towards rdzv_endpoint"
    )
    window: Count = setting(None, "N", "last positions that full-attention layers see; default: all positions")
    window_sinks: int = setting(0, "N", "first positions that these layers see besides the window; default: none", ge=0)
    graphs: Literal["on", "off"] = setting(
        "on", "WHEN", "capture steps and replay them (on a GPU: CUDA graphs); off runs every step eagerly; default: on"
    )
    threads: Threads = setting(None, "N", "CPU threads of an operation, or auto: measured at the start; default: auto")
    fused_layers: Literal["auto", "on", "off"] = setting(
        "auto", "WHEN", "compile decoder layers: auto, on or off; default: auto, on a GPU"
    )
    native_kernels: Literal["auto", "off"] = setting(
        "auto", "WHEN", "C++ kernels on a CPU: auto, or off for torch's operators; default: auto"
    )
    shared_pool: Literal["auto", "on", "off"] = setting(
        "auto",
        "WHEN",
        "keep the KV pool in memory that outlives the worker: auto, on or off; default: auto, if a holder "
        "runs, and on a GPU if there are standby workers",
    )
    standby: bool = Field(
        False, description="wait, ready to serve, until a serving worker is lost; default: no, serve at once"
    )
    standby_pages: Annotated[int, Field(ge=2)] | None = setting(
        None, "N", "pages in the KV pool of a standby worker: those of the serving one; default: see pool_bytes"
    )
    standbys: int = number(0, 0, 64, "N", "standby workers that start later on the same device; default: none")
    runtime_dir: Path = Field(
        default_factory=default_runtime_dir,
        title="FOLDER",
        description="folder of the sockets; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>",
    )
    connect: str = setting(
        "", "ADDRESS", "tcp://HOST:PORT of a scheduler on another host; needs keys; default: the one of runtime_dir"
    )
    keys: Path | None = setting(
        None, "FOLDER", "folder with this worker's CURVE keys, as `tandem keys` makes it; default: none"
    )
    exit_with_parent: bool = Field(False, description="end when the process that started this one ends; default: no")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "LEVEL", "lowest level that is logged: debug, info, warning or error; default: info"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "FORMAT", "text, or json for one JSON object per line; default: text"
    )
    config: Path | None = file("TOML file with any of these settings; default: none")

    @model_validator(mode="after")
    def _what_needs_or_excludes_another(self) -> Self:
        given = [f"{name} is {value}" for name in POOL_SETTINGS if (value := getattr(self, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}; set only one of them, because each decides the size of the pool")
        if self.standby_pages is not None and not self.standby:
            raise ValueError(f"standby_pages is {self.standby_pages} and standby is not set; set num_pages instead")
        if self.window_sinks and self.window is None:
            raise ValueError(f"window_sinks is {self.window_sinks} and window is not set; set window too")
        if not self.connect and self.keys is not None:
            raise ValueError(f"keys is {self.keys} and connect is not set; set connect to tcp://HOST:PORT too")
        if self.connect and self.shared_pool == "on":
            raise ValueError(
                f"shared_pool is on and connect is {self.connect}; the pages of a worker on another host end with it: "
                "leave shared_pool out"
            )
        return self

    @model_validator(mode="after")
    def _a_group_and_its_hosts(self) -> Self:
        for name, refused in (("shared_pool", "on"), ("fused_layers", "on"), ("standby", True)):
            if self.ranks > 1 and getattr(self, name) == refused:
                value = "on" if refused is True else refused
                raise ValueError(f"ranks is {self.ranks} and {name} is {value}; a group has none: leave {name} out")
        if self.nnodes == 1:
            for name in ("rdzv_endpoint", "local_addr"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} is {value} and nnodes is 1; set nnodes to the number of hosts")
            return self
        if self.ranks % self.nnodes:
            raise ValueError(
                f"ranks is {self.ranks} and nnodes is {self.nnodes}; each host has as many ranks: set ranks to a "
                f"multiple of {self.nnodes}"
            )
        if not self.rdzv_endpoint:
            raise ValueError(
                f"nnodes is {self.nnodes} and rdzv_endpoint is not set; set it to HOST:PORT, the same on each host"
            )
        if not self.connect:
            raise ValueError(
                f"nnodes is {self.nnodes} and connect is not set; a group on several hosts reaches its scheduler over "
                "TCP: set connect to tcp://HOST:PORT, and keys"
            )
        return self


# The settings in each part of --help.
_GROUPS = {
    "Model": "model served_name device ranks dtype graphs fused_layers native_kernels threads",
    "Memory": "page_size num_pages pool_bytes keep_free_bytes host_pool_bytes shared_pool",
    "Limits": "max_rows max_length token_budget window window_sinks",
    "Several hosts": "nnodes rdzv_endpoint rdzv_id local_addr",
    "Standby": "standby standby_pages standbys",
    "Scheduler": "runtime_dir connect keys",
    "Process": "exit_with_parent log_level log_format config",
}
_EPILOG = """\
N is a whole number; SIZE is a number of bytes or has a unit: 512MiB, 2GiB.

Examples:
  python -m gpu_worker
  python -m gpu_worker --model Qwen/Qwen3-0.6B --device cuda:0
  python -m gpu_worker --model ~/models/llama --dtype bfloat16 --pool-bytes 4GiB
  python -m gpu_worker --standby
  python -m gpu_worker --connect tcp://scheduler-host:50060 --keys ~/gpu-1
  python -m gpu_worker --connect tcp://scheduler-host:50060 --keys ~/group-1 \\
      --ranks 8 --nnodes 2 --rdzv-endpoint host-1:29400        # the same on host-1 and host-2
"""
PROGRAM = Program(
    command="python -m gpu_worker",
    model=WorkerSettings,
    description="A Tandem worker: it runs one model on one device for one scheduler.",
    epilog=_EPILOG,
    groups={heading: names.split() for heading, names in _GROUPS.items()},
    prefix="TANDEM_WORKER_",
    shared=SHARED,
)
