"""`python -m scheduler_svc.simulator`, alias `tandem simulate`: the simulator, or with --memory the layouts of a cache.

Owns the choice between the two and the exit codes: 2 after an error, which is one line on stderr; 130 if interrupted.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import os
import sys
from collections.abc import Sequence

from scheduler_svc.simulator import command, options
from tandem_contract.settings import SettingError

_USAGE, _INTERRUPTED = 2, 130


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        if any(argument.split("=")[0] == "--memory" for argument in argv):
            # Imported only here, because the simulator does not need it.
            from scheduler_svc.simulator import memory

            return memory.run(options.PROGRAM, argv)
        return command.run(options.read(argv))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"error: {error.filename or 'simulate'}: {error.strerror or error}", file=sys.stderr)
        return _USAGE
    except (SettingError, ValueError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Python would flush the buffer into it at exit, so the buffer goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
