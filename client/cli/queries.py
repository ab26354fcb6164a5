"""The short commands: one call, one answer."""

import dataclasses
import json
from typing import Annotated, Any, cast

import typer

from client.cli.flags import Address, Json, Model, Timeout
from client.cli.generate import parse_token_ids
from client.cli.reporting import Exit, fail, reported
from client.cli.stdin import read_text
from client.connection import DEFAULT_ADDRESS
from client.sync_client import Client
from client.types import AbortOutcome


def tokenize(
    text: Annotated[str, typer.Argument(help="- reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Print the token ids of a text."""
    with reported(address, timeout), Client(address) as client:
        given = read_text().removesuffix("\n") if text == "-" else text
        ids = client.tokenize(given, model=model, timeout=timeout)
        print(json.dumps({"token_ids": ids}) if as_json else " ".join(map(str, ids)))


def detokenize(
    token_ids: Annotated[list[str], typer.Argument(help="Token ids; - reads them from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    skip_special_tokens: Annotated[bool | None, typer.Option("--skip-special-tokens/--no-skip-special-tokens")] = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Print the text of token ids."""
    with reported(address, timeout), Client(address) as client:
        given = read_text() if token_ids == ["-"] else " ".join(token_ids)
        text = client.detokenize(
            parse_token_ids(given), skip_special_tokens=skip_special_tokens, model=model, timeout=timeout
        )
        print(json.dumps({"text": text}, ensure_ascii=False) if as_json else text)


def abort(
    request_ids: Annotated[list[str], typer.Argument(help="Ids as given, or as told in Accepted.")],
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """End live requests. Exits 1 where an id is not live."""
    with reported(address, timeout), Client(address) as client:
        outcomes = client.abort(*request_ids, timeout=timeout)
        if as_json:
            print(json.dumps(outcomes))
        else:
            for request_id, outcome in outcomes.items():
                print(f"{request_id} {outcome}")
        if any(outcome != AbortOutcome.ABORTED for outcome in outcomes.values()):
            raise typer.Exit(Exit.ERROR)


def info(address: Address = DEFAULT_ADDRESS, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Say what is served, its limits and defaults."""
    with reported(address, timeout), Client(address) as client:
        _show(dataclasses.asdict(client.model_info(timeout=timeout)), as_json=as_json)


def load(address: Address = DEFAULT_ADDRESS, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Say how busy the service is."""
    with reported(address, timeout), Client(address) as client:
        told = client.load(timeout=timeout)
        values = dataclasses.asdict(told)
        each = values.pop("per_worker")
        _show({**values, "hit_rate": told.hit_rate, "per_worker": each}, as_json=as_json)


def flush(address: Address = DEFAULT_ADDRESS, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Forget the pages that are kept for prompts to come; say how many those were."""
    with reported(address, timeout), Client(address) as client:
        pages = client.flush_cache(timeout=timeout)
        print(json.dumps({"pages": pages}) if as_json else f"{pages} pages")


def health(
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[float | None, typer.Option(min=0, help="Wait so many seconds for it to serve.")] = None,
    timeout: Timeout = 10.0,
) -> None:
    """Say whether the service serves; exit 3 where it does not."""
    with reported(address, timeout if wait is None else None), Client(address) as client:
        if wait is not None:
            client.wait_ready(wait)
        elif not client.health(timeout=timeout):
            raise fail(
                f"{address} answers, but does not serve: no worker has joined yet, or it is stopping", Exit.UNAVAILABLE
            )
        print("serving")


def _show(values: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, ensure_ascii=False))
        return
    width = max(map(len, values))
    for name, value in values.items():
        for shown in _lines(value):
            print(f"{name:<{width}}  {shown}")


def _lines(value: Any) -> list[str]:
    """A line; of several things that have parts, a line for each."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, tuple) and any(isinstance(part, dict) for part in cast(tuple[Any, ...], value)):
        parts = cast(tuple[dict[str, Any], ...], value)
        return [", ".join(f"{name} {number}" for name, number in part.items()) for part in parts]
    return [json.dumps(round(value, 3) if isinstance(value, float) else value)]
