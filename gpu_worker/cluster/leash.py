"""`python -m gpu_worker.cluster.leash PID COMMAND…`: becomes the command, which ends when its parent PID ends.

Programs such as torchrun have no flag for that. The kernel's setting survives the exec.
"""

import os
import sys
from collections.abc import Sequence

from gpu_worker.process.parent import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Replaces this process. Returns the exit code 1 if the parent has ended already, or 127 without the command."""
    parent, *command = arguments
    die_with_parent()
    # It may have ended before the kernel was asked.
    if os.getppid() != int(parent):
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
