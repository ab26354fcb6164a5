"""The commands that ask a service: one call each, but for health, which combines two.

Owns the JSON output. `figures` owns the text output.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem_client.cli import figures
from tandem_client.cli.figures import Health
from tandem_client.cli.flags import (
    CHAT,
    CONNECTION,
    AddSpecialTokens,
    Json,
    Model,
    Service,
    SkipSpecialTokens,
    Timeout,
    connects,
    given_or_piped,
    option,
    parse_token_ids,
    read_chat,
)
from tandem_client.cli.reporting import Exit, describe, exit_code, reported
from tandem_client.errors import DeadlineExceeded, TandemError, Unavailable
from tandem_client.types import AbortOutcome, DrainProgress, UpdateProgress
from tandem_contract.plural import counted

if TYPE_CHECKING:
    from tandem_client.sync_client import Client

# The limit for GetLoad, which only adds details to the health.
_LOAD_SECONDS = 2.0
_HEALTH_ALONE = "this address serves health alone; the address of --listen serves the rest"


@connects
def tokenize(
    service: Service,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text. Without it, or with -, standard input is read.")
    ] = None,
    chat: Annotated[
        bool, option(CHAT, "--chat", "TEXT is a message of the user, which the chat template renders.")
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
        given = given_or_piped(text, "TEXT", 'tandem tokenize "Return the"')
        if chat or system is not None:
            rendered = client.render_chat(read_chat(given, system), model=model, timeout=timeout)
            made = {"token_ids": rendered.token_ids, "text": rendered.text}
        else:
            ids = client.tokenize(given, add_special_tokens=add_special_tokens, model=model, timeout=timeout)
            made = {"token_ids": ids}
        _print(made, " ".join(map(str, made["token_ids"])), as_json)


@connects
def detokenize(
    service: Service,
    token_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Token ids. Without them, or with -, standard input is read."),
    ] = None,
    model: Model = None,
    skip_special_tokens: SkipSpecialTokens = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Print the text of token ids."""
    with reported(timeout), service.client() as client:
        given = given_or_piped(" ".join(token_ids) if token_ids else None, "ID", "tandem detokenize 17 4")
        text = client.detokenize(
            parse_token_ids(given), skip_special_tokens=skip_special_tokens, model=model, timeout=timeout
        )
        _print({"text": text}, text, as_json)


