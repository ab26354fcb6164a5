"""Runs a command, and ends it with one exit code and, if it failed, one line on standard error.

Replaces the parts of typer's own `main` that read arguments and choose an exit code. Owns exit codes, hints, the
messages for a wrong argument and for a word that is not a command, and the handling of output that cannot be written.
"""

import difflib
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from tandem_client import errors

_NAME = "tandem"
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class Exit(IntEnum):
    OK = 0
    ERROR = 1
    # The request is wrong and would fail again. Also typer's own code for wrong flags.
    USAGE = 2
    # Nothing answers, not ready yet, or full; the same request may succeed later.
    UNAVAILABLE = 3
    DEADLINE = 4
    # 128 + SIGINT and 128 + SIGPIPE, which a shell reports for programs that these signals end.
    INTERRUPTED = 130
    CLOSED_OUTPUT = 141


# Fields with limits of the model or the service, which `tandem info` shows.
_LIMITS_IN_INFO = (
    "text",
    "token_ids",
    "stop.stop_token_ids[",
    "sampling.num_samples",
    "sampling.allowed_token_ids.ids[",
    "sampling.banned_token_ids[",
    "sampling.logit_bias[",
    "output.logprobs",
)
# Messages that contain their limit, which is the same for every service.
_FIXED_LIMITS = ("is empty", "at least 1", "between -100 and 100")


@contextmanager
def reported(timeout: float | None = None, *, of_generate: bool = False) -> Generator[None, None, None]:
    """Turns exceptions of a command's body into one line on stderr and an exit code.

    `timeout` is the limit in seconds that the call had, if any. `of_generate`: messages name that command's flags.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except errors.TandemError as error:
        raise fail(describe(error, timeout, of_generate=of_generate), exit_code(error)) from None
    except (TypeError, ValueError) as error:
        from tandem_client.cli.names import client_in_flags, keyword_in_flags

        message = client_in_flags(keyword_in_flags(str(error), of_generate=of_generate))
        raise fail(message, Exit.USAGE) from None


def fail(message: str, code: Exit = Exit.ERROR) -> typer.Exit:
    """Prints the line and returns the exception for the caller to raise."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(code)


def require_programs(programs: Sequence[str], command: str) -> None:
    """Ends the command with an error if a program of a checkout is not installed."""
    from tandem_client.services.programs import missing_programs

    missing = missing_programs(programs)
    if missing:
        raise fail(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed: this environment has only "
            f"the client. Run {command} in a checkout"
        )


def exit_code(error: errors.TandemError) -> Exit:
    match error:
        case errors.InvalidArgument() | errors.NotFound() | errors.AlreadyExists():
            return Exit.USAGE
        case errors.Unauthenticated() | errors.PermissionDenied() | errors.OtherProtocol():
            return Exit.USAGE
        case errors.Unavailable() | errors.QueueFull():
            return Exit.UNAVAILABLE
        case errors.DeadlineExceeded():
            return Exit.DEADLINE
        case _:
            return Exit.ERROR


def describe(error: errors.TandemError, timeout: float | None = None, *, of_generate: bool | None = False) -> str:
    """Returns error and hint in one line. `timeout`: seconds. `of_generate`: None names keywords, as a chat does."""
    from tandem_client.cli.names import client_in_flags, refusal_in_flags

    message = error.message if of_generate is None else refusal_in_flags(error, of_generate=of_generate)
    message = client_in_flags(" ".join(message.split()))
    hint = _hint(error, timeout)
    return f"{message} ({hint})" if hint else message


def _hint(error: errors.TandemError, timeout: float | None) -> str:
    match error:
        case errors.OtherProtocol() | errors.ClientClosed():
            return ""
        case errors.NothingAnswers():
            return "start one with tandem serve, or name another address with --address or TANDEM_ADDRESS"
        case errors.AnswersTooSlowly():
            return "try again, or check the service with tandem health"
        case errors.Unavailable(retry_after_seconds=None):
            return "the service went away and the output is incomplete: try again"
        case errors.Unavailable():
            return "tandem health --wait 60 returns when the service is ready"
        case errors.QueueFull(retry_after_seconds=float() as seconds):
            return f"try again in {seconds:g} s"
        case errors.Unauthenticated():
            return "set --token-file or TANDEM_TOKEN"
        case errors.NotFound() if error.service_message.startswith("worker: "):
            return "tandem load shows the workers"
        case errors.NotFound():
            return "tandem info shows what is served"
        case errors.InvalidArgument() if _is_limit_in_info(error):
            return "tandem info shows the limits"
        case errors.DeadlineExceeded() if timeout is not None and f"{timeout:g} s" not in error.message:
            return f"--timeout was {timeout:g} s"
        case _:
            return ""


