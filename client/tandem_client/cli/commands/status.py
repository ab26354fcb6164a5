"""`tandem health`, `load` and `info`: the state of a service, its load and its model.

Owns the JSON output, and health, which combines two calls. `figures` owns the text output.
"""

import dataclasses
import json
from typing import Annotated

import grpc
import typer

from tandem_client.cli import figures
from tandem_client.cli.figures import Health, State
from tandem_client.cli.flags import CONNECTION, Json, Timeout, option
from tandem_client.cli.reporting import Exit, describe, exit_code, reported
from tandem_client.cli.service import Service, connects
from tandem_client.errors import DeadlineExceeded, TandemError, Unavailable
from tandem_client.sync_client import Client

# The limit for GetLoad, which only adds details to the health.
_LOAD_SECONDS = 2.0
_HEALTH_ALONE = "this address serves health alone; the address of --listen tells more"


@connects
def info(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Show the served model, its limits and default settings."""
    with reported(timeout), service.client() as client:
        model = client.model_info(timeout=timeout)
        if as_json:
            print(json.dumps(dataclasses.asdict(model), ensure_ascii=False))
        else:
            print("\n".join(figures.of_model(model)))


@connects
def load(service: Service, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Show the current load: requests, pages, workers."""
    with reported(timeout), service.client() as client:
        found = client.load(timeout=timeout)
        if as_json:
            values = dataclasses.asdict(found)
            each = values.pop("per_worker")
            print(json.dumps({**values, "hit_rate": found.hit_rate, "per_worker": each}, ensure_ascii=False))
        else:
            print("\n".join(figures.of_load(found)))


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
            except DeadlineExceeded as error:
                failure = error
        try:
            found = check(client, timeout=timeout if failure is None else _LOAD_SECONDS)
        except (Unavailable, DeadlineExceeded) as error:
            failure = failure or error
            if not as_json:
                raise failure from None
            found = Health(state=State.UNREACHABLE, reason=describe(failure, limit))
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False) if as_json else figures.of_health(found))
        if found.state != State.SERVING:
            raise typer.Exit(exit_code(failure) if failure else Exit.UNAVAILABLE)


def check(client: Client, *, timeout: float | None) -> Health:
    """Returns the answer of grpc.health.v1 with details of GetLoad. Raises TandemError if the former has no answer."""
    state = State.SERVING if client.health(timeout=timeout) else State.NOT_SERVING
    try:
        load = client.load(timeout=_LOAD_SECONDS)
    except TandemError as error:
        # An address of --health-listen.
        is_health_alone = error.code == grpc.StatusCode.UNIMPLEMENTED
        return Health(state=state, reason=_HEALTH_ALONE if is_health_alone else error.message)
    if load.not_serving:
        # The load is newer than the answer of grpc.health.v1.
        state = State.NOT_SERVING
    return Health(
        state=state,
        reason="" if state == State.SERVING else load.not_serving or "the service gives no reason",
        workers=load.workers,
        waiting=load.waiting,
        suspects=load.suspects,
        worker_lost_seconds=load.worker_lost_seconds,
        worker_lost_reason=load.worker_lost_reason or None,
        not_serving_reason=load.not_serving_reason,
        not_serving_since=load.not_serving_since,
    )
