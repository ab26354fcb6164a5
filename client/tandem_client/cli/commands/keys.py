"""`tandem keys`: makes the keys with which workers of other hosts join a scheduler service.

The service's program replaces this process and gets its arguments and its exit code.
"""

import os
import sys

import typer

from tandem_client.cli.reporting import require_programs

PROGRAM = "scheduler_svc"


def keys(context: typer.Context) -> None:
    """Make the keys with which workers on other hosts join."""
    require_programs([PROGRAM], "tandem keys")
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"{PROGRAM}.remote", *context.args])
