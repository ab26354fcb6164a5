"""Ends a command with one line on standard error and one exit code.

Owns exit codes and hints. Knows nothing of the single commands.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import typer

from tandem_client import errors
from tandem_client.cli.flag_names import keyword_in_flags, refusal_in_flags
from tandem_client.services.programs import missing_programs


class Exit(IntEnum):
    """Exit codes of the command."""

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
        raise fail(keyword_in_flags(str(error)) if of_generate else str(error), Exit.USAGE) from None


def fail(message: str, code: Exit = Exit.ERROR) -> typer.Exit:
    """Prints the line and returns the exception for the caller to raise."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(code)


def require_programs(programs: Sequence[str], command: str) -> None:
    """Ends the command with an error if a program of a checkout is not installed."""
    missing = missing_programs(programs)
    if missing:
        raise fail(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed: this environment has only "
            f"the client. Run {command} in a checkout"
        )


def exit_code(error: errors.TandemError) -> Exit:
    """Returns the exit code for an error."""
    match error:
        case errors.InvalidArgument() | errors.NotFound() | errors.AlreadyExists():
            return Exit.USAGE
        case errors.Unauthenticated() | errors.PermissionDenied():
            return Exit.USAGE
        case errors.Unavailable() | errors.QueueFull():
            return Exit.UNAVAILABLE
        case errors.DeadlineExceeded():
            return Exit.DEADLINE
        case _:
            return Exit.ERROR


def describe(error: errors.TandemError, timeout: float | None = None, *, of_generate: bool = False) -> str:
    """Returns the error and a hint in one line."""
    message = refusal_in_flags(error) if of_generate else error.message
    message = " ".join(message.split())
    hint = _hint(error, timeout)
    return f"{message} ({hint})" if hint else message


def _hint(error: errors.TandemError, timeout: float | None) -> str:
    match error:
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
        case errors.NotFound() if error.message.startswith("worker: "):
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
