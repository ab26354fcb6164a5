"""`tandem simulate`: the scheduler's own simulator, started in this terminal.

Owns nothing of it: arguments, output and exit code pass through.
"""

import contextlib
import subprocess
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
    process = subprocess.Popen([sys.executable, "-m", f"{PROGRAM}.simulator", *context.args])
    while True:
        # The terminal's Ctrl-C reaches the simulator too; it says with which code it ends.
        with contextlib.suppress(KeyboardInterrupt):
            status = process.wait()
            raise typer.Exit(status if status >= 0 else 128 - status)
