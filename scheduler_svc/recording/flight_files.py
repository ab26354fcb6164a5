"""The folder of the flight recorder: its files, their number, and those that processes leave at a fatal signal.

Owns names and modes. A process that starts opens `crash-NAME-PID.open` for Python's faulthandler, because nothing can
be opened when the signal comes. A file with content becomes `….txt` when its process is gone, `…-2.txt` if a process of
the same number had one, and the log names it.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from tandem_contract import private_file

log = logging.getLogger("tandem.flight")

MAX_FILES = 20
_KEPT = re.compile(r"(flight-.*\.jsonl|crash-.*\.txt)")
_OPEN = re.compile(r"crash-.*-(\d+)\.open")


def prepare(path: Path) -> None:
    """Creates the folder. Raises OSError."""
    # The folder above may be the runtime folder, removed a moment ago, which must be private too.
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def created(path: Path, number: int) -> Generator[BinaryIO]:
    """Creates the process's file of this number and deletes the oldest ones above the limit. Raises OSError.

    A file that the body cannot write is removed.
    """
    prepare(path)
    at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    # Before, because the new file would seem the oldest if the system's clock was set back.
    _delete_oldest(path, MAX_FILES - 1)
    name = path / f"flight-{at}-{os.getpid()}-{number}.jsonl"
    file = private_file.create(name)
    try:
        with file:
            yield file
    except OSError:
        with contextlib.suppress(OSError):
            name.unlink()
        raise


def catch_fatal_signals(path: Path, process: str) -> None:
    """Has this process write the stacks of its threads at SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL.

    Without a folder to write to, it only logs why.
    """
    name = path / f"crash-{process}-{os.getpid()}.open"
    try:
        prepare(path)
        # In a container the process that died may have had this one's number.
        _settle(name)
        file = private_file.create(name, buffering=0)
    except OSError as error:
        log.warning("the stacks at a fatal signal cannot be written to %s: %s", name, error.strerror)
        return
    faulthandler.enable(file)

    def forget() -> None:
        faulthandler.disable()
        file.close()
        with contextlib.suppress(OSError):
            name.unlink()

    atexit.register(forget)


def collect_crashes(path: Path) -> None:
    """Logs the files of processes that ended by a fatal signal, and deletes the empty ones of others that are gone."""
    with contextlib.suppress(OSError):
        for match in filter(None, map(_OPEN.fullmatch, os.listdir(path))):
            if _is_running(int(match[1])):
                continue
            _settle(path / match[0])
        _delete_oldest(path, MAX_FILES)


def _settle(file: Path) -> None:
    """Deletes the open file of a dead process, or keeps and logs it if it has stacks. Raises OSError."""
    if not file.exists():
        return
    if not file.stat().st_size:
        file.unlink()
        return
    kept, number = file.with_suffix(".txt"), 1
    while kept.exists():
        number += 1
        kept = file.with_name(f"{file.stem}-{number}.txt")
    file.rename(kept)
    log.error("process %s ended by a fatal signal: its stacks are in %s", file.stem.rpartition("-")[2], kept)


def _delete_oldest(path: Path, num_kept: int) -> None:
    with contextlib.suppress(OSError):
        files = [path / name for name in os.listdir(path) if _KEPT.fullmatch(name)]
        for file in sorted(files, key=lambda one: (one.stat().st_mtime_ns, one.name))[:-num_kept]:
            file.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # It belongs to another user.
    return True
