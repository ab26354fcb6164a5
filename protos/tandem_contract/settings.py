"""The settings of a program: flags over environment over a TOML file over the defaults of a pydantic model.

Owns the order of these sources, --help and --version, which values of each source a type takes, and what is said of
those refused: a line for each, all at once, with the name as it was given. Knows no setting by name, but that `config`
is the file. A field's `title` is the placeholder behind its flag in --help, its `description` says what it does; one
without a description is not listed. Needs pydantic.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import stat
import sys
import textwrap
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tandem_contract.plural import counted
from tandem_contract.processes import WRONG_SETTINGS
from tandem_contract.version import version

_TANDEM = "TANDEM_"
SHARED = {
    name: (f"{_TANDEM}{name.upper()}",) for name in ("exit_with_parent", "log_format", "log_level", "runtime_dir")
}
"""Settings of scheduler and worker, and the variable that sets each of them for both."""
_PREFIXES = ("TANDEM_SCHEDULER_", "TANDEM_WORKER_", "TANDEM_HOLDER_", "TANDEM_GATEWAY_")
_OF_CLIENT = frozenset({"TANDEM_ADDRESS", "TANDEM_TLS", "TANDEM_TOKEN", "TANDEM_TOKEN_FILE"})
_TLS_OF_CLIENT = "TANDEM_TLS_"

# What Kubernetes sets in the environment of every container for Services such as tandem-scheduler, as NAME=VALUE: the
# host of a Service, its ports, and one group for each port.
_SERVICE_LINK = re.compile(
    r"TANDEM_(\w+_)?(SERVICE_HOST=[\da-f.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\S+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[\da-f.:]+))"
)

Model = TypeVar("Model", bound=BaseModel)
# The longest file of settings, and value that a message shows.
_MAX_FILE_BYTES, _MAX_SHOWN = 1 << 20, 200
# What a variable may say for true and false, in any case.
_WORDS = {
    word: truth for truth, words in {True: "true 1 yes on", False: "false 0 no off"}.items() for word in words.split()
}


_SIZE = re.compile(r"\d{1,30}|\d{1,30}(\.\d{1,30})? ?[kmgtpe]?i?b", re.ASCII | re.IGNORECASE)


class SettingError(ValueError):
    """Settings are refused. Each line of the message has a setting, its value and the requirement."""


def refused(program: str, error: Exception) -> int:
    """Prints each line of the error behind the program's name, if stderr is read. Returns the exit code."""
    for line in str(error).splitlines():
        with suppress(OSError):
            print(f"{program}: {line}", file=sys.stderr)
    return WRONG_SETTINGS


