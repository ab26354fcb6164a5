"""`python -m scheduler_svc.simulator.memory`: the KV cache lab without the simulator."""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import sys

from scheduler_svc.flags import SettingError
from scheduler_svc.simulator.memory.command import run


def main() -> int:
    """Returns the exit code."""
    try:
        return run("python -m scheduler_svc.simulator.memory", sys.argv[1:])
    except (SettingError, ValueError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
