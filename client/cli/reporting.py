"""How a command ends: one line for people, one exit code for scripts.

Owns exit codes and hints. Knows nothing of what the commands do.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum

import typer

from client.errors import (
    AlreadyExists,
    AnswersTooSlowly,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    NothingAnswers,
    QueueFull,
    TandemError,
    Unavailable,
)


class Exit(IntEnum):
    """What the shell sees."""

    OK = 0
    ERROR = 1
    # The request is wrong; the same again will fail again. Also typer's own code for wrong flags.
    USAGE = 2
    # Nobody there, not ready yet, or full; the same may work later.
    UNAVAILABLE = 3
    DEADLINE = 4
    # 128 + SIGINT, 128 + SIGPIPE: what a shell sees of programs that these signals end.
    INTERRUPTED = 130
    CLOSED_OUTPUT = 141


# Fields whose limit `tandem info` tells: the model's length, its vocabulary, how many samples or logprobs; a single
# token of a list, not how many there may be.
_LIMITS_IN_INFO = (
    "prompt",
    "text",
    "token_ids",
    "stop.stop_token_ids[",
    "stop.max_new_tokens",
    "sampling.num_samples",
    "sampling.allowed_token_ids.ids[",
    "sampling.banned_token_ids[",
    "output.logprobs",
)


@contextmanager
def reported(address: str, timeout: float | None = None) -> Generator[None, None, None]:
    """Turns what a command's body raises into one line on stderr and an exit code. `timeout` in seconds, if given."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except TandemError as error:
        raise _failure(describe(error, address, timeout), exit_code(error)) from None
    except (TypeError, ValueError) as error:
        raise _failure(str(error), Exit.USAGE) from None


def fail(message: str, code: Exit = Exit.ERROR) -> typer.Exit:
    """Says it and gives what to raise."""
    return _failure(message, code)


def exit_code(error: TandemError) -> Exit:
    """The code of an error's kind."""
    match error:
        case InvalidArgument() | NotFound() | AlreadyExists():
            return Exit.USAGE
        case Unavailable() | QueueFull():
            return Exit.UNAVAILABLE
        case DeadlineExceeded():
            return Exit.DEADLINE
        case _:
            return Exit.ERROR


def describe(error: TandemError, address: str, timeout: float | None = None) -> str:
    """The error and what to do about it, in one line."""
    message = " ".join(error.message.split())
    if error.keyword and error.keyword not in message:
        message = f"{error.keyword}: {message}"
    hint = _hint(error, address, timeout)
    return f"{message} ({hint})" if hint else message


def _hint(error: TandemError, address: str, timeout: float | None) -> str:
    match error:
        case NothingAnswers():
            return "start it with tandem serve, or name another service with --address or TANDEM_ADDRESS"
        case AnswersTooSlowly():
            return "try again, or check the service with tandem health"
        case Unavailable(retry_after_seconds=None):
            return "the service went away"
        case Unavailable():
            return "tandem health --wait 60 returns when the service is ready"
        case QueueFull(retry_after_seconds=float() as seconds):
            return f"try again in {seconds:g} s"
        case NotFound():
            return "tandem info says what is served"
        case InvalidArgument() if (error.field or "").startswith(_LIMITS_IN_INFO) and "empty" not in error.message:
            return "tandem info says the limits"
        case DeadlineExceeded() if timeout is not None:
            return f"--timeout was {timeout:g} s"
        case _:
            return ""


def _failure(message: str, code: Exit) -> typer.Exit:
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(code)
