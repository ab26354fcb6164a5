"""Runs a command: replaces the parts of typer's own `main` that read arguments and choose an exit code.

Owns the message for a wrong argument, the exit code, and the handling of output that cannot be written. Knows nothing
of the single commands.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tandem_client.cli.reporting import Exit
from tandem_client.services.programs import PROGRAMS, missing_programs

_NAME = "tandem"


class CheckoutCommand(TyperCommand):
    """A command that starts programs of a checkout. The help lists it only if these are installed."""

    programs = PROGRAMS


class TandemGroup(TyperGroup):
    """All commands. An error is one line, and every exit code is one of `Exit`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands whose programs are installed; the others explain what is missing."""
        return [name for name, each in self.commands.items() if not missing_programs(getattr(each, "programs", ()))]

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Runs the command that the arguments name, and exits."""
        try:
            code = self._run(sys.argv[1:] if args is None else args)
            # Unlike sys.stdout.flush(), this works in a process that was started without a standard output.
            print(end="", flush=True)
        except BrokenPipeError:
            _discard_output()
            code = Exit.CLOSED_OUTPUT
        except OSError as error:
            _discard_output()
            print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
            code = Exit.ERROR
        sys.exit(code)

    def _run(self, arguments: Sequence[str]) -> int:
        try:
            with self.make_context(_NAME, list(arguments)) as context:
                self.invoke(context)
        except typer.Exit as end:
            return end.exit_code
        except (KeyboardInterrupt, typer.Abort):
            return Exit.INTERRUPTED
        except typer.TyperException as error:
            print(f"error: {usage_error(error)}", file=sys.stderr)
            return error.exit_code
        return Exit.OK


def usage_error(error: typer.TyperException) -> str:
    """Returns one line about a wrong argument, which ends with the command that prints the help."""
    context: Any = getattr(error, "ctx", None)
    hint = f" ({context.command_path} --help)" if context is not None else ""
    parameter: Any = getattr(error, "param", None)
    if parameter is not None:
        return f"{_flag_of(parameter)} {_wrong_value(error)}{hint}"
    message = " ".join(error.format_message().split()).rstrip(".")
    similar: list[str] | None = getattr(error, "possibilities", None)
    if similar:
        message = f"{message.partition(' (')[0]}; similar: {similar[0]}"
    elif message.startswith("Got unexpected extra argument"):
        words = message.partition("(")[2].partition("(")[2].rstrip(")")
        message = f"unexpected: {words}; put quotes around a text of several words"
    return f"{message[:1].lower()}{message[1:].replace('. Did you', '; did you')}{hint}"


def _flag_of(parameter: Any) -> str:
    """Returns the name on the command line: the first long flag, or the metavar of an argument."""
    long = [name for name in parameter.opts if name.startswith("--")]
    return long[0] if long else parameter.metavar or parameter.name.upper()


def _wrong_value(error: typer.TyperException) -> str:
    """Returns the problem of a parameter. The error has a cause if pydantic read the value."""
    cause: Any = error.__cause__
    if cause is None:
        return error.message or "is missing"
    problem: dict[str, Any] = cause.errors()[0]
    value, limits = str(problem["input"])[:40], problem.get("ctx", {})
    match problem["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return f"is {value!r}; it must be a whole number"
        case "float_parsing" | "float_type":
            return f"is {value!r}; it must be a number"
        case "greater_than_equal":
            return f"is {value}; it must be at least {limits['ge']:g}"
        case "less_than_equal":
            return f"is {value}; it must be at most {limits['le']:g}"
        case _:
            return f"is wrong: {problem['msg'].removeprefix('Value error, ').rstrip('.')}"


def _discard_output() -> None:
    """Sends buffered output to /dev/null, because the interpreter would fail to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
