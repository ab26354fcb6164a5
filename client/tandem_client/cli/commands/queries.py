"""The short commands: one call, one answer."""

import dataclasses
import json
from typing import Annotated

import typer

from tandem_client.cli.figures import of_quarantined
from tandem_client.cli.flags import (
    CHAT,
    CONNECTION,
    AddSpecialTokens,
    Json,
    Model,
    SkipSpecialTokens,
    Timeout,
    option,
)
from tandem_client.cli.reporting import Exit, reported
from tandem_client.cli.service import Service, connects
from tandem_client.cli.values import parse_token_ids, read_chat, read_text
from tandem_client.plural import counted
from tandem_client.types import AbortOutcome


@connects
def tokenize(
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="Text; - reads it from standard input."),
    ],
    service: Service,
    chat: Annotated[
        bool,
        option(CHAT, "--chat", "TEXT is a message of the user, which the chat template renders."),
    ] = False,
    system: Annotated[
        str | None, option(CHAT, "--system TEXT", "The system's message before it; implies --chat.")
    ] = None,
    add_special_tokens: AddSpecialTokens = None,
    model: Model = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Print the token ids of a text or of a chat."""
    with reported(timeout), service.client() as client:
        given = read_text().removesuffix("\n") if text == "-" else text
        if chat or system is not None:
            rendered = client.render_chat(read_chat(given, system), model=model, timeout=timeout)
            made = {"token_ids": rendered.token_ids, "text": rendered.text}
            print(json.dumps(made, ensure_ascii=False) if as_json else " ".join(map(str, rendered.token_ids)))
            return
        ids = client.tokenize(given, add_special_tokens=add_special_tokens, model=model, timeout=timeout)
        print(json.dumps({"token_ids": ids}) if as_json else " ".join(map(str, ids)))


@connects
def detokenize(
    token_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID", help="Token ids; - reads them from standard input."),
    ],
    service: Service,
    model: Model = None,
    skip_special_tokens: SkipSpecialTokens = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Print the text of token ids."""
    with reported(timeout), service.client() as client:
        given = read_text() if token_ids == ["-"] else " ".join(token_ids)
        text = client.detokenize(
            parse_token_ids(given), skip_special_tokens=skip_special_tokens, model=model, timeout=timeout
        )
        print(json.dumps({"text": text}, ensure_ascii=False) if as_json else text)


@connects
def abort(
    request_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID", help="Request ids: those you set, or those in the `accepted` message."),
    ],
    service: Service,
    held_by: Annotated[
        str | None,
        option(
            CONNECTION,
            "--service NAME",
            "The service that has them, if a proxy is in front of several: `service` beside the `accepted` message.",
        ),
    ] = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Cancel running or waiting requests; exit code 1 if an id is unknown."""
    with reported(timeout), service.client() as client:
        outcomes = client.abort(*request_ids, service=held_by, timeout=timeout)
        if as_json:
            print(json.dumps(outcomes))
        else:
            for request_id, outcome in outcomes.items():
                print(f"{request_id} {outcome}")
        if any(outcome != AbortOutcome.ABORTED for outcome in outcomes.values()):
            raise typer.Exit(Exit.ERROR)


@connects
def flush(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Empty the prefix cache and print how many pages were freed."""
    with reported(timeout), service.client() as client:
        pages = client.flush_cache(timeout=timeout)
        print(json.dumps({"pages": pages}) if as_json else f"{pages} pages")


@connects
def quarantine(
    service: Service,
    clear: Annotated[
        bool, option(CONNECTION, "--clear", "Let the quarantined requests run again, all of them or those named.")
    ] = False,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="With --clear: keys, as the list shows them.")
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the requests that are refused because they killed their workers, or clear the list."""
    with reported(timeout), service.client() as client:
        if clear:
            removed = client.clear_quarantine(*(keys or ()), timeout=timeout)
            print(json.dumps({"removed": removed}) if as_json else f"{counted(removed, 'request')} may run again")
            return
        found = client.quarantine(timeout=timeout)
        if as_json:
            print(json.dumps([dataclasses.asdict(request) for request in found], ensure_ascii=False))
            return
        for request in found:
            print("\n".join(of_quarantined(request)))
        if not found:
            print("no request is quarantined")
