"""`python -m scheduler_svc.simulator`, which `tandem simulate` starts: the simulator, or with --memory the lab.

Owns the choice between the two and how a run ends: errors in one line on stderr, code 2; 130 where interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from scheduler_svc.simulator import arguments, command

_USAGE, _INTERRUPTED = 2, 130


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    try:
        if any(argument.split("=")[0] == "--memory" for argument in argv):
            return _lab(argv)
        return command.run(arguments.parser().parse_args(argv))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"error: {error.filename or 'simulate'}: {error.strerror or error}", file=sys.stderr)
        return _USAGE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _lab(argv: Sequence[str]) -> int:
    # Only here: the lab draws, the simulator does not.
    from scheduler_svc.kv_lab import command as lab

    parser = argparse.ArgumentParser(prog="tandem simulate", allow_abbrev=False)
    lab.add_arguments(parser)
    return lab.run(parser.parse_args(argv))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left. What is buffered has nowhere to go, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
