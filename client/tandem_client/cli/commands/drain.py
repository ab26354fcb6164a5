"""`tandem drain`: empties a worker or the service, and prints the progress."""

import dataclasses
import json
from typing import Annotated

import typer

from tandem_client.cli.flags import CONNECTION, Json, Timeout, option
from tandem_client.cli.reporting import Exit, reported
from tandem_client.cli.service import Service, connects
from tandem_client.plural import counted
from tandem_client.types import DrainProgress, DrainState


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
    state = DrainState.UNKNOWN
    with reported(timeout), service.client() as client:
        for progress in client.drain(worker, max_seconds=max_seconds, force=force, timeout=timeout):
            state = progress.state
            line = json.dumps(dataclasses.asdict(progress), ensure_ascii=False) if as_json else _line(progress)
            print(line, flush=True)
    if state != DrainState.DONE:
        raise typer.Exit(Exit.ERROR)


def _line(progress: DrainProgress) -> str:
    """Returns one line: time, state, what is left, what happens."""
    parts = [f"{progress.seconds:7.2f} s  {progress.state.replace('_', ' '):11}"]
    if progress.worker:
        parts.append(f"{counted(progress.worker_running, 'request')} here, {progress.moved:,} moved")
    else:
        parts.append(f"{progress.running:,} running, {progress.waiting:,} waiting")
    parts.append(f"at most {counted(progress.tokens_left, 'token')} left")
    return "  ".join([*parts, progress.detail])
