"""A program that prints what its start gave it, as JSON, and then ends as its first argument says."""

import atexit
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any


def report() -> dict[str, Any]:
    """What two starts of the same program have in common."""
    process = Path("/proc/self")
    listed = sorted(map(int, os.listdir("/proc/self/fd")))
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    return {
        "arguments": sys.argv,
        "command": sys.orig_argv,
        "shown": list(filter(None, (process / "cmdline").read_text().split("\0"))),
        "name": __name__,
        "spec": __spec__.name if __spec__ else None,
        "path": sys.path,
        "folder": os.getcwd(),
        "variables": dict(os.environ),
        "descriptors": [each for each in listed if (process / "fd" / str(each)).exists()],
        "stdin": os.readlink("/proc/self/fd/0"),
        "stdout is stderr": os.path.sameopenfile(1, 2),
        "is line by line": [sys.stdout.write_through, sys.stderr.write_through],
        "parent, group and session": [os.getppid(), os.getpgrp(), os.getsid(0)],
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()],
        "masks": [status[name] for name in ("SigBlk", "SigIgn")],
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "threads": [threading.active_count(), threading.current_thread().name],
    }


def print_lost(numbers: list[int]) -> None:
    """Prints those of these descriptors that other code has closed."""
    listed = set(map(int, os.listdir("/proc/self/fd")))
    print([number for number in numbers if number not in listed])


if __name__ == "__main__":
    print(json.dumps({"same": report(), "other": [os.getpid(), random.random()]}))
    match sys.argv[1]:
        case "returns":
            pass
        case "raises":
            raise ValueError("as ordered")
        case "says why":
            sys.exit("the last line")
        case "leaves a thread":
            threading.Thread(target=lambda: (threading.main_thread().join(), print("the last line"))).start()
        case "logs":
            # logging, which a forking process has imported, writes it when the program ends.
            handler = MemoryHandler(100, logging.CRITICAL, target=logging.StreamHandler(sys.stdout))
            logging.getLogger().addHandler(handler)
            logging.error("the last line")
        case "waits":
            print("waits")
            signal.pause()
        case "keeps files":
            atexit.register(print_lost, [os.dup(0) for _ in range(200)])
        case code:
            sys.exit(int(code))
