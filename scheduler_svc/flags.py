"""Command-line flags and error messages, both made from the fields of a pydantic model.

The service's settings and the options of `tandem simulate` are such models. A field's `title` is the placeholder behind
its flag in --help, its `description` says what the flag does. Bounds and types come from the field, so help, check and
message agree. This module knows no setting by name.
"""

import argparse
import difflib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tandem_contract.version import version

Fields = Mapping[str, FieldInfo]
_Model = TypeVar("_Model", bound=BaseModel)


class SettingError(Exception):
    """Settings are invalid. Each line of the message has a setting, its value and the requirement."""


class _SettingsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises SettingError, because argparse would print all flags before the error and exit."""
        raise SettingError(f"{message} (--help lists the flags)")


def parse(
    program: str,
    version_text: str,
    description: str,
    fields: Fields,
    arguments: list[str],
    groups: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, object]:
    """Returns the settings that the arguments name, with their values as written. Raises SettingError.

    `groups` maps a heading of --help to names of fields. --help and --version print and raise SystemExit.
    """
    parser = _SettingsParser(prog=program, description=description, allow_abbrev=False, usage="%(prog)s [FLAG ...]")
    parser.add_argument("--version", action="version", version=version_text)
    sections = {
        name: section
        for heading, names in (groups or {}).items()
        for section in [parser.add_argument_group(heading)]
        for name in names
    }
    for name, field in fields.items():
        add, words = sections.get(name, parser).add_argument, _help(field)
        if field.annotation is bool:
            add(_flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=words)
        else:
            placeholder = field.title or "|".join(_choices(field)) or None
            add(_flag(name), metavar=placeholder, default=argparse.SUPPRESS, help=words)
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [_flag(name).removeprefix("--") for name in fields]
        hint = suggestion(unknown[0].partition("=")[0], flags, "--")
        raise SettingError(f"there is no flag {unknown[0]}{hint}")
    return vars(found)


def number(default: float | None, low: float, high: float, title: str, description: str) -> Any:
    """Returns the field of a number from `low` to `high`."""
    return Field(default, ge=low, le=high, title=title, description=description)


def file(description: str) -> Any:
    """Returns the field of a path that may be left out."""
    return Field(None, title="FILE", description=description)


def one_of(names: Iterable[str]) -> AfterValidator:
    """Returns the check that a value is one of these lower-case names, in any case."""

    def check(value: str) -> str:
        if value.lower() not in names:
            raise ValueError(f"{value!r}; it must be one of {', '.join(names)}")
        return value.lower()

    return AfterValidator(check)


def read(
    program: str, description: str, model: type[_Model], arguments: Iterable[str], groups: Mapping[str, Iterable[str]]
) -> _Model:
    """Returns the options of a command that reads flags only. Raises SettingError, and SystemExit as `parse` does."""
    fields = _fields(model)
    return checked(model, parse(program, f"tandem {version()}", description, fields, list(arguments), groups))


def checked(model: type[_Model], values: Mapping[str, object]) -> _Model:
    """Returns the model with these values. Raises SettingError with one line for each flag that is wrong.

    Whole numbers may have commas between thousands, as --help prints them.
    """
    fields = _fields(model)
    plain = {
        name: value.replace(",", "") if isinstance(value, str) and _type(fields[name]) is int else value
        for name, value in values.items()
    }
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise SettingError("\n".join(_flag_message(each, fields) for each in error.errors())) from None


def _fields(model: type[BaseModel]) -> Fields:
    """Returns the fields by the names of their flags."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _flag_message(problem: ErrorDetails, fields: Fields) -> str:
    """Names the flag, its value and what the value must be. A validator of the model words the error itself."""
    if problem["type"] == "value_error":
        words = str(problem.get("ctx", {}).get("error"))
        return f"{_flag(str(problem['loc'][0]))} is {words}" if problem["loc"] else words
    name = str(problem["loc"][0])
    return f"{_flag(name)} is {_shown(problem['input'])}; it must be {_requirement(fields[name])}"


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
    shown = f"{default:,}" if isinstance(default, int) else f"{default:g}" if isinstance(default, float) else default
    return f"{words} (default: {shown})"


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
    kind = _type(field)
    if choices := _choices(field):
        return f"one of {', '.join(choices)}"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(field)
    return "a path" if kind is Path else "text"


def _type(field: FieldInfo) -> Any:
    """The type of a value that is not None."""
    kind: Any = field.annotation
    return get_args(kind)[0] if get_origin(kind) is UnionType else kind


def _choices(field: FieldInfo) -> list[str]:
    kind = _type(field)
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []


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