@connects
def abort(
    request_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID", help="Request ids: those you set, in the `accepted` message, or in HTTP answers."),
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
        _print(outcomes, "\n".join(f"{request_id} {outcome}" for request_id, outcome in outcomes.items()), as_json)
        for detail in outcomes.details.values():
            print(f"{detail}; tandem requests lists them", file=sys.stderr)
        if any(outcome != AbortOutcome.ABORTED for outcome in outcomes.values()):
            raise typer.Exit(Exit.ERROR)


@connects
def requests(
    service: Service,
    tenant: Annotated[str, option(CONNECTION, "--tenant NAME", "Only requests of this tenant.")] = "",
    states: Annotated[
        list[str] | None,
        option(CONNECTION, "--state STATE", "Only these: waiting, running, kept (an ended answer); may repeat."),
    ] = None,
    id_prefix: Annotated[str, option(CONNECTION, "--id PREFIX", "Only ids that begin with this.")] = "",
    limit: Annotated[int | None, option(CONNECTION, "--limit COUNT", "Show at most this many.", min=1)] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the requests that wait or run, the oldest first, with the ids that abort takes."""
    with reported(timeout), service.client() as client:
        listed = client.all_requests(tenant=tenant, states=states or (), id_prefix=id_prefix, timeout=timeout)
        # One more than the limit shows whether there are others.
        shown = list(islice(listed, limit and limit + 1))
        is_cut = limit is not None and len(shown) > limit
        shown = shown[:limit]
        if shown:
            text = "\n".join(figures.of_requests(shown, is_cut=is_cut))
        else:
            text = "no such request waits or runs" if tenant or states or id_prefix else "no request waits or runs"
        _print(list(map(dataclasses.asdict, shown)), text, as_json)


@connects
def flush(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Empty the prefix cache and print how many pages were freed."""
    with reported(timeout), service.client() as client:
        pages = client.flush_cache(timeout=timeout)
        _print({"pages": pages}, counted(pages, "page"), as_json)


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
            _print({"removed": removed}, f"{counted(removed, 'request')} may run again", as_json)
            return
        refused = client.quarantine(timeout=timeout)
        lines = [line for request in refused for line in figures.of_quarantined(request)] or [
            "no request is quarantined"
        ]
        _print(list(map(dataclasses.asdict, refused)), "\n".join(lines), as_json)


@connects
def info(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Show the served model, its limits and default settings."""
    with reported(timeout), service.client() as client:
        model = client.model_info(timeout=timeout)
        _print(dataclasses.asdict(model), "\n".join(figures.of_model(model)), as_json)


@connects
def load(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Show the current load: requests, pages, workers."""
    with reported(timeout), service.client() as client:
        now = client.load(timeout=timeout)
        values = dataclasses.asdict(now)
        values |= {"hit_rate": now.hit_rate, "per_worker": values.pop("per_worker")}
        _print(values, "\n".join(figures.of_load(now)), as_json)


@connects
def health(
    service: Service,
    wait: Annotated[
        float | None, option(CONNECTION, "--wait SECONDS", "Wait up to this long until it serves; at least 0.", min=0)
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Check whether the service computes a request that arrives now; exit code 3 if not."""
    limit = timeout if wait is None else None
    with reported(limit), service.client(max_retries=0) as client:
        failure: TandemError | None = None
        if wait is not None:
            try:
                client.wait_ready(wait)
            except (Unavailable, DeadlineExceeded) as error:
                failure = error
        try:
            seen = check(client, timeout=timeout if failure is None else _LOAD_SECONDS)
        except (Unavailable, DeadlineExceeded) as error:
            failure = failure or error
            if not as_json:
                raise failure from None
            seen = Health(state="unreachable", reason=describe(failure, limit))
        _print(seen.as_dict(), figures.of_health(seen), as_json)
        if seen.state != "serving":
            raise typer.Exit(exit_code(failure) if failure else Exit.UNAVAILABLE)


def check(client: "Client", *, timeout: float | None) -> Health:
    """Returns grpc.health.v1's answer, within `timeout` seconds, with details of GetLoad. Raises TandemError."""
    state = "serving" if client.health(timeout=timeout) else "not_serving"
    try:
        load = client.load(timeout=_LOAD_SECONDS)
    except TandemError as error:
        # An address of --health-listen.
        is_health_alone = error.code.name == "UNIMPLEMENTED"
        return Health(state=state, reason=_HEALTH_ALONE if is_health_alone else error.message)
    if load.not_serving:
        # The load is newer than the answer of grpc.health.v1.
        state = "not_serving"
    reason = "" if state == "serving" else load.not_serving or "the service gives no reason"
    return Health(state=state, reason=reason, load=load)


@connects
def drain(
    service: Service,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="A worker's process id or name (tandem load); default: the service.")
    ] = "",
    max_seconds: Annotated[
        float,
        option(
            CONNECTION,
            "--max SECONDS",
            "Time for the drain; default: no limit for a worker, grace_seconds for the service.",
            min=0,
        ),
    ] = 0.0,
    force: Annotated[bool, option(CONNECTION, "--force", "Drain the last worker that serves, too.")] = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Let a worker, or the service, end its requests and leave; exit code 1 if it could not end in order."""
    with reported(timeout), service.client() as client:
        _follow(client.drain(worker, max_seconds=max_seconds, force=force, timeout=timeout), as_json)


@connects
def update_weights(
    service: Service,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with safetensors, on the workers' hosts.")],
    version: Annotated[str, option(CONNECTION, "--version NAME", "Name of the weights, never used before.")],
    running: Annotated[
        Literal["finish", "recompute", "continue", "abort"],
        option(CONNECTION, "--running HOW", "Requests on a worker that loads: finish, recompute, continue or abort."),
    ] = "recompute",
    in_turn: Annotated[bool, option(CONNECTION, "--in-turn", "Load on one worker after the other.")] = False,
    max_seconds: Annotated[
        float, option(CONNECTION, "--max SECONDS", "Time for the update; default: 600.", min=0)
    ] = 0.0,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Let all workers load new weights of the same model; exit code 1 if not all of them have."""
    with reported(timeout), service.client() as client:
        progress = client.update_weights(
            folder, version=version, running=running, in_turn=in_turn, max_seconds=max_seconds, timeout=timeout
        )
        _follow(progress, as_json)


def _print(value: object, text: str, as_json: bool) -> None:
    print(json.dumps(value, ensure_ascii=False) if as_json else text, flush=True)


def _follow(progress: Iterable[DrainProgress | UpdateProgress], as_json: bool) -> None:
    """Prints the progress of an operation as it comes. Ends the command with exit code 1 if it was not done."""
    state = ""
    try:
        for report in progress:
            state = report.state
            _print(dataclasses.asdict(report), figures.of_progress(report), as_json)
    except (KeyboardInterrupt, DeadlineExceeded):
        if state:
            print("it goes on; the same command shows its progress again", file=sys.stderr)
        raise
    if state != "done":
        raise typer.Exit(Exit.ERROR)
