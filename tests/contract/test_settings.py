"""Settings of all programs: the order of the sources, what a type takes in each of them, and the messages."""

import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from gpu_worker import holder
from gpu_worker import settings as worker
from scheduler_svc import settings as scheduler
from tandem_client.gateway import settings as gateway
from tandem_contract import settings
from tandem_contract.settings import SHARED, Program, SettingError, Size, file, number, without_service_links
from tandem_contract.version import version

PROGRAMS: dict[str, Program[Any]] = {
    "scheduler": scheduler.PROGRAM, "worker": worker.PROGRAM, "holder": holder.PROGRAM, "gateway": gateway.PROGRAM,
}  # fmt: skip
# Of each program: a whole number and a misspelling of its name, and a value that is not the default.
NUMBERS = {
    "scheduler": ("max_waiting", "max_waitng", 7), "worker": ("max_rows", "max_colums", 7),
    "holder": ("max_bytes", "max_byte", 7), "gateway": ("max_requests", "max_reqests", 7),
}  # fmt: skip
of_each = pytest.mark.parametrize("name", PROGRAMS)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Every(BaseModel):
    """A setting of each type."""

    whole: int = number(1, 0, 1_000_000, "N", "a whole number")
    many: int | None = Field(None, ge=1, description="a whole number without an upper bound")
    share: float = number(0.5, 0, 1000, "X", "a number")
    above: float = Field(1.0, gt=0, le=9, description="a number above 0")
    size: Size = Field(0, description="bytes")
    text: str = Field("", max_length=8, description="text")
    path: Path | None = file("a path")
    kind: Literal["on", "off"] = Field("on", description="one of two")
    colour: Colour | None = Field(None, description="one of two")
    switch: bool = Field(False, description="a truth")
    hidden: int = 0
    config: Path | None = file("TOML file")


EVERY = Program(command="every", model=Every, description="Every type.", prefix="TANDEM_EVERY_", shared=SHARED)


