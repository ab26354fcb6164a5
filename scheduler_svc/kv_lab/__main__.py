"""`python -m scheduler_svc.kv_lab`: the KV cache lab without the simulator."""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import sys

from scheduler_svc.kv_lab.command import run
from tandem_contract.settings import SettingError


def main() -> int:
    """Returns the exit code."""
    try:
        return run("python -m scheduler_svc.kv_lab", sys.argv[1:])
    except (SettingError, ValueError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
