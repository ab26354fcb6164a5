"""The worker's command line: flags over environment (TANDEM_<NAME>) over file (--config FILE, TOML).

Owns the flags, --help and --version, and the wording of settings that are refused: one line for all of them, each
named as it was given. Unknown flags, file keys and TANDEM_ variables are refused by name; a variable that belongs to
another of Tandem's programs is accepted.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict, SettingsError

from gpu_worker.settings import ENV_PREFIX, OTHER_PROGRAMS_SETTINGS, SettingsRefused, WorkerSettings
from gpu_worker.version import version_line

_SWITCHES = ("exit_with_parent",)
# What stands for a value in --help.
_VALUES = {
    "model": "NAME",
    "served_name": "NAME",
    "device": "DEVICE",
    "dtype": "TYPE",
    "pool_bytes": "SIZE",
    "keep_free_bytes": "SIZE",
    "host_pool_bytes": "SIZE",
    "runtime_dir": "FOLDER",
    "log_level": "LEVEL",
    "log_format": "FORMAT",
    "config": "FILE",
}
_GROUPS = {
    "Model": ("model", "served_name", "device", "dtype", "threads"),
    "Memory": ("page_size", "num_pages", "pool_bytes", "keep_free_bytes", "host_pool_bytes"),
    "Limits": ("max_rows", "max_length", "token_budget", "window", "window_sinks"),
    "Process": ("runtime_dir", "exit_with_parent", "log_level", "log_format", "config"),
}
_EPILOG = """\
N is a whole number; SIZE is a number of bytes or has a unit: 512MiB, 2GiB.
Each setting may also be an environment variable (TANDEM_MAX_ROWS=64) or a key of the file (max_rows = 64).

Examples:
  python -m gpu_worker
  python -m gpu_worker --model Qwen/Qwen3-0.6B --device cuda:0
  python -m gpu_worker --model ~/models/llama --dtype bfloat16 --pool-bytes 4GiB
"""


class _Parser(argparse.ArgumentParser):
    """Raises SettingsRefused instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsRefused(f"{message}; --help lists the settings")


def load_settings(arguments: Sequence[str]) -> WorkerSettings:
    """The settings of this process. Raises SettingsRefused; --help and --version exit."""
    flags = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    _check_environment(os.environ)
    file = flags.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    if file and not Path(file).is_file():
        raise SettingsRefused(f"config file {file} does not exist")

    class FromFile(WorkerSettings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return FromFile(**flags)
    except ValidationError as error:
        raise SettingsRefused("; ".join(_sentence(problem, flags) for problem in error.errors())) from error
    except TOMLDecodeError as error:
        raise SettingsRefused(f"config file {file} is not valid TOML: {error}") from error
    except (SettingsError, OSError) as error:
        raise SettingsRefused(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m gpu_worker",
        usage="python -m gpu_worker [settings]",
        description=WorkerSettings.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            help_line = str(WorkerSettings.model_fields[name].description).replace("%", "%%")
            kind: dict[str, Any] = {"metavar": _VALUES.get(name, "N")}
            if name in _SWITCHES:
                kind = {"action": argparse.BooleanOptionalAction, "default": None}
            group.add_argument(_flag(name), help=help_line, **kind)
    other = parser.add_argument_group("Information")
    other.add_argument("-h", "--help", action="help", help="print this and exit")
    other.add_argument("--version", action="version", version=version_line(), help="print the version and exit")
    return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_environment(environ: Mapping[str, str]) -> None:
    """Raises SettingsRefused for TANDEM_ variables that no program of Tandem has."""
    known = {name.upper() for name in (*WorkerSettings.model_fields, *OTHER_PROGRAMS_SETTINGS)}
    unknown = [name for name in environ if name.startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :] not in known]
    if unknown:
        raise SettingsRefused(f"unknown environment variable {', '.join(sorted(unknown))}; --help lists the settings")


def _sentence(problem: Any, flags: Mapping[str, object]) -> str:
    """One of pydantic's errors, as `<name as given> is <value>; it <what it must be>`."""
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{name}: there is no such setting; --help lists the settings"
    shown = name
    if name in flags:
        shown = _flag(name)
    elif f"{ENV_PREFIX}{name.upper()}" in os.environ:
        shown = f"{ENV_PREFIX}{name.upper()}"
    return f"{shown} is {problem['input']!r}; it {_what_it_must_be(problem)}"


def _what_it_must_be(problem: Any) -> str:
    kind, limits = str(problem["type"]), problem.get("ctx", {})
    if kind.startswith("int"):
        return "must be a whole number"
    if kind == "greater_than_equal":
        return f"must be at least {limits['ge']}"
    if kind == "literal_error":
        return f"must be {limits['expected']}".replace("'", "")
    if kind.startswith("bool"):
        return "must be true or false"
    if kind.startswith("byte_size"):
        return "must be a number of bytes, or have a unit such as 512MiB or 2GiB"
    return str(problem["msg"]).removeprefix("Value error, ")
