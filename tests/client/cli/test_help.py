"""Help, version and wrong arguments: the output for a user's first try of a command."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from tandem_client.cli import reporting
from tandem_client.cli.__main__ import app
from tandem_contract.version import version
from tests.rigs.processes import child_environment

ROOT = Path(__file__).resolve().parents[3]
PANELS = ("Prompt", "Chat", "Constraint", "Sampling", "Stopping", "Output", "Cache", "Connection")


def tandem(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "TANDEM_ADDRESS": "127.0.0.1:1"}).invoke(app, arguments)


@pytest.mark.parametrize("name", [name for name in get_command(app).commands if name not in ("simulate", "keys")])
def test_help_describes_every_flag(name: str) -> None:
    result = tandem(name, "--help", columns=120)
    assert result.exit_code == 0 and "…" not in result.stdout
    for parameter in get_command(app).commands[name].params:
        for flag in parameter.opts if parameter.param_type_name == "option" else ():
            assert f" {flag} " in result.stdout, flag
        assert "help" in parameter.opts[0] or getattr(parameter, "help", None), f"{parameter.opts} says nothing"


def test_help_of_generate_has_panels_in_order_and_two_examples() -> None:
    text = tandem("generate", "-h", columns=120).stdout
    places = [text.index(f"─ {title} ─") for title in PANELS]
    assert places == sorted(places)
    examples = [line.strip() for line in text[text.index("Examples:") :].splitlines()[1:]]
    # Each on its own line, so that it can be pasted.
    assert [line.partition(" generate ")[2][:1] != "" for line in filter(None, examples)] == [True, True]


def test_tandem_without_a_command_prints_its_help() -> None:
    alone, helped = tandem(), tandem("--help")
    assert (alone.exit_code, helped.exit_code) == (2, 0)
    assert alone.stdout == helped.stdout and "141 the output was closed" in " ".join(helped.stdout.split())


def test_the_version_is_printed_alone() -> None:
    result = tandem("--version")
    assert (result.exit_code, result.stdout) == (0, f"tandem {version()}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("generate", "x", "-t", "abc"), "--temperature is 'abc'; it must be a number"),
        (("generate", "x", "-n", "1.5"), "--max-new-tokens is '1.5'; it must be a whole number"),
        (("generate", "x", "--timeout", "-1"), "--timeout is -1; it must be at least 0"),
        (("plot", "x", "--width", "9000"), "--width is 9000; it must be at most 8000"),
        (("generate", "x", "--temprature", "1"), "no such option: --temprature; similar: --temperature"),
        (("tokenize", "Return", "the", "sum"), "unexpected: the sum; put quotes around a text of several words"),
        (("generate", "x", "--bypass-cache", "both"), "--bypass-cache is wrong: 'both' is not one of 'read', 'write'"),
        (("generat", "x"), "there is no command 'generat'; did you mean tandem generate?"),
        (("xyzzy",), "there is no command 'xyzzy'"),
        (
            ("run", "llama"),
            "there is no command 'run'; tandem serve starts a service, and tandem chat or tandem generate asks it",
        ),
        (
            ("PS",),
            "there is no command 'PS'; tandem requests lists the requests that wait or run, tandem load shows the load",
        ),
        (("update-weights",), "FOLDER is missing"),
        (("info", "-a", "localhost"), "--address is 'localhost'; it must be HOST:PORT, such as localhost:50051"),
    ],
)  # fmt: skip
def test_a_wrong_argument_prints_one_line_that_names_the_help_command(arguments: tuple[str, ...], line: str) -> None:
    result = tandem(*arguments)
    name = f"{arguments[0]} " if arguments[0] in get_command(app).commands else ""
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {line} (tandem {name}--help)\n"


def test_a_word_of_another_tool_is_no_command_and_names_commands_that_there_are() -> None:
    commands = get_command(app).commands
    for word, said in reporting._WORDS.items():
        assert word not in commands and word == word.lower()
        named = re.findall(r"tandem ([a-z][a-z-]*|--[a-z]+)", said) + re.findall(r"drain|generate$", said)
        assert named and {name for name in named if not name.startswith("--")} <= set(commands), word
    assert {"run", "ps", "models", "logs", "stop", "top", "list", "pull", "status", "start", "kill"} <= set(
        reporting._WORDS
    )


def imported(*calls: tuple[str, ...]) -> set[str]:
    """The packages that a process has imported after these calls of the command."""
    code = (
        "import contextlib, os, sys\n"
        "from tandem_client.cli.__main__ import app\n"
        f"for words in {calls!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        "        app(words)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=True)
    return set(done.stdout.split())


# What takes long to import: gRPC, protobuf and its messages, an event loop, a terminal's library.
CALLS = {"asyncio", "google", "grpc", "tandem"}


def test_the_version_and_a_wrong_word_import_nothing_that_calls_or_draws() -> None:
    found = imported(("--version",), ("run",), ("lod",))
    assert "typer" in found
    assert not found & {*CALLS, "rich", "logging"}


def test_no_help_imports_what_calls_a_service() -> None:
    # The programs that `tandem serve` runs are called by this one.
    helps = [(name, "--help") for name in get_command(app).commands if name not in ("serve", "simulate", "keys")]
    found = imported((), ("--help",), *helps)
    assert "rich" in found
    assert not found & CALLS


def test_serve_and_simulate_are_listed_only_if_their_programs_are_installed(tmp_path: Path) -> None:
    listed = tandem("--help").stdout
    assert "│ serve " in listed and "│ simulate " in listed
    # The files of the wheel: client, contract and stubs, without a checkout. -S leaves out editable installs.
    (tmp_path / "tandem_client").symlink_to(ROOT / "client" / "tandem_client")
    (tmp_path / "tandem_contract").symlink_to(ROOT / "protos" / "tandem_contract")
    path = [str(tmp_path), str(ROOT / ".stubs"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def alone(argument: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-S", "-P", "-m", "tandem_client.cli", argument]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    helped = alone("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "serve" not in helped.stdout.split() and "simulate" not in helped.stdout.split()
    called = alone("simulate")
    assert (called.returncode, called.stderr.count("\n")) == (1, 1)
    assert "scheduler_svc is not installed" in called.stderr
