"""`python -m tests.client.quick_pings PROGRAM ARGUMENTS…`: a program that notices dead connections soon."""

import runpy
import sys

from tandem_client import connection

PING_MS = 300


def main() -> None:
    connection.KEEPALIVE_MS = connection.PING_TIMEOUT_MS = PING_MS
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
