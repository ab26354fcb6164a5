"""The worker's command line: flags over environment (TANDEM_WORKER_<NAME>) over file (--config FILE, TOML).

Owns the flags, --help and --version, and the messages about refused settings: one line for all of them, each named as
it was given. Unknown flags, file keys and TANDEM_WORKER_ variables are refused by name. A few variables without the
name of a program (TANDEM_LOG_LEVEL) set the scheduler service too.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from gpu_worker.settings import ENV_PREFIX, SHARED_PREFIX, SHARED_SETTINGS, SettingsRefused, WorkerSettings
from tandem_contract.service_links import service_link_warnings, without_service_links
from tandem_contract.version import version

# Variables of the scheduler service, the gateway and the client.
_OTHER_PROGRAMS = ("TANDEM_SCHEDULER_", "TANDEM_GATEWAY_", "TANDEM_ADDRESS", "TANDEM_TLS", "TANDEM_TOKEN")
# The settings in each part of --help, with the placeholders of their values; a setting without one is a switch.
_GROUPS = {
    "Model": "model=NAME served_name=NAME device=DEVICE ranks=N dtype=TYPE graphs=WHEN fused_layers=WHEN "
    "native_kernels=WHEN threads=N",
    "Memory": "page_size=N num_pages=N pool_bytes=SIZE keep_free_bytes=SIZE host_pool_bytes=SIZE shared_pool=WHEN",
    "Limits": "max_rows=N max_length=N token_budget=N window=N window_sinks=N",
    "Several hosts": "nnodes=N rdzv_endpoint=HOST:PORT rdzv_id=NAME local_addr=ADDRESS",
    "Standby": "standby standby_pages=N standbys=N",
    "Scheduler": "runtime_dir=FOLDER connect=ADDRESS keys=FOLDER",
    "Process": "exit_with_parent log_level=LEVEL log_format=FORMAT config=FILE",
}
_EPILOG = """\
N is a whole number; SIZE is a number of bytes or has a unit: 512MiB, 2GiB.
Each setting may also be an environment variable (TANDEM_WORKER_MAX_ROWS=64) or a key of the file (max_rows = 64).
TANDEM_EXIT_WITH_PARENT, TANDEM_LOG_FORMAT, TANDEM_LOG_LEVEL and TANDEM_RUNTIME_DIR set the scheduler service too.

Examples:
  python -m gpu_worker
  python -m gpu_worker --model Qwen/Qwen3-0.6B --device cuda:0
  python -m gpu_worker --model ~/models/llama --dtype bfloat16 --pool-bytes 4GiB
  python -m gpu_worker --standby
  python -m gpu_worker --connect tcp://scheduler-host:50060 --keys ~/gpu-1
  python -m gpu_worker --connect tcp://scheduler-host:50060 --keys ~/group-1 \\
      --ranks 8 --nnodes 2 --rdzv-endpoint host-1:29400        # the same on host-1 and host-2
"""


class _WorkerParser(argparse.ArgumentParser):
    """Raises SettingsRefused instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsRefused(f"{message}; --help lists the settings")


def load_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Returns the settings of this process. Raises SettingsRefused; --help and --version exit."""
    flags = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    _refuse_unknown_variables(os.environ)
    values = _variables(os.environ) | flags
    try:
        return WorkerSettings.model_validate(_file(values.get("config")) | values)
    except ValidationError as error:
        raise SettingsRefused("; ".join(_sentence(problem, flags) for problem in error.errors())) from error


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings whose variables are not empty; this program's own variables win over shared ones."""
    names = {SHARED_PREFIX: SHARED_SETTINGS, ENV_PREFIX: WorkerSettings.model_fields}
    every = ((name, environ.get(f"{prefix}{name.upper()}")) for prefix, each in names.items() for name in each)
    return {name: value for name, value in every if value}


def _file(path: str | None) -> dict[str, Any]:
    """Returns the content of the TOML file, nothing if there is no path."""
    if not path:
        return {}
    if not Path(path).is_file():
        raise SettingsRefused(f"config file {path} does not exist")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsRefused(f"config file {path} is not valid TOML: {error}") from error
    except OSError as error:
        raise SettingsRefused(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = _WorkerParser(
        prog="python -m gpu_worker",
        usage="python -m gpu_worker [settings]",
        description=WorkerSettings.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for title, entries in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, _, placeholder in (entry.partition("=") for entry in entries.split()):
            help_line = str(WorkerSettings.model_fields[name].description).replace("%", "%%")
            switch = {"action": argparse.BooleanOptionalAction, "default": None}
            kind: dict[str, Any] = {"metavar": placeholder} if placeholder else switch
            group.add_argument(_flag(name), help=help_line, **kind)
    other = parser.add_argument_group("Information")
    other.add_argument("-h", "--help", action="help", help="print this and exit")
    other.add_argument("--version", action="version", version=f"tandem {version()}", help="print the version and exit")
    return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """Returns a line for the TANDEM_ variables that no program reads, and one for those of Kubernetes."""
    own = without_service_links(environ)
    read = (ENV_PREFIX, *_OTHER_PROGRAMS)
    shared = {f"{SHARED_PREFIX}{name.upper()}" for name in SHARED_SETTINGS}
    ignored = [
        name
        for name in sorted(own)
        if own[name] and name.startswith(SHARED_PREFIX) and not name.startswith(read) and name not in shared
    ]
    warnings: list[str] = []
    if ignored:
        warnings.append(f"ignored {', '.join(ignored)}: variables of this program begin with {ENV_PREFIX}")
    return warnings + service_link_warnings(environ, SHARED_PREFIX, _OTHER_PROGRAMS)


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [name.upper() for name in WorkerSettings.model_fields]
    for name in sorted(without_service_links(environ)):
        setting = name.removeprefix(ENV_PREFIX)
        if name.startswith(ENV_PREFIX) and setting not in known:
            near = difflib.get_close_matches(setting, known, n=1)
            hint = f"did you mean {ENV_PREFIX}{near[0]}?" if near else "--help lists the settings"
            raise SettingsRefused(f"there is no environment variable {name}; {hint}")


def _sentence(problem: Any, flags: Mapping[str, object]) -> str:
    """Returns a pydantic error as `<name as given> is <value>; it must be <requirement>`."""
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{name}: there is no such setting; --help lists the settings"
    if name in flags:
        shown = _flag(name)
    else:
        variables = (f"{prefix}{name.upper()}" for prefix in (ENV_PREFIX, SHARED_PREFIX))
        shown = next((variable for variable in variables if os.environ.get(variable)), name)
    if problem["type"] == "string_too_long":
        return f"{shown} has {len(problem['input'])} characters; the limit is {problem['ctx']['max_length']}"
    return f"{shown} is {problem['input']!r}; it {_requirement(problem)}"


def _requirement(problem: Any) -> str:
    kind, limits = str(problem["type"]), problem.get("ctx", {})
    if kind.startswith("int"):
        return "must be a whole number"
    if kind == "greater_than_equal":
        return f"must be at least {limits['ge']}"
    if kind == "less_than_equal":
        return f"must be at most {limits['le']}"
    if kind == "string_pattern_mismatch":
        return f"must match {limits['pattern']}"
    if kind == "string_unicode":
        return "must be UTF-8 text"
    if kind == "literal_error":
        return f"must be {limits['expected']}".replace("'", "")
    if kind.startswith("bool"):
        return "must be true or false"
    if kind.startswith("byte_size"):
        return "must be a number of bytes, or have a unit such as 512MiB or 2GiB"
    return str(problem["msg"]).removeprefix("Value error, ")
