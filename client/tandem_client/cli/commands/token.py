"""`tandem token new`: draws a token and prints the entry of its hash for the service's token file.

Owns the form of a token. The service stores and compares SHA-256 hashes only.
"""

import base64
import hashlib
import re
import secrets
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from tandem_client.cli.flags import option
from tandem_client.cli.reporting import HELP, Exit, TandemGroup
from tandem_contract.private_file import private

PREFIX = "tandem_"
_BYTES = 32
_TENANT = re.compile(rf"(?!{PREFIX})[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")
_PANEL = "Token"


class TokenRight(StrEnum):
    INFERENCE = "inference"
    CONTROL = "control"
    METRICS = "metrics"


token = typer.Typer(cls=TandemGroup, context_settings=HELP, invoke_without_command=True, add_completion=False)


@token.callback()
def _token(context: typer.Context) -> None:
    """Make tokens for a service."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(Exit.USAGE)


def _checked_tenant(name: str) -> str:
    if not _TENANT.fullmatch(name):
        raise typer.BadParameter(
            f"is {name[:40]!r}; it must have 1 to 64 letters, digits, dots, dashes or underscores and begin with a "
            "letter or digit"
        )
    return name


def _checked_expiry(text: str | None) -> str | None:
    """Returns the time as TOML."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"is {text[:40]!r}; it must be like 2027-01-01 or 2027-01-01T12:00:00Z") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    if moment <= datetime.now(UTC):
        raise typer.BadParameter(f"is {text[:40]}; it must be in the future")
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@token.command(context_settings=HELP)
def new(
    tenant: Annotated[
        str, option(_PANEL, "--tenant NAME", "The tenant of requests with the token.", callback=_checked_tenant)
    ] = "default",
    rights: Annotated[
        list[TokenRight] | None,
        option(_PANEL, "--rights inference|control|metrics", "What it may call; repeatable. Default: inference."),
    ] = None,
    expires: Annotated[
        str | None,
        option(_PANEL, "--expires DATE", "When it ends, such as 2027-01-01. Default: never.", callback=_checked_expiry),
    ] = None,
    name: Annotated[str, option(_PANEL, "--name TEXT", "A note for people, in the entry.")] = "",
    out: Annotated[
        str | None, option(_PANEL, "--out FILE", "Write the token to this new file of mode 0600, and do not show it.")
    ] = None,
) -> None:
    """Draw a token; print it on standard error, and its entry for the token file on standard output."""
    drawn = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_BYTES)).rstrip(b"=").decode()
    if out is None:
        print(f"token, shown only now: {drawn}", file=sys.stderr)
    else:
        with open(out, "x", opener=private) as file:
            file.write(f"{drawn}\n")
    chosen = list(dict.fromkeys(rights or [TokenRight.INFERENCE]))
    quoted = ", ".join(f'"{right}"' for right in chosen)
    # A dot in a name would begin another table.
    key = f'"{tenant}"' if "." in tenant else tenant
    print(f"[[tenants.{key}.tokens]]")
    print(f'hash = "sha256:{hashlib.sha256(drawn.encode()).hexdigest()}"')
    print(f"rights = [{quoted}]")
    if expires is not None:
        print(f"expires = {expires}")
    if name:
        print(f"name = {_text(name)}")


def _text(value: str) -> str:
    """Returns the text as TOML, with `?` for bytes of the command line that are not UTF-8, which TOML cannot have."""
    escaped = "".join(map(_escaped, value.encode(errors="replace").decode()))
    return f'"{escaped}"'


def _escaped(char: str) -> str:
    if char.isprintable() and char not in '"\\':
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 1 << 16 else f"\\U{ord(char):08x}"
