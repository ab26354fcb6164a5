"""`tandem simulate`: runs the scheduler's simulator in this terminal.

The simulator's program replaces this process and gets its arguments, its signals and its exit code.
"""

import os
import sys

import typer

from tandem_client.cli.reporting import require_programs

PROGRAM = "scheduler_svc"


def simulate(context: typer.Context) -> None:
    """Predict speed and latency for a machine, model and workload, with the real scheduler on virtual time."""
    require_programs([PROGRAM], "tandem simulate")
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"{PROGRAM}.simulator", *context.args])