class Sources:
    """Gives settings of a program in one of three ways, and the name that the messages then use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def flag(self, program: Program[Any], name: str, value: str) -> tuple[str, Any]:
        given = f"--{name.replace('_', '-')}"
        return given, lambda: program.read([given, value], {})

    def variable(self, program: Program[Any], name: str, value: str) -> tuple[str, Any]:
        given = f"{program.prefix}{name.upper()}"
        return given, lambda: program.read([], {given: value})

    def key(self, program: Program[Any], name: str, value: str) -> tuple[str, Any]:
        path = self.folder / "settings.toml"
        path.write_text(f"{name} = {value}\n")
        return f"{name} in {path}", lambda: program.read(["--config", str(path)], {})


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as caught:
        read()
    return str(caught.value)


@of_each
def test_flags_win_over_the_environment_over_the_file(tmp_path: Path, name: str) -> None:
    program, (number, _, value) = PROGRAMS[name], NUMBERS[name]
    path = tmp_path / "settings.toml"
    path.write_text(f'{number} = {value}\nlog_format = "json"\n')
    flag, variable = f"--{number.replace('_', '-')}", f"{program.prefix}{number.upper()}"

    def read(*flags: str, **variables: str) -> tuple[object, object]:
        found = program.read(flags, variables)
        return getattr(found, number), found.log_format

    by_file = (value, "json")
    assert read("--config", str(path)) == by_file
    assert read(**{f"{program.prefix}CONFIG": str(path)}) == by_file
    # An empty variable sets nothing.
    assert read("--config", str(path), **{variable: ""}) == by_file
    assert read("--config", str(path), **{variable: "8"}) == (8, "json")
    assert read("--config", str(path), f"{flag}=9", **{variable: "8"}) == (9, "json")
    assert read("--config", str(path), flag, "9", flag, "10") == (10, "json"), "the last one counts"


@of_each
@pytest.mark.parametrize("source", ["flag", "variable", "key"])
def test_an_unknown_name_is_refused_with_the_nearest_one(sources: Sources, name: str, source: str) -> None:
    program, (near, wrong, _) = PROGRAMS[name], NUMBERS[name]
    (right, _), (given, read) = (getattr(sources, source)(program, each, "1") for each in (near, wrong))
    kind = {"flag": "flag", "variable": "environment variable", "key": "setting"}[source]
    assert refusal(read) == f"there is no {kind} {given}; did you mean {right.partition(' in ')[0]}?"
    given, read = getattr(sources, source)(program, "qq", "1")
    assert refusal(read) == f"there is no {kind} {given} (--help lists them)"


WHOLE = "a whole number from 0 to 1,000,000"
NUMBER, TRUTH, ONE = "a number from 0 to 1,000", "true or false", "one of on, off"
BYTES = "a number of bytes, or have a unit such as 512MiB or 2GiB"


@pytest.mark.parametrize("source", ["flag", "variable"])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "5", 5), ("whole", "1,024", 1024), ("whole", "+5", 5), ("whole", "true", WHOLE),
        ("whole", "5.5", WHOLE), ("whole", "5.0", WHOLE), ("whole", "1e3", WHOLE), ("whole", "1_0", WHOLE),
        ("whole", "-1", WHOLE), ("whole", "x", WHOLE), ("many", "0", "a whole number, at least 1"),
        ("many", "9", 9), ("share", "5", 5.0), ("share", "-1", NUMBER), ("share", "2.5e1", 25.0),
        ("share", ".5", 0.5), ("share", "true", NUMBER), ("share", "nan", NUMBER), ("share", "inf", NUMBER),
        ("share", "1e999", NUMBER), ("share", "1_0", NUMBER), ("above", "0", "a number above 0 and at most 9"),
        ("size", "4096", 4096), ("size", "2GiB", 2 << 30), ("size", "1.5 GB", 1_500_000_000),
        ("size", "1.5gib", 3 << 29), ("size", "much", BYTES), ("size", "2XB", BYTES),
        ("size", "-1", "a whole number, at least 0"), ("size", "true", BYTES), ("text", "5", "5"),
        ("text", "\udcff", "UTF-8 text"), ("path", "~/x", Path.home() / "x"), ("path", "5", Path("5")),
        ("kind", "off", "off"), ("kind", "Off", ONE), ("kind", "true", ONE), ("colour", "red", Colour.RED),
        ("colour", "pink", "one of red, blue"),
    ],
)  # fmt: skip
def test_what_a_flag_and_a_variable_may_say(sources: Sources, source: str, name: str, text: str, value: object) -> None:
    given, read = getattr(sources, source)(EVERY, name, text)
    if isinstance(value, str) and value != text:
        shown = text if is_number(text) else repr(text)
        assert refusal(read) == f"{given} is {shown}; it must be {value}"
    else:
        found = getattr(read(), name)
        assert (found, type(found)) == (value, type(value))


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "toml", "value"),
    [
        ("whole", "5", 5), ("whole", '"5"', WHOLE), ("whole", "true", WHOLE), ("whole", "5.0", WHOLE),
        ("whole", "5.5", WHOLE), ("whole", "[5]", WHOLE), ("share", "5", 5.0), ("share", "5.5", 5.5),
        ("share", "true", NUMBER), ("share", '"5"', NUMBER), ("share", "nan", NUMBER), ("share", "-inf", NUMBER),
        ("size", "4096", 4096), ("size", '"2GiB"', 2 << 30), ("size", "true", "a whole number, at least 0"),
        ("size", "5.5", "a whole number, at least 0"), ("text", "5", "text"), ("text", "true", "text"),
        ("path", "1", "a path"), ("path", '"a/b"', Path("a/b")), ("kind", "true", ONE), ("kind", '"off"', "off"),
        ("colour", '"red"', Colour.RED), ("colour", "1", "one of red, blue"), ("switch", "true", True),
        ("switch", "false", False), ("switch", "1", TRUTH), ("switch", '"true"', TRUTH),
    ],
)  # fmt: skip
def test_what_a_file_may_say(sources: Sources, name: str, toml: str, value: object) -> None:
    given, read = sources.key(EVERY, name, toml)
    if isinstance(value, str) and value != toml.strip('"'):
        said = refusal(read)
        assert said.startswith(f"{given} is ") and said.endswith(f"; it must be {value}")
    else:
        found = getattr(read(), name)
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("source", ["flag", "variable", "key"])
def test_a_text_above_its_limit_is_refused_with_its_length(sources: Sources, source: str) -> None:
    text = '"123456789"' if source == "key" else "123456789"
    given, read = getattr(sources, source)(EVERY, "text", text)
    assert refusal(read) == f"{given} has 9 characters; the limit is 8"


@pytest.mark.parametrize("truth", [True, False])
def test_a_variable_says_true_and_false_in_four_words(truth: bool) -> None:
    for word in ("true", "1", "yes", "on", "True") if truth else ("false", "0", "no", "off", "FALSE"):
        assert EVERY.read([], {"TANDEM_EVERY_SWITCH": word}).switch is truth
    for word in ("2", "y", "t", "perhaps", "none"):
        read = lambda word=word: EVERY.read([], {"TANDEM_EVERY_SWITCH": word})  # noqa: E731
        assert refusal(read).endswith("it must be true or false")


def test_a_switch_takes_no_value() -> None:
    assert EVERY.read(["--switch"], {}).switch
    assert not EVERY.read(["--switch", "--no-switch"], {}).switch
    assert refusal(lambda: EVERY.read(["--switch=true"], {})) == "--switch is 'true'; it takes no value"
    assert refusal(lambda: EVERY.read(["--switch", "true"], {})) == "there is no flag true (--help lists them)"


def test_a_flag_needs_its_value_and_its_full_name() -> None:
    for arguments in (["--whole"], ["--whole", "--switch"]):
        assert refusal(lambda words=arguments: EVERY.read(words, {})) == f"--whole has no value; it must be {WHOLE}"
    assert EVERY.read(["--text="], {}).text == ""
    assert EVERY.read(["--text=--switch"], {}).text == "--switch"
    assert refusal(lambda: EVERY.read(["--who", "3"], {})) == "there is no flag --who; did you mean --whole?"


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('kind = "x"\nshar = 1\n')
    flags = ["--config", str(path), "--whole", "x", "--who", "3", "--above"]
    said = refusal(lambda: EVERY.read(flags, {"TANDEM_EVERY_MANY": "0", "TANDEM_EVERY_QQ": ""}))
    assert said.splitlines() == [
        "there is no flag --who; did you mean --whole?",
        "--above has no value; it must be a number above 0 and at most 9",
        "there is no environment variable TANDEM_EVERY_QQ (--help lists them)",
        f"there is no setting shar in {path}; did you mean share?",
        f"--whole is 'x'; it must be {WHOLE}",
        "TANDEM_EVERY_MANY is 0; it must be a whole number, at least 1",
        f"kind in {path} is 'x'; it must be one of on, off",
    ]


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@of_each
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_write(b'log_format = "x\n'), "is not TOML: Illegal character '\\n' (at line 1, column 16)"),
        (_write(b'log_format = "text"\n\nlog_format: text\n'), "is not TOML: Expected '=' after a key in a key/"),
        (_write(b'log_format = "text"\nlog_format = "json"\n'), "is not TOML: Cannot overwrite a value (at line 2,"),
        (_write(b"a = " + b"[" * 100_000), "is not TOML: maximum recursion depth exceeded"),
        (_write(b"\xff\xfe"), "is not UTF-8 text (byte 0)"),
        (_write(b"#" * ((1 << 20) + 1)), "has 1,048,577 bytes; the limit is 1,048,576"),
        (Path.mkdir, "is a folder"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: None, "does not exist"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "settings.toml"
    make(path)
    assert refusal(lambda: PROGRAMS[name].read(["--config", str(path)], {})).startswith(f"config file {path} {said}")


def test_an_unreadable_folder_of_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", denied)
    said = refusal(lambda: EVERY.read(["--config", "/secret/settings.toml"], {}))
    assert said == "config file /secret/settings.toml cannot be read: Permission denied"


def test_a_file_of_another_system_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte order mark, and ends of lines and tabs as Windows writes them."""
    path = tmp_path / "settings.toml"
    path.write_bytes(b'\xef\xbb\xbf# settings\r\nwhole\t=\t7\r\n\r\npath = "~/x"\r\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    found = EVERY.read(["--config", "~/settings.toml"], {})
    assert (found.whole, found.path) == (7, tmp_path / "x")
    assert EVERY.read([], {"TANDEM_EVERY_CONFIG": "~/settings.toml"}).whole == 7


@pytest.mark.parametrize("source", ["flag", "variable", "key"])
def test_a_home_folder_is_found_and_a_missing_user_named(
    sources: Sources, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(sources.folder)
    quoted = (lambda text: repr(text).replace("'", '"')) if source == "key" else str
    places = {"~": "/home/me", "~/a": "/home/me/a", "~root/a": "/root/a", "./~": "./~", "a~/b": "a~/b"}
    for text, path in places.items():
        _, read = getattr(sources, source)(EVERY, "path", quoted(text))
        assert read().path == Path(path)
    given, read = getattr(sources, source)(EVERY, "path", quoted("~nobody-here/a"))
    assert refusal(read) == f"{given} is '~nobody-here/a'; there is no user of this name"
    if source != "variable":
        given, read = getattr(sources, source)(EVERY, "path", quoted(""))
        assert refusal(read) == f"{given} is ''; it must be a path"


# Of each kind of setting: values of a file that it does not take. A path is a text; a size may be one too.
_NO_SCALARS = ["[1]", "{ a = 1 }", "2024-01-01", "07:32:00"]
_WRONG = {
    bool: ["1", "0", '"true"', "1.0", *_NO_SCALARS],
    int: ["true", "false", "5.0", "nan", "inf", "-1e400", "-1", f"{10**40}", "0x" + "f" * 20_000, '"x"', *_NO_SCALARS],
    float: ["true", "false", "nan", "-inf", "1e400", "-1.0", f"{10**40}", '"1.5"', *_NO_SCALARS],
    str: ["true", "1", "1.5", *_NO_SCALARS],
}
# Of the same kinds: texts of flags and variables.
_WRONG_TEXTS = {
    bool: ["2", "maybe", "1.0"],
    int: ["true", "5.0", "1e3", "nan", "1e400", "-1", f"{10**40}", "9" * 5000, "x", "[1]", "0x10", "1 2", "\u0661"],
    float: ["true", "nan", "inf", "1e400", "-1", "x", "[1]", "1_0", "\u0661"],
    str: ["\udcff"],
}  # fmt: skip


def _kind_of(field: Any) -> type:
    kind = settings._kind(field)[0]
    return kind if kind in (bool, int, float) else str


def _has_bounds(field: Any, text: str) -> bool:
    """Whether a whole number of this size is refused by the setting's bounds."""
    bounds = settings._kind(field)[1]
    return "le" in bounds if not text.startswith("-") else "ge" in bounds or "gt" in bounds


def _wrong_values(program: Program[Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the source, a setting, and a value that it must not take from there."""
    for setting, field in settings._fields(program.model).items():
        kind, is_path = _kind_of(field), settings._kind(field)[0] is Path
        for source, wrong in {"key": _WRONG, "flag": _WRONG_TEXTS, "variable": _WRONG_TEXTS}.items():
            is_taken = setting == "config" or (kind is bool and source == "flag") or (is_path and source != "key")
            for text in () if is_taken else wrong[kind]:
                is_large = text.isdigit() or text[:2] == "0x" or text[1:].isdigit()
                if kind is str or not is_large or len(text) == 1 or _has_bounds(field, text):
                    yield source, setting, text


@of_each
def test_no_setting_takes_a_value_of_another_kind(sources: Sources, name: str) -> None:
    program, taken, num_refused = PROGRAMS[name], list[str](), 0
    for source, setting, text in _wrong_values(program):
        given, read = getattr(sources, source)(program, setting, text)
        try:
            found = getattr(read(), setting)
        except SettingError as error:
            num_refused += 1
            pattern = rf"{re.escape(given)} is .*; it must (be|match) .*"
            if not re.fullmatch(pattern, str(error)) or len(str(error)) > 800:
                taken.append(str(error))
        else:
            taken.append(f"{given} {text[:50]} -> {found!r}")
    assert taken == []
    assert num_refused > 30


@of_each
def test_help_lists_each_setting_with_its_default_once(capsys: pytest.CaptureFixture[str], name: str) -> None:
    program = PROGRAMS[name]
    for arguments in (["-h"], ["--help"], ["--nonsense", "--help"]):
        with pytest.raises(SystemExit) as ended:
            program.read(arguments, {})
        assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split("usage: ")[1].split())
    fields: Mapping[str, Any] = program.model.model_fields
    for setting, field in fields.items():
        assert (f" --{setting.replace('_', '-')}" in said) is (field.description is not None)
    assert "else /tmp/tandem-<uid>" in said or "runtime_dir" not in fields
    assert not re.findall(r"factory|None|False|float\b|default default|default: \)|SUPPRESS", said)


@of_each
def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        PROGRAMS[name].read(["--version"], {})
    assert capsys.readouterr().out == f"tandem {version()}\n"


@of_each
def test_variables_of_other_programs_change_nothing_and_give_no_warning(name: str) -> None:
    others = {program.prefix: "1" for other, program in PROGRAMS.items() if other != name}
    variables = {f"{prefix}{setting}": "5" for prefix in others for setting in ("MAX_WAITING", "X")}
    variables |= dict.fromkeys(("TANDEM_TLS", "TANDEM_TLS_CA", "TANDEM_TOKEN", "TANDEM_TOKEN_FILE"), "1")
    assert PROGRAMS[name].read([], variables) == PROGRAMS[name].read([], {})
    assert PROGRAMS[name].warnings({**variables, "TANDEM_ADDRESS": "127.0.0.1:1"}) == []


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_a_shared_variable_sets_both_programs_without_a_warning(name: str) -> None:
    program = PROGRAMS[name]
    variables = {"TANDEM_RUNTIME_DIR": "/run/tandem", "TANDEM_LOG_FORMAT": "json", "TANDEM_LOG_LEVEL": "error"}
    variables["TANDEM_EXIT_WITH_PARENT"] = "yes"
    found = program.read([], variables)
    assert (str(found.runtime_dir), found.log_format, found.log_level) == ("/run/tandem", "json", "error")
    assert found.exit_with_parent
    assert program.warnings(variables) == []
    assert program.read([], variables | {f"{program.prefix}LOG_LEVEL": "debug"}).log_level == "debug"
    said = refusal(lambda: program.read([], {"TANDEM_LOG_FORMAT": "xml"}))
    assert said == "TANDEM_LOG_FORMAT is 'xml'; it must be one of text, json"


def test_other_shared_variables() -> None:
    assert gateway.PROGRAM.read([], {"TANDEM_ADDRESS": "127.0.0.1:9"}).address == "127.0.0.1:9"
    variables = {"TANDEM_RUNTIME_DIR": "/all", "TANDEM_LOG_FORMAT": "json"}
    assert holder.PROGRAM.read([], variables).log_format == "json"
    for first in ("TANDEM_RUNTIME_DIR", "TANDEM_WORKER_RUNTIME_DIR", "TANDEM_HOLDER_RUNTIME_DIR"):
        variables[first] = f"/{first}"
        assert str(holder.PROGRAM.read([], variables).runtime_dir) == f"/{first}"


@of_each
def test_names_without_a_program_are_ignored_with_a_warning(name: str) -> None:
    """Also those of the program's own settings."""
    program = PROGRAMS[name]
    variables = {"TANDEM_MAX_WAITING": "5", "TANDEM_TOKENS": "3", "TANDEM_RECORD": "", "TANDEM_TOKEN": "of the client"}
    assert program.read([], variables) == program.read([], {})
    assert program.warnings(variables) == [
        f"ignored TANDEM_MAX_WAITING, TANDEM_TOKENS: variables of this program begin with {program.prefix}"
    ]


def test_scheduler_and_worker_share_these_settings() -> None:
    prefixes = [program.prefix for program in PROGRAMS.values()]
    assert prefixes == ["TANDEM_SCHEDULER_", "TANDEM_WORKER_", "TANDEM_HOLDER_", "TANDEM_GATEWAY_"]
    both = set(scheduler.SchedulerSettings.model_fields) & set(worker.WorkerSettings.model_fields)
    # Both programs have `config` too, but a file has the keys of one program.
    assert {*SHARED, "config"} == both


def service_links(service: str, host: str, *ports: tuple[str, int, str]) -> dict[str, str]:
    """What Kubernetes sets for a Service with these ports, each a name, a number and a protocol.

    As in https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
    """
    prefix = service.upper().replace("-", "_")
    at = f"[{host}]" if ":" in host else host
    found = {f"{prefix}_SERVICE_HOST": host, f"{prefix}_SERVICE_PORT": str(ports[0][1])}
    found[f"{prefix}_PORT"] = f"{ports[0][2].lower()}://{at}:{ports[0][1]}"
    for name, port, protocol in ports:
        if name:
            found[f"{prefix}_SERVICE_PORT_{name.upper().replace('-', '_')}"] = str(port)
        one = f"{prefix}_PORT_{port}_{protocol}"
        found |= {one: f"{protocol.lower()}://{at}:{port}", f"{one}_PROTO": protocol.lower()}
        found |= {f"{one}_PORT": str(port), f"{one}_ADDR": host}
    return found


@of_each
@pytest.mark.parametrize("service", ["tandem-{}", "tandem-{}-1", "tandem"])
@pytest.mark.parametrize(
    ("host", "ports"),
    [
        ("10.0.0.11", [("", 50051, "TCP")]),
        ("fd00::b", [("grpc", 50051, "TCP"), ("http-metrics", 9090, "TCP"), ("health", 53, "UDP"), ("x", 1, "SCTP")]),
    ],
)
def test_what_kubernetes_sets_for_services_is_ignored_with_one_line(
    name: str, service: str, host: str, ports: list[tuple[str, int, str]]
) -> None:
    program = PROGRAMS[name]
    environ = {
        name: value for other in PROGRAMS for name, value in service_links(f"tandem-{other}", host, *ports).items()
    }
    own = service_links(service.format(name), host, *ports)
    assert program.read([], environ | own) == program.read([], {})
    (line,) = program.warnings(environ | own)
    assert line.startswith("ignored what Kubernetes sets for Services: ")
    assert set(own) <= set(line.rpartition(": ")[2].split(", "))


@of_each
def test_another_unknown_variable_is_refused(name: str) -> None:
    """Also one with a name of Kubernetes and another value."""
    variable = f"{PROGRAMS[name].prefix}PORT"
    assert without_service_links({variable: "50051"}), "a port alone is none of theirs"
    said = refusal(lambda: PROGRAMS[name].read([], {variable: "50051"}))
    assert f"there is no environment variable {variable}" in said


def test_no_setting_has_a_name_that_kubernetes_uses() -> None:
    every = {name for program in PROGRAMS.values() for name in program.model.model_fields}
    assert not [name for name in every if name.endswith(("_port", "_service_host")) or "_port_" in name]


@of_each
def test_defaults_are_finite_and_within_their_bounds(name: str) -> None:
    program = PROGRAMS[name]
    defaults = program.read([], {})
    values = defaults.model_dump()
    assert not [each for each in values.values() if isinstance(each, float) and not math.isfinite(each)]
    assert program.model.model_validate(values, strict=True) == defaults