def without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set for the program."""
    return {name: value for name, value in environ.items() if not _SERVICE_LINK.fullmatch(f"{name}={value}")}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, and the name of the setting where it stands: a flag, a variable, or a key with its file."""

    name: str
    value: object
    is_text: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Generic[Model]):
    """What the reader knows of a program. `command` starts it, `groups` maps a heading of --help to settings.

    Variables begin with `prefix`; `shared` has further ones of a setting, the first wins. Without a prefix the program
    reads flags alone.
    """

    command: str
    model: type[Model]
    description: str
    epilog: str = ""
    groups: Mapping[str, Iterable[str]] = dataclasses.field(default_factory=dict[str, Iterable[str]])
    prefix: str = ""
    shared: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict[str, Sequence[str]])

    def read(self, arguments: Iterable[str], environ: Mapping[str, str]) -> Model:
        """Returns the settings. Raises SettingError; --help and --version print and raise SystemExit."""
        problems: list[str] = []
        given = self._flags(deque(arguments), problems)
        if self.prefix:
            given = self._variables(environ, problems) | given
            given = self._file(given.get("config"), problems) | given
        fields = _fields(self.model)
        values = {name: _typed(value, fields[name]) for name, value in given.items()}
        try:
            settings = self.model.model_validate(values, strict=True)
        except ValidationError as error:
            problems += [_sentence(problem, fields, given) for problem in error.errors()]
            raise SettingError("\n".join(problems)) from None
        if problems:
            raise SettingError("\n".join(problems))
        return settings

    def warnings(self, environ: Mapping[str, str]) -> list[str]:
        """Returns a line for the TANDEM_ variables that no program reads, and one for those of Kubernetes."""
        others = (*(prefix for prefix in _PREFIXES if prefix != self.prefix), _TLS_OF_CLIENT)
        taken = _OF_CLIENT | {variable for variables in SHARED.values() for variable in variables}
        given = without_service_links(environ)
        ours = [name for name in sorted(environ) if name.startswith(_TANDEM) and not name.startswith(others)]
        ignored = [name for name in ours if given.get(name) and not name.startswith(self.prefix) and name not in taken]
        links = [name for name in ours if name not in given]
        said = f"ignored {', '.join(ignored)}: variables of this program begin with {self.prefix}"
        of_links = f"ignored what Kubernetes sets for Services: {', '.join(links)}"
        return [line for line, names in ((said, ignored), (of_links, links)) if names]

    def _flags(self, words: deque[str], problems: list[str]) -> dict[str, _Given]:
        if {"-h", "--help"}.intersection(words):
            print(self._help(), end="")
            raise SystemExit(0)
        if "--version" in words:
            print(f"tandem {version()}")
            raise SystemExit(0)
        fields = _fields(self.model)
        names = {_flag(name): name for name in fields}
        switches = {flag for flag, name in names.items() if _kind(fields[name])[0] is bool}
        switches |= {f"--no-{flag[2:]}" for flag in switches}
        values: dict[str, _Given] = {}
        while words:
            flag, equals, value = words.popleft().partition("=")
            follows = not equals and bool(words) and not words[0].startswith("--")
            if flag in switches:
                name = names.get(flag) or names[f"--{flag[5:]}"]
                values[name] = _Given(flag, flag in names, is_text=False)
                if equals:
                    problems.append(f"{flag} is {_shown(value)}; it takes no value")
                continue
            if follows:
                value = words.popleft()
            if flag not in names:
                problems.append(f"there is no flag {flag}{_hint(flag, [*names, *switches], '--')}")
            elif equals or follows:
                values[names[flag]] = _Given(flag, value)
            else:
                problems.append(f"{flag} has no value; it must be {_requirement(fields[names[flag]])}")
        return values

    def _variables(self, environ: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
        """Empty variables set nothing, and the program's own win over shared ones."""
        by_prefix = {f"{self.prefix}{name.upper()}": name for name in _fields(self.model)}
        problems += [
            f"there is no environment variable {name}{_hint(name, by_prefix, self.prefix)}"
            for name in sorted(without_service_links(environ))
            if name.startswith(self.prefix) and name not in by_prefix
        ]
        shared = {variable: name for name, several in self.shared.items() for variable in several}
        values: dict[str, _Given] = {}
        for variable, name in (by_prefix | shared).items():
            if environ.get(variable):
                values.setdefault(name, _Given(variable, environ[variable]))
        return values

    def _file(self, given: _Given | None, problems: list[str]) -> dict[str, _Given]:
        if given is None:
            return {}
        fields = _fields(self.model)
        path = _typed(given, fields["config"])
        if not isinstance(path, Path):
            return {}  # The check of the types refuses it.
        try:
            content = _toml(path)
        except ValueError as error:
            problems.append(f"config file {path} {error}")
            return {}
        problems += [f"there is no setting {key} in {path}{_hint(key, fields)}" for key in content if key not in fields]
        return {key: _Given(f"{key} in {path}", content[key], is_text=False) for key in content if key in fields}

    def _help(self) -> str:
        words, fields = self.description, _fields(self.model)
        if self.prefix:
            name = next(iter(fields))
            words += (
                f" Each flag is also an environment variable ({self.prefix}{name.upper()}) and a key of the TOML"
                f" file of --config ({name}); flags win over variables, variables over the file. A relative path, in"
                " the file too, begins in the working directory; ~ is the home folder."
            )
        if variables := sorted(variable for several in self.shared.values() for variable in several):
            words += f" {', '.join(variables)} set other programs too."
        parser = argparse.ArgumentParser(
            prog=self.command,
            description=textwrap.fill(words, 100),
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="%(prog)s [FLAG ...]",
        )
        parser.add_argument("--version", action="version", help="print the version and exit")
        sections = {
            name: section
            for heading, names in self.groups.items()
            for section in [parser.add_argument_group(heading)]
            for name in names
        }
        for name, field in fields.items():
            if field.description is None:
                continue
            add = sections.get(name, parser).add_argument
            if _kind(field)[0] is bool:
                add(_flag(name), action=argparse.BooleanOptionalAction, help=_help(field), default=argparse.SUPPRESS)
            else:
                add(_flag(name), metavar=field.title or "|".join(_choices(field)) or None, help=_help(field))
        return parser.format_help()


def setting(default: object, title: str, description: str, **bounds: float) -> Any:
    """Returns a field; bounds: pydantic's, such as ge, le and max_length."""
    return Field(default, title=title, description=description, **cast(Any, bounds))


def number(default: float | None, low: float, high: float, title: str, description: str) -> Any:
    return Field(default, ge=low, le=high, title=title, description=description)


def file(description: str) -> Any:
    return Field(None, title="FILE", description=description)


def one_of(names: Iterable[str]) -> AfterValidator:
    """Returns the check that a value is one of these lower-case names, in any case.

    The words of such a check stand behind the setting and its value.
    """

    def check(value: str) -> str:
        if value.lower() not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return value.lower()

    return AfterValidator(check)


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    with suppress(ValidationError):
        if _SIZE.fullmatch(value):
            return int(TypeAdapter(ByteSize).validate_python(value))
    raise ValueError("it must be a number of bytes, or have a unit such as 512MiB or 2GiB")


Size = Annotated[int, Field(ge=0), BeforeValidator(_bytes)]
"""A number of bytes, given as 2GiB, "1.5 GB", 512MiB, or in bytes."""


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields by their names outside."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file, which may begin with a byte order mark.

    Raises ValueError; its message goes on after the path.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")
        if status.st_size > _MAX_FILE_BYTES:
            raise ValueError(f"has {status.st_size:,} bytes; the limit is {_MAX_FILE_BYTES:,}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        raise ValueError("does not exist") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not TOML: {error}") from None


def _path(text: str) -> object:
    """Returns the path; the text if it can be none, or names the home of a user that is not there."""
    expanded = os.path.expanduser(text)
    return text if not text or "\0" in text or (text[0] == "~" and expanded == text) else Path(expanded)


def _typed(given: _Given, field: FieldInfo) -> object:
    """Returns the value with the field's type if it can have it; the strict check refuses any other.

    Text of a flag or variable may be a number or a truth, a text of the file may not. Whole numbers of it may have
    commas between thousands, as --help prints them.
    """
    value, kind = given.value, _kind(field)[0]
    if not isinstance(value, str):
        # No comparison with a bound refuses these.
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    if kind is Path:
        return _path(value)
    if not _is_utf8(value):
        # No text takes bytes.
        return os.fsencode(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value) if value in list(kind) else value
    if not given.is_text:
        return value
    if kind is bool:
        return _WORDS.get(value.lower(), value)
    # Python converts no more digits than that.
    if kind is int and re.fullmatch(r"[+-]?[\d,]{0,3999}\d", value, re.ASCII):
        return int(value.replace(",", ""))
    if kind is float and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.ASCII | re.IGNORECASE):
        return float(value)
    return value


