"""`python -m gpu_worker.cluster.leash PID COMMAND…`: becomes the command, which ends when its parent PID ends.

Programs such as torchrun have no flag for that. The kernel's setting survives the exec.
"""

import gpu_worker.process.import_path  # noqa: F401

# isort: split
import os
import sys
from collections.abc import Sequence

from tandem_contract.parent import PARENT, die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Replaces this process, or ends it if the parent has ended. Returns the exit code 127 without the command."""
    os.environ[PARENT], *command = arguments
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
