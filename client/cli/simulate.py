"""`tandem simulate`: the scheduler's own simulator, in this terminal.

Owns nothing of it: arguments, output, signals and exit code are the simulator's, whose program takes this process over.
"""

import os
import sys

import typer

from client.cli.reporting import fail
from client.processes import missing_programs

PROGRAM = "scheduler_svc"


def simulate(context: typer.Context) -> None:
    """Say what to expect of a machine, model and workload: the real core on virtual time. See simulate --help."""
    if missing_programs([PROGRAM]):
        raise fail(
            f"{PROGRAM} cannot be found: this environment has the client alone. The simulator runs from a checkout"
        )
    os.execv(sys.executable, [sys.executable, "-m", f"{PROGRAM}.simulator", *context.args])
