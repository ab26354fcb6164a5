"""Any program that a supervisor keeps: it says in each program's words that it serves. Ends with its parent.

The variable KEPT_MODE is the mode of `machines.py`.
"""

import os
import signal
import sys

from tandem_contract.child import die_with_parent


def main() -> None:
    """See the module's docstring."""
    die_with_parent()
    if os.environ["KEPT_MODE"] == "refuses":
        print("frontend failed: no tokenizer", flush=True)
        sys.exit(2)
    address = "127.0.0.1:1"
    serves = (f"frontend listening on {address}", f"gateway listening on http://{address}", "joined the scheduler")
    print(*serves, f"serves {os.getpid()}", sep="\n", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
