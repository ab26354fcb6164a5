"""The scheduler service with its secrets written to a file: `python -m tests.rigs.known_secrets FILE flags…`.

Owns the file: a line of hexadecimal digits for each value that the service draws (the root of page hashes, the front
ends' secret, the workers' key). A test then searches for these values in places where they must not appear.
"""

import runpy
import secrets
import sys
from pathlib import Path


def main() -> None:
    draw, path = secrets.token_bytes, Path(sys.argv.pop(1))

    def noted(count: int | None = None) -> bytes:
        value = draw(count)
        with path.open("a") as file:
            file.write(f"{value.hex()}\n")
        return value

    secrets.token_bytes = noted
    runpy.run_module("scheduler_svc", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
