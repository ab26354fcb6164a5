"""How the flags of commands are declared and read: a command's flags as a table, and those that several commands share.

Owns the flags that say which service a command calls and how it proves its identity; and the syntax of prompts, token
ids, biases and JSON, for which typer has no type. A token comes from a file or from a variable, never from the command
line, which other users of the machine can read. Imports no gRPC, which no help needs.
"""

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar

import typer

from tandem_client.address import DEFAULT_ADDRESS, problem_of

if TYPE_CHECKING:
    from tandem_client.async_client import AsyncClient
    from tandem_client.connection import TlsSettings
    from tandem_client.sync_client import Client
    from tandem_client.wire.request import Prompt

PANELS = PROMPT, CHAT, CONSTRAINT, SAMPLING, STOPPING, OUTPUT, CACHE, CONNECTION = (
    "Prompt", "Chat", "Constraint", "Sampling", "Stopping", "Output", "Cache", "Connection",
)  # fmt: skip


_Command = TypeVar("_Command", bound=Callable[..., None])

THE_PROMPT = "the prompt"
# Keywords of `generate` that have a flag of another name.
OTHER_NAMES = {
    "prompt": THE_PROMPT,
    "allowed_token_ids": "--allow",
    "banned_token_ids": "--ban",
    "stop_token_ids": "--stop-token-id",
    "max_time_seconds": "--max-time",
    "max_queue_seconds": "--max-queue",
    "prompt_logprobs_start": "--prompt-logprobs",
    "cache_salt": "--salt",
    "bypass_cache_read": "--bypass-cache read",
    "bypass_cache_write": "--bypass-cache write",
    "linger_seconds": "--linger",
    "choices": "--choice",
}
_KEYWORDS = {flag: keyword for keyword, flag in OTHER_NAMES.items()}

TOKEN_VARIABLE = "TANDEM_TOKEN"
_MAX_TOKEN_BYTES = 4096
# As much as a client sends (`connection`): nothing longer is read into memory. The service's own limit is lower.
_MAX_TEXT_BYTES = 64 * 2**20

_JSON_NAMES: Mapping[Any, str] = {list: "a JSON list", dict: "a JSON object", (dict, bool): "a JSON schema"}


def option(panel: str | None, usage: str, description: str, **settings: Any) -> Any:
    """Declares a flag. `usage` has its names and, if the flag takes a value, the metavar: `--max-new-tokens -n N`."""
    names = usage.split()
    metavar = None if names[-1].startswith("-") else names.pop()
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=description, **settings)


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Declares one parameter of a command, for `takes`."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag(panel: str | None, kind: Any, usage: str, description: str, default: Any = None, **settings: Any) -> Parameter:
    """Declares a flag. The parameter has the name of the keyword that it sets, or its own if it sets none."""
    flag_name = usage.split()[0].partition("/")[0]
    name = _KEYWORDS.get(flag_name) or flag_name.removeprefix("--").replace("-", "_")
    wanted = kind | None if default is None else kind
    return parameter(name, Annotated[wanted, option(panel, usage, description, **settings)], default)


def takes(parameters: Sequence[Parameter]) -> Callable[[_Command], _Command]:
    """Declares the parameters of a command in a table; its function may collect them as `**options`."""

    def declared(command: _Command) -> _Command:
        command.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return declared


def _checked(address: str) -> str:
    if problem := problem_of(address):
        raise typer.BadParameter(problem)
    return address


