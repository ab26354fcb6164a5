"""`tandem simulate`: the scheduler's own simulator, in this terminal.

Owns only the start: the simulator's program replaces this process, so arguments, output, signals and exit code are its.
"""

import os
import sys

import typer

from tandem_client.cli.reporting import fail
from tandem_client.services.child import missing_programs

PROGRAM = "scheduler_svc"


def simulate(context: typer.Context) -> None:
    """Predict speed and latency for a machine, model and workload, with the real scheduler on virtual time."""
    if missing_programs([PROGRAM]):
        raise fail(
            f"{PROGRAM} is not installed: this environment has only the client. Run tandem simulate in a checkout"
        )
    os.execv(sys.executable, [sys.executable, "-m", f"{PROGRAM}.simulator", *context.args])
