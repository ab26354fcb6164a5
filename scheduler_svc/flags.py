"""Command-line flags and error messages, both made from the fields of a settings class.

Owns the wording. A field's `title` is the placeholder of its value in --help, its `description` is the help text.
Bounds and types are read from the field, so that help, check and message cannot differ. Names no setting.
"""

import argparse
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Fields = Mapping[str, FieldInfo]


class SettingError(Exception):
    """Settings are invalid. Each line of the message has a setting, its value and the requirement."""


class _SettingsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises SettingError, because argparse would print all flags before the error and exit."""
        raise SettingError(f"{message} (--help lists the flags)")


def parse(program: str, version: str, description: str, fields: Fields, arguments: list[str]) -> dict[str, object]:
    """Returns the settings that the arguments name, their values as written. Raises SettingError.

    --help and --version print and raise SystemExit.
    """
    parser = _SettingsParser(prog=program, description=description, allow_abbrev=False, usage="%(prog)s [FLAG ...]")
    parser.add_argument("--version", action="version", version=version)
    for name, field in fields.items():
        if field.annotation is bool:
            parser.add_argument(
                _flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=_help(field)
            )
        else:
            parser.add_argument(_flag(name), metavar=field.title, default=argparse.SUPPRESS, help=_help(field))
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [_flag(name).removeprefix("--") for name in fields]
        hint = suggestion(unknown[0].partition("=")[0], flags, "--")
        raise SettingError(f"there is no flag {unknown[0]}{hint}")
    return vars(found)


def message(problem: ErrorDetails, fields: Fields) -> str:
    """Returns the error message for a setting: its name, its value and the requirement."""
    name, value = str(problem["loc"][0]), problem["input"]
    if name not in fields:
        return f"there is no setting {name}{suggestion(name, fields)}"
    return f"{name} is {_shown(value)}; it must be {_requirement(fields[name])}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(field: FieldInfo) -> str:
    default = field.default
    words = str(field.description).replace("%", "%%")
    if field.default_factory is not None or default is None or isinstance(default, bool):
        return words
    return f"{words} (default: {default:,})" if isinstance(default, int) else f"{words} (default: {_plain(default)})"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the end of a message about an unknown name: the most similar known name, after `prefix`."""
    near = difflib.get_close_matches(name.removeprefix(prefix), list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else " (--help lists them)"


def _shown(value: object) -> str:
    try:
        float(str(value))
    except ValueError:
        return repr(value)
    return str(value)


def _requirement(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(field)
    return "a path" if Path in (kind, *get_args(kind)) else "text"


def _range(field: FieldInfo) -> str:
    bounds = {
        name: f"{limit:,g}" if isinstance(limit, float) else f"{limit:,}"
        for rule in field.metadata
        for name in ("ge", "gt", "le")
        if (limit := getattr(rule, name, None)) is not None
    }
    if "ge" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    return f" above {bounds['gt']} and at most {bounds['le']}"
