"""`tandem update-weights`: lets all workers load new weights, and prints the progress."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem_client.cli.flags import CONNECTION, Json, Timeout, option
from tandem_client.cli.reporting import Exit, reported
from tandem_client.cli.service import Service, connects
from tandem_client.types import UpdateProgress, UpdateState


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
    state = UpdateState.UNKNOWN
    with reported(timeout), service.client() as client:
        for progress in client.update_weights(
            folder, version=version, running=running, in_turn=in_turn, max_seconds=max_seconds, timeout=timeout
        ):
            state = progress.state
            line = json.dumps(dataclasses.asdict(progress), ensure_ascii=False) if as_json else _line(progress)
            print(line, flush=True)
    if state != UpdateState.DONE:
        raise typer.Exit(Exit.ERROR)


def _line(progress: UpdateProgress) -> str:
    """Returns one line: time, state, workers, requests, what happens."""
    workers = f"{progress.workers_updated} of {progress.workers} workers updated"
    requests = f"{progress.running:,} running, {progress.waiting:,} waiting"
    state = progress.state.replace("_", " ")
    return "  ".join([f"{progress.seconds:7.2f} s  {state:10}", workers, requests, progress.detail])