def _is_utf8(text: str) -> bool:
    """Whether the text can be encoded; a flag that is not UTF-8 has halves of surrogate pairs."""
    return not re.search("[\ud800-\udfff]", text)


def _sentence(problem: ErrorDetails, fields: Mapping[str, FieldInfo], given: Mapping[str, _Given]) -> str:
    """Names the setting, its value and what the value must be. A validator of the model words the error itself."""
    context = problem.get("ctx", {})
    if not problem["loc"]:
        return str(context.get("error", problem["msg"]))
    name = str(problem["loc"][0])
    label, value = given[name].name, given[name].value
    match problem["type"]:
        case "value_error":
            requirement = str(context["error"])
        case "string_too_long":
            return f"{label} has {len(str(value))} characters; the limit is {context['max_length']}"
        case "string_pattern_mismatch":
            requirement = f"it must match {context['pattern']}"
        case _ if isinstance(value, str) and not _is_utf8(value):
            requirement = "it must be UTF-8 text"
        case _ if _kind(fields[name])[0] is Path and str(value).startswith("~"):
            requirement = "there is no user of this name"
        case _:
            requirement = f"it must be {_requirement(fields[name])}"
    return f"{label} is {_shown(value)}; {requirement}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _hint(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns the end of a message about an unknown name: the most similar known one. All names have the prefix."""
    near = difflib.get_close_matches(name.removeprefix(prefix), [full.removeprefix(prefix) for full in names], n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else " (--help lists them)"


def _help(field: FieldInfo) -> str:
    default = field.default
    words = str(field.description).replace("%", "%%")
    if field.default_factory is not None or default in (None, "") or isinstance(default, bool) or "default:" in words:
        return words
    shown = f"{default:,}" if isinstance(default, int) else f"{default:g}" if isinstance(default, float) else default
    return f"{words} (default: {shown})"


def _shown(value: object) -> str:
    """Numbers and truths as they are, all other values in quotation marks; the beginning of long ones."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN:
        return f"a number of {counted(value.bit_length(), 'bit')}"
    try:
        float(str(value))
    except ValueError:
        shown = repr(value)
    else:
        shown = str(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}… ({counted(len(shown), 'character')})"


def _requirement(field: FieldInfo) -> str:
    kind, bounds = _kind(field)
    if choices := _choices(field):
        return f"one of {', '.join(choices)}"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(bounds)
    return "a path" if kind is Path else "text"


def _kind(field: FieldInfo) -> tuple[Any, dict[str, Any]]:
    """Returns the type of a value that is not None, and its bounds by the names ge, gt and le."""
    kind, rules = cast(Any, field.annotation), list[Any](field.metadata)
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        kind, *more = get_args(kind)
        rules += more if origin is Annotated else []
    rules += [rule for one in rules if isinstance(one, FieldInfo) for rule in one.metadata]
    bounds = {name: getattr(rule, name, None) for rule in rules for name in ("ge", "gt", "le") if hasattr(rule, name)}
    return kind, bounds


def _choices(field: FieldInfo) -> list[str]:
    kind = _kind(field)[0]
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []


def _range(bounds: Mapping[str, Any]) -> str:
    shown = {name: f"{limit:,g}" if isinstance(limit, float) else f"{limit:,}" for name, limit in bounds.items()}
    if "gt" in shown:
        return f" above {shown['gt']} and at most {shown['le']}"
    if "le" in shown:
        return f" from {shown['ge']} to {shown['le']}"
    return f", at least {shown['ge']}" if "ge" in shown else ""