def _is_limit_in_info(error: errors.InvalidArgument) -> bool:
    is_fixed = any(words in error.message for words in _FIXED_LIMITS)
    return (error.field or "").startswith(_LIMITS_IN_INFO) and not is_fixed


class TandemGroup(TyperGroup):
    """Some commands. An error is one line, and every exit code is one of `Exit`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command. Raises UsageError with what is there instead."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            ctx.fail(no_such_command(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
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


_START = "tandem serve starts a service"
_LOAD = "tandem load shows requests, pages and workers, tandem health whether it serves"
_REQUESTS = "tandem requests lists the requests that wait or run, tandem load shows the load"
_INFO = "tandem info shows the served model"
_PULL = "tandem serve takes a folder or a hub name as its model"
_STOP = "Ctrl-C ends tandem serve, and tandem drain lets a service end its requests first"
_LOG = "tandem serve -v prints the log of its programs, or has it in serve.log of the runtime folder"
_BENCH = "tandem simulate predicts speeds, and tandem plot draws a step log"
# What users of ollama, docker, vllm or systemd type.
_WORDS = {
    "run": f"{_START}, and tandem chat or tandem generate asks it",
    **dict.fromkeys(("start", "up", "daemon", "api_server"), _START),
    **dict.fromkeys(("status", "stats"), _LOAD),
    **dict.fromkeys(("ps", "top", "queue", "jobs"), _REQUESTS),
    **dict.fromkeys(("models", "model", "list", "ls", "show", "inspect"), _INFO),
    **dict.fromkeys(("pull", "download", "create", "fetch"), _PULL),
    **dict.fromkeys(("stop", "down", "shutdown", "quit"), _STOP),
    **dict.fromkeys(("restart", "reload"), f"{_STOP}; {_START}"),
    **dict.fromkeys(("logs", "log", "journalctl"), _LOG),
    **dict.fromkeys(("cancel", "kill", "rm"), "tandem abort ends requests"),
    **dict.fromkeys(("complete", "completion", "prompt", "ask"), "tandem generate continues a text"),
    **dict.fromkeys(("encode", "decode"), "tandem tokenize prints token ids, tandem detokenize their text"),
    **dict.fromkeys(("login", "auth"), "tandem token new makes a token; --token-file or TANDEM_TOKEN gives it"),
    **dict.fromkeys(("bench", "benchmark"), _BENCH),
    "version": "tandem --version prints it",
    "help": "tandem --help lists the commands",
}


def no_such_command(word: str, commands: Iterable[str]) -> str:
    """Returns the hint for a word that is not a command: the command that does this, or the nearest one."""
    said = f"there is no command {word[:40]!r}"
    if (does_that := _WORDS.get(word.lower())) is not None:
        return f"{said}; {does_that}"
    near = difflib.get_close_matches(word.lower(), commands, n=1)
    return f"{said}; did you mean tandem {near[0]}?" if near else said


def usage_error(error: typer.TyperException) -> str:
    """Returns one line about a wrong argument, which ends with the command that prints the help."""
    context: Any = getattr(error, "ctx", None)
    hint = f" ({context.command_path} --help)" if context is not None else ""
    parameter: Any = getattr(error, "param", None)
    if parameter is not None:
        # The first long flag, or the metavar of an argument.
        long = [name for name in parameter.opts if name.startswith("--")]
        return f"{long[0] if long else parameter.metavar or parameter.name.upper()} {_wrong_value(error)}{hint}"
    message = " ".join(error.format_message().split()).rstrip(".")
    similar: list[str] | None = getattr(error, "possibilities", None)
    if similar:
        message = f"{message.partition(' (')[0]}; similar: {similar[0]}"
    elif message.startswith("Got unexpected extra argument"):
        words = message.partition("(")[2].partition("(")[2].rstrip(")")
        message = f"unexpected: {words}; put quotes around a text of several words"
    return f"{message[:1].lower()}{message[1:].replace('. Did you', '; did you')}{hint}"


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
