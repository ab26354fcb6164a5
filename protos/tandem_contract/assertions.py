"""Refuses to run a program without assertions: by them a program in a wrong state ends, instead of going on with it."""

import sys


def require_assertions(program: str) -> None:
    """Ends the process with one line and exit code 2 if Python leaves assertions out."""
    if not sys.flags.optimize:
        return
    if sys.stderr is not None:
        how = "-O, -OO and PYTHONOPTIMIZE leave out the assertions that end a program in a wrong state"
        print(f"{program}: Python's {how}; start it without them", file=sys.stderr)
    sys.exit(2)