Address = Annotated[
    str,
    option(CONNECTION, "--address -a HOST:PORT", "Address of the service.", envvar="TANDEM_ADDRESS", callback=_checked),
]
Json = Annotated[bool, option(OUTPUT, "--json", "Print JSON, for programs.")]
Model = Annotated[str | None, option(PROMPT, "--model NAME", "Fail unless this model is served.")]
Timeout = Annotated[
    float | None, option(CONNECTION, "--timeout SECONDS", "Give up after this time; at least 0.", min=0)
]
AddSpecialTokens = Annotated[
    bool | None,
    option(
        PROMPT,
        "--add-special-tokens/--no-add-special-tokens",
        "Add the special tokens with which the tokenizer begins a text (default).",
    ),
]
SkipSpecialTokens = Annotated[
    bool | None,
    option(OUTPUT, "--skip-special-tokens/--no-skip-special-tokens", "Leave special tokens out of the text (default)."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service that a command talks to, as its flags say."""

    address: str
    token_file: str | None
    tls: bool
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_server_name: str | None

    def client(self, *, max_retries: int = 3) -> "Client":
        """Returns a client. Raises OSError, and ValueError if the flags do not fit together."""
        from tandem_client.sync_client import Client

        return Client(self.address, max_retries=max_retries, token=self._token(), tls=self._tls())

    def async_client(self) -> "AsyncClient":
        """Returns a client for an event loop. Raises as `client` does."""
        from tandem_client.async_client import AsyncClient

        return AsyncClient(self.address, token=self._token(), tls=self._tls())

    def _tls(self) -> "TlsSettings | None":
        from tandem_client.connection import TlsSettings

        names = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        if not self.tls and not any(names):
            return None
        return TlsSettings(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name)

    def _token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE) or None
        with Path(self.token_file).open("rb") as file:
            return file.read(_MAX_TOKEN_BYTES).decode("utf-8-sig", errors="replace").strip()


def _shared(usage: str, description: str, kind: Any = str, default: Any = None) -> Parameter:
    """A flag that a variable may set, too: TANDEM_TLS_CA for --tls-ca."""
    variable = f"TANDEM_{usage.split()[0].removeprefix('--').upper().replace('-', '_')}"
    return flag(CONNECTION, kind, usage, description, default, envvar=variable)


_OF_SERVICE = (
    parameter("address", Address, DEFAULT_ADDRESS),
    _shared("--token-file FILE", f"File with the token; or the token in {TOKEN_VARIABLE}."),
    _shared("--tls", "Use TLS, which the next flags imply.", bool, False),
    _shared("--tls-ca FILE", "Authority of the service's certificate, PEM; default: the public ones."),
    _shared("--tls-cert FILE", "Own certificate, PEM, for a service that asks for one."),
    _shared("--tls-key FILE", "Key of --tls-cert, PEM."),
    _shared("--tls-server-name NAME", "Name in the service's certificate, if it is not the address's."),
)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of a service in place of its parameter `service`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        flags = {flag.name: values.pop(flag.name) for flag in _OF_SERVICE}
        command(service=Service(**flags), **values)

    parameters: list[Parameter] = []
    for declared in signature(command).parameters.values():
        parameters += _OF_SERVICE if declared.name == "service" else (declared.replace(kind=Parameter.KEYWORD_ONLY),)
    run.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return run


def parse_token_ids(text: str) -> Sequence[int]:
    """Reads numbers separated by blanks or commas, with or without brackets. Raises ValueError."""
    words = text.strip().strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"a token id is {wrong[:40]!r}; it must be a whole number, 0 or greater")
    return [int(word) for word in words]


def parse_biases(given: Sequence[str]) -> dict[int, float]:
    """Reads words like 17=-2.5. Raises ValueError."""
    biases: dict[int, float] = {}
    for word in given:
        token, _, bias = word.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias is {word[:40]!r}; it must be ID=X, like 17=-2.5") from None
        if token_id in biases:
            raise ValueError(f"--logit-bias names token {token_id} twice; each token has one bias")
        biases[token_id] = value
    return biases


def given_or_piped(argument: str | None, placeholder: str, example: str) -> str:
    """Returns the argument, or standard input if it is - or missing while a pipe or a file is on it.

    Raises ValueError: there is neither, or the text is empty.
    """
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):  # pyright: ignore[reportUnnecessaryComparison]
        raise ValueError(f"{placeholder} is missing: {example}, or pipe it to standard input")
    if argument not in (None, "-"):
        text, name = argument, placeholder
    else:
        # The shell's last line break is not part of the text.
        text, name = read_text().removesuffix("\n"), "standard input"
    if not text:
        raise ValueError(f"{name} is empty; at least 1 character is needed")
    return text


def read_chat(prompt: "Prompt", system: str | None) -> list[dict[str, str]]:
    """Returns the conversation of one message of the user. Raises ValueError."""
    if not isinstance(prompt, str):
        raise ValueError("--chat and --token-ids exclude each other; a chat is text")
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def read_json(flag: str, given: str | None, kinds: type | tuple[type, ...]) -> Any:
    """Returns the JSON value, of one of these types, of a flag: its text, or the file it names. Raises ValueError."""
    if given is None:
        return None
    is_text = given.lstrip()[:1] in ("{", "[") or given in ("true", "false")
    text = given if is_text else read_file(given, flag)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{flag} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, kinds):
        raise ValueError(f"{flag} is {str(value)[:40]!r}; it must be {_JSON_NAMES[kinds]}")
    return value


def read_file(path: str, flag: str) -> str:
    """Returns the text of the file that a flag names. Raises ValueError if it cannot be read or is not UTF-8."""
    try:
        with Path(path).open("rb") as file:
            return decoded(file, f"{flag}: {path}")
    except OSError as error:
        raise ValueError(f"{flag}: {path[:200]}: {error.strerror}") from None


def read_text() -> str:
    """Reads standard input, in every locale with \\n as line break. Raises ValueError: too long, or not UTF-8."""
    return io.StringIO(decoded(sys.stdin.buffer, "standard input"), newline=None).read()


def decoded(file: BinaryIO, name: str) -> str:
    """Returns the text of a file. Raises ValueError if it is too long or not UTF-8."""
    raw = file.read(_MAX_TEXT_BYTES + 1)
    if len(raw) > _MAX_TEXT_BYTES:
        raise ValueError(f"{name} has more than {_MAX_TEXT_BYTES:,} bytes, the most that one request can have")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start})") from None
